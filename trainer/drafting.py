"""What the drafter itself makes of a step's blocks, without gradient and in bounded memory: its tokens, its confidence.

Shapes: M blocks, B slots, P = B - 1 draft slots, H hidden.
"""

from collections.abc import Iterator

import torch

from ..generation import resolve_block, resolve_left_to_right
from ..modeling_xpress import XPressDrafterConfig, XPressModel, previous_tokens
from .bounded import CHUNK, ObjectiveInputs


def block_chunks(
    config: XPressDrafterConfig, h_MBH: torch.Tensor, inputs: ObjectiveInputs
) -> Iterator[tuple[torch.Tensor, ObjectiveInputs]]:
    """As many blocks at a time as have `CHUNK` logits, at least one."""
    size = max(1, CHUNK // (config.num_draft_tokens * config.vocab_size))
    for start in range(0, len(h_MBH), size):
        blocks = slice(start, start + size)
        yield h_MBH[blocks], inputs.chunk(blocks)


@torch.no_grad()
def own_draft(drafter: XPressModel, h_MBH: torch.Tensor, inputs: ObjectiveInputs) -> torch.Tensor:
    """The tokens `[M, P]` that `generate` would draft for these blocks, greedy, with the drafter's own passes."""
    config, refiner, drafts = drafter.config, drafter.refiner, []
    for h, part in block_chunks(config, h_MBH, inputs):
        base, anchors = part.head(h[:, 1:]), part.tokens_MB[:, 0]
        if config.refiner_type == "markov":
            drafts.append(resolve_left_to_right(refiner, base, anchors))
        else:
            passes, shortlist = config.xpress_num_passes, config.xpress_topc
            drafts.append(
                resolve_block(refiner, h, base, part.predecessors_M, anchors, passes, shortlist_size=shortlist)
            )
    return torch.cat([draft.tokens for draft in drafts])


@torch.no_grad()
def label_probabilities(drafter: XPressModel, h_MBH: torch.Tensor, inputs: ObjectiveInputs) -> torch.Tensor:
    """The drafter's probability of every slot's label, given the true tokens before it `[M, P]`, fp32."""
    refiner, found = drafter.refiner, []
    for h, part in block_chunks(drafter.config, h_MBH, inputs):
        logits, labels = part.head(h[:, 1:]), part.tokens_MB[:, 1:]
        if refiner is not None:
            prev = previous_tokens(part.predecessors_M, part.tokens_MB[:, 0], labels)
            logits = logits + refiner.w2(refiner.latents(refiner.begin_block(h), prev)[:, 1:])
        found.append(logits.float().softmax(dim=-1).gather(-1, labels[..., None]).squeeze(-1))
    return torch.cat(found)
