"""What the logs say: sums over batches that become means over all processes, and what the drafter itself would draft.

Shapes: M blocks, B slots, P = B - 1 draft slots, H hidden, V vocabulary.
"""

import time
from collections.abc import Callable

import torch
from accelerate import Accelerator

from ..generation import resolve_block, resolve_left_to_right
from ..modeling_xpress import XPressDrafterConfig
from .objective import ObjectiveTerms, simulated_tau


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
        """The objective's terms, and tau of the base and of every round."""
        self.add(**{name: getattr(terms, name) for name in ("teacher_forced", "consistency", "anchor", "weight")})
        self.add(blocks=torch.tensor(len(labels_MP), device=labels_MP.device))
        for j, guess_MP in enumerate(terms.guesses):
            self.add(**{f"tau_pass_{j}": simulated_tau(guess_MP, labels_MP, counted_MP)})

    def add_slots(self, tokens_MP: torch.Tensor, labels_MP: torch.Tensor, counted_MP: torch.Tensor) -> None:
        """How many of the slots that count would be kept: theirs and all tokens before them are the labels."""
        kept_MP = ((tokens_MP == labels_MP) & counted_MP).cumprod(dim=-1)
        self.add(kept=kept_MP.sum(dim=0), counted=counted_MP.sum(dim=0))

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """
        Over all processes: loss terms per unit of weight, tau per block (accepted + 1), and for every slot the share of
        blocks which have it that keep it, as `DraftingStatistics.acceptance` counts. A slot that no block has is left out.
        """
        names = list(self.sums)
        flat = accelerator.reduce(torch.cat([self.sums[name].view(-1) for name in names]))
        parts = flat.split([self.sums[name].numel() for name in names])
        sums = {name: part.tolist() for name, part in zip(names, parts)}
        kept, counted = sums.pop("kept"), sums.pop("counted")
        sums = {name: value[0] for name, value in sums.items()}
        means = {f"loss_{name}": sums[name] / sums["weight"] for name in ("teacher_forced", "consistency", "anchor")}
        means |= {name: value / sums["blocks"] for name, value in sums.items() if name.startswith("tau")}
        means |= {f"acceptance_slot_{k}": a / b for k, (a, b) in enumerate(zip(kept, counted), start=1) if b}
        return means | {"anchors_per_second": sums["blocks"] / (time.perf_counter() - self.started)}


def own_draft(
    config: XPressDrafterConfig,
    refiner,
    h_MBH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    predecessors_M: torch.Tensor,
    anchors_M: torch.Tensor,
    chunk: int = 2**23,
) -> torch.Tensor:
    """
    The tokens `[M, P]` that `generate` would draft for these blocks, greedy, with the config's own passes and shortlist.

    Args:
        head: The target's head: states `[..., H]` to logits `[..., V]`.
        chunk: Elements of `[M, P, V]` at a time.
    """
    size = max(1, chunk // (config.num_draft_tokens * config.vocab_size))
    drafts = []
    for h, predecessors, anchors in zip(h_MBH.split(size), predecessors_M.split(size), anchors_M.split(size)):
        base = head(h[:, 1:])
        if config.refiner_type == "markov":
            drafts.append(resolve_left_to_right(refiner, base, anchors))
        else:
            passes, shortlist = config.xpress_num_passes, config.xpress_topc
            drafts.append(resolve_block(refiner, h, base, predecessors, anchors, passes, shortlist_size=shortlist))
    return torch.cat([draft.tokens for draft in drafts])
