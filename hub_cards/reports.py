"""What `xpress eval` measured, as Markdown and as plots.

A report is plain data: `{"command", "settings", "held_out", "arms", "means"}`; `summarise` and `mean_over_sets` give the
last two, `check_untrained` what is held out. It is checked before anything is written. A slow-down is written as one.
"""

from pathlib import Path

from ..generation.evaluation import PLAIN
from ..generation.evaluation_numbers import NEAR_TIE_STEPS, check_summary


STEPS = ("draft", "refine", "verify", "rest")


def markdown(report: dict) -> str:
    """The whole report."""
    arms, settings = report["arms"], report["settings"]
    check_summary(arms)
    parts = ["# What `xpress eval` measured", f"```\n{report['command']}\n```", conditions(settings), held_out(report)]
    if len(sets := list(dict.fromkeys(arm["set"] for arm in arms))) > 1:
        parts += ["## All sets", "Means of the sets' numbers; texts identical to plain's, in all sets:"]
        parts += [mean_table(report["means"]), "Share of the time behind the prompt's forward:"]
        parts.append(time_table(report["means"]))
    if any(settings["arms"].values()):
        parts += ["## Passes", "tau after K passes, and its distance from the fixed point's:", pass_table(report)]
    for name in sets:
        own = [arm for arm in arms if arm["set"] == name]
        parts += [f"## {name}", f"Prompts: {own[0]['prompts']}, rendered-prompt hash `{settings['prompts'][name]}`."]
        parts += [
            speed_table(own),
            "Draft tokens kept, by slot:",
            slot_table(own),
            "Share of the time behind the prompt's forward:",
            time_table(own),
        ]
    return "\n\n".join([*parts, legend(settings)]) + "\n"


def conditions(settings: dict) -> str:
    """What was run, and on what."""
    generate, machine = settings["generate"], settings["environment"]
    how = f"temperature {generate['temperature']:g}, seed {settings['seed']}" if generate["do_sample"] else "greedy"
    template = ", ".join(f"{key} {value}" for key, value in settings["template"].items()) or "no variables"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("xpress_drafter", "torch", "transformers", "python"))
    sources = ", ".join(f"{name} from `{source}`" for name, source in settings["sources"].items())
    shortlist = ", ".join(f"{role} {size or 'all'}" for role, size in settings["shortlist"].items()) or "-"
    thresholds = ", ".join(f"{role} {p or 'none'}" for role, p in settings["confidence_threshold"].items()) or "-"
    return (
        f"{how}, at most {generate['max_new_tokens']} new tokens, {settings['dtype']}, {machine['device']} "
        f"({machine['cpu_capability']}, threads: {machine['threads']}); {versions}. Chat template: {template}. "
        f"Prompt lookup: {settings['lookup_tokens']} tokens. Tokens refined per slot: {shortlist}. Confidence threshold of our own arms: {thresholds}. "
        f"Prompts: {sources}."
    )


def held_out(report: dict) -> str:
    """Whether the prompts were trained on, as far as it was asked."""
    if report["held_out"] is None:
        return "Whether these prompts were trained on was not checked (`--trained-on`)."
    prompts, turns = report["means"][0]["prompts"], sum(rows["turns"] for rows in report["held_out"])
    return (
        f"None of the {prompts} prompts was trained on: checked by hash, whatever case and white space, and by 13-grams, with "
        f"and without their instruction, against the {turns} user turns of {', '.join(rows['rows'] for rows in report['held_out'])}."
    )


def legend(settings: dict) -> str:
    """What the numbers mean."""
    dtype, steps = settings["dtype"], NEAR_TIE_STEPS[settings["dtype"]]
    near = f"where plain's two best logits are less than {steps} rounding steps of the best one apart in {dtype}"
    return (
        "tau: tokens per round, accepted + 1, with the interval that 95 % of resampled prompts give. tokens/s and speed-up: "
        "median over prompts (lower to upper quartile), the arms interleaved in one process, warm-up not counted; the "
        "speed-up is the ratio to plain on the same prompt, with the prompt's forward and without it. identical: the same "
        f"tokens as plain; rounding: {'they part ' + near if steps else 'not in float32, where texts must be equal'}; different: they part "
        "elsewhere. copied: rounds that a drafter's arm copied in the place of drafting, which the slots leave out. Drafts that a confidence "
        "threshold ends reach the later slots in their surer rounds alone. draft: "
        "the backbone and the target's head on its states, or the look-up; refine: all passes and the choice of tokens. "
        "rest: all that is in no model's forward and no refinement; for arms in Transformers' own loops, "
        "the drafter's head and sampling are in it too."
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(quartiles: list[float] | None, digits: int) -> str:
    """A median with its quartiles."""
    if quartiles is None:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles)
    return f"{middle} ({low} to {high})"


def ratio(quartiles: list[float]) -> str:
    """A speed-up; one under 1 is called what it is."""
    return spread(quartiles, 2) + (", slower" if quartiles[1] < 1 else "")


def speed_table(arms: list[dict]) -> str:
    greedy = arms[0]["identity"] is not None
    header = ["arm", "tau (95 %)", "tokens/s", "speed-up", "without prefill", "seconds", "without prefill"]
    rows = []
    for arm in arms:
        low, high = arm["tau_interval"]
        row = [arm["arm"], f"{arm['tau']:.2f} ({low:.2f} to {high:.2f})", spread(arm["tokens_per_second"], 1)]
        row += [ratio(arm["speed_up"]), spread(arm["speed_up_without_prefill"], 2)]
        row += [f"{arm['seconds']:.1f}", f"{arm['seconds_without_prefill']:.1f}"]
        rows.append(row + (identity_cells(arm) if greedy else []))
    return table(header + (list(arms[0]["identity"]) if greedy else []), rows)


def mean_table(means: list[dict]) -> str:
    header = ["arm", "tau", "tokens/s", "speed-up", "slower than plain on", *means[0]["identity"]]
    rows = []
    for mean in means:
        numbers = [f"{mean['tau']:.2f}", f"{mean['tokens_per_second']:.1f}", f"{mean['speed_up']:.2f}"]
        counts = identity_cells(mean) if mean["identity"] else []
        rows.append([mean["arm"], *numbers, ", ".join(mean["slower_on"]) or "-", *counts])
    return table(header, rows)


def identity_cells(arm: dict) -> list[str]:
    """How many texts are plain's, of how many, and how many are not."""
    identical, *others = arm["identity"].values()
    return [f"{identical} of {arm['prompts']}", *map(str, others)]


def pass_table(report: dict) -> str:
    """tau by set and K, a last row for the sets' mean; the last column is the fixed point."""
    passes = {name: k for name, k in report["settings"]["arms"].items() if k is not None}
    found = {(arm["set"], arm["arm"]): arm["tau"] for arm in report["arms"]}
    found |= {("mean", mean["arm"]): mean["tau"] for mean in report["means"]}
    *names, last = sorted(passes, key=passes.get)
    rows = []
    for chosen in dict.fromkeys(chosen for chosen, _ in found):
        end = found[chosen, last]
        cells = [f"{found[chosen, name]:.2f} ({found[chosen, name] / end - 1:+.1%})" for name in names]
        rows.append([chosen, *cells, f"{end:.2f}"])
    return table(["set", *(f"K = {passes[name]}" for name in names), f"fixed point (K = {passes[last]})"], rows)


def slot_table(arms: list[dict]) -> str:
    drafting = [arm for arm in arms if arm["acceptance"]]
    longest = max((len(arm["acceptance"]) for arm in drafting), default=0)
    rows = []
    for arm in drafting:
        shares = [f"{share:.2f}" for share in arm["acceptance"]]
        rounds = [str(arm["rounds"]), f"{arm['copied'] / max(arm['rounds'], 1):.0%}" if arm["copied"] else "-"]
        rows.append([arm["arm"], *rounds, *shares, *["-"] * (longest - len(shares))])
    return table(["arm", "rounds", "copied", *map(str, range(1, longest + 1))], rows)


def time_table(arms: list[dict]) -> str:
    return table(["arm", *STEPS], [[arm["arm"], *(f"{arm['split'][step]:.1%}" for step in STEPS)] for arm in arms])


def plotting() -> tuple:
    """Matplotlib's figure class and as many colours as there are arms; a `ValueError` where it is not installed."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: `pip install matplotlib` (the extra `plot`), or leave `--plots` "
            "out; the numbers are in the Markdown and JSON files."
        ) from error
    return Figure, colormaps["tab20"].colors


def write_plots(report: dict, folder: Path) -> list[Path]:
    """Tau against K, speed-up by set, and acceptance by slot, as PNG files."""
    check_summary(report["arms"])
    (figure_class, colours), files = plotting(), []
    for name, draw in (("tau", draw_tau), ("speed-up", draw_speed_up), ("acceptance", draw_acceptance)):
        figure = figure_class(figsize=(10, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.set_prop_cycle(color=colours)
        draw(axes, report)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def draw_tau(axes, report: dict) -> None:
    """A line per set, over the arms that make a number of passes; sets stand a little apart, so that no bar hides another."""
    passes = report["settings"]["arms"]
    names = list(dict.fromkeys(arm["set"] for arm in report["arms"]))
    for number, name in enumerate(names):
        arms = [arm for arm in report["arms"] if arm["set"] == name and passes[arm["arm"]] is not None]
        arms.sort(key=lambda arm: passes[arm["arm"]])
        taus, ends = [arm["tau"] for arm in arms], zip(*(arm["tau_interval"] for arm in arms))
        errors = [[abs(tau - end) for tau, end in zip(taus, side)] for side in ends]
        places = [passes[arm["arm"]] + 0.06 * (number - (len(names) - 1) / 2) for arm in arms]
        axes.errorbar(places, taus, yerr=errors or None, marker="o", capsize=3, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="Jacobi passes K (the last is the fixed point)", ylabel="tau, tokens per round")


def draw_speed_up(axes, report: dict) -> None:
    """Bars by set, with their quartiles; the line at 1 is plain."""
    names = list(dict.fromkeys(arm["set"] for arm in report["arms"]))
    arms = [name for name in dict.fromkeys(arm["arm"] for arm in report["arms"]) if name != PLAIN]
    width = 0.8 / max(len(arms), 1)
    for number, chosen in enumerate(arms):
        quartiles = [arm["speed_up"] for arm in report["arms"] if arm["arm"] == chosen]
        errors = [[middle - low for low, middle, _ in quartiles], [high - middle for _, middle, high in quartiles]]
        places, heights = [i + number * width for i in range(len(names))], [middle for _, middle, _ in quartiles]
        axes.bar(places, heights, width, yerr=errors, error_kw={"elinewidth": 0.7, "alpha": 0.6}, label=chosen)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names)
    axes.set(ylabel="speed-up over plain, median and quartiles")


def draw_acceptance(axes, report: dict) -> None:
    """A line per arm, the mean over the sets in which the slot was drafted."""
    for chosen in dict.fromkeys(arm["arm"] for arm in report["arms"] if arm["acceptance"]):
        shares = [arm["acceptance"] for arm in report["arms"] if arm["arm"] == chosen]
        columns = [[of_set[k] for of_set in shares if k < len(of_set)] for k in range(max(map(len, shares)))]
        heights = [sum(column) / len(column) for column in columns]
        axes.plot(range(1, len(heights) + 1), heights, marker="o", markersize=4, label=chosen)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="slot", ylabel="draft tokens kept (all before it kept too)", ylim=(0, 1.02))
