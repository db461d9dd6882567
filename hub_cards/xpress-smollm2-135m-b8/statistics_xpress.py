"""What drafting did: counts from the loop's rounds, seconds from wrappers around its steps.

with track_drafting() as drafting:
    target.generate(**inputs, assistant_model=drafter)
print(drafting.tau, drafting.acceptance)
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import NamedTuple

import torch
import transformers


class Round(NamedTuple):
    drafted: int  # draft tokens verified
    accepted: int  # of those kept
    passes: int  # Jacobi passes run
    copied: bool = False  # from the text itself, by prompt lookup, and not drafted


@dataclass
class DraftingStatistics:
    """
    Counts and seconds of one or more `generate` calls. The prompt's forward, which drafts nothing, is no round: a call
    makes `1 + accepted + len(rounds)` tokens.
    """

    rounds: list[Round] = field(default_factory=list)
    seconds: Counter = field(default_factory=Counter)  # "draft", "refine", "verify", "total"

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def passes(self) -> int:
        return sum(r.passes for r in self.rounds)

    @property
    def copied(self) -> int:
        """Rounds that copied from the text in the place of drafting."""
        return len(self.rounds) - len(self.own_rounds)

    @property
    def own_rounds(self) -> list[Round]:
        """The drafter's: those that did not copy."""
        return [r for r in self.rounds if not r.copied]

    @property
    def tau(self) -> float:
        """Tokens per round: accepted + 1 (the bonus or correction token counts). 0 before the first round."""
        return self.accepted / len(self.rounds) + 1 if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """For slots 1, 2, ...: of the rounds that verified the slot's draft token, the share that kept it. Copied rounds do
        not count."""
        own = self.own_rounds
        longest = max((r.drafted for r in own), default=0)
        verified = [sum(r.drafted >= k for r in own) for k in range(1, longest + 1)]
        kept = [sum(r.accepted >= k for r in own) for k in range(1, longest + 1)]
        return [k / v for k, v in zip(kept, verified)]

    @property
    def overhead(self) -> float:
        """The share of the time spent outside model forwards and refinement."""
        steps = sum(self.seconds[step] for step in ("draft", "refine", "verify"))
        return 1 - steps / self.seconds["total"] if self.seconds["total"] else 0.0


# One variable for every copy of this file, the package's and those of published folders, so that `track_drafting` of
# one sees the drafters of another.
_TRACKED: ContextVar[tuple[DraftingStatistics, ...]] = vars(transformers.generation).setdefault(
    "_xpress_tracked", ContextVar("xpress_tracked", default=())
)


@contextmanager
def track_drafting():
    """Collects the statistics of every drafted `generate` call inside, in this thread (or task) alone."""
    statistics = DraftingStatistics()
    token = _TRACKED.set((*_TRACKED.get(), statistics))
    try:
        yield statistics
    finally:
        _TRACKED.reset(token)


def tracked() -> tuple[DraftingStatistics, ...]:
    """The statistics objects that want to hear of the current call."""
    return _TRACKED.get()


def timed(step: str, function: Callable, sinks: tuple[DraftingStatistics, ...], device: torch.device) -> Callable:
    """`function`, its seconds added to every sink. On an accelerator its queue is drained before the clock is read."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @wraps(function)
    def wrapper(*args, **kwargs):
        start = now()
        try:
            return function(*args, **kwargs)
        finally:
            for sink in sinks:
                sink.seconds[step] += now() - start

    return wrapper
