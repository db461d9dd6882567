"""From the rows of `xpress eval` to numbers: tau with its interval, speeds, time shares, identity; checked as they are made.

A row is one prompt: `{"set", "index", "prompt", "arms": {name: ArmRun.as_dict() and how it parted from plain}}`.
tau is tokens per round, accepted + 1. Quartiles are over prompts, speed-ups are ratios within a prompt, and an interval
is what 95 % of resamplings of the prompts give.
"""

import torch

from .arms import digest
from .evaluation import PLAIN
from .statistics_xpress import DraftingStatistics, Round


NEAR_TIE_STEPS = {"float32": 0, "bfloat16": 4, "float16": 4}  # below so many rounding steps a difference is rounding
RESAMPLINGS = 2000


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile, between neighbours by their distance."""
    steps = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(steps).tolist()


def tau_of(accepted: int, rounds: int) -> float:
    """Tokens per round: accepted + 1. One where nothing came behind the prompt's forward."""
    return accepted / max(rounds, 1) + 1


def bootstrap_tau(accepted: list[int], rounds: list[int], seed: int = 0) -> list[float]:
    """The 95 % interval of tau from each prompt's accepted tokens and rounds, the prompts drawn again and again."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(rounds), (RESAMPLINGS, len(rounds)), generator=generator)
    accepted_D, rounds_D = (torch.tensor(counts)[drawn].sum(dim=1) for counts in (accepted, rounds))
    taus = accepted_D.double() / rounds_D.clamp(min=1) + 1
    return taus.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def verdict(run: dict, dtype: str) -> str:
    """`identical` to plain; `rounding`, where plain's two best logits were within rounding of each other; `different`."""
    if run["identical"]:
        return "identical"
    return "rounding" if run["gap_steps"] is not None and run["gap_steps"] < NEAR_TIE_STEPS[dtype] else "different"


def check_rows(rows: list[dict]) -> None:
    """Raises unless every arm was given its row's prompt and its tokens are those of its forwards."""
    for row in rows:
        where = f"{row['set']}, prompt {row['index'] + 1}"
        for name, run in row["arms"].items():
            accepted = sum(r[1] for r in run["rounds"])
            expected = run["first_tokens"] + accepted + len(run["rounds"])
            if run["tokens"] != expected:
                raise ValueError(
                    f"{where}, {name}: {run['tokens']} tokens, expected {expected}: {run['first_tokens']} of the prompt's "
                    f"forward, {accepted} accepted and {len(run['rounds'])} rounds. Its row was changed, or is of another "
                    "version: measure again in a new folder."
                )
            if run["prompt"] != row["prompt"]:
                raise ValueError(
                    f"{where}, {name}: the target was given the prompt {run['prompt']}, expected {row['prompt']}, that of "
                    "all arms: measure again in a new folder."
                )


def check_summary(arms: list[dict]) -> None:
    """Raises unless each arm's numbers agree with its counts, and all arms are of the same prompts."""
    for arm in arms:
        where = f"{arm['set']}, {arm['arm']}"
        made = arm["first_tokens"] + arm["accepted"] + arm["rounds"]
        if arm["tokens"] != made or abs(arm["tau"] - tau_of(arm["accepted"], arm["rounds"])) > 1e-9:
            raise ValueError(
                f"{where}: {arm['tokens']} tokens and tau {arm['tau']}, expected {made} and "
                f"{tau_of(arm['accepted'], arm['rounds'])} from {arm['first_tokens']} + {arm['accepted']} accepted + "
                f"{arm['rounds']} rounds: write the summary again from its rows."
            )
        others = {other["prompts_hash"] for other in arms if other["set"] == arm["set"]}
        if others != {arm["prompts_hash"]}:
            raise ValueError(f"{where}: the arms' prompts are {sorted(others)}, expected the same for all.")


def summarise(rows: list[dict], names: list[str], dtype: str, greedy: bool) -> list[dict]:
    """Every arm on every set, in the order of the rows' sets and of `names`; checked."""
    check_rows(rows)
    arms = []
    for chosen in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == chosen]
        arms += [summarise_arm(of_set, name, dtype, greedy) for name in names]
    check_summary(arms)
    return arms


def summarise_arm(rows: list[dict], name: str, dtype: str, greedy: bool) -> dict:
    """One arm on the rows of one set."""
    runs, plain = [row["arms"][name] for row in rows], [row["arms"][PLAIN] for row in rows]
    drafting = DraftingStatistics([Round(*r) for run in runs for r in run["rounds"]])
    seconds = sum(run["seconds"] for run in runs)
    decoding = seconds - sum(run["prefill_seconds"] for run in runs)
    split = {step: sum(run["split"][step] for run in runs) / decoding for step in ("draft", "refine", "verify")}
    verdicts = [verdict(run, dtype) for run in runs] if greedy else []
    counts = {word: verdicts.count(word) for word in ("identical", "rounding", "different")} if greedy else None
    return {
        "set": rows[0]["set"],
        "arm": name,
        "prompts": len(rows),
        "prompts_hash": digest([run["prompt"] for run in runs]),
        "tokens": sum(run["tokens"] for run in runs),
        "first_tokens": sum(run["first_tokens"] for run in runs),
        "rounds": len(drafting.rounds),
        "drafted": drafting.drafted,
        "accepted": drafting.accepted,
        "passes": drafting.passes,
        "copied": drafting.copied,
        "tau": tau_of(drafting.accepted, len(drafting.rounds)),
        "tau_interval": bootstrap_tau(
            [sum(r[1] for r in run["rounds"]) for run in runs], [len(run["rounds"]) for run in runs]
        ),
        "acceptance": drafting.acceptance,
        "tokens_per_second": quartiles([run["tokens"] / run["seconds"] for run in runs]),
        "speed_up": quartiles(
            [ours["tokens"] / ours["seconds"] / (p["tokens"] / p["seconds"]) for ours, p in zip(runs, plain)]
        ),
        "speed_up_without_prefill": decoding_speed_up(runs, plain),
        "seconds": seconds,
        "seconds_without_prefill": decoding,
        "split": split | {"rest": 1 - sum(split.values())},
        "identity": counts,
    }


def decoding_speed_up(runs: list[dict], plain: list[dict]) -> list[float] | None:
    """As the speed-up, behind the prompt's forward; over the prompts where both arms went on, None if there are none."""

    def rate(run: dict) -> float:
        return (run["tokens"] - run["first_tokens"]) / (run["seconds"] - run["prefill_seconds"])

    ratios = [rate(ours) / rate(p) for ours, p in zip(runs, plain) if ours["rounds"] and p["rounds"]]
    return quartiles(ratios) if ratios else None


def mean_over_sets(arms: list[dict]) -> list[dict]:
    """Each arm's tau, speeds and time shares as means of its sets', where it is slower than plain, and identity in all."""
    means, greedy = [], arms[0]["identity"] is not None
    for name in dict.fromkeys(arm["arm"] for arm in arms):
        own = [arm for arm in arms if arm["arm"] == name]
        medians = [arm["speed_up"][1] for arm in own]
        words = own[0]["identity"] if greedy else ()
        means.append(
            {
                "arm": name,
                "prompts": sum(arm["prompts"] for arm in own),
                "tau": sum(arm["tau"] for arm in own) / len(own),
                "speed_up": sum(medians) / len(own),
                "tokens_per_second": sum(arm["tokens_per_second"][1] for arm in own) / len(own),
                "split": {step: sum(arm["split"][step] for arm in own) / len(own) for step in own[0]["split"]},
                "slower_on": [arm["set"] for arm in own if arm["speed_up"][1] < 1],
                "identity": {word: sum(arm["identity"][word] for arm in own) for word in words},
            }
        )
    return means
