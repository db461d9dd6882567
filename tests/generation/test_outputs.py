"""What `generate` returns and reports: scores, logits, states, attentions, statistics. CASES D1, D2."""

import time

import pytest
import torch
from rig import (
    BLOCK,
    CACHE,
    assert_rounds,
    drafted,
    make_drafter,
    make_target,
    oracle,
    plain,
    prompt,
    ref,
    target,
)
from transformers.cache_utils import StaticLayer
from xpress_drafter import DraftingStatistics, track_drafting
from xpress_drafter.generation import candidate_generator_xpress, statistics_xpress
from xpress_drafter.generation.decoding_xpress import logger as decoding_logger
from xpress_drafter.generation.pairing_xpress import logger as pairing_logger
from xpress_drafter.generation.statistics_xpress import Round
from xpress_drafter.modeling_xpress.modeling_xpress import base_logits


PATTERN = (0, 3, BLOCK - 1)
LENGTH = 7
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_close(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            assert_close(a, b)
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "kind, cache_implementation",
    [("qwen3", None), ("qwen3-alternating", None), ("gemma2", None)]
    + [("qwen3", "static")] * StaticLayer.is_croppable,
)
def test_records_are_the_plain_ones(kind, cache_implementation):
    model = make_target(kind)
    model.set_attn_implementation("eager")
    kwargs = {**EVERYTHING, "cache_implementation": cache_implementation, "repetition_penalty": 1.1}
    expected = plain(model, prompt(), 20, **kwargs)
    text = expected.sequences
    output, drafting = drafted(model, prompt(), oracle(model, text, PATTERN), 20, **kwargs)
    assert torch.equal(output.sequences, expected.sequences)
    assert_rounds(drafting, PATTERN)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert len(output[name]) == 20
        assert_close(output[name], expected[name])
    assert set(expected.keys()) <= set(output.keys()) <= {*expected.keys(), "drafting"}


def test_records_of_a_clipped_block():
    token = int(ref()[0, LENGTH + 4])
    kwargs = {**EVERYTHING, "output_attentions": False, "eos_token_id": token, "pad_token_id": 0}
    expected = plain(target(), prompt(), 20, **kwargs)
    output, _ = drafted(target(), prompt(), oracle(target(), ref()), 20, **kwargs)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == expected.sequences.shape[1] - LENGTH < 6
    for name in ("scores", "logits", "hidden_states"):
        assert_close(output[name], expected[name])


def test_transition_scores():
    kwargs = {"return_dict_in_generate": True, "output_scores": True}
    output, _ = drafted(target(), prompt(), oracle(target(), ref(), PATTERN), 20, **kwargs)
    expected = plain(target(), prompt(), 20, **kwargs)
    ours, theirs = (
        target().compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (output, expected)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_records_while_sampling_belong_to_the_tokens():
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "do_sample": True}
    output, _ = drafted(target(), prompt(), oracle(target(), ref(), PATTERN), 20, temperature=0.7, top_k=9, **kwargs)
    logits = target()(output.sequences).logits[0, LENGTH - 1 : -1]
    torch.testing.assert_close(torch.cat(output.logits), logits, atol=1e-4, rtol=1e-4)
    scores = torch.cat(output.scores)
    assert (scores.isfinite().sum(dim=-1) == 9).all()
    assert scores.gather(1, output.sequences[0, LENGTH:, None]).isfinite().all()


def test_without_return_dict_records_are_ignored_as_upstream():
    output, _ = drafted(target(), prompt(), oracle(target(), ref()), 10, output_hidden_states=True, output_scores=True)
    assert torch.equal(output, ref()[:, :17])


@pytest.mark.parametrize("n", [1, 2, 3, 12, 24])
def test_statistics_of_a_call(n):
    output, drafting = drafted(target(), prompt(), oracle(target(), ref(), PATTERN), n, return_dict_in_generate=True)
    own = output.drafting
    assert own.rounds == drafting.rounds
    assert output.sequences.shape[1] - LENGTH == 1 + own.accepted + len(own.rounds) == n
    assert own.drafted == sum(r.drafted for r in own.rounds) >= own.accepted
    if n == 24:  # rounds keep 0, 3, 5, 0, 3, 5 and end; tau counts the target's own token
        assert [r.accepted for r in own.rounds] == [0, 3, 5, 0, 3, 5, 0]
        assert own.tau == pytest.approx(16 / 7 + 1)
        assert {"draft", "refine", "verify", "total"} == set(own.seconds)
        assert own.seconds["total"] > own.seconds["draft"] + own.seconds["refine"] + own.seconds["verify"] > 0
        assert 0 < own.overhead < 1


def test_the_target_s_head_on_the_backbone_s_states_is_drafting(monkeypatch):
    """As for a drafter without a refiner: what the refiner costs is what comes on top."""

    def slow_head(*arguments):
        time.sleep(0.05)
        return base_logits(*arguments)

    monkeypatch.setattr(candidate_generator_xpress, "base_logits", slow_head)
    _, drafting = drafted(target(), prompt(), oracle(target(), ref(), PATTERN), 12)
    assert drafting.seconds["draft"] > 0.05 * len(drafting.rounds) > drafting.seconds["refine"] > 0


def test_acceptance_of_rounds_of_different_lengths():
    statistics = DraftingStatistics([Round(5, 3, 2), Round(5, 2, 2), Round(5, 1, 1), Round(2, 0, 1)])
    assert statistics.acceptance == pytest.approx([3 / 4, 2 / 4, 1 / 3, 0, 0])
    assert DraftingStatistics().tau == 0.0 and DraftingStatistics().acceptance == []


def test_track_drafting_collects_calls_and_nests():
    drafter = oracle(target(), ref(), PATTERN)
    with track_drafting() as outer:
        first, inner = drafted(target(), prompt(), drafter, 10)
        plain(target(), prompt(), 5)
        drafted(target(), prompt(), drafter, 10)
    assert 0 < len(inner.rounds) < len(outer.rounds)
    assert not statistics_xpress.tracked()
    rounds = list(outer.rounds)
    target().generate(prompt(), assistant_model=drafter, max_new_tokens=10, do_sample=False)
    assert outer.rounds == rounds


def test_passes_are_counted():
    drafter = make_drafter(target(), xpress_num_passes=2)
    for passes, options in ((2, {}), (0, {"num_passes": 0}), (1, {"num_passes": 1})):
        _, drafting = drafted(target(), prompt(), drafter, 12, **options)
        assert max(r.passes for r in drafting.rounds) == passes


def test_a_useless_drafter_is_named(caplog):
    decoding_logger.warning_once.cache_clear()
    decoding_logger.addHandler(caplog.handler)
    drafted(target(), prompt(), make_drafter(target()), 40)
    decoding_logger.removeHandler(caplog.handler)
    assert "tau is 1." in caplog.text and "trained for this target" in caplog.text


def test_length_past_the_trained_one_is_named_once(caplog):
    """From the first token past it; not where it is unknown, nor for a drafter that was never trained."""
    drafter = make_drafter(target())
    pairing_logger.warning_once.cache_clear()
    assert drafter.config.trained_length == 0
    for trained_length, new_tokens in ((None, 14), (0, 14), (20, 20 - prompt().shape[1])):
        drafter.config.trained_length = trained_length
        drafted(target(), prompt(), drafter, new_tokens)
    assert "went past" not in caplog.text
    for new_tokens in (14, 18):  # 21 tokens in all, then 25
        output, _ = drafted(target(), prompt(), drafter, new_tokens)
        assert torch.equal(output, plain(target(), prompt(), new_tokens))
        assert caplog.text.count("went past 20 tokens, the longest that the drafter was trained on") == 1


def test_output_has_the_cache_under_upstreams_name():
    expected = plain(target(), prompt(), 5, return_dict_in_generate=True)
    output, _ = drafted(target(), prompt(), make_drafter(target()), 5, return_dict_in_generate=True)
    assert CACHE in expected and type(output[CACHE]) is type(expected[CACHE])
