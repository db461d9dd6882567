"""The co-training objective of xPress (arXiv 2608.02438), as plain functions of tensors.

    L = l(refined | true tokens) + lambda_c * mean_j l(refined | own guesses of round j - 1) + lambda_b * l(base)
    l = c * CE(data token) + (1 - c) * sum_v |p - q|,  weighted by exp(-(k - 1) / gamma) at slot k

Base logits, hidden states and the refiner's per-block part carry gradient from every term; only the guesses, being
arg-maxima, are detached. The rounds are the Jacobi passes of generation, so that what is trained is what runs.

Shapes: M blocks, B slots, P = B - 1 draft slots, V columns of draft logits (the vocabulary, or the draft vocabulary), H
hidden.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..generation import row_argmax
from ..modeling_xpress import DraftVocabulary, previous_tokens


class ObjectiveTerms(NamedTuple):
    """Sums over slots of weight times loss, one per term, and what the sums are divided by."""

    teacher_forced: torch.Tensor
    consistency: torch.Tensor  # mean over the rounds
    anchor: torch.Tensor
    weight: torch.Tensor  # sum of the weights of the learned slots
    guesses: list[torch.Tensor]  # [M, P] arg-max tokens: of the base, then of every round

    def loss(self, lambda_c: float, lambda_b: float) -> torch.Tensor:
        """The weighted sum of the terms; the caller divides by the global batch's `weight`."""
        return self.teacher_forced + lambda_c * self.consistency + lambda_b * self.anchor


def position_weights(block_size: int, gamma: float, device=None) -> torch.Tensor:
    """`exp(-(k - 1) / gamma)` for the draft slots k = 1..B-1 `[P]`. Source: DFlash."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


def slot_loss(
    logits_MPV: torch.Tensor, labels_MP: torch.Tensor, teacher_MPV: torch.Tensor, ce_weight: float
) -> torch.Tensor:
    """
    `ce_weight * CE(label) + (1 - ce_weight) * sum_v |p - q|` of every slot `[M, P]`, in fp32.

    The second part is twice the total variation between the teacher's distribution p and the drafter's q: the
    probability with which speculative sampling rejects (Leviathan et al. 2023) is its half, p being over all tokens. Over a draft
    vocabulary p is the teacher's distribution given that the token can be drafted.
    """
    log_q = F.log_softmax(logits_MPV.float(), dim=-1)
    ce = -log_q.gather(-1, labels_MP[..., None]).squeeze(-1)
    l1 = (teacher_MPV - log_q.exp()).abs().sum(dim=-1)
    return ce_weight * ce + (1.0 - ce_weight) * l1


def xpress_objective(
    refiner,
    h_MBH: torch.Tensor,
    base_MPV: torch.Tensor,
    tokens_MB: torch.Tensor,
    predecessors_M: torch.Tensor,
    teacher_MPV: torch.Tensor,
    weights_MP: torch.Tensor,
    *,
    num_rounds: int,
    ce_weight: float,
    vocabulary: DraftVocabulary | None = None,
) -> ObjectiveTerms:
    """
    All terms of the objective, as the formulas say; autograd keeps all logits. Training runs `bounded_objective`, the same
    numbers in bounded memory, which is tested against this.

    Args:
        refiner: `XPressHead`, `MarkovHead`, or `None` (plain DFlash: only the base term, as `teacher_forced`).
        h_MBH: Normed backbone states of all slots.
        base_MPV: The target's head on the draft slots' states.
        tokens_MB: The data's tokens: the anchor, then the labels.
        predecessors_M: The token before each anchor.
        teacher_MPV: The target's distribution for each draft slot, fp32.
        weights_MP: Position weight of every slot that is learned, 0 where it is not.
        vocabulary: What the logits' columns stand for; the vocabulary where omitted.
    """
    anchors_M, labels_MP = tokens_MB[:, 0], tokens_MB[:, 1:]
    vocabulary = DraftVocabulary(base_MPV.shape[-1]) if vocabulary is None else vocabulary
    columns_MP, _ = vocabulary.columns(labels_MP)

    def weighted(logits_MPV):
        return (slot_loss(logits_MPV, columns_MP, teacher_MPV, ce_weight) * weights_MP).sum()

    guesses = [vocabulary.tokens(row_argmax(base_MPV))]
    anchor = weighted(base_MPV)
    if refiner is None:
        return ObjectiveTerms(anchor, anchor.new_zeros(()), anchor.new_zeros(()), weights_MP.sum(), guesses)

    block = refiner.begin_block(h_MBH)

    def refine(tokens_MP):
        prev_MB = previous_tokens(predecessors_M, anchors_M, tokens_MP)
        return base_MPV + refiner.w2(refiner.latents(block, prev_MB)[:, 1:])

    teacher_forced = weighted(refine(labels_MP))
    consistency = anchor.new_zeros(())
    for _ in range(num_rounds):
        refined_MPV = refine(guesses[-1])
        consistency = consistency + weighted(refined_MPV) / num_rounds
        guesses.append(vocabulary.tokens(row_argmax(refined_MPV)))
    return ObjectiveTerms(teacher_forced, consistency, anchor, weights_MP.sum(), guesses)
