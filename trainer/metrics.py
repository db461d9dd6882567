"""What the logs say: sums over batches, which become means over all processes.

Shapes: M blocks, P draft slots of a block.
"""

import time

import torch
from accelerate import Accelerator

from .objective import ObjectiveTerms


TERMS = ("teacher_forced", "consistency", "anchor")


class Sums:
    """Sums of one logging window or one evaluation; they stay on the device until `means`."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.started = time.perf_counter()

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_terms(
        self, terms: ObjectiveTerms, totals: torch.Tensor, labels_MP: torch.Tensor, counted_MP: torch.Tensor
    ) -> None:
        """The objective's terms, what divides them, and what the base and every round would have accepted."""
        self.add(**{name: getattr(terms, name) for name in TERMS}, weight=totals[0], anchor_weight=totals[1])
        self.add(blocks=counted_MP[:, 0].sum(), counted=counted_MP.sum(dim=0))
        for j, guess_MP in enumerate(terms.guesses):
            self.add(**{f"tau_pass_{j}": kept(guess_MP, labels_MP, counted_MP).sum()})

    def add_draft(self, tokens_MP: torch.Tensor, labels_MP: torch.Tensor, counted_MP: torch.Tensor) -> None:
        """What of the drafter's own tokens would have been accepted; beside `add_terms`."""
        kept_MP = kept(tokens_MP, labels_MP, counted_MP)
        self.add(tau=kept_MP.sum(), kept=kept_MP.sum(dim=0))

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """
        Over all processes: loss terms per unit of weight, tau per block (accepted + 1), and for every slot the share of
        blocks which have it that keep it, as `DraftingStatistics.acceptance` counts. A slot that no block has is left out.
        """
        names = list(self.sums)
        flat = accelerator.reduce(torch.cat([self.sums[name].view(-1) for name in names]))
        parts = flat.split([self.sums[name].numel() for name in names])
        sums = {name: part.tolist() for name, part in zip(names, parts)}
        slots = zip(sums.pop("kept"), sums.pop("counted"))
        sums = {name: value[0] for name, value in sums.items()}
        weights = {"anchor": sums["anchor_weight"]}
        means = {f"loss_{name}": sums[name] / (weights.get(name, sums["weight"]) or 1.0) for name in TERMS}
        means |= {name: value / sums["blocks"] + 1 for name, value in sums.items() if name.startswith("tau")}
        means |= {f"acceptance_slot_{k}": a / b for k, (a, b) in enumerate(slots, start=1) if b}
        return means | {"anchors_per_second": sums["blocks"] / (time.perf_counter() - self.started)}


def kept(tokens_MP: torch.Tensor, labels_MP: torch.Tensor, counted_MP: torch.Tensor) -> torch.Tensor:
    """The draft tokens that would be kept had the target answered with the labels: right, as are all before them."""
    return ((tokens_MP == labels_MP) & counted_MP).cumprod(dim=-1)
