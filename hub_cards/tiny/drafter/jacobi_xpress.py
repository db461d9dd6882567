"""Resolving a block: from the base logits of all slots to draft tokens, by parallel Jacobi passes.

A pass recomputes every slot at once from the tokens of the pass before. Slot k reads only slots before it, so after j
passes slots 1..j hold what left-to-right decoding would give, and after B - 1 passes all do: the fixed point.

Sampling draws one Gumbel noise for the block and shares it between the seed and all passes, so that a token is
`argmax(scores + noise)` and moves only when its scores do. The proposal q of a slot is the softmax of the very scores
whose arg-max gave its token, in the last pass: slot k's scores depend on the noise of slots before k alone, so its
token is a draw from q given them, whatever K is.

Shapes: N rows, B slots of a block, P = B - 1 draft slots, V columns of draft logits (the vocabulary, or the draft
vocabulary), C shortlist, H hidden, R rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .refiner_xpress import MarkovHead, previous_tokens
from .vocabulary_xpress import DraftVocabulary


Scores = Callable[[torch.Tensor], torch.Tensor]


class Draft(NamedTuple):
    tokens: torch.Tensor  # [N, P]
    # fp32, over the target's vocabulary [N, P, V]: softmax is q. None when greedy, where q is one-hot.
    scores: torch.Tensor | None
    passes: int  # Jacobi passes run
    copied: bool = False  # from the text so far, in the place of drafting
    confidence: torch.Tensor | None = None  # q of each slot's likeliest token [N, P], fp32; None where nobody asked


def row_argmax(logits: torch.Tensor, chunk: int = 1024) -> torch.Tensor:
    """`logits.argmax(-1)`, ties to the lowest index; over a large vocabulary by chunks, several times faster on CPUs.

    PyTorch's CPU maximum is vectorised and its arg-max is not, so the maxima of the chunks are compared first and only
    the winning chunk is searched.
    """
    V = logits.shape[-1]
    if V <= 4 * chunk or logits.device.type != "cpu" or not logits.is_contiguous():
        return logits.argmax(dim=-1)
    rows = logits.view(-1, V)
    whole = V - V % chunk
    chunks = rows[:, :whole].unflatten(1, (-1, chunk))
    maxima = chunks.amax(dim=-1)
    best = maxima.argmax(dim=-1, keepdim=True)
    winner = chunks.gather(1, best[..., None].expand(-1, 1, chunk)).squeeze(1)
    index = best.squeeze(1) * chunk + winner.argmax(dim=-1)
    if whole < V:
        rest, value = rows[:, whole:], maxima.gather(1, best).squeeze(1)
        index = torch.where(rest.amax(dim=-1) > value, whole + rest.argmax(dim=-1), index)
    return index.view(logits.shape[:-1])


def row_topk(logits: torch.Tensor, size: int, runs: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits.topk(size, -1)` in any order; on CPUs by the best of interleaved runs, several times faster.

    The `size` best values lie in the `size` groups of `runs` values with the best maxima.
    """
    V = logits.shape[-1]
    groups = V // runs
    if logits.device.type != "cpu" or V % runs or groups < 4 * size:
        return logits.topk(size, dim=-1)
    rows = logits.reshape(-1, runs, groups)
    best = rows.amax(dim=1).topk(size, dim=-1, sorted=False).indices  # [rows, size] of the groups
    candidates = rows.gather(2, best[:, None].expand(-1, runs, -1)).flatten(1)
    values, index = candidates.topk(size, dim=-1, sorted=False)
    ids = (index // size) * groups + best.gather(1, index % size)
    return values.view(*logits.shape[:-1], size), ids.view(*logits.shape[:-1], size)


def gumbel_noise(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise in fp32: `-log(E)` with E exponential; `argmax(scores + noise)` draws from softmax."""
    return -torch.empty(shape, dtype=torch.float32, device=device).exponential_().log_()


def resolve_block(
    refiner,
    h_NBH: torch.Tensor,
    base_NPV: torch.Tensor,
    predecessor_N: torch.Tensor,
    anchor_N: torch.Tensor,
    num_passes: int,
    *,
    sample: bool = False,
    warp: Scores | None = None,
    shortlist_size: int = 0,
    vocabulary: DraftVocabulary | None = None,
    threshold: float = 0.0,
) -> Draft:
    """
    The block's draft tokens after `num_passes` Jacobi passes, fewer where a pass changes nothing.

    Args:
        refiner: `XPressHead`, `MarkovHead` or `None` (the base's own tokens).
        h_NBH: Normed backbone states of all slots.
        base_NPV: The target's head, or its rows of the draft vocabulary, on the draft slots' states.
        predecessor_N, anchor_N: The tokens before and at slot 0.
        num_passes: K. 0 gives the base's tokens, B - 1 or more the fixed point.
        sample: Draw tokens with shared Gumbel noise; arg-max otherwise.
        warp: What is done to scores over the target's vocabulary before choosing (temperature, top-k, ...), each row alone.
        shortlist_size: Refine only the C best base tokens of each slot; 0 refines all.
        vocabulary: What the columns of `base_NPV` stand for; the target's vocabulary where omitted.
        threshold: Above 0, give the tokens' `confidence` too, and on a CPU make no pass for what `shorten` would cut off.
    """
    num_passes = 0 if refiner is None else min(num_passes, base_NPV.shape[1])
    choose = _choice(base_NPV, sample, warp, vocabulary)
    tokens_NP, scores = choose(base_NPV)
    if num_passes == 0:
        return Draft(tokens_NP, scores, 0, confidence=choose.confidence() if threshold > 0 else None)
    block = refiner.begin_block(h_NBH)
    readout = _readout(refiner.w2, base_NPV, choose, shortlist_size)
    passes, kept_N = 0, 1.0
    while passes < num_passes:
        latents = refiner.latents(block, previous_tokens(predecessor_N, anchor_N, tokens_NP))[:, 1:]
        before = tokens_NP
        tokens_NP, scores = readout(choose, latents)
        passes += 1
        if tokens_NP.device.type != "cpu":
            continue  # comparing would make the host wait for the accelerator, which costs more than a pass
        if torch.equal(before, tokens_NP):
            break
        if threshold > 0:  # slots 1 to `passes` are settled, and so is whether the draft ends there
            kept_N = kept_N * choose.confidence(slice(passes - 1, passes))[:, 0]
            if (kept_N < threshold).all():
                break
    return Draft(tokens_NP, scores, passes, confidence=choose.confidence() if threshold > 0 else None)


def resolve_left_to_right(
    refiner: MarkovHead,
    base_NPV: torch.Tensor,
    anchor_N: torch.Tensor,
    *,
    sample: bool = False,
    warp: Scores | None = None,
    vocabulary: DraftVocabulary | None = None,
    threshold: float = 0.0,
) -> Draft:
    """
    A Markov head's own way: B - 1 steps of one row each, every step reading the token of the one before; with a `threshold`
    and on a CPU no more steps than `shorten` would leave.
    """
    choose = _choice(base_NPV, sample, warp, vocabulary)
    previous_N, steps, confidence, kept_N = anchor_N, [], [], 1.0
    for k in range(base_NPV.shape[1]):
        bias_NV = vocabulary_product(refiner.w2, refiner.markov_w1(previous_N))
        logits_N1V = (base_NPV[:, k] + bias_NV.to(base_NPV.dtype))[:, None]
        steps.append(choose(logits_N1V, slice(k, k + 1)))
        previous_N = steps[-1][0][:, 0]
        if threshold > 0:
            confidence.append(choose.confidence())
            kept_N = kept_N * confidence[-1][:, 0]
            if kept_N.device.type == "cpu" and (kept_N < threshold).all():
                break
    tokens, scores = zip(*steps)
    return Draft(
        torch.cat(tokens, dim=1),
        torch.cat(scores, dim=1) if sample else None,
        len(steps),
        confidence=torch.cat(confidence, dim=1) if threshold > 0 else None,
    )


def shorten(draft: Draft, threshold: float) -> Draft:
    """
    One sequence's draft without its unlikely end: behind a slot up to which the product of confidences, the drafter's own
    estimate of how often all is kept so far, is under `threshold`. The first token always stays.

    Whether a token is dropped depends on the slots before it and never on itself, so those that stay are draws from q.
    """
    likely_P = draft.confidence[0].cumprod(dim=0)[:-1] >= threshold
    kept = slice(1 + int(likely_P.sum()))
    scores = None if draft.scores is None else draft.scores[:, kept]
    return draft._replace(tokens=draft.tokens[:, kept], scores=scores, confidence=draft.confidence[:, kept])


def vocabulary_product(w2, x_QR: torch.Tensor) -> torch.Tensor:
    """`w2(x)` `[Q, V]`. On CPUs a product of few rows with many is up to twice as fast with those first (see NOTES.md)."""
    if x_QR.device.type != "cpu" or len(w2.weight) <= VocabularyReadout.CHUNK:
        return w2(x_QR)
    return torch.mm(w2.weight, x_QR.T).T


def _readout(w2, base_NPV: torch.Tensor, choose, shortlist_size: int):
    if shortlist_size > 0:
        return ShortlistReadout(base_NPV, w2, shortlist_size)
    if choose.plain and base_NPV.device.type == "cpu" and len(w2.weight) > VocabularyReadout.CHUNK:
        return VocabularyReadout(base_NPV, w2)
    return RowReadout(base_NPV, w2)


def _choice(base_NPV: torch.Tensor, sample: bool, warp: Scores | None, vocabulary: DraftVocabulary | None):
    vocabulary = DraftVocabulary(base_NPV.shape[-1]) if vocabulary is None else vocabulary
    return SampledChoice(base_NPV, warp, vocabulary) if sample else GreedyChoice(warp, vocabulary)


class Choice:
    """Keeps the logits or scores that it chose from last: `judged_NPV`."""

    def confidence(self, slots: slice = slice(None)) -> torch.Tensor:
        """The probability of the likeliest token of each slot: how often a target that knows its next token keeps it."""
        # On a strided readout the softmax takes five times as long.
        return self.judged_NPV[:, slots].float().contiguous().softmax(dim=-1).amax(dim=-1)


class GreedyChoice(Choice):
    """The best token of each slot; no scores, as q is one-hot."""

    def __init__(self, warp: Scores | None, vocabulary: DraftVocabulary):
        self.warp, self.plain, self.vocabulary = warp, warp is None, vocabulary

    def __call__(self, logits_NPV: torch.Tensor, slots: slice = slice(None)) -> tuple[torch.Tensor, None]:
        if self.plain:
            self.judged_NPV = logits_NPV
            return self.vocabulary.tokens(row_argmax(logits_NPV)), None
        scores = self.vocabulary.whole(logits_NPV)
        self.judged_NPV = self.warp(scores.flatten(0, 1)).view_as(scores)
        return row_argmax(self.judged_NPV), None


class SampledChoice(Choice):
    """Draws tokens from warped scores with one noise for the whole block; also returns the scores behind them."""

    plain = False

    def __init__(self, base_NPV: torch.Tensor, warp: Scores | None, vocabulary: DraftVocabulary):
        self.noise_NPV = gumbel_noise((*base_NPV.shape[:-1], vocabulary.size), base_NPV.device)
        self.warp, self.vocabulary = warp, vocabulary

    def __call__(self, logits_NPV: torch.Tensor, slots: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.vocabulary.whole(logits_NPV.float())
        if self.warp is not None:
            scores = self.warp(scores.flatten(0, 1)).view_as(scores)
        self.judged_NPV = scores
        return row_argmax(scores + self.noise_NPV[:, slots]), scores


class RowReadout:
    """Base logits plus the refiner's bias, a row for every slot: for accelerators, small vocabularies and warped scores."""

    def __init__(self, base_NPV: torch.Tensor, w2):
        self.base_NPV, self.w2 = base_NPV, w2

    def __call__(self, choose, latents_NPR: torch.Tensor):
        bias_NPV = vocabulary_product(self.w2, latents_NPR.flatten(0, 1)).view_as(self.base_NPV)
        return choose(self.base_NPV + bias_NPV.to(self.base_NPV.dtype))


class VocabularyReadout:
    """
    The same with the vocabulary first and in chunks, for arg-maxima on CPUs: the product reads the weight at memory
    speed, and a chunk's sum and maxima are taken while it is still in the processor's cache.
    """

    CHUNK, FOLD = 2**14, 64  # rows of the vocabulary in a chunk; interleaved runs of a chunk whose maxima are compared

    def __init__(self, base_NPV: torch.Tensor, w2):
        self.shape, V = base_NPV.shape[:2], base_NPV.shape[2]
        self.w2, self.base_VQ = w2, base_NPV.flatten(0, 1).T.contiguous()
        Q = self.base_VQ.shape[1]
        size = min(self.CHUNK, -(-V // self.FOLD) * self.FOLD)
        self.chunks = [slice(start, min(start + size, V)) for start in range(0, V, size)]
        self.bias_VQ = torch.empty((size, Q), dtype=w2.weight.dtype)
        self.sum_CVQ = base_NPV.new_empty(
            (len(self.chunks), size, Q), dtype=torch.promote_types(base_NPV.dtype, w2.weight.dtype)
        )
        self.sum_CVQ[-1, V - self.chunks[-1].start :] = -torch.inf

    def __call__(self, choose, latents_NPR: torch.Tensor):
        x_RQ, maxima = latents_NPR.flatten(0, 1).T.to(self.bias_VQ.dtype), []  # autocast leaves `out=` products alone
        for rows, sum_VQ in zip(self.chunks, self.sum_CVQ):
            length = rows.stop - rows.start
            bias_VQ = torch.mm(self.w2.weight[rows], x_RQ, out=self.bias_VQ[:length])
            torch.add(self.base_VQ[rows], bias_VQ, out=sum_VQ[:length])
            maxima.append(sum_VQ.view(self.FOLD, -1).amax(dim=0))
        choose.judged_NPV = self.sum_CVQ.flatten(0, 1).T.view(*self.shape, -1)
        return choose.vocabulary.tokens(self._search(torch.stack(maxima)).view(self.shape)), None

    def _search(self, maxima: torch.Tensor) -> torch.Tensor:
        """The best row of every column: first among the maxima of all runs, then inside the winning run."""
        C, size, Q = self.sum_CVQ.shape
        width = size // self.FOLD
        run_Q = maxima.view(C * width, Q).argmax(dim=0)
        chunk_Q, offset_Q = run_Q // width, run_Q % width
        runs = self.sum_CVQ.view(C, self.FOLD, width, Q)[chunk_Q, :, offset_Q, torch.arange(Q)]
        return chunk_Q * size + runs.argmax(dim=-1) * width + offset_Q


class ShortlistReadout:
    """The same over the C best base tokens of each slot; tokens outside can not be drafted (q is 0 there)."""

    def __init__(self, base_NPV: torch.Tensor, w2, size: int):
        self.shape = base_NPV.shape
        self.base_NPC, self.columns_NPC = row_topk(base_NPV, min(size, self.shape[-1]))
        self.rows_NPCR = F.embedding(self.columns_NPC, w2.weight)  # plain indexing is several times slower on CPUs

    def __call__(self, choose, latents_NPR: torch.Tensor):
        bias_NPC = torch.matmul(self.rows_NPCR, latents_NPR[..., None]).squeeze(-1)
        logits_NPC = self.base_NPC + bias_NPC.to(self.base_NPC.dtype)
        if choose.plain:
            choose.judged_NPV = logits_NPC
            best_NP = self.columns_NPC.gather(-1, logits_NPC.argmax(dim=-1, keepdim=True)).squeeze(-1)
            return choose.vocabulary.tokens(best_NP), None
        return choose(logits_NPC.new_full(self.shape, -torch.inf).scatter_(-1, self.columns_NPC, logits_NPC))
