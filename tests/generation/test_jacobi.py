"""Resolving a block: Jacobi against the sequential decode, sampled draws against their proposal, shortlist, Markov."""

import pytest
import torch
from rig import BLOCK, HIDDEN, VOCAB, make_drafter, target
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from xpress_drafter.generation import Draft, jacobi_xpress, resolve_block, resolve_left_to_right, row_argmax


N, P = 64, BLOCK - 1


def random_block(seed: int = 0, bias: float = 8.0, **config):
    """A refiner whose biases have that deviation (the base: 2), and N blocks for it: refiner, h, base, predecessor, anchor."""
    refiner = make_drafter(target(), seed=seed, **config).refiner
    h, base = torch.randn(N, BLOCK, HIDDEN), 2 * torch.randn(N, P, VOCAB)
    refiner.w2.weight *= bias / refiner(h, torch.randint(VOCAB, (N, BLOCK))).std()
    return refiner, h, base, torch.randint(VOCAB, (N,)), torch.randint(VOCAB, (N,))


def sequential(refiner, h, base, predecessor, anchor, choose) -> torch.Tensor:
    """The slow reference: slot after slot, each from the full refiner on the tokens chosen so far."""
    tokens = torch.zeros(len(h), P, dtype=torch.long)
    for k in range(P):
        prev = torch.cat([predecessor[:, None], anchor[:, None], tokens[:, :-1]], dim=1)
        logits = base + refiner(h, prev)[:, 1:]
        tokens[:, k] = choose(logits[:, k], k)
    return tokens


@pytest.mark.parametrize("seed", range(3))
def test_after_j_passes_j_slots_equal_the_sequential_decode(seed):
    block = random_block(seed)
    expected = sequential(*block, lambda logits, k: logits.argmax(dim=-1))
    settled = []
    for j in range(P + 3):
        draft = resolve_block(*block, j)
        assert torch.equal(draft.tokens[:, :j], expected[:, :j])
        assert draft.scores is None and draft.passes <= min(j, P)
        settled.append((draft.tokens == expected).float().mean().item())
    assert settled[0] < 0.2 and settled[P - 2] < 1 == settled[P]  # one pass was not enough
    assert torch.equal(resolve_block(*block, 0).tokens, block[2].argmax(dim=-1))


@pytest.mark.parametrize("warp", [None, LogitsProcessorList([TemperatureLogitsWarper(2.0), TopKLogitsWarper(7)])])
def test_sampled_passes_share_their_noise(warp, monkeypatch):
    block = random_block(bias=2.0)
    noise = jacobi_xpress.gumbel_noise((N, P, VOCAB), torch.device("cpu"))
    monkeypatch.setattr(jacobi_xpress, "gumbel_noise", lambda shape, device: noise.expand(shape))
    warped = warp and (lambda scores: warp(torch.empty((1, 0)), scores))
    choose = lambda logits, k: ((warped(logits) if warp else logits) + noise[:, k]).argmax(dim=-1)  # noqa: E731
    expected = sequential(*block, choose)
    for j in range(P + 1):
        draft = resolve_block(*block, j, sample=True, warp=warped)
        assert torch.equal(draft.tokens[:, :j], expected[:, :j])
    assert torch.equal(draft.tokens, expected)


@pytest.mark.parametrize("shortlist_size", [0, 12])
@pytest.mark.parametrize("num_passes", [0, 1, 2, P])
def test_tokens_are_redrawn_from_the_returned_scores(num_passes, shortlist_size, monkeypatch):
    """With the recorded noise, the arg-max of the returned scores gives exactly the returned tokens."""
    recorded = []
    draw = jacobi_xpress.gumbel_noise
    monkeypatch.setattr(jacobi_xpress, "gumbel_noise", lambda *args: recorded.append(draw(*args)) or recorded[-1])
    draft = resolve_block(*random_block(bias=2.0), num_passes, sample=True, shortlist_size=shortlist_size)
    assert len(recorded) == 1
    assert torch.equal((draft.scores + recorded[0]).argmax(dim=-1), draft.tokens)


@pytest.mark.parametrize("num_passes", [0, 1, 2, P])
@pytest.mark.parametrize("slot", range(P))
def test_a_slots_noise_reaches_later_proposals_only(num_passes, slot, monkeypatch):
    """And their confidence: whether a slot is dropped for its confidence is decided before it is drawn."""
    block = random_block(bias=2.0)
    noise = jacobi_xpress.gumbel_noise((N, P, VOCAB), torch.device("cpu"))
    other = noise.clone()
    other[:, slot] = other[:, slot].roll(1, dims=-1)
    drafts = []
    for values in (noise, other):
        monkeypatch.setattr(jacobi_xpress, "gumbel_noise", lambda shape, device, values=values: values)
        drafts.append(resolve_block(*block, num_passes, sample=True, threshold=1e-30))
    before, after = drafts
    for name in ("scores", "confidence"):
        one, two = getattr(before, name), getattr(after, name)
        assert torch.equal(one[:, : slot + 1], two[:, : slot + 1])
        if num_passes and slot < P - 1:
            assert not torch.equal(one[:, slot + 1], two[:, slot + 1])
    assert not torch.equal(before.tokens[:, slot], after.tokens[:, slot])


def test_stops_early_only_where_a_pass_changed_nothing():
    refiner, h, base, predecessor, anchor = random_block()
    refiner.w2.weight.zero_()
    draft = resolve_block(refiner, h, base, predecessor, anchor, P)
    assert draft.passes == 1 and torch.equal(draft.tokens, base.argmax(dim=-1))


def test_no_refiner_gives_the_base():
    _, h, base, predecessor, anchor = random_block()
    assert torch.equal(resolve_block(None, h, base, predecessor, anchor, 6).tokens, base.argmax(dim=-1))


@pytest.mark.parametrize("sample", [False, True])
def test_a_shortlist_of_all_tokens_changes_nothing(sample):
    block = random_block()
    drafts = []
    for size in (0, VOCAB, VOCAB + 5):
        torch.manual_seed(3)
        drafts.append(resolve_block(*block, 3, sample=sample, shortlist_size=size))
    for draft in drafts[1:]:
        assert torch.equal(draft.tokens, drafts[0].tokens)
        if sample:
            torch.testing.assert_close(draft.scores, drafts[0].scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("warp", [None, lambda scores: scores / 2])
def test_a_shortlist_drafts_the_best_of_its_tokens(warp):
    block = random_block()
    listed = torch.zeros(N, P, VOCAB, dtype=torch.bool).scatter_(-1, block[2].topk(9, dim=-1).indices, True)
    expected = sequential(
        block[0],
        block[1],
        block[2].masked_fill(~listed, -torch.inf),
        *block[3:],
        lambda logits, k: logits.argmax(dim=-1),
    )
    assert torch.equal(resolve_block(*block, P, shortlist_size=9, warp=warp).tokens, expected)
    sampled = resolve_block(*block, P, sample=True, shortlist_size=9, warp=warp)
    assert torch.equal(sampled.scores.isfinite(), listed)


@pytest.mark.parametrize("sample", [False, True])
def test_markov_left_to_right_is_its_jacobi_fixed_point(sample):
    refiner, h, base, predecessor, anchor = random_block(xpress_rank=None, markov_rank=16)
    drafts: list[Draft] = []
    for resolve in (
        lambda **how: resolve_left_to_right(refiner, base, anchor, **how),
        lambda **how: resolve_block(refiner, h, base, predecessor, anchor, P, **how),
    ):
        torch.manual_seed(3)
        drafts.append(resolve(sample=sample))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    if sample:
        torch.testing.assert_close(drafts[0].scores, drafts[1].scores)


def test_gumbel_noise_draws_from_the_softmax():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = (scores + jacobi_xpress.gumbel_noise((200_000, 4), torch.device("cpu"))).argmax(dim=-1)
    frequencies = draws.bincount(minlength=4) / len(draws)
    assert (frequencies - scores.softmax(dim=-1)).abs().max() < 4 * 0.5 / len(draws) ** 0.5


@pytest.mark.parametrize("size", [1, 96, 4096, 4097, 5000, 5119, 5120, 8192, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_argmax_is_torchs(size, dtype):
    logits = torch.randn(3, 4, size).to(dtype)
    assert torch.equal(row_argmax(logits), logits.argmax(dim=-1))
    for places in ([0, size - 1], [size // 2, size - 1], [0, size // 3, size // 2], range(size)):
        tied = logits.clone()
        tied[..., list(places)] = 100.0
        assert (row_argmax(tied) == min(places)).all()  # ties to the lowest index
    assert torch.equal(row_argmax(logits.transpose(0, 1)), logits.transpose(0, 1).argmax(dim=-1))


@pytest.mark.parametrize("size", [96, 5000])
def test_row_argmax_of_what_is_not_a_number_is_still_a_token(size):
    logits = torch.full((4, size), torch.nan)
    logits[1, : size // 2] = 0.0
    logits[2] = -torch.inf
    index = row_argmax(logits)
    assert ((0 <= index) & (index < size)).all()


class Readout(torch.nn.Module):
    """A refiner reduced to its readout: the latents of a slot are those of the token before it."""

    def __init__(self, vocab: int, rank: int, dtype: torch.dtype):
        super().__init__()
        self.w1 = torch.nn.Embedding(vocab, rank, dtype=dtype)
        self.w2 = torch.nn.Linear(rank, vocab, bias=False, dtype=dtype)

    def begin_block(self, h_NBH):
        return None

    def latents(self, block, prev_NB):
        return self.w1(prev_NB)


@pytest.mark.parametrize("vocab", [96, 1000, 2**14, 2**14 + 1, 40_000])
def test_the_fast_greedy_readout_equals_the_plain_one(vocab):
    """Vocabulary first and in chunks, against a row for every slot (which a warp, even one of nothing, asks for)."""
    readout, base = Readout(vocab, 16, torch.float32), 4 * torch.randn(3, P, vocab)
    block = readout, torch.randn(3, BLOCK, HIDDEN), base, *torch.randint(vocab, (2, 3))
    for passes in (1, 2, P):
        slow = resolve_block(*block, passes, warp=lambda scores: scores)
        assert torch.equal(resolve_block(*block, passes).tokens, slow.tokens)


@pytest.mark.parametrize("vocab", [96, 40_000])
def test_the_fast_greedy_readout_in_bf16_finds_a_best_sum(vocab):
    """Sums may round to the same value there: any of the best will do."""
    readout, base = Readout(vocab, 16, torch.bfloat16), 4 * torch.randn(3, P, vocab, dtype=torch.bfloat16)
    predecessor, anchor = torch.randint(vocab, (2, 3))
    tokens = resolve_block(readout, torch.randn(3, BLOCK, HIDDEN), base, predecessor, anchor, 1).tokens
    prev = torch.cat([anchor[:, None], base.argmax(dim=-1)[:, :-1]], dim=1)
    sums = base + readout.w2(readout.w1(prev))
    assert torch.equal(sums.gather(2, tokens[..., None])[..., 0], sums.amax(dim=-1))


@pytest.mark.parametrize("vocab", [96, 4096, 40_000])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_row_topk_is_torchs(vocab, size):
    logits = torch.randn(2, 3, vocab)
    values, ids = jacobi_xpress.row_topk(logits, size)
    assert torch.equal(values.sort(dim=-1).values, logits.topk(size, dim=-1).values.sort(dim=-1).values)
    assert torch.equal(logits.gather(-1, ids), values)
    assert all(len(set(row)) == size for row in ids.flatten(0, 1).tolist())
