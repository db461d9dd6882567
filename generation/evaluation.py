"""Measures a drafter against its target alone: the same prompts through every arm, interleaved, in one process.

An arm is a way to generate. Prompt by prompt all arms run in turn, so that a drift of the machine hits all alike;
speed-ups are medians of per-prompt ratios within the run.
"""

import time
from dataclasses import dataclass, field
from statistics import median

import torch

from .statistics_xpress import DraftingStatistics, track_drafting


PLAIN = "plain"


@dataclass
class ArmResult:
    """One arm over all prompts. Seconds include the prompt's forward."""

    name: str
    seconds: list[float] = field(default_factory=list)  # per prompt
    tokens: list[int] = field(default_factory=list)  # new tokens per prompt
    identical: list[bool] = field(default_factory=list)  # text equal to the plain arm's, per prompt
    drafting: DraftingStatistics = field(default_factory=DraftingStatistics)

    @property
    def tokens_per_second(self) -> float:
        return median(t / s for t, s in zip(self.tokens, self.seconds))

    def speed_up(self, plain: "ArmResult") -> float:
        """Median over prompts of this arm's tokens per second over the plain arm's."""
        rates = ([t / s for t, s in zip(arm.tokens, arm.seconds)] for arm in (self, plain))
        return median(ours / theirs for ours, theirs in zip(*rates))

    def as_row(self, plain: "ArmResult") -> dict:
        """The arm's numbers as plain data, for JSON and cards."""
        return {
            "arm": self.name,
            "tau": self.drafting.tau if self.drafting.rounds else 1.0,
            "tokens_per_second": self.tokens_per_second,
            "speed_up": self.speed_up(plain),
            "identical": sum(self.identical),
            "prompts": len(self.identical),
            "tokens": sum(self.tokens),
            "rounds": len(self.drafting.rounds),
            "accepted": self.drafting.accepted,
            "acceptance": self.drafting.acceptance,
            "seconds": dict(self.drafting.seconds),
            "overhead": self.drafting.overhead,
        }


def pass_arms(drafter, passes: list[int]) -> dict[str, dict]:
    """Arms by name: plain, the drafter's base logits alone (DFlash), K passes, and the fixed point (B - 1 passes)."""
    arms = {PLAIN: {}, "DFlash (K = 0)": {"assistant_model": drafter, "num_passes": 0}}
    for k in passes:
        arms[f"xPress K = {k}"] = {"assistant_model": drafter, "num_passes": k}
    arms["xPress fixed point"] = {"assistant_model": drafter, "num_passes": drafter.config.num_draft_tokens}
    return arms


def compare(target, prompts: list[torch.Tensor], arms: dict[str, dict], on_prompt=None, **generate) -> list[ArmResult]:
    """
    Runs every prompt through every arm.

    Args:
        prompts: `input_ids` `[1, n]` each.
        arms: Name to `generate` arguments; the first is what the others are compared with.
        on_prompt: Called with the number of prompts done, after each.
        generate: Arguments of `generate` for all arms.
    """
    results = [ArmResult(name) for name in arms]
    for arguments in arms.values():  # warm-up, not counted
        target.generate(prompts[0], **{**generate, "max_new_tokens": 8}, **arguments)
    for done, prompt in enumerate(prompts, 1):
        expected = None
        for result, arguments in zip(results, arms.values()):
            with track_drafting() as drafting:
                start = time.perf_counter()
                output = target.generate(prompt, **generate, **arguments)
                result.seconds.append(time.perf_counter() - start)
            expected = output if expected is None else expected
            result.tokens.append(output.shape[1] - prompt.shape[1])
            result.identical.append(torch.equal(output, expected))
            result.drafting.rounds += drafting.rounds
            result.drafting.seconds += drafting.seconds
        if on_prompt is not None:
            on_prompt(done)
    return results
