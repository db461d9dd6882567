"""Blocks of a training sequence: where they start, what they read, what they must predict, what each slot may see.

Slot k of a block whose anchor is at position a predicts the token at a + k; slot 0 is the anchor itself. A slot counts
only while every slot before it is supervised. The block sees the target's features of positions **before** its anchor
(same document, no padding) and its own slots; nothing else.

Shapes: N sequences, S positions, A anchors of a sequence, B slots of a block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..modeling_xpress import DraftVocabulary


class Blocks(NamedTuple):
    anchors: torch.Tensor  # [N, A] position of the anchor, ascending; 0 where there is none
    valid: torch.Tensor  # [N, A] whether there is one
    tokens: torch.Tensor  # [N, A, B] the sequence's tokens at a + k: the anchor, then the labels
    counted: torch.Tensor  # [N, A, B] slots that must be predicted; slot 0 never is
    learned: torch.Tensor  # [N, A, B] those that enter the loss: none from the first label on that cannot be drafted
    predecessors: torch.Tensor  # [N, A] token before the anchor; the anchor itself at a document's start
    positions: torch.Tensor  # [N, A, B] positions inside their document


def sample_anchors(
    loss_mask_NS: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Anchors drawn uniformly without replacement from positions that are supervised, as is the next one.

    Drawn on the CPU, so that a seed means the same anchors on every device.

    Returns:
        Ascending positions `[N, A]` and whether each is one (sequences may hold fewer than A).
    """
    N, S = loss_mask_NS.shape
    candidates = loss_mask_NS[:, :-1] & loss_mask_NS[:, 1:]
    A = min(num_anchors, max(int(candidates.sum(dim=1).max()), 1))
    draws = torch.rand(N, S - 1, generator=generator).to(loss_mask_NS.device).masked_fill_(~candidates, -1.0)
    chosen = draws.topk(A, dim=1)
    positions = chosen.indices.masked_fill(chosen.values < 0, S).sort(dim=1).values
    valid = positions < S
    return positions.masked_fill(~valid, 0), valid


def spread_anchors(loss_mask_NS: torch.Tensor, num_anchors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    As `sample_anchors`, except that they are spread evenly over each row's candidates: the same every time, and
    whatever other rows share the batch.
    """
    S = loss_mask_NS.shape[1]
    candidates = loss_mask_NS[:, :-1] & loss_mask_NS[:, 1:]
    total_N1 = candidates.sum(dim=1, keepdim=True)
    wanted_N1 = total_N1.clamp_max(num_anchors)
    # Of a row's m candidates the i-th is chosen where i * wanted / m + 1/2 reaches a whole number: `wanted` times.
    reached = (candidates.cumsum(dim=1) * wanted_N1 + total_N1 // 2) // total_N1.clamp_min(1)
    chosen = candidates & (reached > F.pad(reached, (1, 0))[:, :-1])
    A = max(int(wanted_N1.max()), 1)
    positions = torch.arange(S - 1, device=chosen.device).where(chosen, S).sort(dim=1).values[:, :A]
    valid = positions < S
    return positions.masked_fill(~valid, 0), valid


def cut_blocks(
    input_ids_NS: torch.Tensor,
    loss_mask_NS: torch.Tensor,
    anchors_NA: torch.Tensor,
    valid_NA: torch.Tensor,
    block_size: int,
    document_ids_NS: torch.Tensor | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> Blocks:
    """
    Everything that a step needs to know of its blocks. A block ends with its sequence and with its document. Without a
    `vocabulary` every label can be drafted.
    """
    N, S = input_ids_NS.shape
    if document_ids_NS is None:
        document_ids_NS = torch.zeros_like(input_ids_NS)
    slots = torch.arange(block_size, device=input_ids_NS.device)
    indices = anchors_NA[:, :, None] + slots  # [N, A, B]
    inside = indices < S
    indices = indices.clamp_max(S - 1)

    def at(table_NS, index):
        return table_NS.gather(1, index.flatten(1)).view(index.shape)

    same_document = at(document_ids_NS, indices) == at(document_ids_NS, anchors_NA)[..., None]
    supervised = at(loss_mask_NS, indices) & inside & same_document & valid_NA[..., None]
    counted = supervised.cumprod(dim=-1).bool() & (slots > 0)

    before = (anchors_NA - 1).clamp_min(0)
    has_predecessor = (anchors_NA > 0) & (at(document_ids_NS, before) == at(document_ids_NS, anchors_NA))
    predecessors = torch.where(has_predecessor, at(input_ids_NS, before), at(input_ids_NS, anchors_NA))
    positions = at(document_positions(document_ids_NS), anchors_NA)[..., None] + slots
    tokens, learned = at(input_ids_NS, indices), counted
    if vocabulary is not None:
        _, draftable = vocabulary.columns(tokens)
        learned = counted & (draftable | (slots == 0)).cumprod(dim=-1).bool()
    return Blocks(anchors_NA, valid_NA, tokens, counted, learned, predecessors, positions)


def document_positions(document_ids_NS: torch.Tensor) -> torch.Tensor:
    """Positions `[N, S]` that count from 0 in every document (documents are runs of one id)."""
    S = document_ids_NS.shape[1]
    index = torch.arange(S, device=document_ids_NS.device).expand_as(document_ids_NS)
    starts = torch.ones_like(document_ids_NS, dtype=torch.bool)
    starts[:, 1:] = document_ids_NS[:, 1:] != document_ids_NS[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def block_attention_mask(
    anchors_NA: torch.Tensor,
    valid_NA: torch.Tensor,
    block_size: int,
    attention_mask_NS: torch.Tensor,
    document_ids_NS: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Who sees whom, `[N, 1, A * B, S + A * B]`, True where visible; keys are the context, then all blocks.

    Slot (n, k) sees context j iff j < a_n, in the same document and no padding, and every slot of its own block.
    The slots of an anchor that is none see themselves alone, so that no softmax is empty. One byte an entry, whatever
    the number of heads; `flex_block_mask` says the same in far less.
    """
    (N, A), S = anchors_NA.shape, attention_mask_NS.shape[1]
    context = torch.arange(S, device=anchors_NA.device) < anchors_NA[..., None]  # [N, A, S]
    context &= attention_mask_NS.bool()[:, None] & valid_NA[..., None]
    if document_ids_NS is not None:
        context &= document_ids_NS[:, None] == document_ids_NS.gather(1, anchors_NA)[..., None]
    own = torch.eye(A, dtype=torch.bool, device=anchors_NA.device)
    own = own.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1).expand(N, -1, -1)
    return torch.cat([context.repeat_interleave(block_size, 1), own], dim=-1)[:, None]


def flex_block_mask(
    anchors_NA: torch.Tensor,
    valid_NA: torch.Tensor,
    block_size: int,
    attention_mask_NS: torch.Tensor,
    document_ids_NS: torch.Tensor,
) -> BlockMask:
    """`block_attention_mask` for `flex_attention`, which skips the tiles that nobody sees."""
    (N, A), S = anchors_NA.shape, attention_mask_NS.shape[1]
    real_NS, anchor_documents_NA = attention_mask_NS.bool(), document_ids_NS.gather(1, anchors_NA)

    def visible(n, head, query, key):
        block, position = query // block_size, key.clamp_max(S - 1)
        context = (key < anchors_NA[n, block]) & valid_NA[n, block] & real_NS[n, position]
        context = context & (document_ids_NS[n, position] == anchor_documents_NA[n, block])
        return torch.where(key < S, context, (key - S) // block_size == block)

    length = A * block_size
    return create_block_mask(visible, N, None, length, S + length, device=anchors_NA.device)


def teacher_positions(blocks: Blocks, length: int) -> torch.Tensor:
    """Where each draft slot is predicted from, position a + k - 1: flat indices of `[N * S]`, `[M, P]` for valid blocks."""
    rows, _ = blocks.valid.nonzero(as_tuple=True)
    slots = torch.arange(blocks.tokens.shape[2] - 1, device=rows.device)
    positions = (blocks.anchors[blocks.valid][:, None] + slots).clamp_max(length - 1)
    return rows[:, None] * length + positions
