"""What the logs say: sums over batches that become means over all processes, and what the drafter itself would draft.

Shapes: M blocks, B slots, P = B - 1 draft slots, H hidden, V vocabulary.
"""

import time

import torch
from accelerate import Accelerator

from ..generation import resolve_block, resolve_left_to_right
from ..modeling_xpress import XPressModel
from .bounded import CHUNK, ObjectiveInputs
from .objective import ObjectiveTerms


class Sums:
    """Sums of one logging window or one evaluation; they stay on the device until `means`."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.started = time.perf_counter()

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_terms(self, terms: ObjectiveTerms, labels_MP: torch.Tensor, counted_MP: torch.Tensor) -> None:
        """The objective's terms, and what the base and every round would have accepted."""
        self.add(**{name: getattr(terms, name) for name in ("teacher_forced", "consistency", "anchor", "weight")})
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
        means = {f"loss_{name}": sums[name] / sums["weight"] for name in ("teacher_forced", "consistency", "anchor")}
        means |= {name: value / sums["blocks"] + 1 for name, value in sums.items() if name.startswith("tau")}
        means |= {f"acceptance_slot_{k}": a / b for k, (a, b) in enumerate(slots, start=1) if b}
        return means | {"anchors_per_second": sums["blocks"] / (time.perf_counter() - self.started)}


def kept(tokens_MP: torch.Tensor, labels_MP: torch.Tensor, counted_MP: torch.Tensor) -> torch.Tensor:
    """The draft tokens that would be kept had the target answered with the labels: right, as are all before them."""
    return ((tokens_MP == labels_MP) & counted_MP).cumprod(dim=-1)


def own_draft(drafter: XPressModel, h_MBH: torch.Tensor, inputs: ObjectiveInputs) -> torch.Tensor:
    """The tokens `[M, P]` that `generate` would draft for these blocks, greedy, with the drafter's own passes."""
    config, drafts = drafter.config, []
    size = max(1, CHUNK // (config.num_draft_tokens * config.vocab_size))
    parts = (h_MBH, inputs.predecessors_M, inputs.tokens_MB[:, 0])
    for h, predecessors, anchors in zip(*(part.split(size) for part in parts)):
        base = inputs.head(h[:, 1:])
        if config.refiner_type == "markov":
            drafts.append(resolve_left_to_right(drafter.refiner, base, anchors))
        else:
            passes, shortlist = config.xpress_num_passes, config.xpress_topc
            drafts.append(
                resolve_block(drafter.refiner, h, base, predecessors, anchors, passes, shortlist_size=shortlist)
            )
    return torch.cat([draft.tokens for draft in drafts])
