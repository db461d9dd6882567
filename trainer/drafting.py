"""What the drafter makes of a step's blocks: states; and without gradient, in bounded memory, its tokens and confidence.

Shapes: N sequences, S positions, A anchors of a sequence, M blocks in all, B slots, P = B - 1 draft slots, H hidden,
F = H * taps.
"""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..generation import resolve_block, resolve_left_to_right
from ..modeling_xpress import XPressModel, previous_tokens
from .blocks import Blocks, block_attention_mask, document_positions, flex_block_mask
from .bounded import CHUNK, ObjectiveInputs
from .wrapping import to_target


def draft_blocks(
    drafter: XPressModel,
    target: PreTrainedModel,
    features_NSF: torch.Tensor,
    blocks: Blocks,
    attention_mask_NS: torch.Tensor,
    document_ids_NS: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backbone's normed states of all blocks `[N, A, B, H]`, in one pass over context and blocks."""
    N, A, B = blocks.tokens.shape
    noise_ids = torch.full_like(blocks.tokens, drafter.config.mask_token_id)
    noise_ids[..., 0] = blocks.tokens[..., 0]
    noise_embeds = target.get_input_embeddings()(to_target(target, noise_ids.flatten(1)))
    if document_ids_NS is None:
        document_ids_NS = torch.zeros_like(attention_mask_NS)
    flex = drafter.config._attn_implementation == "flex_attention"
    make_mask = flex_block_mask if flex else block_attention_mask
    h = drafter.forward(
        noise_embeds=noise_embeds.to(device=features_NSF.device, dtype=drafter.dtype),
        context_hidden_states=features_NSF.to(drafter.dtype),
        position_ids=torch.cat([document_positions(document_ids_NS), blocks.positions.flatten(1)], dim=1),
        attention_mask=make_mask(blocks.anchors, blocks.valid, B, attention_mask_NS, document_ids_NS),
    ).last_hidden_state
    return h.view(N, A, B, -1)


def block_chunks(h_MBH: torch.Tensor, inputs: ObjectiveInputs) -> Iterator[tuple[torch.Tensor, ObjectiveInputs]]:
    """As many blocks at a time as have `CHUNK` logits, at least one."""
    size = max(1, CHUNK // (inputs.weights_MP.shape[1] * len(inputs.vocabulary)))
    for start in range(0, len(h_MBH), size):
        blocks = slice(start, start + size)
        yield h_MBH[blocks], inputs.chunk(blocks)


@torch.no_grad()
def own_draft(
    drafter: XPressModel, h_MBH: torch.Tensor, inputs: ObjectiveInputs, num_passes: int | None = None
) -> torch.Tensor:
    """The tokens `[M, P]` that `generate` would draft for these blocks, greedy; with the drafter's own passes where omitted."""
    config, refiner, drafts = drafter.config, drafter.refiner, []
    passes = config.xpress_num_passes if num_passes is None else num_passes
    for h, part in block_chunks(h_MBH, inputs):
        base, anchors = part.head(h[:, 1:]), part.tokens_MB[:, 0]
        if config.refiner_type == "markov":
            drafts.append(resolve_left_to_right(refiner, base, anchors, vocabulary=part.vocabulary))
        else:
            how = {"shortlist_size": config.xpress_topc, "vocabulary": part.vocabulary}
            drafts.append(resolve_block(refiner, h, base, part.predecessors_M, anchors, passes, **how))
    return torch.cat([draft.tokens for draft in drafts])


@torch.no_grad()
def label_probabilities(drafter: XPressModel, h_MBH: torch.Tensor, inputs: ObjectiveInputs) -> torch.Tensor:
    """The drafter's probability of every slot's label, given the true tokens before it `[M, P]`, fp32."""
    refiner, found = drafter.refiner, []
    for h, part in block_chunks(h_MBH, inputs):
        logits, labels = part.head(h[:, 1:]), part.tokens_MB[:, 1:]
        if refiner is not None:
            prev = previous_tokens(part.predecessors_M, part.tokens_MB[:, 0], labels)
            logits = logits + refiner.w2(refiner.latents(refiner.begin_block(h), prev)[:, 1:])
        columns, _ = part.vocabulary.columns(labels)
        found.append(logits.float().softmax(dim=-1).gather(-1, columns[..., None]).squeeze(-1))
    return torch.cat(found)
