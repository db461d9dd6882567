"""What a card says of measurements and of training, as Markdown, and what the Hub is told of them."""

from huggingface_hub import EvalResult

from ..generation.evaluation import PLAIN
from ..generation.evaluation_numbers import check_summary, mean_over_sets
from ..generation.prompt_sets import HUB_SETS
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
    settings, means = report["settings"], mean_over_sets(report["arms"])
    temperature = settings["generate"].get("temperature")
    title = "Greedy" if temperature is None else f"Temperature {temperature:g}"
    speeds = {"tau": ("tau", 2), "tokens/s": ("tokens_per_second", 1), "Speed-up over plain": ("speed_up", 2)}
    parts = [f"### {title}, {settings['dtype']}", conditions(settings), held_out(report | {"means": means})]
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


def metrics(report: dict) -> list[EvalResult]:
    """tau and speed-up on every set, of the number of passes that is fastest in their mean."""
    passes = report["settings"]["arms"]
    refined = [mean for mean in mean_over_sets(report["arms"]) if passes[mean["arm"]]]
    if not refined:
        return []
    fastest = max(refined, key=lambda mean: mean["speed_up"])["arm"]
    found = []
    for arm in (arm for arm in report["arms"] if arm["arm"] == fastest):
        source = HUB_SETS[arm["set"]].source if arm["set"] in HUB_SETS else arm["set"]
        for kind, name, value in (
            ("tau", f"tau, {TAU}", arm["tau"]),
            ("speed-up", f"speed-up over {PLAIN}", arm["speed_up"][1]),
        ):
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=source,
                    dataset_name=arm["set"],
                    metric_type=kind,
                    metric_name=f"{name} ({fastest})",
                    metric_value=round(value, 3),
                )
            )
    return found


def learning_curve(history: list[dict]) -> str:
    """Loss and simulated tau over the training, at some evenly spread points of a trainer's log."""
    points = [entry for entry in history if "tau_pass_0" in entry]
    held_out = {entry["step"]: entry["eval_tau"] for entry in history if "eval_tau" in entry}
    last = len(points) - 1
    chosen = sorted({round(i * last / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    taus = [key for key in points[0] if key.startswith("tau_pass_")]
    rows = []
    for point in (points[i] for i in chosen):
        cells = [f"{point[key]:.2f}" for key in taus]
        cells += [f"{held_out[point['step']]:.2f}" if point["step"] in held_out else "-"] if held_out else []
        rows.append([str(int(point["step"])), f"{point['loss']:.3f}", *cells])
    header = ["step", "loss", *(f"tau, K = {key.removeprefix('tau_pass_')}" for key in taus)]
    return table([*header, *(["tau on held-out answers"] if held_out else [])], rows)
