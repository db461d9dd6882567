"""Numbers that cannot be read two ways (CASES J1, J2, J4): tau, acceptance by slot, speed-ups, the refinement bench."""

import pytest
import torch
from xpress_drafter.generation.benchmark import refinement_ways, time_ways
from xpress_drafter.generation.evaluation import ArmResult, compare, pass_arms
from xpress_drafter.generation.statistics_xpress import DraftingStatistics, Round


def test_tau_counts_the_target_s_own_token():
    statistics = DraftingStatistics([Round(3, accepted, 2) for accepted in (3, 2, 1, 0)])
    assert statistics.accepted / len(statistics.rounds) == 1.5
    assert statistics.tau == 2.5
    assert statistics.acceptance == [3 / 4, 2 / 4, 1 / 4]
    assert (statistics.drafted, statistics.passes) == (12, 8)


def test_a_slow_down_is_reported_as_one():
    plain = ArmResult("plain", seconds=[1.0, 2.0, 1.0], tokens=[10, 20, 10])
    slow = ArmResult("slow", seconds=[2.0, 4.0, 1.0], tokens=[10, 20, 10])
    assert slow.speed_up(plain) == 0.5
    assert plain.tokens_per_second == 10


def test_compare_counts_every_token_and_sees_what_differs():
    class Echo:
        """A target whose `generate` appends what its arm says."""

        def generate(self, prompt, appended, **generate):
            return torch.cat([prompt, appended], dim=1)

    right, wrong = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4]])
    arms = {"plain": {"appended": right}, "same": {"appended": right}, "other": {"appended": wrong}}
    results = compare(Echo(), [torch.tensor([[7, 8]])] * 2, arms)
    assert [result.tokens for result in results] == [[3, 3]] * 3
    assert [all(result.identical) for result in results] == [True, True, False]


def test_arms_name_the_fixed_point_by_its_passes():
    class Drafter:
        class config:
            num_draft_tokens = 7

    arms = pass_arms(Drafter, [2])
    assert list(arms) == ["plain", "DFlash (K = 0)", "xPress K = 2", "xPress fixed point"]
    assert [arm.get("num_passes") for arm in arms.values()] == [None, 0, 2, 7]


def test_the_refinement_bench_times_every_way():
    ways = refinement_ways(256, 32, 8, 16, 4, shortlist=16, dtype=torch.bfloat16)
    times = time_ways(ways, repeats=2)
    assert list(times)[0] == "Markov, 3 steps" and len(times) == 7
    assert all(value > 0 for value in times.values())


@pytest.mark.parametrize(("name", "passes"), [("xPress K = 6", 6), ("xPress K = 4, best 64", 4)])
def test_no_bench_way_stops_early(name, passes):
    """With the bench's weights every pass moves a token, so that K passes are timed where K are named."""
    draft = refinement_ways(4096, 64, 32, 64, 16, shortlist=64, dtype=torch.bfloat16)[name]()
    assert draft.passes == passes
