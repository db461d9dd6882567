"""Checkpoints as their makers write them: those of the test vectors, tiny ones of our own, and the folders they lie in."""

import json
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
from rig import BLOCK, HIDDEN, MASK_TOKEN, make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from xpress_drafter import XPressDrafterConfig, XPressDrafterModel


VECTORS = Path(__file__).parent / "vectors"

# The fields that a tiny drafter's config needs; `rig.make_target`'s shapes.
FIELDS = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "block_size": BLOCK,
    "mask_token_id": MASK_TOKEN,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
}
REFINERS = {"xpress": {"xpress_rank": 16}, "markov": {"markov_rank": 16}, None: {}}


def config(refiner: str | None = "xpress", **kwargs) -> XPressDrafterConfig:
    return XPressDrafterConfig(**{**FIELDS, **REFINERS[refiner], **kwargs})


def drafter(refiner: str | None = "xpress", **kwargs) -> XPressDrafterModel:
    """A random drafter whose every part shows in its output, mixer too."""
    torch.manual_seed(2)
    model = XPressDrafterModel(config(refiner, initializer_range=0.3, **kwargs)).eval()
    if refiner == "xpress":
        torch.nn.init.normal_(model.xpress_head.mix.L, std=0.3)
    return model


@lru_cache
def vector(name: str) -> tuple[dict[str, torch.Tensor], dict]:
    """A test vector's tensors and its description."""
    return load_file(VECTORS / f"{name}.safetensors"), json.loads((VECTORS / f"{name}.json").read_text())


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def borrowed(tensors: dict[str, torch.Tensor]) -> SimpleNamespace:
    """What a drafter asks its target for, from a vector's `target.*`."""
    embedding = torch.nn.Embedding.from_pretrained(tensors["target.embed_tokens.weight"])
    head = torch.nn.Linear(*tensors["target.lm_head.weight"].shape[::-1], bias=False)
    head.weight.data = tensors["target.lm_head.weight"]
    head.requires_grad_(False)
    return SimpleNamespace(
        config=Qwen3Config(), device=torch.device("cpu"), get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: head,
    )  # fmt: skip


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder of a config and one weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **changes) -> Path:
    """Sets entries of a folder's config; `None` takes one out."""
    entries = json.loads((folder / "config.json").read_text()) | changes
    entries = {key: value for key, value in entries.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def write_zlab(folder: Path, **changes) -> Path:
    """A plain DFlash drafter as z-lab publishes one."""
    tensors, about = vector("dflash")
    about = about["config"] | {"architectures": ["DFlashDraftModel"]} | changes
    return write(folder, about, part(tensors, "weights."))


def write_speculators(folder: Path, kind: str = "xpress", **changes) -> Path:
    """A checkpoint as speculators saves one: `xpress`, or `fill` or `shift` for DSpark's two layouts."""
    tensors, about = vector("speculators_xpress")
    weights = part(tensors, "weights.")
    if kind != "xpress":
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("refiner_head.")}
        weights |= part(tensors, "dspark.weights.")
    return write(folder, (about["config"] if kind == "xpress" else about["dspark_config"][kind]) | changes, weights)


def agreeing_pair():
    """
    A target whose next token hangs on its last token alone, and a drafter whose refiner has learned just that.

    Its drafts are all right after B - 1 passes, though its backbone is random: what a round keeps, the refiner earned.
    """
    target = make_target()
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model = make_drafter(target, xpress_rank=HIDDEN, xpress_num_passes=BLOCK - 1)
    head = model.xpress_head
    with torch.no_grad():
        head.w1.weight.copy_(target.model.norm(target.get_input_embeddings().weight))
        head.in_proj.weight.mul_(1e-6)[:, -HIDDEN:] += torch.eye(HIDDEN)
        head.mix.L.zero_()
        head.mlp.down_proj.weight.mul_(1e-6)
        head.w2.weight.copy_(1000 * target.lm_head.weight)
    return target, model
