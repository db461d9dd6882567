"""Adapting a trained drafter: LoRA (or another PEFT method) on the backbone, the refiner in full."""

from copy import copy

from peft import PeftConfig, PeftModel, get_peft_model

from ..modeling_xpress import XPressModel
from .weighting import is_refiner


# Every matrix of the backbone: `fc` of the context features, then attention and MLP of the layers.
BACKBONE = r"fc|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


def adapt(drafter: XPressModel, peft_config: PeftConfig) -> PeftModel:
    """
    The drafter in an adapter. What the config leaves open is filled in: all matrices of the backbone as
    `target_modules`, and the refiner as `modules_to_save`, which is small and trained in full.

    `drafter` is changed in place; merge with `merge_and_unload`. A checkpoint holds adapter and refiner.
    """
    refiners = sorted({name.split(".")[0] for name, _ in drafter.named_parameters() if is_refiner(name)})
    config = copy(peft_config)
    if config.target_modules is None:
        config.target_modules = BACKBONE
    if config.modules_to_save is None and refiners:
        config.modules_to_save = refiners
        config.exclude_modules = config.exclude_modules or rf"({'|'.join(refiners)})\..*"
    return get_peft_model(drafter, config)
