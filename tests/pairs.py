"""
Rounds of two tokens in many rows at once, by the very functions that the loop calls (`resolve_block`, `verify`), on a
target distribution that is known exactly: p1(x) p2(y | x). For tests of whether what comes out is the target's.
"""

import torch
from rig import BLOCK, HIDDEN, VOCAB, make_drafter, target
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from xpress_drafter.generation import Draft, resolve_block, verify


ROWS, P = 2000, BLOCK - 1


def warpers(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> LogitsProcessorList:
    chosen = LogitsProcessorList()
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p:
        chosen.append(MinPLogitsWarper(min_p))
    return chosen


class Case:
    """A refiner on one block, and a target of two tokens whose logits are the refined ones with noise.

    Slot 1 is drafted well once refined, slot 2 less well: then its q matters, and it depends on slot 1's token.
    """

    def __init__(self, seed: int = 0, bias: float = 4.0, spread: float = 2.5):
        self.refiner = make_drafter(target(), seed=seed).refiner
        h, base, prev = torch.randn(1, BLOCK, HIDDEN), 1.5 * torch.randn(1, P, VOCAB), torch.full((VOCAB, BLOCK), 3)
        prev[:, 2] = torch.arange(VOCAB)  # slot 2 reads the token of slot 1
        self.refiner.w2.weight *= bias / self.refiner(h, prev[:1]).std()
        refined = base + self.refiner(h.expand(VOCAB, -1, -1), prev)[:, 1:]
        self.first_V = refined[0, 0] + 0.7 * torch.randn(VOCAB)
        self.second_VV = refined[:, 1] + spread * torch.randn(VOCAB, VOCAB)  # row x: the logits after x
        self.h, self.base = h.expand(ROWS, -1, -1), base.expand(ROWS, -1, -1)
        self.context = prev[0, :1].expand(ROWS), prev[0, 1:2].expand(ROWS)  # predecessor, anchor

    def draft(self, num_passes: int, warp: LogitsProcessorList, **how) -> Draft:
        shaped = (lambda scores: warp(None, scores)) if warp else None
        return resolve_block(self.refiner, self.h, self.base, *self.context, num_passes, warp=shaped, **how)

    def pairs(self, draft: Draft | list[Draft], warp: LogitsProcessorList) -> tuple[torch.Tensor, float]:
        """Two tokens a row: one round of two draft tokens, and where it made only one, another from the target.

        Also the share of rows that kept their first draft token. A list has a draft for each row, of its own length.
        """
        first_V, second_VV = self.scores(warp)
        pairs = torch.zeros(ROWS, 2, dtype=torch.long)
        short, kept = [], 0
        for row in range(ROWS):
            at, of = (0, draft[row]) if isinstance(draft, list) else (row, draft)
            tokens = of.tokens[at, :2]
            scores_TV = torch.stack([first_V, second_VV[tokens[0]]])
            made = verify(tokens, None if of.scores is None else of.scores[at, :2], scores_TV, sample=True)
            pairs[row, : len(made)] = torch.tensor(made)
            if len(made) == 1:
                short.append(row)
            kept += made[0] == tokens[0]
        pairs[short, 1] = torch.multinomial(second_VV[pairs[short, 0]].softmax(dim=-1), 1)[:, 0]
        return pairs, kept / ROWS

    def scores(self, warp: LogitsProcessorList) -> tuple[torch.Tensor, torch.Tensor]:
        return warp(None, self.first_V[None].clone())[0], warp(None, self.second_VV.clone())

    def p_value(self, pairs: torch.Tensor, warp: LogitsProcessorList) -> float:
        first_V, second_VV = self.scores(warp)
        return chi_square(pairs, first_V.softmax(dim=-1)[:, None] * second_VV.softmax(dim=-1))


def chi_square(pairs: torch.Tensor, p_VV: torch.Tensor) -> float:
    """The probability of frequencies this far from p: the least, times three, of both tokens' and the pairs' tests."""
    cells = torch.zeros_like(p_VV).index_put_(tuple(pairs.T), torch.ones(len(pairs)), accumulate=True)
    assert not cells[p_VV == 0].any()  # a token the target cannot produce
    tests = ((cells.sum(1), p_VV.sum(1)), (cells.sum(0), p_VV.sum(0)), (cells.flatten(), p_VV.flatten()))
    return min(1.0, 3 * min(token_chi_square(counts, p) for counts, p in tests))


def token_chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p.double() * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts.double()[order]
    large = int((expected >= 5).sum())
    pool = lambda x: torch.cat([x[:large], x[large:].sum()[None]])  # noqa: E731
    expected, counts = pool(expected), pool(counts)
    if expected[-1] < 5:  # too small for a cell of its own
        expected, counts = (torch.cat([x[:-2], x[-2:].sum()[None]]) for x in (expected, counts))
    if len(expected) == 1:
        return 1.0
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum().item(), len(expected) - 1))
