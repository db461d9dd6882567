"""`xpress data`, `xpress train` and `xpress walk`: from prompts to a drafter of one's own, and what it reaches on rows."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .trainer.answers import LONGEST, AnswerSettings


training_app = typer.Typer()
console = Console(highlight=False)


@training_app.command()
def data(
    prompts: Annotated[
        str, typer.Argument(help="JSONL file or `datasets` name: messages, prompt, question or turns.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the rows; a killed run goes on in it.")],
    target: Annotated[str, typer.Option(help="Hub id or folder of the target, which answers the prompts.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the target.")] = None,
    answers: Annotated[
        Literal["regenerated", "given"], typer.Option(help="Whose answers: the target's, or the data's.")
    ] = AnswerSettings.answers,
    split: Annotated[str, typer.Option(help="Of a `datasets` name.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Of a `datasets` name that has several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First rows only.")] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="A prompt set as `xpress eval` takes them, a JSONL file or one of the Hub's; what asks one of its prompts, "
            "worded as there or otherwise, is left out. May be given several times."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = AnswerSettings.temperature,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is all.")] = AnswerSettings.top_p,
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = AnswerSettings.top_k,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = AnswerSettings.seed,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Of an answer; one that does not end is kept so.")
    ] = AnswerSettings.max_new_tokens,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=3, help=f"Of a row; longer prompts are dropped, not cut. {LONGEST} or the target's context if omitted."
        ),
    ] = AnswerSettings.max_length,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Conversations answered together.")
    ] = AnswerSettings.batch_size,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the target.")
    ] = AnswerSettings.dtype,
    template_args: Annotated[
        str, typer.Option(help="""Variables of the chat template, as JSON: '{"enable_thinking": false}'.""")
    ] = "{}",
):
    """Training rows: prompts, answered by the target itself."""
    from transformers.utils import logging

    from .trainer.answers import write_rows
    from .trainer.held_out import asking, read_sets
    from .trainer.prompts import read_conversations

    logging.disable_progress_bar()
    try:
        settings = AnswerSettings(
            target=target,
            revision=revision,
            answers=answers,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            batch_size=batch_size,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            dtype=dtype,
            template_args=json.loads(template_args),
        )
        conversations = read_conversations(
            prompts, split=split, subset=subset, limit=limit, given_answers=answers == "given"
        )
        excluded = asking(conversations, read_sets(exclude)) if exclude else set()
        with AnswerProgress(len(conversations) - len(excluded)) as progress:
            manifest = write_rows(conversations, out, settings, progress.update, excluded)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    counts = manifest["counts"]
    console.print(
        f"{counts['rows']} rows from {counts['prompts']} prompts in {out}: {counts['tokens']} tokens, of which "
        f"{counts['supervised_tokens']} ({counts['supervised_tokens'] / counts['tokens']:.0%}) are supervised. "
        f"Excluded: {manifest['excluded']}. Dropped: {counts['dropped'] or 'none'}. "
        f"Answers that did not end: {counts.get('unfinished_answers', 0)}."
    )


class AnswerProgress:
    """A bar over the conversations, or lines, with the supervised tokens per second of this run and the time left."""

    def __init__(self, total: int):
        self.bar = Progress(
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("", total=total, speed=0.0)
        self.begun: tuple[float, int] | None = None  # when, and how many tokens there were already

    def __enter__(self) -> "AnswerProgress":
        self.bar.start()
        return self

    def __exit__(self, *error):
        self.bar.stop()

    def update(self, done: int, tokens: int):
        if self.begun is None:
            self.begun = time.perf_counter(), tokens
        start, before = self.begun
        speed = (tokens - before) / max(time.perf_counter() - start, 1e-9)
        self.bar.update(self.task, completed=done, speed=speed)
        if not console.is_terminal:  # a log shows no bar
            console.print(f"{done} of {self.bar.tasks[0].total} prompts, {speed:.0f} tokens/s")


@training_app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other values for its fields.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As KEY=VALUE.")] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Count parameters, memory, tokens and steps; load no weights.")
    ] = False,
    devices: Annotated[
        int, typer.Option(min=1, help="Of the dry run; `accelerate launch` says it to a real one.")
    ] = 1,
):
    """A drafter for a target, from a recipe: tiny, smollm2-135m, qwen3-8b-b16, qwen3-8b-adapt or your own."""
    from transformers.utils import logging

    from .trainer.plan import make_plan
    from .trainer.recipe_runs import run, save_drafter
    from .trainer.recipes import parse_overrides, read_recipe

    logging.disable_progress_bar()
    try:
        chosen = read_recipe(recipe, parse_overrides([*(overrides or []), *(settings or [])]))
        if devices > 1 and not dry_run:
            raise ValueError(f"`--devices` is {devices} without `--dry-run`, expected `accelerate launch` to say it.")
        if dry_run:
            show_plan(make_plan(chosen, devices), devices)
            return
        trainer = run(chosen)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    folder = save_drafter(trainer)
    if not trainer.is_world_process_zero():
        return
    taus = {
        key: value for entry in trainer.state.log_history for key, value in entry.items() if key.startswith("tau_pass")
    }
    last = ", ".join(f"{value:.2f} at K = {key.removeprefix('tau_pass_')}" for key, value in taus.items())
    console.print(
        f"{trainer.state.global_step} steps; the drafter lies in {folder}. Simulated tau on the last logged training rows "
        f"(accepted + 1): {last or 'none logged'}."
    )


@training_app.command()
def walk(
    rows: Annotated[list[Path], typer.Argument(exists=True, help="Folders that `xpress data` made, greedily.")],
    target: Annotated[str, typer.Option(help="Hub id or folder of the target.")],
    drafter: Annotated[str, typer.Option(help="Hub id or folder of its drafter.")],
    passes: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Jacobi passes K; may be given several times. The drafter's own if omitted."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many rows of every folder, evenly spread.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the arithmetic; the drafter's weights are float32.")
    ] = "float32",
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers.")] = None,
):
    """
    Tau that `generate` would reach on rows of the target's greedy answers, read many positions at a time: many times faster than
    drafting them anew, and says nothing of speed.
    """
    import torch
    from transformers.utils import logging

    from .generation import XPressDrafterModel
    from .generation.evaluation_runs import write_json
    from .hub_cards.results import walked
    from .trainer.row_folder import weights_fingerprint
    from .trainer.walking import walk_folders

    logging.disable_progress_bar()
    try:
        if out is not None and not out.absolute().parent.is_dir():
            raise ValueError(f"`--out` is {out}, whose folder is not there, expected one that is: make it first.")
        model = XPressDrafterModel.from_pretrained(drafter, dtype=torch.float32)
        report = {"command": shlex.join(["xpress", *sys.argv[1:]]), "drafter": drafter, "target": target}
        report |= {"weights": weights_fingerprint(model), "dtype": dtype, "complete": False, "walks": []}
        for walk in walk_folders(rows, target, model, passes or [None], limit, dtype):
            report["walks"].append({**walk._asdict(), "tau": {str(number): tau for number, tau in walk.tau.items()}})
            report["complete"] = len(report["walks"]) == len(rows)
            if out is not None:
                write_json(out, report)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    console.print(walked([report]), soft_wrap=True, markup=False)


def show_plan(plan, devices: int):
    """Prints what a recipe will take."""
    table = Table(title=f"On {devices} device{'s' if devices > 1 else ''}, nothing loaded", show_header=False)
    table.add_column(), table.add_column(justify="right")
    for name, count in plan.parameters.items():
        table.add_row(f"parameters, {name}", f"{count / 1e6:,.1f} M")
    table.add_section()
    for name, count in (
        ("rows", plan.rows),
        ("tokens in them", plan.tokens),
        ("rows a step", plan.rows_per_step),
        ("steps", plan.steps),
        ("tokens read in all", plan.tokens_read),
    ):
        table.add_row(name, f"{count:,}")
    table.add_section()
    for name, size in plan.memory.items():
        table.add_row(f"memory a device, {name}", f"{size / 2**30:.2f} GiB")
    table.add_row("memory a device, in all", f"{sum(plan.memory.values()) / 2**30:.2f} GiB")
    if plan.disk:
        table.add_row("on the disk, the target's states", f"{plan.disk / 2**30:.2f} GiB")
    console.print(table)
