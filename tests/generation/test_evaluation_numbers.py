"""What `xpress eval` counts and concludes, by hand-worked numbers (CASES J1, J3, J4)."""

from types import SimpleNamespace

import pytest
import torch
from xpress_drafter.generation.arms import gap_in_steps
from xpress_drafter.generation.evaluation_numbers import (
    bootstrap_tau,
    check_rows,
    check_summary,
    mean_over_sets,
    quartiles,
    summarise,
    verdict,
)


def run(rounds, seconds, **other) -> dict:
    accepted = sum(accepted for _, accepted, _ in rounds)
    split = {"draft": 0.1 * (seconds - 0.5), "refine": 0.0, "verify": 0.7 * (seconds - 0.5)}
    counts = {"tokens": 1 + accepted + len(rounds), "first_tokens": 1, "rounds": rounds, "prompt": "p"}
    return {**counts, "seconds": seconds, "prefill_seconds": 0.5, "split": split, "identical": True, **other}


def rows() -> list[dict]:
    """Two prompts: plain makes 7 tokens in 3.5 s; the drafter the same in 2 rounds, once faster and once slower."""
    plain = [[0, 0, 0]] * 6
    drafted = [[3, 3, 2], [3, 1, 2]]
    return [
        {"set": "s", "index": i, "prompt": "p", "arms": {"plain": run(plain, 3.5), "ours": run(drafted, seconds)}}
        for i, seconds in enumerate((1.75, 7.0))
    ]


def test_quartiles_lie_between_neighbours():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]
    assert quartiles([2.0, 1.0]) == [1.25, 1.5, 1.75]
    assert quartiles([3.0]) == [3.0, 3.0, 3.0]


def test_bootstrap_of_a_constant_is_that_constant():
    assert bootstrap_tau([6, 3, 9], [2, 1, 3]) == [4.0, 4.0]
    assert bootstrap_tau([0, 0], [0, 0]) == [1.0, 1.0]  # nothing was drafted


def test_bootstrap_is_deterministic_and_covers_what_resampling_gives():
    """Of two prompts, one keeps nothing and one keeps one a round: tau is 1, 1.5, 1.5 or 2, equally often."""
    assert bootstrap_tau([0, 10], [10, 10]) == [1.0, 2.0]
    many = list(range(20)), [10] * 20
    low, high = bootstrap_tau(*many)
    assert (low, high) == tuple(bootstrap_tau(*many)) != tuple(bootstrap_tau(*many, seed=1))
    # The mean of 20 draws from 0.0 ... 1.9 has the deviation 0.577 / sqrt(20) = 0.129.
    assert low == pytest.approx(1.95 - 1.96 * 0.129, abs=0.03) and high == pytest.approx(1.95 + 1.96 * 0.129, abs=0.03)


@pytest.mark.parametrize(
    ("identical", "gap", "dtype", "expected"),
    [
        (True, None, "bfloat16", "identical"),
        (False, 3.9, "bfloat16", "rounding"),
        (False, 4.0, "bfloat16", "different"),
        (False, 3.9, "float16", "rounding"),
        (False, 0.0, "float32", "different"),
        (False, None, "bfloat16", "different"),  # one text goes on where the other had ended
    ],
)
def test_a_difference_is_rounding_only_near_a_tie(identical, gap, dtype, expected):
    assert verdict({"identical": identical, "gap_steps": gap}, dtype) == expected


def test_the_gap_is_that_of_plain_where_the_texts_part():
    """bf16 has 2^-7 of a number between it and the next: logits of 8 and 7.5 are 8 steps apart."""

    class Target:
        dtype = torch.bfloat16

        def __call__(self, ids):
            self.seen = ids.tolist()
            return SimpleNamespace(logits=torch.tensor([[[0.0, 1.0, 2.0], [8.0, 7.5, 0.0]]]))

    target, prompt = Target(), torch.tensor([[5, 6]])
    assert gap_in_steps(target, prompt, [1, 2, 0], [1, 2, 1]) == 8.0
    assert gap_in_steps(target, prompt, [1, 2, 0], [1, 2, 2]) == 128.0  # no runner-up: no near tie excuses it
    assert target.seen == [[5, 6, 1, 2]]
    assert gap_in_steps(target, prompt, [1, 2], [1, 2, 3]) is None


def test_a_summary_by_hand():
    plain, ours = summarise(rows(), ["plain", "ours"], "float32", greedy=True)
    assert (plain["tau"], plain["acceptance"], plain["speed_up"]) == (1.0, [], [1.0, 1.0, 1.0])
    assert (ours["tokens"], ours["first_tokens"], ours["rounds"], ours["accepted"], ours["drafted"]) == (
        14,
        2,
        4,
        8,
        12,
    )
    assert ours["tau"] == 3.0 and ours["tau_interval"] == [3.0, 3.0] and ours["passes"] == 8
    assert ours["acceptance"] == [1.0, 0.5, 0.5]
    assert ours["tokens_per_second"] == [1.75, 2.5, 3.25]  # of 4 and 1
    assert ours["speed_up"] == [0.875, 1.25, 1.625]  # of 2 and 0.5
    assert ours["speed_up_without_prefill"] == pytest.approx(quartiles([3.0 / 1.25, 3.0 / 6.5]))
    assert (ours["seconds"], ours["seconds_without_prefill"]) == (8.75, 7.75)
    assert ours["split"] == pytest.approx({"draft": 0.1, "refine": 0.0, "verify": 0.7, "rest": 0.2})
    assert ours["identity"] == {"identical": 2, "rounding": 0, "different": 0}


def test_means_are_of_sets_and_name_those_where_an_arm_is_slower():
    plain, ours = summarise(rows(), ["plain", "ours"], "float32", greedy=True)
    other = ours | {
        "set": "t",
        "speed_up": [0.5, 0.75, 1.0],
        "identity": {"identical": 0, "rounding": 1, "different": 1},
    }
    _, mean = mean_over_sets([plain, ours, plain | {"set": "t"}, other])
    assert (mean["arm"], mean["tau"], mean["speed_up"], mean["slower_on"]) == ("ours", 3.0, 1.0, ["t"])
    assert mean["identity"] == {"identical": 2, "rounding": 1, "different": 1} and mean["prompts"] == 4
    assert mean["split"] == pytest.approx({"draft": 0.1, "refine": 0.0, "verify": 0.7, "rest": 0.2})


def test_nothing_is_said_of_identity_under_sampling():
    sampled = rows()
    for row in sampled:
        for entry in row["arms"].values():
            del entry["identical"]
    assert [arm["identity"] for arm in summarise(sampled, ["plain", "ours"], "float32", greedy=False)] == [None, None]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", 8, "s, prompt 2, ours: 8 tokens, expected 7: 1 of the prompt's forward, 4 accepted and 2 rounds"),
        ("rounds", [[3, 3, 2]], "7 tokens, expected 5"),
        ("prompt", "q", "was given the prompt q, expected p"),
    ],
)
def test_a_row_with_a_planted_error_is_refused(key, value, message):
    planted = rows()
    planted[1]["arms"]["ours"][key] = value
    with pytest.raises(ValueError, match=message):
        check_rows(planted)
    with pytest.raises(ValueError, match=message):
        summarise(planted, ["plain", "ours"], "float32", greedy=True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tau", 2.0, "tau 2.0, expected 14 and 3.0"),
        ("accepted", 9, "expected 15"),
        ("prompts_hash", "other", "arms' prompts are"),
    ],
)
def test_a_summary_with_a_planted_error_is_refused(key, value, message):
    plain, ours = summarise(rows(), ["plain", "ours"], "float32", greedy=True)
    with pytest.raises(ValueError, match=message):
        check_summary([plain, ours | {key: value}])
