"""Make the xPress agreement vector: what speculators computes for a tiny random drafter on fixed inputs.

The test-suite reads only the two files this script writes; it needs neither this script nor its environment,
which is its own virtual environment (speculators caps Transformers below the version we build on):

    pip install torch==2.13.0
    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    pip install transformers==5.19.0 "datasets<=5.1.0" safetensors numpy pydantic pydantic-settings loguru rich \
        typer click tqdm httpx aiohttp psutil protobuf "openai>=2"
    python tests/vectors/make_speculators.py [OUTPUT.safetensors]

torch comes first (a CPU build will do) and speculators with `--no-deps`, because its torchvision and torchaudio
requirements, which nothing here imports, would replace that torch by a newer CUDA build.

Everything runs through the package: its training constructor, `save_pretrained`, `forward` and losses. Spies record
what passes by and change nothing. Beside the tensors goes a .json of the same name: both configs as saved, the
losses, the gradient norms, the versions. Two runs write the same bytes.

Tensors, with A anchors, B slots, V vocabulary, H hidden, S positions, J = B - 1 rounds:
    weights.*   the xPress checkpoint exactly as saved;  target.*  the target's embedding, final norm and head
    dspark.*    a Markov checkpoint's own heads and its logits, on the same backbone and the `plain` inputs
    plain.*     one document, each slot of each block supervised;  grad.* are its gradients
    packed.*    two documents and padding, holes in the loss mask, anchors at document starts, one padded anchor
"""

import contextlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import safetensors.torch
import torch
import transformers
from speculators.losses import eager, resolve_loss_config
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import DSparkDraftModel
from speculators.models.dspark import core as dspark_core
from speculators.models.xpress import XPressDraftModel
from speculators.models.xpress import core as xpress_core
from speculators.train.cli import create_transformer_layer_config


SEED = 2608
TARGET = "tiny-target"  # a folder of the temporary working directory: it is what the saved config names
BLOCK, RANK, VOCAB, HIDDEN, AUX_LAYERS, MASK_TOKEN = 6, 8, 101, 48, (2, 4, 6), 100
ROUNDS = BLOCK - 1
LOSSES = {  # name -> (loss spec, is the hard label the data token)
    "teacher_ce": ('{"ce": 0.1, "tv": 0.9}', False),  # what speculators trains with by default
    "data_ce": ('{"ce": 0.1, "tv": 0.9}', True),
    "data_ce_l1": ('{"ce": 0.1, "tv": 1.8}', True),  # 0.9 of L1 = 2 TV
}
GRADIENT_LOSS = "data_ce_l1"
GRADIENTS = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.k_proj.weight")


class Spy:
    """Calls what it wraps and keeps the arguments and the result of each call."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        self.calls.append((args, kwargs, result))
        return result


def normal(shape, std, generator):
    return torch.randn(shape, generator=generator) * std


@torch.no_grad()
def fill(module, seed):
    """Random weights large enough that each part shows in the logits; norms off one; the whole mixer non-zero."""
    generator = torch.Generator().manual_seed(seed)
    gains = {"token_embed": 2.5, "readout": 0.7}  # the tokens must change the argmax, and change it again
    for name, weight in sorted(module.named_parameters()):
        part = name.split(".")[-2] if "." in name else name
        if name.endswith("mix_l"):
            weight.copy_(normal(weight.shape, 0.4, generator))
        elif "norm" in name:
            weight.copy_(1 + normal(weight.shape, 0.2, generator))
        elif "embed" in part or part == "markov_w1" or weight.ndim == 1:
            weight.copy_(normal(weight.shape, gains.get(part, 1.0), generator))
        else:
            weight.copy_(normal(weight.shape, gains.get(part, 1.0) * weight.shape[1] ** -0.5, generator))


def save_target():
    """Save the tiny Qwen3 target whose embedding, norm and head the drafters borrow; return those three."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    target = transformers.Qwen3ForCausalLM(config)
    fill(target, SEED)
    target.save_pretrained(TARGET)
    parts = {"embed_tokens": target.model.embed_tokens, "norm": target.model.norm, "lm_head": target.lm_head}
    return {f"target.{name}.weight": part.weight.detach() for name, part in parts.items()}


def build(model_class, **kwargs):
    """A drafter of two full-attention layers, made as speculators' training makes one."""
    layers = create_transformer_layer_config(
        TARGET, num_layers=2, draft_arch="qwen3", hidden_act=None, sliding_window=2048, full_attention_indices=[0, 1]
    )
    drafter = model_class.from_training_args(
        verifier_config=layers,
        verifier_name_or_path=TARGET,
        target_layer_ids=list(AUX_LAYERS),
        block_size=BLOCK,
        draft_vocab_size=VOCAB,
        mask_token_id=MASK_TOKEN,
        draft_attn_impl="eager",
        **kwargs,
    )
    return drafter.eval()


def fill_drafter(drafter):
    """Fill only what the drafter owns: the borrowed weights stay the target's."""
    borrowed = {name: drafter.get_submodule(name) for name in ("embed_tokens", "lm_head", "verifier_lm_head")}
    kept = {name: part.weight.detach().clone() for name, part in borrowed.items()}
    norm = drafter.verifier_norm.weight.detach().clone()
    fill(drafter, SEED + 1)
    with torch.no_grad():
        drafter.verifier_norm.weight.copy_(norm)
        for name, part in borrowed.items():
            part.weight.copy_(kept[name])


def checkpoint(drafter, folder):
    """What `save_pretrained` leaves behind: the tensors and the config."""
    drafter.save_pretrained(folder)
    config = json.loads(Path(folder, "config.json").read_text())
    return safetensors.torch.load_file(Path(folder, "model.safetensors")), config


def inputs(case):
    """The keyword inputs of speculators' forward, and how many anchors it is to choose."""
    generator = torch.Generator().manual_seed(SEED + len(case))
    if case == "plain":
        documents = [0] * 20
        supervised, anchors = range(4, 20), 5
    else:
        documents = [0] * 9 + [1] * 10 + [-1] * 3
        supervised, anchors = (0, 1, 5, 6, 8, 9, 10, 14, 15, 16, 18), 10
    length = len(documents)
    positions = [documents[:i].count(d) if d >= 0 else 0 for i, d in enumerate(documents)]
    tokens = torch.randint(0, MASK_TOKEN, (1, length), generator=generator)
    return {
        "hidden_states": normal((1, length, len(AUX_LAYERS) * HIDDEN), 1.0, generator),
        "input_ids": tokens,
        "loss_mask": torch.tensor([[i in supervised for i in range(length)]]),
        "verifier_last_hidden_states": normal((1, length, HIDDEN), 1.0, generator),
        "document_ids": torch.tensor([documents]),
        "position_ids": torch.tensor([positions]),
    }, anchors


def run(drafter, core, batch, **kwargs):
    """One forward of speculators under a fixed seed: the loss, its terms, and what the three spies saw."""
    anchors, metrics = Spy(dflash_core.select_anchors), Spy(core.compute_metrics)
    backbone = Spy(drafter._backbone_forward)
    torch.manual_seed(SEED)  # the anchors are drawn inside
    with (
        patch.object(dflash_core, "select_anchors", anchors),
        patch.object(drafter, "_backbone_forward", backbone),
        patch.object(core, "compute_metrics", metrics),
    ):
        _, loss, terms = drafter(**batch, **kwargs)
    return loss, terms, (anchors.calls[0][2], backbone.calls[0][2], metrics.calls[0][0])


@contextlib.contextmanager
def previous_tokens(drafter):
    """Yield a list that collects the tokens each refiner pass reads."""
    seen = []
    hook = drafter.refiner_head.token_embed.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    yield seen
    hook.remove()


def losses_of(drafter, batch, anchors):
    """The loss and each of its terms, for each way to set it up."""
    table = {}
    for name, (spec, data_labels) in LOSSES.items():
        config = resolve_loss_config(spec, "eager")
        _, terms, _ = run(
            drafter, xpress_core, batch, max_anchors=anchors, loss_config=config, ce_from_data=data_labels
        )
        table[name] = {key: value.item() for key, value in terms.items()}
    return table


def per_position(logits, teacher, labels):
    """Speculators' own losses before any weighting, [1 + J + 1, A, B]: refined, each round, base."""
    data = torch.nn.functional.one_hot(labels, VOCAB).float()  # its CE takes the argmax as the label
    shape = (-1, BLOCK)
    return {
        "tv": torch.stack([eager.tv_loss(x, teacher).view(shape) for x in logits]),
        "ce_teacher": torch.stack([eager.ce_loss(x, teacher).view(shape) for x in logits]),
        "ce_data": torch.stack([eager.ce_loss(x, data).view(shape) for x in logits]),
    }


@torch.no_grad()
def trace(drafter, batch, anchors):
    """Every tensor between the inputs and the loss, block by block, with enough rounds to reach the fixed point."""
    kwargs = {"loss_config": resolve_loss_config(LOSSES["teacher_ce"][0], "eager"), "consistency_passes": ROUNDS}
    with previous_tokens(drafter) as read:
        _, _, (chosen, backbone, seen) = run(drafter, xpress_core, batch, max_anchors=anchors, **kwargs)
    refined, rounds, base, teacher, mask = seen[:5]
    hidden, _, _, _, indices = backbone
    blocks = (anchors, BLOCK, -1)
    shared = {
        "anchors": chosen[0],
        "anchor_valid": chosen[1],
        "block_indices": indices.view(anchors, BLOCK),
        "block_mask": mask.view(anchors, BLOCK),
        "hidden": hidden.view(blocks),
        "teacher_logits": teacher.view(blocks),
        "base_logits": base.view(blocks),
        "refined_logits": refined.view(blocks),
        "refined_prev": read[0],
        "round_logits": torch.stack([x.view(blocks) for x in rounds]),
        "round_prev": torch.stack(read[1:]),
    }
    labels = batch["input_ids"][:, indices]
    return shared | per_position([refined, *rounds, base], teacher, labels)


def gradients(drafter, batch, anchors):
    """Norm of each gradient of the loss, and the gradients that show every path into the backbone and the refiner."""
    spec, data_labels = LOSSES[GRADIENT_LOSS]
    loss, _, _ = run(
        drafter,
        xpress_core,
        batch,
        max_anchors=anchors,
        loss_config=resolve_loss_config(spec, "eager"),
        ce_from_data=data_labels,
    )
    drafter.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    shown = {name: g for name, g in found.items() if name in GRADIENTS or name.startswith("refiner_head.")}
    return {f"grad.{name}": g for name, g in shown.items()}, {name: g.norm().item() for name, g in found.items()}


@torch.no_grad()
def markov(backbone, batch, anchors):
    """Markov checkpoint on the same backbone: its own heads, and its logits in both block layouts."""
    tensors, configs = {}, {}
    for layout, from_anchor in (("fill", False), ("shift", True)):
        drafter = build(DSparkDraftModel, markov_rank=RANK, sample_from_anchor=from_anchor)
        fill_drafter(drafter)
        drafter.load_state_dict(backbone, strict=False)
        kwargs = {"loss_config": resolve_loss_config("kl_div", "eager"), "tv_loss_fn": eager.tv_loss}
        _, _, (_, _, seen) = run(drafter, dspark_core, batch, max_anchors=anchors, **kwargs)
        logits, teacher, confidence, mask = (x.view(anchors, BLOCK, -1) for x in seen[:4])
        traced = {"logits": logits, "teacher_logits": teacher, "confidence": confidence, "block_mask": mask}
        tensors |= {f"dspark.{layout}.{name}": value.squeeze(-1) for name, value in traced.items()}
        weights, configs[layout] = checkpoint(drafter, f"dspark-{layout}")
    own = {f"dspark.weights.{name}": value for name, value in weights.items() if name not in backbone}
    return tensors | own, configs


def make():
    """Return the tensors and the description to save."""
    target = save_target()
    drafter = build(XPressDraftModel, xpress_rank=RANK, xpress_mlp_ratio=2, num_jacobi_passes=3)
    fill_drafter(drafter)
    weights, config = checkpoint(drafter, "xpress")
    tensors = target | {f"weights.{name}": value for name, value in weights.items()}
    losses = {}
    for case in ("plain", "packed"):
        batch, anchors = inputs(case)
        losses[case] = losses_of(drafter, batch, anchors)
        traced = {f"input.{name}": value for name, value in batch.items()} | trace(drafter, batch, anchors)
        tensors |= {f"{case}.{name}": value for name, value in traced.items()}
    batch, anchors = inputs("plain")
    grads, norms = gradients(drafter, batch, anchors)
    backbone = {name: value for name, value in weights.items() if not name.startswith("refiner_head.")}
    dspark, dspark_configs = markov(backbone, batch, anchors)
    about = {
        "versions": {name: version(name) for name in ("speculators", "transformers", "torch")},
        "seed": SEED,
        "config": config,
        "dspark_config": dspark_configs,
        "losses": losses,
        "gradient_loss": GRADIENT_LOSS,
        "gradient_norms": norms,
    }
    return tensors | grads | dspark, about


def main():
    torch.set_num_threads(1)
    output = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "speculators_xpress.safetensors")
    output = output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tensors, about = make()
        os.chdir(output.parent)
    safetensors.torch.save_file({name: value.detach().clone().contiguous() for name, value in tensors.items()}, output)
    output.chmod(0o644)
    output.with_suffix(".json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
