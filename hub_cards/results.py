"""What a card says of measurements and of training, as Markdown, and what the Hub is told of them."""

from huggingface_hub import EvalResult

from ..generation.evaluation import PLAIN
from ..generation.evaluation_numbers import check_summary
from .reports import STEPS, conditions, held_out, identity_cells, table


CURVE_POINTS = 10
TAU = "tokens per round, accepted + 1"


def compared(rows: list[dict], command: str, conditions: str) -> str:
    """The rows of `xpress compare`."""
    header = ["arm", "tau", "tokens/s", "speed-up", "identical to plain"]
    cells = []
    for row in rows:
        numbers = [f"{row['tau']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['speed_up']:.2f}"]
        cells.append([row["arm"], *numbers, f"{row['identical']} of {row['prompts']}"])
    return "\n\n".join([conditions, table(header, cells), "Made by:", f"```\n{command}\n```"])


def evaluated(report: dict) -> str:
    """A report of `xpress eval`: all arms on all sets, how a round's time is spent, and whose texts are plain's."""
    check_summary(report["arms"])
    settings, means = report["settings"], report["means"]
    temperature = settings["generate"].get("temperature")
    title = "Greedy" if temperature is None else f"Temperature {temperature:g}"
    speeds = {"tau": ("tau", 2), "tokens/s": ("tokens_per_second", 1), "Speed-up over plain": ("speed_up", 2)}
    parts = [f"### {title}, {settings['dtype']}", conditions(settings), held_out(report)]
    for name, (key, digits) in speeds.items():
        parts += [f"{name}:", matrix(report["arms"], means, key, digits)]
    parts += ["Share of the time behind the prompt's forward, in the mean of the sets:", shares(means)]
    return "\n\n".join([*parts, f"```\n{report['command']}\n```"])


def matrix(arms: list[dict], means: list[dict], key: str, digits: int) -> str:
    """One number of every arm on every set, and its mean; medians over prompts where it has quartiles."""
    sets = list(dict.fromkeys(arm["set"] for arm in arms))
    found = {(arm["arm"], arm["set"]): arm[key] for arm in arms} | {(mean["arm"], "mean"): mean[key] for mean in means}
    rows = []
    for mean in means:
        values = [found[mean["arm"], chosen] for chosen in [*sets, "mean"]]
        medians = [value[1] if isinstance(value, list) else value for value in values]
        slower = [" (slower)" if key == "speed_up" and value < 1 else "" for value in medians]
        rows.append([mean["arm"], *(f"{value:.{digits}f}{word}" for value, word in zip(medians, slower))])
    return table(["arm", *sets, "mean"], rows)


def shares(means: list[dict]) -> str:
    """How a round's time is spent, and, of greedy arms, how many texts are plain's."""
    counts = list(means[0]["identity"])
    rows = []
    for mean in means:
        cells = [f"{mean['split'][step]:.1%}" for step in STEPS]
        rows.append([mean["arm"], *cells, *(identity_cells(mean) if counts else [])])
    return table(["arm", *STEPS, *counts], rows)


def walked(reports: list[dict]) -> str:
    """Reports of `xpress walk`, a drafter each: tau of every number of passes on every folder of rows, and its mean."""
    same = ("target", "dtype", "rows")
    kinds = [
        (report["target"], report["dtype"], [[w["rows"], w["count"], w["made_from"]] for w in report["walks"]])
        for report in reports
    ]
    for kind in kinds[1:]:
        if different := [name for name, ours, theirs in zip(same, kind, kinds[0]) if ours != theirs]:
            raise ValueError(f"the walks differ in their {' and '.join(different)}, expected the same: walk alike.")
    rows = []
    for report in reports:
        for number in report["walks"][0]["tau"]:
            taus = [walk["tau"][number] for walk in report["walks"]]
            how = "own passes" if number == "None" else f"K = {number}"
            rows.append([f"{report['drafter']}, {how}", *(f"{tau:.2f}" for tau in [*taus, sum(taus) / len(taus)])])
    header = ["drafter", *(f"{walk['rows']} ({walk['count']})" for walk in reports[0]["walks"]), "mean"]
    return "\n\n".join([table(header, rows), "```\n" + "\n".join(report["command"] for report in reports) + "\n```"])


def metrics(report: dict) -> list[EvalResult]:
    """tau and speed-up on every set, of the number of passes that is fastest in their mean."""
    settings = report["settings"]
    refined = [mean for mean in report["means"] if settings["arms"][mean["arm"]]]
    if not refined:
        return []
    fastest = max(refined, key=lambda mean: mean["speed_up"])["arm"]
    found = []
    for arm in (arm for arm in report["arms"] if arm["arm"] == fastest):
        how = f"{fastest}; {arm['prompts']} prompts, at most {settings['generate']['max_new_tokens']} tokens each"
        for kind, name, value in (
            ("tau", f"tau, {TAU}", arm["tau"]),
            ("speed-up", f"speed-up over {PLAIN}", arm["speed_up"][1]),
        ):
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=settings["sources"][arm["set"]],
                    dataset_name=arm["set"],
                    metric_type=kind,
                    metric_name=f"{name} ({how})",
                    metric_value=round(value, 3),
                )
            )
    return found


def learning_curve(history: list[dict]) -> str:
    """Loss and simulated tau over the training, at some points of a trainer's log."""
    points = [entry for entry in history if "tau_pass_0" in entry]
    if not points:
        raise ValueError(
            "the trainer's log holds no `tau_pass_0`, expected some points of it: train with `logging_steps` of at most "
            "`max_steps`."
        )
    held_out = {entry["step"]: entry["eval_tau"] for entry in history if "eval_tau" in entry}
    evaluated = [i for i, point in enumerate(points) if point["step"] in held_out]
    taus = [key for key in points[0] if key.startswith("tau_pass_")]
    rows = []
    for point in (points[i] for i in curve_places(len(points) - 1, evaluated)):
        cells = [f"{point[key]:.2f}" for key in taus]
        cells += [f"{held_out[point['step']]:.2f}" if point["step"] in held_out else "-"] if held_out else []
        rows.append([str(int(point["step"])), f"{point['loss']:.3f}", *cells])
    header = ["step", "loss", *(f"tau, K = {key.removeprefix('tau_pass_')}" for key in taus)]
    return table([*header, *(["tau on held-out answers"] if held_out else [])], rows)


def curve_places(last: int, evaluated: list[int]) -> list[int]:
    """Evenly spread places from 0 to `last`; each moves to the nearest evaluated one within half of the way to the next."""
    way, chosen = last / (CURVE_POINTS - 1), set()
    for place in (i * way for i in range(CURVE_POINTS)):
        near = [(abs(other - place), other) for other in evaluated if abs(other - place) <= way / 2]
        chosen.add(min(near)[1] if near else round(place))
    return sorted(chosen)
