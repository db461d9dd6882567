"""Sampling leaves the target's distribution as it is, for any drafter and any K: CASES B1, B2, B3, B4, B6.

Most of it is by `pairs.Case`: frequencies of pairs must pass a chi-square test, and the same test must fail for planted
faults. One test draws through `generate` itself.
"""

import pytest
import torch
from pairs import ROWS, Case, P, chi_square, token_chi_square, warpers
from rig import (
    BLOCK,
    MASK_TOKEN,
    VOCAB,
    drafted,
    make_drafter,
    make_target,
    oracle,
    plain,
    prompt,
    ref,
    target,
)
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from xpress_drafter.generation import (
    Draft,
    XPressCandidateGenerator,
    candidate_generator_xpress,
    resolve_block,
    verify,
)
from xpress_drafter.generation.acceptance_xpress import residual
from xpress_drafter.modeling_xpress import DraftVocabulary


SETTINGS = [(K, options) for K in (0, 1, 2, P - 1, P) for options in ({}, {"temperature": 1.3, "top_k": 5})] + [
    (1, {"temperature": 0.7}),
    (1, {"temperature": 2.0}),
    (1, {"temperature": 1.3, "top_p": 0.8}),
    (1, {"top_k": 5, "top_p": 0.8}),
    (1, {"temperature": 1.5, "min_p": 0.05}),
]


@pytest.mark.parametrize("num_passes, options", SETTINGS, ids=str)
def test_pairs_follow_the_target(num_passes, options):
    case, warp = Case(), warpers(**options)
    pairs, kept = case.pairs(case.draft(num_passes, warp, sample=True), warp)
    assert case.p_value(pairs, warp) > 1e-3
    assert kept > 0.1


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}], ids=str)
def test_pairs_follow_the_target_with_a_shortlist(num_passes, options):
    case, warp = Case(1), warpers(**options)
    pairs, kept = case.pairs(case.draft(num_passes, warp, sample=True, shortlist_size=10), warp)
    assert case.p_value(pairs, warp) > 1e-3
    assert kept > 0.1


@pytest.mark.parametrize("num_passes", [0, 2, P])
def test_pairs_follow_the_target_with_a_draft_vocabulary(num_passes):
    """Also the tokens that cannot be drafted."""
    case, warp = Case(), warpers(temperature=1.3)
    probable = case.base[0, :2].topk(40, dim=-1).indices.flatten().unique().tolist()
    vocabulary = DraftVocabulary(VOCAB, torch.tensor(probable[::2]))
    refiner = make_drafter(target(), draft_token_ids=probable[::2]).refiner
    weights = case.refiner.state_dict()
    refiner.load_state_dict(weights | {"w2.weight": weights["w2.weight"][vocabulary.ids_D]})
    draft = resolve_block(
        refiner,
        case.h,
        case.base[..., vocabulary.ids_D],
        *case.context,
        num_passes,
        sample=True,
        warp=lambda scores: warp(None, scores),
        vocabulary=vocabulary,
    )
    pairs, kept = case.pairs(draft, warp)
    assert case.p_value(pairs, warp) > 1e-3 and kept > 0.05
    assert len(set(pairs[:, 0].tolist()) - set(probable[::2])) > 5 and len(pairs) == ROWS
    if num_passes == 0:  # the planted fault: the proposal of another block
        pairs, _ = case.pairs(Draft(draft.tokens, draft.scores.roll(1, dims=-1), 0), warp)
        assert case.p_value(pairs, warp) < 1e-6


@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_proposal_of_the_pass_before_is_found_out(num_passes):
    """The planted fault: tokens of the last pass, scores of the one before. The same statistic must fail."""
    case, warp, drafts = Case(), warpers(temperature=1.3), []
    for passes in (num_passes, num_passes - 1):
        torch.manual_seed(7)
        drafts.append(case.draft(passes, warp, sample=True))
    pairs, _ = case.pairs(drafts[0], warp)
    assert case.p_value(pairs, warp) > 1e-3
    pairs, _ = case.pairs(Draft(drafts[0].tokens, drafts[1].scores, num_passes), warp)
    assert case.p_value(pairs, warp) < 1e-6


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"top_k": 5}], ids=str)
def test_unwarped_proposals_are_found_out(options):
    """The planted fault: drafts from warped scores, declared as drawn from the raw ones."""
    case, warp = Case(), warpers(**options)
    torch.manual_seed(7)
    draft = case.draft(1, warp, sample=True)
    torch.manual_seed(7)
    raw = case.draft(1, LogitsProcessorList(), sample=True)
    pairs, _ = case.pairs(Draft(draft.tokens, raw.scores, 1), warp)
    assert case.p_value(pairs, warp) < 1e-6


@pytest.mark.parametrize("num_passes", [0, 2])
def test_arg_max_drafts_have_a_one_hot_proposal(num_passes):
    case, warp = Case(2, bias=1.0), warpers(temperature=1.3)
    draft = case.draft(num_passes, warp)
    assert draft.scores is None
    pairs, kept = case.pairs(draft, warp)
    assert case.p_value(pairs, warp) > 1e-3
    assert kept > 0.01
    soft = case.draft(num_passes, warp, sample=True).scores
    pairs, _ = case.pairs(Draft(draft.tokens, soft, num_passes), warp)  # the planted fault
    assert case.p_value(pairs, warp) < 1e-6


@pytest.fixture(scope="module")
def flat_pair():
    """A target flat enough for a drafter to meet it, a drafter, and p of tokens 2 and 3 after `prompt(4)`, enumerated."""
    model = make_target(seed=3, num_hidden_layers=2)
    model.lm_head.weight *= 0.4
    drafter = make_drafter(model, num_hidden_layers=1, target_layer_ids=[0], xpress_num_passes=1)
    drafter.xpress_head.w2.weight *= 0.05
    first_V = model(prompt(4)).logits[0, -1].softmax(dim=-1)
    two = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    logits = model(torch.cat([prompt(4).expand(len(two), -1), two], dim=1)).logits
    second_VV = logits[::VOCAB, -2].softmax(dim=-1)
    third_VVV = logits[:, -1].softmax(dim=-1).view(VOCAB, VOCAB, VOCAB)
    return model, drafter, torch.einsum("x,xy,xyz->yz", first_V, second_VV, third_VVV)


def until_seven(input_ids, scores, **kwargs):
    return torch.full((1,), input_ids.shape[1] >= 7)


BY_ROWS = [[], [lambda input_ids, scores: scores]]


@pytest.mark.parametrize("processors, threshold", [(BY_ROWS[0], 0), (BY_ROWS[1], 0), (BY_ROWS[0], 0.06)])
def test_generate_draws_from_the_target(flat_pair, processors, threshold):
    """Through `generate`: tokens 2 and 3, which one round drafts, against their enumerated distribution. A threshold ends
    the draft before or behind token 3, as the drafter is sure of token 2."""
    model, drafter, p_VV = flat_pair
    runs, pairs, accepted, drafted_tokens = 600, [], 0, set()
    for _ in range(runs):
        output, drafting = drafted(
            model,
            prompt(4),
            drafter,
            5,
            do_sample=True,
            top_k=0,
            logits_processor=processors,
            confidence_threshold=threshold,
            stopping_criteria=StoppingCriteriaList([until_seven]),
        )
        pairs.append(output[0, 5:7])
        accepted += drafting.rounds[0].accepted
        drafted_tokens.add(min(drafting.rounds[0].drafted, 2))
    assert chi_square(torch.stack(pairs), p_VV) > 1e-3
    assert accepted > 0.1 * runs
    assert drafted_tokens == ({1, 2} if threshold else {2})


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-6}], ids=str)
@pytest.mark.parametrize("pattern", [(BLOCK - 1,), (0, 3)], ids=str)
def test_degenerate_settings_equal_greedy(settings, pattern):
    drafter = oracle(target(), ref(), pattern)
    for chosen in (drafter, make_drafter(target())):
        output, drafting = drafted(target(), prompt(), chosen, 20, do_sample=True, **{"top_k": 0, **settings})
        assert torch.equal(output, ref()[:, :27])
        assert drafting.drafted >= 15


def test_a_drafter_equal_to_the_target_is_always_kept():
    p_TV = torch.randn(4, VOCAB)
    for seed in range(200):
        torch.manual_seed(seed)
        tokens = torch.multinomial(p_TV[:3].softmax(dim=-1), 1)[:, 0]
        made = verify(tokens, p_TV[:3], p_TV, sample=True)
        assert made[:3] == tokens.tolist() and len(made) == 4
    assert torch.equal(residual(p_TV[0].softmax(-1), p_TV[0].softmax(-1)), p_TV[0].softmax(-1))


def test_a_token_of_no_proposal_is_never_kept():
    scores_TV, q_PV = torch.zeros(2, 4), torch.tensor([[-torch.inf, 0.0, 0.0, 0.0]])
    for seed in range(50):
        torch.manual_seed(seed)
        assert verify(torch.tensor([0]), q_PV, scores_TV, sample=True) == [0]  # the residual: p - q is left at 0 alone


def test_a_proposal_that_is_not_a_number_is_rejected_and_leaves_p():
    p_V = torch.tensor([0.5, 0.3, 0.2, 0.0])
    scores_TV, counts = p_V.log().expand(2, -1), torch.zeros(4)
    for _ in range(3000):
        (token,) = verify(torch.tensor([3]), torch.full((1, 4), torch.nan), scores_TV, sample=True)
        counts[token] += 1
    assert token_chi_square(counts, p_V) > 1e-3


def test_verify_without_a_bonus_row():
    scores_TV = torch.eye(3)[[0, 1]] * 10
    assert verify(torch.tensor([0, 1]), None, scores_TV, sample=False) == [0, 1]
    assert verify(torch.tensor([0, 2]), None, scores_TV, sample=False) == [0, 1]
    assert verify(torch.tensor([2, 1]), None, scores_TV, sample=False) == [0]
    assert verify(torch.tensor([0]), None, scores_TV, sample=False) == [0, 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_drafter_is_warped_as_the_target(temperature, monkeypatch):
    """Temperature and top-k reach the proposal; processors that look at the tokens before do not."""
    drafter, seen = make_drafter(target(), xpress_num_passes=0), []

    def resolve(refiner, h, base, *args, **how):
        draft = resolve_block(refiner, h, base, *args, **how)
        seen.append((base, draft.scores))
        return draft

    monkeypatch.setattr(candidate_generator_xpress, "resolve_block", resolve)
    settings = {"do_sample": True, "temperature": temperature, "top_k": 9, "repetition_penalty": 1.5}
    drafted(target(), prompt(), drafter, 6, **settings)
    assert seen
    for base, scores in seen:
        kept = scores.isfinite()
        assert (kept.sum(dim=-1) == 9).all()
        torch.testing.assert_close(scores[kept], (base / temperature)[kept])


def test_greedy_proposes_no_distribution():
    for sample in (False, True):
        config = GenerationConfig(do_sample=sample, max_length=40)
        generator = XPressCandidateGenerator(make_drafter(target()), target(), config)
        outputs = target()(prompt(), output_hidden_states=True)
        ids, scores = generator.get_candidates(torch.cat([prompt(), ref()[:, 7:8]], dim=1), {}, outputs)
        assert ids.shape == (1, 8 + P)
        assert (scores is None) != sample


def test_sampling_is_reproducible_from_a_seed():
    drafter = make_drafter(target())
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(drafted(target(), prompt(), drafter, 20, do_sample=True, temperature=2.0)[0])
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert MASK_TOKEN < VOCAB and not torch.equal(texts[0], plain(target(), prompt(), 20))
