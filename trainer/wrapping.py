"""What stands around a drafter in training (DDP, FSDP, DeepSpeed, PEFT) and where the frozen target stands."""

from collections.abc import Callable

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..modeling_xpress import XPressModel


def bare_drafter(model: nn.Module) -> XPressModel:
    """The drafter inside whatever wraps it."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if isinstance(model, PeftModel) else model


def inside_forward(model: nn.Module, function: Callable):
    """
    `function(drafter)`, run as the forward of `model`, so that backbone and refiner are used where the wrappers expect
    it: FSDP and DeepSpeed gather weights there, DDP waits for their gradients.

    The drafter's hooks have run by then, so `function` calls `drafter.forward`, not the drafter.
    """
    drafter = bare_drafter(model)
    patched = drafter.__dict__.get("forward")  # by accelerate, for autocast

    def restore():
        del drafter.forward
        if patched is not None:
            drafter.forward = patched

    def redirected(*args, **kwargs):
        restore()
        try:
            return function(drafter)
        finally:
            drafter.forward = redirected

    drafter.forward = redirected
    try:
        return model()
    finally:
        restore()


def freeze_target(target: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The target without gradients, in eval mode, on `device`; one that was placed or quantised at load stays there."""
    if isinstance(target, PeftModel) and target.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"the target has a {target.peft_type.value} adapter, whose learned prompt the drafter's positions do not know: "
            "expected one that changes the weights, such as LoRA."
        )
    target.eval().requires_grad_(False)
    placed = hasattr(target, "hf_device_map") or (hasattr(target, "hf_quantizer") and target.hf_quantizer is not None)
    return target if placed else target.to(device)


def to_target(target: PreTrainedModel, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where the target reads it; an offloaded target's hooks bring it where they want it."""
    return tensor if target.device.type == "meta" else tensor.to(target.device)
