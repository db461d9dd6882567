"""Drafts that end where they become unlikely: what confidence is, where they end, and that no output changes."""

import pytest
import torch
from pairs import Case, P, warpers
from rig import BLOCK, HIDDEN, VOCAB, OracleDrafter, drafted, make_drafter, oracle, plain, prompt, ref, target
from xpress_drafter import XPressDrafterModel
from xpress_drafter.generation import Draft, resolve_block, resolve_left_to_right
from xpress_drafter.generation.jacobi_xpress import shorten
from xpress_drafter.modeling_xpress import previous_tokens


REFINERS = {"xpress": {}, "markov": {"xpress_rank": None, "markov_rank": 16}}
N = 20
ALL = 1e-30  # nothing is as unlikely: whole blocks, with their confidence


def block(refiner: str):
    model = make_drafter(target(), **REFINERS[refiner]).refiner
    torch.manual_seed(3)
    h, base = torch.randn(N, BLOCK, HIDDEN), 2 * torch.randn(N, P, VOCAB)
    return model, h, base, torch.randint(VOCAB, (N,)), torch.randint(VOCAB, (N,))


HOT = warpers(temperature=1.7, top_k=9)
WAYS = {
    "greedy": {},
    "greedy, warped": {"warp": lambda scores: HOT(None, scores)},
    "sampled": {"sample": True},
    "sampled, warped": {"sample": True, "warp": lambda scores: HOT(None, scores)},
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_passes", [0, 1, P])
@pytest.mark.parametrize("refiner", REFINERS)
def test_confidence_is_the_softmax_of_the_likeliest_tokens(refiner, num_passes, way):
    """By the scores of the pass that chose the slots' tokens, made anew by the plain refiner."""
    model, h, base, *context = block(refiner)
    drafts = []
    for passes in (num_passes, max(num_passes - 1, 0)):
        torch.manual_seed(5)
        drafts.append(resolve_block(model, h, base, *context, passes, threshold=ALL, **WAYS[way]))
    draft, before = drafts
    scores = base
    if num_passes:
        scores = scores + model.w2(
            model.latents(model.begin_block(h), previous_tokens(*context, before.tokens))[:, 1:]
        )
    if "warp" in WAYS[way]:
        scores = WAYS[way]["warp"](scores.flatten(0, 1)).view_as(base)
    expected = scores.softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(draft.confidence, expected)
    assert resolve_block(model, h, base, *context, num_passes, **WAYS[way]).confidence is None


@torch.no_grad()
@pytest.mark.parametrize("sample", [False, True])
def test_confidence_of_a_shortlist(sample):
    """The softmax of its tokens alone, as is q."""
    model, h, base, *context = block("xpress")
    best = base.topk(7, dim=-1).indices
    listed, drafts = torch.full_like(base, -torch.inf).scatter_(-1, best, base.gather(-1, best)), []
    for logits, size in ((base, 7), (listed, 0), (base, 0)):
        torch.manual_seed(5)
        drafts.append(resolve_block(model, h, logits, *context, P, sample=sample, shortlist_size=size, threshold=ALL))
    torch.testing.assert_close(drafts[0].confidence, drafts[1].confidence, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(drafts[0].confidence, drafts[2].confidence)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_confidence_left_to_right(way):
    model, h, base, predecessor, anchor = block("markov")
    drafts = []
    for resolve in (
        lambda **how: resolve_left_to_right(model, base, anchor, **how),
        lambda **how: resolve_block(model, h, base, predecessor, anchor, P, **how),
    ):
        torch.manual_seed(5)
        drafts.append(resolve(threshold=ALL, **WAYS[way]))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    torch.testing.assert_close(drafts[0].confidence, drafts[1].confidence)


@torch.no_grad()
def test_confidence_of_a_large_vocabulary_in_chunks():
    """The readout that arg-maxima on CPUs take, past one chunk and with its padding."""
    model, base = make_drafter(target()).refiner, 2 * torch.randn(3, P, 40_000)
    model.w2 = torch.nn.Linear(16, 40_000, bias=False)
    h, tokens = torch.randn(3, BLOCK, HIDDEN), torch.randint(VOCAB, (2, 3))
    model.w1 = torch.nn.Embedding(40_000, 16)
    fast = resolve_block(model, h, base, *tokens, P, threshold=ALL)
    slow = resolve_block(model, h, base, *tokens, P, threshold=ALL, warp=lambda scores: scores)
    assert torch.equal(fast.tokens, slow.tokens)
    torch.testing.assert_close(fast.confidence, slow.confidence)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_passes", [1, 3, P])
@pytest.mark.parametrize("threshold", [0.1, 0.5])
def test_passes_that_would_be_cut_off_are_not_made(threshold, num_passes, way):
    """The same drafts as by all passes, in fewer of them."""
    model, h, base, *context = block("xpress")
    model.w2.weight *= 0.3  # so that it is less sure
    made = [0, 0]
    for i in range(N):
        drafts, row = [], slice(i, i + 1)
        for asked in (threshold, ALL):
            torch.manual_seed(i)
            args = h[row], base[row], *(tokens[row] for tokens in context)
            drafts.append(shorten(resolve_block(model, *args, num_passes, threshold=asked, **WAYS[way]), threshold))
        ours, expected = drafts
        made = [a + b.passes for a, b in zip(made, drafts)]
        assert torch.equal(ours.tokens, expected.tokens) and torch.equal(ours.confidence, expected.confidence)
        assert ours.scores is None or torch.equal(ours.scores, expected.scores)
    assert made[0] < made[1] or num_passes < P


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_steps_that_would_be_cut_off_are_not_made(way):
    model, _, base, _, anchor = block("markov")
    model.w2.weight *= 0.3
    for i in range(N):
        drafts, row = [], slice(i, i + 1)
        for asked in (0.1, ALL):
            torch.manual_seed(i)
            drafts.append(resolve_left_to_right(model, base[row], anchor[row], threshold=asked, **WAYS[way]))
        short = shorten(drafts[1], 0.1)
        assert torch.equal(drafts[0].tokens, short.tokens) and drafts[0].passes == short.tokens.shape[1]


@pytest.mark.parametrize(
    "confidence, threshold, length",
    [
        ([0.9, 0.5, 0.5, 0.9], 0.3, 3),  # 0.9, 0.45, 0.225: the third is the last
        ([0.9, 0.5, 0.5, 0.9], 0.225, 4),
        ([0.9, 0.5, 0.9, 0.1], 0.05, 4),
        ([0.1, 1.0, 1.0, 1.0], 0.2, 1),
        ([1.0, 1.0, 1.0, 1.0], 1.0, 4),
        ([0.5, 1.0, 1.0, 1.0], 1.0, 1),
        ([0.9, float("nan"), 0.9, 0.9], 0.1, 2),
        ([0.2], 0.5, 1),
    ],
)
def test_where_a_draft_ends(confidence, threshold, length):
    P = len(confidence)
    tokens, scores = torch.arange(P)[None], torch.randn(1, P, 5)
    short = shorten(Draft(tokens, scores, 2, confidence=torch.tensor([confidence], dtype=torch.float64)), threshold)
    assert torch.equal(short.tokens, tokens[:, :length]) and torch.equal(short.scores, scores[:, :length])
    assert short.passes == 2 and short.confidence.shape == (1, length)


def test_a_cut_that_looks_at_the_token_is_found_out():
    """The planted fault: an unlikely token itself is dropped. The same statistic must fail."""
    case, warp = Case(spread=0.5), warpers(temperature=1.3)
    draft = case.draft(2, warp, sample=True)
    q_NP = draft.scores.softmax(dim=-1).gather(-1, draft.tokens[..., None])[..., 0]
    likely = (q_NP.cumprod(dim=1)[:, :2] >= 0.01).sum(dim=1).clamp_min(1)
    rows = [
        Draft(draft.tokens[i : i + 1, :length], draft.scores[i : i + 1, :length], 2)
        for i, length in enumerate(likely.tolist())
    ]
    pairs, _ = case.pairs(rows, warp)
    assert case.p_value(pairs, warp) < 1e-6


@pytest.mark.parametrize("refiner", [*REFINERS, "none"])
@pytest.mark.parametrize("threshold", [0.02, 0.3, 1])
@pytest.mark.parametrize("settings", [{}, {"suppress_tokens": [3]}, {"repetition_penalty": 1.3}], ids=str)
def test_greedy_text_is_plains(refiner, threshold, settings):
    text = plain(target(), prompt(), 30, **settings)
    drafter = make_drafter(target(), **REFINERS.get(refiner, {"xpress_rank": None}))
    if refiner == "xpress":
        drafter.xpress_head.w2.weight *= 0.2  # else it is sure of most tokens
    output, drafting = drafted(target(), prompt(), drafter, 30, confidence_threshold=threshold, **settings)
    assert torch.equal(output, text)
    assert min(r.drafted for r in drafting.rounds[:-BLOCK]) < P


class Fading(OracleDrafter):
    """As the oracle, but less and less sure along the block, so that a draft ends behind its third slot."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * torch.tensor([1, 1, 1, *(BLOCK - 3) * [0.02]])[:, None]
        return output


def test_drafts_that_end_are_kept_whole_in_part_and_not_at_all():
    drafter = oracle(target(), ref(), (BLOCK - 1, 1, 0), cls=Fading)
    output, drafting = drafted(target(), prompt(), drafter, 40, confidence_threshold=0.3)
    assert torch.equal(output, ref())
    assert {(r.drafted, r.accepted) for r in drafting.rounds[:-2]} == {(3, 3), (3, 1), (3, 0)}


@pytest.mark.parametrize("pattern", [(BLOCK - 1,), (0, 3, BLOCK - 1)], ids=str)
def test_a_sure_drafter_keeps_its_blocks(pattern):
    """An oracle is sure of every token, right or wrong."""
    drafter = oracle(target(), ref(), pattern)
    output, drafting = drafted(target(), prompt(), drafter, 40, confidence_threshold=0.3)
    assert torch.equal(output, ref())
    assert {r.drafted for r in drafting.rounds[:-2]} == {P}


def test_the_drafters_own_threshold_and_a_calls(tmp_path):
    make_drafter(target(), confidence_threshold=1, xpress_rank=None).save_pretrained(tmp_path)
    drafter = XPressDrafterModel.from_pretrained(tmp_path)
    assert drafter.config.confidence_threshold == 1
    ones, _ = drafted(target(), prompt(), drafter, 12, return_dict_in_generate=True)
    assert {r.drafted for r in ones.drafting.rounds[:-1]} == {1}
    whole, _ = drafted(target(), prompt(), drafter, 12, return_dict_in_generate=True, confidence_threshold=0)
    assert {r.drafted for r in whole.drafting.rounds[:1]} == {P}
    assert torch.equal(ones.sequences, whole.sequences)


def test_copied_drafts_are_not_cut():
    ids = prompt(120)
    _, drafting = drafted(
        target(),
        ids,
        make_drafter(target(), xpress_rank=None),
        40,
        confidence_threshold=1,
        prompt_lookup_num_tokens=3,
        max_matching_ngram_size=1,
    )
    assert {r.drafted for r in drafting.rounds[:-1] if r.copied} == {2}
    assert {r.drafted for r in drafting.rounds[:-1] if not r.copied} == {1}
