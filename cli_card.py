"""`xpress card`: the card of a drafter, from what `xpress data`, `train` and `eval` wrote and what no command knows."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .cli_eval import SUMMARY, TIMING


card_app = typer.Typer()
console = Console(highlight=False)
CARD, RESULTS, WALKED = "README.md", "results.json", "walked.json"
REPORT_KEYS = ("command", "settings", "held_out", "arms", "means")
# Of the recipe, and not for a card: where things lay, the target's shape, and what was expected of the rows.
UNSAID = (
    "target",
    "target_config",
    "data",
    "eval_data",
    "feature_cache",
    "output_dir",
    "expected_rows",
    "expected_tokens",
)


@card_app.command("card")
def write_card(
    drafter: Annotated[Path, typer.Argument(help="Its folder, which the card is written into.", exists=True)],
    facts: Annotated[
        Path, typer.Argument(help="YAML of what no command knows: hub_cards/facts has some.", exists=True)
    ],
    results: Annotated[list[Path], typer.Option(help="Folder of `xpress eval`; may be given several times.")],
    training: Annotated[Path, typer.Option(help="`output_dir` of `xpress train`; its rows must be where they were.")],
    walked: Annotated[
        list[Path] | None,
        typer.Option(help="File of `xpress walk`, this drafter's first; may be given several times."),
    ] = None,
):
    """Writes README.md, and the numbers that it states (results.json, walked.json), into a drafter's folder."""
    from .hub_cards.cards import evaluated_card, read_facts

    try:
        reports = [read_report(folder) for folder in results]
        trained, manifests = read_training(training)
        for folder, report in zip(results, reports):
            check_rows(folder, report, manifests)
        check_trained(drafter, training)
        model = check_weights(drafter, dict(zip(results, reports)))
        walks = [read_walk(file) for file in walked or []]
        check_walked(drafter, walks, training)
        card = evaluated_card(read_facts(facts), model.config, model.num_parameters(), trained, reports, walks)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    card.save(drafter / CARD)
    (drafter / WALKED).unlink(missing_ok=True)
    written = {RESULTS: reports} | ({WALKED: walks} if walks else {})
    for name, content in written.items():
        (drafter / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(f"In {drafter}: {', '.join([CARD, *written])}.", soft_wrap=True)


def read_report(folder: Path) -> dict:
    if not (folder / SUMMARY).exists():
        raise ValueError(f"{folder} holds no {SUMMARY}, expected a folder of an `xpress eval` that came to its end.")
    report = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    lacking = [key for key in REPORT_KEYS if key not in report]
    settings = report.get("settings", {})
    other = settings.get("timing") != TIMING or "confidence_threshold" not in settings
    if lacking or other or any("prompts" not in mean for mean in report["means"]):
        raise ValueError(
            f"the {SUMMARY} of {folder} is of another version of `xpress eval`, or lacks a part ({', '.join(lacking) or '-'}): "
            "measure again, in a new folder."
        )
    return report


def read_training(folder: Path) -> tuple:
    """What the card says of a training, and the manifests of its rows."""
    from .hub_cards.cards import Training
    from .trainer.checkpoints import STATE, last_whole_checkpoint
    from .trainer.recipe_runs import NOTE
    from .trainer.recipes import read_recipe
    from .trainer.row_folder import read_manifest

    checkpoint = last_whole_checkpoint(str(folder))
    if checkpoint is None or not (folder / NOTE).exists():
        raise ValueError(
            f"{folder} holds no {NOTE} and whole checkpoint, expected the `output_dir` of `xpress train`."
        )
    history = json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))["log_history"]
    recipe = read_recipe(str(folder / NOTE))
    manifests = [read_manifest(Path(rows)) for rows in recipe.folders]
    if unfinished := [rows for rows, made in zip(recipe.folders, manifests) if not made["complete"]]:
        raise ValueError(
            f"{', '.join(unfinished)}: not complete, expected rows that are. Run the same `xpress data` again."
        )
    shown = {key: value for key, value in recipe.values().items() if key not in UNSAID}
    return Training(describe_rows(manifests), history, shown), manifests


def describe_rows(manifests: list[dict]) -> str:
    """How many rows there are, and who answered how: a clause for each way."""
    rows, tokens = Counter(), Counter()
    for made in manifests:
        how = describe_answers(made["settings"])
        rows[how] += made["counts"]["rows"]
        tokens[how] += made["counts"]["supervised_tokens"]
    return f"{'; '.join(f'{rows[how]:,} rows with {tokens[how]:,} supervised tokens, {how}' for how in rows)}."


def describe_answers(settings: dict) -> str:
    """Who answered, and how."""
    if settings["answers"] == "given":
        return "the data set's own answers"
    drawn = "greedily"
    if settings["temperature"]:
        drawn = "at temperature {temperature:g} (top-p {top_p:g}, top-k {top_k})".format(**settings)
    return (
        f"answered by the target itself, {drawn}, in at most {settings['max_new_tokens']} tokens ({settings['dtype']})"
    )


def check_rows(folder: Path, report: dict, manifests: list[dict]) -> None:
    """Raises where the prompts were held against no rows or other ones than those of the training."""
    if report["held_out"] is None:
        raise ValueError(
            f"the prompts of {folder} were held against no rows, expected those that the drafter was trained on: run its "
            "`xpress eval` again with `--trained-on` for each folder of them; nothing is measured anew."
        )
    held = {rows["prompts_sha256"] for rows in report["held_out"]}
    if lacking := [made for made in manifests if made["settings"]["prompts_sha256"] not in held]:
        raise ValueError(
            f"the prompts of {folder} were not held against {len(lacking)} of the {len(manifests)} folders of rows that the "
            "drafter was trained on: run its `xpress eval` again with `--trained-on` for each; nothing is measured anew."
        )


def check_trained(drafter: Path, training: Path) -> None:
    """Raises where the training made another drafter."""
    from .generation import XPressDrafterModel
    from .trainer.row_folder import weights_fingerprint

    made = training / "drafter"
    if not made.exists():
        raise ValueError(
            f"{training} holds no drafter, expected the `output_dir` of an `xpress train` that came to its end."
        )
    ours, theirs = (weights_fingerprint(XPressDrafterModel.from_pretrained(folder)) for folder in (drafter, made))
    if ours != theirs:
        raise ValueError(
            f"{drafter} holds other weights than {made}: name the training that made it, or copy its drafter there again."
        )


def read_walk(file: Path) -> dict:
    walk = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(walk, dict) or not walk.get("complete"):
        raise ValueError(f"{file} is not of an `xpress walk --out` that came to its end: walk again.")
    return walk


def check_walked(drafter: Path, walks: list[dict], training: Path) -> None:
    """Raises where the first walk is of another drafter, or rows of any were asked what it was trained on."""
    from .generation import XPressDrafterModel
    from .trainer.asked import Asked
    from .trainer.recipe_runs import NOTE
    from .trainer.recipes import read_recipe
    from .trainer.row_folder import weights_fingerprint

    if not walks:
        return
    if walks[0]["weights"] != weights_fingerprint(XPressDrafterModel.from_pretrained(drafter, dtype=torch.float32)):
        raise ValueError(
            f"{walks[0]['drafter']} was walked with, expected the weights of {drafter} first: walk with them."
        )
    trained = {turn for rows in read_recipe(str(training / NOTE)).folders for turn in Asked.load(Path(rows)).turns}
    for rows in (part["rows"] for walk in walks for part in walk["walks"]):
        if known := trained.intersection(Asked.load(Path(rows)).turns):
            raise ValueError(
                f"{len(known)} questions of {rows}, which were walked, were trained on, expected none: walk rows of other prompts."
            )


def check_weights(drafter: Path, reports: dict[Path, dict]):
    """The drafter; raises where a report is of another one."""
    from .generation import XPressDrafterModel
    from .trainer.row_folder import weights_fingerprint

    for folder, report in reports.items():
        settings = report["settings"]
        model = XPressDrafterModel.from_pretrained(drafter, dtype=getattr(torch, settings["dtype"]))
        if settings["weights"].get("drafter") != weights_fingerprint(model):
            raise ValueError(f"{folder} did not measure the weights of {drafter}: measure them, in a new folder.")
    return model
