"""`xpress bench-refine`, `bench-objective` and `study`: what the method costs, and which of its parts matter."""

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from .generation.benchmark import refinement_ways, time_ways


lab_app = typer.Typer()
console = Console(highlight=False)


@lab_app.command()
def bench_refine(
    vocab_size: int = 151936,
    hidden_size: int = 4096,
    rank: int = 256,
    mlp_width: int = 512,
    block_size: int = 16,
    shortlist: int = 512,
    repeats: int = 20,
):
    """Times one block's refinement at a head's shape (the 8B drafter's by default): in bf16, or float32 where this CPU lacks it."""
    from .trainer.bfloat16 import quick_dtype

    dtype = quick_dtype()
    ways = refinement_ways(vocab_size, hidden_size, rank, mlp_width, block_size, shortlist, dtype)
    times = time_ways(ways, repeats)
    markov = next(iter(times.values()))
    table = Table(title=f"One block's refinement, {measured_with(dtype)}, median of {repeats}")
    for column in ("", "ms", "Markov / this"):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in times.items():
        table.add_row(name, f"{value:.2f}", f"{markov / value:.1f}x")
    console.print(table)


@lab_app.command()
def bench_objective(
    vocab_size: int = 49152,
    hidden_size: int = 576,
    rank: int = 128,
    mlp_width: int = 256,
    block_size: int = 16,
    anchors: Annotated[int, typer.Option(min=8, help="Blocks; a quarter and a half of them are measured first.")] = 64,
    repeats: int = 2,
):
    """
    Times one step's objective and measures its memory, beside the formulas differentiated by autograd: in bf16, or float32
    where this CPU lacks it.
    """
    from .trainer.benchmark import measure, objective_ways, peak_megabytes
    from .trainer.bfloat16 import quick_dtype

    dtype = quick_dtype()
    table = Table(title=f"Objective and gradients, V = {vocab_size}, B = {block_size}, {measured_with(dtype)}")
    for column in ("", "anchors", "seconds", "anchors/s", "peak MB"):
        table.add_column(column, justify="left" if not column else "right")
    found, before = {}, 0.0
    for name, count in (*(("bounded", anchors // part) for part in (4, 2, 1)), ("dense", anchors)):  # peaks only grow
        ways = objective_ways(vocab_size, hidden_size, rank, mlp_width, block_size, count, dtype)
        before = before or peak_megabytes()
        seconds, peak = measure(ways[name], repeats)
        found[name] = seconds, megabytes = seconds, peak - before
        table.add_row(name, str(count), f"{seconds:.2f}", f"{count / seconds:.0f}", f"{megabytes:.0f}")
    console.print(table)
    (seconds, memory), (dense_seconds, dense_memory) = found["bounded"], found["dense"]
    console.print(
        f"bounded: {dense_seconds / seconds:.1f} times as fast, {memory:.0f} MB where dense takes {dense_memory:.0f}"
    )


def measured_with(dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"


@lab_app.command()
def study(
    folder: Annotated[Path, typer.Argument(exists=True, help="A folder of `xpress build-tiny`.")],
    what: Annotated[Literal["ablation", "choices"], typer.Argument(help="The objective's terms, or the sizes.")],
    steps: Annotated[int, typer.Option(min=1, help="Of every run.")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every variant.")] = 3,
):
    """Trains the tiny pair's drafter many ways for equally many steps; prints tau on held-out answers."""
    from .trainer.study import ABLATION, CHOICES, run_study, study_table

    variants = ABLATION if what == "ablation" else CHOICES
    runs = run_study(
        variants, range(seeds), folder, steps, lambda run: console.print_json(json.dumps(run), indent=None)
    )
    console.print(study_table(runs), soft_wrap=True, markup=False)
