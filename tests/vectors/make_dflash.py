"""Make the DFlash agreement vector: what z-lab's own drafter computes for a tiny random model on fixed inputs.

The test-suite reads only the two files this script writes; it needs neither this script nor its environment, which
is its own virtual environment (dflash pins its versions):

    pip install torch==2.13.0
    pip install transformers==5.15.0 dflash==0.1.0
    python tests/vectors/make_dflash.py [OUTPUT.safetensors]

Everything runs through the package: its model, its cache and its cropping, called as its generation loop calls them.
Beside the tensors goes a .json of the same name: the config, the layer ids the package picks, the versions. Two runs
write the same bytes.

Tensors, with B slots, H hidden, V vocabulary, C context positions new in the round, P positions passed in:
    weights.*           the drafter;  target.* the borrowed embedding and head
    <round>.context     [1, C, n*H]  target features, concatenated over the layer ids
    <round>.tokens      [1, B]       anchor, then mask tokens;  .noise [1, B, H] their embedding
    <round>.positions   [1, P]       those of the new context, then those of the block
    <round>.hidden      [1, B, H]    normed output of every slot;  .logits [1, B, V]
`first` fills an empty cache, `second` continues from that cache with the block's own entries cropped off, `sliding`
is `first` without a cache and with the layer types the config's `sliding` entry names.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from dflash import model as dflash
from safetensors.torch import save_file
from transformers import Qwen3Config


SEED = 2602
BLOCK, HIDDEN, VOCAB, MASK_TOKEN, LAYERS = 6, 48, 101, 100, 3
PROMPT, PRODUCED = 11, 3  # context of the first round; tokens the first round yielded, bonus included
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}


def make_config(**kwargs):
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        block_size=BLOCK,
        num_target_layers=12,
        dflash_config={"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 5, 9]},
        **kwargs,
    )


def normal(shape, std, generator):
    return torch.randn(shape, generator=generator) * std


@torch.no_grad()
def fill(module, generator):
    """Random weights of order one in effect; norms off one."""
    for name, weight in sorted(module.named_parameters()):
        if "norm" in name:
            weight.copy_(1 + normal(weight.shape, 0.2, generator))
        else:
            weight.copy_(normal(weight.shape, weight.shape[1] ** -0.5, generator))


def make_target(generator):
    """The two modules the package asks its target for."""
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    fill(head, generator)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN)
    with torch.no_grad():
        embedding.weight.copy_(normal((VOCAB, HIDDEN), 1.0, generator))
    return embedding, head


def draft(drafter, target, context, anchor, start, cache):
    """One draft pass: the block starts at absolute position `start`, the new context ends right before it."""
    embedding, head = target
    tokens = torch.tensor([[anchor] + [MASK_TOKEN] * (BLOCK - 1)])
    noise = embedding(tokens)
    positions = torch.arange(start - context.shape[1], start + BLOCK)[None]
    hidden = drafter(
        target_hidden=context,
        noise_embedding=noise,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    logits = drafter.compute_logits(hidden, head)
    return {
        "context": context,
        "tokens": tokens,
        "noise": noise,
        "positions": positions,
        "hidden": hidden,
        "logits": logits,
    }


@torch.no_grad()
def make():
    """Return the tensors and the description to save."""
    generator = torch.Generator().manual_seed(SEED)
    drafter = dflash.DFlashDraftModel(make_config()).eval()
    fill(drafter, generator)
    target = make_target(generator)
    features = normal((1, PROMPT + PRODUCED, len(drafter.target_layer_ids) * HIDDEN), 1.0, generator)
    cache, start = dflash._make_cache(drafter.config), PROMPT
    rounds = {"first": draft(drafter, target, features[:, :start], 17, start, cache)}
    dflash._crop_to(cache, start)
    rounds["second"] = draft(drafter, target, features[:, start:], 42, start + PRODUCED, cache)

    sliding = dflash.DFlashDraftModel(make_config(**SLIDING)).eval()
    sliding.load_state_dict(drafter.state_dict())
    rounds["sliding"] = draft(sliding, target, features[:, :start], 17, start, None)

    tensors = {f"weights.{name}": value for name, value in drafter.state_dict().items()}
    tensors |= {"target.embed_tokens.weight": target[0].weight, "target.lm_head.weight": target[1].weight}
    tensors |= {f"{name}.{key}": value for name, traced in rounds.items() for key, value in traced.items()}
    layer_ids = {
        f"{n} of {of}": dflash.build_target_layer_ids(of, n) for n, of in ((1, 36), (3, 12), (5, 36), (6, 40))
    }
    about = {
        "versions": {name: version(name) for name in ("dflash", "transformers", "torch")},
        "seed": SEED,
        "config": drafter.config.to_diff_dict(),
        "sliding": SLIDING,
        "default_layer_ids": layer_ids,
    }
    return tensors, about


def main():
    torch.set_num_threads(1)
    output = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "dflash.safetensors")
    tensors, about = make()
    save_file({name: value.detach().clone().contiguous() for name, value in tensors.items()}, output)
    output.chmod(0o644)
    output.with_suffix(".json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
