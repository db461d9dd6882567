"""Muon for matrices, AdamW for the rest, as one optimizer, so that `Trainer(optimizers=...)` can hold it."""

from collections.abc import Iterable

import torch
from torch import nn


TABLES = ("embed", "lm_head", "w1", "w2")  # one row per token: no hidden matrices, though of two dimensions


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon (Jordan et al. 2024, torch's own) for hidden matrices, AdamW for tables, norms and the mixer.

    On the tiny pair it needed half of AdamW's steps, for the target and for the drafter (`NOTES.md`).

    Args:
        named_parameters: All that is trained, by name.
        muon_lr, adamw_lr (`float`): Their learning rates; a scheduler scales both alike.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], muon_lr: float, adamw_lr: float):
        matrices, rest = [], []
        for name, parameter in named_parameters:
            hidden = parameter.dim() == 2 and not any(table in name for table in TABLES)
            (matrices if hidden else rest).append(parameter)
        self.parts = [
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict):
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups[:] = [group for part in self.parts for group in part.param_groups]
