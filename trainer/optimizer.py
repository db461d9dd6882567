"""Muon for matrices, AdamW for the rest, as one optimizer, so that `Trainer(optimizers=...)` can hold it."""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import nn
from torch.optim.adamw import adamw

from .bfloat16 import quick_dtype


TABLES = ("embed", "lm_head", "w1", "w2")  # one row per token: no hidden matrices, though of two dimensions
MOMENTUM = 0.95


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """
    `matrix` `[m, n]` with its singular values moved near 1: five quintic Newton-Schulz steps (Jordan et al. 2024), in bf16
    where the device multiplies in it. As `torch.optim.Muon`, which is in bf16 everywhere.
    """
    m, n = matrix.shape
    x = matrix.to(quick_dtype(matrix.device))
    x = x.T if m > n else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if m > n else x


# Of `TrainingArguments`, with defaults of `MuonAdamW`'s own.
SETTINGS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon (Jordan et al. 2024) for hidden matrices, AdamW for tables, norms and the mixer: a group of parameters each, told
    apart by `muon`. Muon is momentum with Nesterov's look ahead, whose step is orthogonalized.

    On the tiny pair it needed half of AdamW's steps, for the target and for the drafter (`NOTES.md`).

    Args:
        named_parameters: All that is trained, by name.
        muon_lr, adamw_lr (`float`): Their learning rates; a scheduler scales both alike. Muon's is that of a wide matrix;
            one of m > n rows steps sqrt(m / n) times as far.
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
        muon = {"muon": True, "lr": muon_lr, "weight_decay": weight_decay}
        adam = {"muon": False, "lr": adamw_lr, "weight_decay": 0.0}
        adam |= {"betas": (adam_beta1, adam_beta2), "eps": adam_epsilon}
        super().__init__([{"params": matrices, **muon}, {"params": rest, **adam}], {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                for parameter in moving:
                    self._muon(parameter, group["lr"], group["weight_decay"])
            else:
                self._adamw(moving, group)
        return loss

    def _muon(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        if parameter.dim() != 2:
            raise ValueError(
                f"Muon got a piece of shape {list(parameter.shape)}, expected a whole matrix: DeepSpeed and FSDP 1 flatten "
                "what they shard. Use FSDP with `fsdp_version: 2`, or `optimizer: adamw`."
            )
        m, n = parameter.shape
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
        step = orthogonalized(parameter.grad.lerp(average, MOMENTUM))
        parameter.mul_(1 - lr * weight_decay).add_(step, alpha=-lr * sqrt(max(1, m / n)))

    def _adamw(self, parameters: list[nn.Parameter], group: dict) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.tensor(0.0), **moments}
        states = [self.state[parameter] for parameter in parameters]
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            first,
            second,
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict: dict) -> None:
        if "parts" in state_dict:
            raise ValueError(
                "the optimizer's state has `parts`, of a version that kept Muon and AdamW apart, expected `state` and "
                "`param_groups`: begin the run anew, or end it with the version that began it."
            )
        super().load_state_dict(state_dict)
