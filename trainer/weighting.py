"""Options beyond the paper, off by default: weights of slots and of the base term, and which parts learn how fast.

Shapes: M blocks, B slots, P = B - 1 draft slots.
"""

import math

import torch
from torch import nn

from ..modeling_xpress import XPressModel


SCHEDULES = {
    "constant": lambda progress: 0.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
}


def scheduled(kind: str, start: float, end: float, progress: float) -> float:
    """A value on its way from `start` to `end`, at `progress` from 0 to 1; `"constant"` stays at the start."""
    return start + (end - start) * SCHEDULES[kind](min(progress, 1.0))


def dpace_weights(q_MP: torch.Tensor, counted_MP: torch.Tensor, alpha: float) -> torch.Tensor:
    """
    `weight_k = sum_{j >= k} prod_{i <= j} c_i` with `c_i = (1 - alpha) q_i + alpha`, over the slots that are learned `[M, P]`.

    q_i is the probability of slot i's label, so a slot weighs what it adds to the tokens that are expected to be kept.
    Source: D-PACE.
    """
    reached_MP = (((1.0 - alpha) * q_MP + alpha) * counted_MP).cumprod(dim=-1)
    return reached_MP.flip(-1).cumsum(dim=-1).flip(-1)


def is_refiner(name: str) -> bool:
    """Whether a parameter of this name, however wrapped, is the refiner's."""
    return "xpress_head." in name or "markov_head." in name


def freeze_backbone(drafter: XPressModel) -> None:
    """Leaves only the refiner trainable."""
    if drafter.refiner is None:
        raise ValueError("`freeze_backbone` is set, but the drafter has no refiner: nothing would be trained.")
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(is_refiner(name))


def scale_backbone_rate(optimizer: torch.optim.Optimizer, model: nn.Module, scale: float) -> None:
    """Gives the backbone's parameters groups of their own, with `scale` times the rate."""
    refiner = {parameter for name, parameter in model.named_parameters() if is_refiner(name)}
    groups = []
    for group in optimizer.param_groups:
        for inside in (True, False):  # the refiner first: Trainer logs the first group's rate
            parameters = [parameter for parameter in group["params"] if (parameter in refiner) == inside]
            rate = group["lr"] * (1.0 if inside else scale)
            groups += [{**group, "params": parameters, "lr": rate}] if parameters else []
    optimizer.param_groups[:] = sorted(groups, key=lambda group: group["params"][0] not in refiner)
