"""Muon for matrices, AdamW for the rest, as one optimizer, so that `Trainer(optimizers=...)` can hold it."""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import nn

from .bfloat16 import multiplies_bf16


TABLES = ("embed", "lm_head", "w1", "w2")  # one row per token: no hidden matrices, though of two dimensions


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """
    `matrix` `[m, n]` with its singular values moved near 1: five quintic Newton-Schulz steps (Jordan et al. 2024), in bf16
    where the device multiplies in it. As `torch.optim.Muon`, which is in bf16 everywhere.
    """
    m, n = matrix.shape
    x = matrix.to(torch.bfloat16 if multiplies_bf16(matrix.device) else torch.float32)
    x = x.T if m > n else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if m > n else x


class Muon(torch.optim.Optimizer):
    """
    Momentum whose step is orthogonalized (Jordan et al. 2024), with Nesterov's look ahead, for matrices alone.

    Args:
        lr (`float`): Of a wide matrix; one of m > n rows steps sqrt(m / n) times as far.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["weight_decay"], group["momentum"])

    def _move(self, parameter: nn.Parameter, lr: float, weight_decay: float, momentum: float) -> None:
        m, n = parameter.shape
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        step = orthogonalized(parameter.grad.lerp(average, momentum))
        parameter.mul_(1 - lr * weight_decay).add_(step, alpha=-lr * sqrt(max(1, m / n)))


# Of `TrainingArguments`, with defaults of `MuonAdamW`'s own.
SETTINGS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon (Jordan et al. 2024) for hidden matrices, AdamW for tables, norms and the mixer.

    On the tiny pair it needed half of AdamW's steps, for the target and for the drafter (`NOTES.md`).

    Args:
        named_parameters: All that is trained, by name.
        muon_lr, adamw_lr (`float`): Their learning rates; a scheduler scales both alike.
        weight_decay (`float`): Of the matrices; the rest has none.
        adam_beta1, adam_beta2, adam_epsilon (`float`): Of the rest.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        muon_lr: float,
        adamw_lr: float,
        weight_decay: float = 0.01,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.95,
        adam_epsilon: float = 1e-8,
    ):
        matrices, rest = [], []
        for name, parameter in named_parameters:
            hidden = parameter.dim() == 2 and not any(table in name for table in TABLES)
            (matrices if hidden else rest).append(parameter)
        self.parts = [
            Muon(matrices, lr=muon_lr, weight_decay=weight_decay),
            torch.optim.AdamW(rest, adamw_lr, (adam_beta1, adam_beta2), adam_epsilon, weight_decay=0.0),
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
