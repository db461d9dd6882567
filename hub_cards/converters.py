"""Exchange with other formats: speculators' checkpoints in, the form that vLLM reads without remote code out.

    load_speculators("checkpoint-folder", num_target_layers=36).save_pretrained("my-drafter")
    export_released(drafter, "for-vllm")

speculators (0.9) holds the same backbone under the same keys. What differs: layer ids count `hidden_states`, so they are
ours + 1; the refiner's tensors have other names, and its width is a ratio of its rank; the layers' config is nested; a draft
vocabulary is kept twice, as `d2t` and as `t2d`. Whatever would be read wrongly is refused with a `ValueError`: another block
layout, layers that see a window, heads that we do not have.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from ..generation import XPressDrafterModel
from ..modeling_xpress import DraftVocabulary, XPressDrafterConfig


logger = logging.get_logger(__name__)

# Beginnings of speculators' tensor names, and ours; the first that fits counts.
SPECULATORS_KEYS = {
    "refiner_head.token_embed.": "xpress_head.w1.",
    "refiner_head.readout.": "xpress_head.w2.",
    "refiner_head.mix_l": "xpress_head.mix.L",
    "refiner_head.mlp_gate.": "xpress_head.mlp.gate_proj.",
    "refiner_head.mlp_up.": "xpress_head.mlp.up_proj.",
    "refiner_head.mlp_down.": "xpress_head.mlp.down_proj.",
    "refiner_head.": "xpress_head.",
}

# What must be in the config of each kind of checkpoint.
_ALL = {
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "sample_from_anchor",
    "transformer_layer_config",
}
NEEDED = {
    "dflash": _ALL,
    "dspark": _ALL | {"markov_rank"},
    "xpress": _ALL | {"xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"},
}


def load_speculators(folder: str | Path, num_target_layers: int | None = None) -> XPressDrafterModel:
    """
    A drafter from a local folder that speculators saved (`dflash`, `xpress`, or `dspark` with fill-in blocks).

    Args:
        folder (`str` or `Path`): Holds `config.json` and safetensors files.
        num_target_layers (`int`, *optional*): Layers of the target, which speculators does not store.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise ValueError(
            f"{folder} holds {sorted(path.name for path in folder.glob('*'))}, expected a config.json and safetensors "
            "files: download the whole checkpoint first."
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    config, tensors = convert_speculators(config, tensors, num_target_layers)
    return XPressDrafterModel.from_pretrained(None, config=config, state_dict=tensors)


def convert_speculators(
    config: dict, tensors: dict[str, torch.Tensor], num_target_layers: int | None = None
) -> tuple[XPressDrafterConfig, dict[str, torch.Tensor]]:
    """Our config and tensors, from those of a speculators checkpoint."""
    _refuse_unread(config, tensors)
    layers = {k: v for k, v in config["transformer_layer_config"].items() if k not in ("model_type", "architectures")}
    reduced = config["draft_vocab_size"] != layers["vocab_size"]
    converted = XPressDrafterConfig(
        **layers,
        **_refiner_fields(config),
        block_size=config["block_size"],
        mask_token_id=config["mask_token_id"],
        target_layer_ids=[i - 1 for i in config["aux_hidden_state_layer_ids"]],
        num_target_layers=num_target_layers,
        draft_vocab_size=config["draft_vocab_size"] if reduced else None,
    )
    dropped = sorted(name for name in tensors if name.startswith("confidence_head."))
    if dropped:
        logger.warning(f"The confidence head is left out, as nothing here reads it: {dropped}.")
    ours = {_our_name(name): tensor for name, tensor in tensors.items() if name not in (*dropped, "t2d")}
    return converted, ours


def _our_name(name: str) -> str:
    for theirs, ours in SPECULATORS_KEYS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _refiner_fields(config: dict) -> dict:
    if config["speculators_model_type"] == "xpress":
        return {
            "xpress_rank": config["xpress_rank"],
            "xpress_mlp_hidden": config["xpress_rank"] * config["xpress_mlp_ratio"],
            "xpress_num_passes": config["num_jacobi_passes"],
        }
    if config["speculators_model_type"] == "dspark":
        return {"markov_rank": config["markov_rank"] or None}  # 0: no head
    return {}


def _refuse_unread(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Raises a `ValueError` for what is missing, or would be read wrongly."""
    kind = config.get("speculators_model_type")
    if kind not in NEEDED:
        raise ValueError(
            f"`speculators_model_type` is {kind!r}, expected one of {sorted(NEEDED)}: no other layout is read. A released "
            "folder, which lacks the key, loads by `XPressDrafterModel.from_pretrained` as it is; DeepSpec's own DSpark "
            "folders are in the shift layout (slot k predicts position a + k + 1) and cannot be used."
        )
    if missing := sorted(key for key in NEEDED[kind] if config.get(key) is None):
        raise ValueError(
            f"the speculators config has no {missing}, expected all of {sorted(NEEDED[kind])}: they are never guessed."
        )
    layers, layer_ids = config["transformer_layer_config"], config["aux_hidden_state_layer_ids"]
    width, reduced = layers["hidden_size"], config["draft_vocab_size"] != layers["vocab_size"]
    maps, both = sorted({"d2t", "t2d"} & tensors.keys()), ["d2t", "t2d"]
    for key, got, expected, remedy in (
        ("sample_from_anchor", config["sample_from_anchor"], False, "True is the shift layout. Train it with False."),
        ("transformer_layer_config.model_type", layers.get("model_type"), "qwen3", "Train it with Qwen3's layers."),
        (
            "the vocabulary maps",
            maps,
            both if reduced else [],
            "They go with a reduced `draft_vocab_size`, and it with them.",
        ),
        ("target_hidden_size", config.get("target_hidden_size") or width, width, "Train it as wide as its target."),
        ("markov_head_type", config.get("markov_head_type") or "vanilla", "vanilla", "Train it with a vanilla head."),
    ):
        if got != expected:
            raise ValueError(f"the speculators checkpoint has `{key}`={got!r}, expected {expected!r}. {remedy}")
    if reduced:
        ids_D = DraftVocabulary.from_offsets(layers["vocab_size"], tensors["d2t"]).ids_D
        if not torch.equal(tensors["t2d"].nonzero().flatten(), ids_D):
            raise ValueError(
                "the speculators checkpoint's `t2d` and `d2t` name other tokens, expected the same ones: download it again."
            )
    if min(layer_ids) < 1:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` is {layer_ids}, expected ids from 1 on: 0 is the embedding's output, which is "
            "no layer's. Train it on layers only."
        )


def export_released(drafter: XPressDrafterModel, folder: str | Path) -> None:
    """
    Writes a drafter as the released checkpoints are: `model_type` "qwen3", bf16, no code.

    vLLM (from 0.33) serves such a folder without remote code, with `method` "dflash"; our own class reads it too.
    """
    config = drafter.config
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"the drafter drafts {config.draft_vocab_size} of its target's {config.vocab_size} tokens (`draft_vocab_size`), expected "
            "all of them, which is what readers of the released form take: train it without `draft_vocab_size`, or publish its "
            "folder with its own code."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    left_out = {"auto_map", "num_draft_tokens", "target_layer_ids_start"}
    if config.refiner_type != "xpress":
        left_out |= {"xpress_num_passes", "xpress_topc"}
    fields = {k: v for k, v in config.to_diff_dict().items() if v is not None and k not in left_out}
    fields |= {"model_type": "qwen3", "dtype": "bfloat16", "rope_theta": config.rope_parameters["rope_theta"]}
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["convert_speculators", "export_released", "load_speculators"]
