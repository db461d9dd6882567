"""`xpress data` and `xpress train`: from prompts to a drafter of one's own, each command resumable."""

import json
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
    ] = "regenerated",
    split: Annotated[str, typer.Option(help="Of a `datasets` name.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Of a `datasets` name that has several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First rows only.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 is all.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of an answer; one that does not end is kept so.")] = 1024,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=3, help="Of a row; longer prompts are dropped, not cut. 4096 or the target's context if omitted."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations answered together.")] = 32,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the target.")] = "bfloat16",
    template_args: Annotated[
        str, typer.Option(help="""Variables of the chat template, as JSON: '{"enable_thinking": false}'.""")
    ] = "{}",
):
    """Training rows: prompts, answered by the target itself."""
    from transformers.utils import logging

    from .trainer.answers import AnswerSettings, write_rows
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
        with AnswerProgress(len(conversations)) as progress:
            manifest = write_rows(conversations, out, settings, progress.update)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    counts = manifest["counts"]
    console.print(
        f"{counts['rows']} rows from {counts['prompts']} prompts in {out}: {counts['tokens']} tokens, of which "
        f"{counts['supervised_tokens']} ({counts['supervised_tokens'] / counts['tokens']:.0%}) are supervised. "
        f"Dropped: {counts['dropped'] or 'none'}. Answers that did not end: {counts.get('unfinished_answers', 0)}."
    )


class AnswerProgress:
    """A bar over the conversations, with the supervised tokens per second of this run and the time left."""

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
