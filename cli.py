"""The command line: `xpress demo`, `generate`, `compare`, `build-tiny`; next door `data`, `train`, `eval` and `card`, the benches and `study`."""

import json
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from .cli_card import card_app
from .cli_eval import eval_app
from .cli_lab import lab_app
from .cli_training import training_app
from .generation.evaluation import compare, pass_arms
from .generation.statistics_xpress import DraftingStatistics, track_drafting
from .trainer.bfloat16 import warn_of_slow_bf16
from .trainer.prompts import read_conversations


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(training_app)
app.add_typer(lab_app)
app.add_typer(eval_app)
app.add_typer(card_app)
console = Console(highlight=False)

HERE = Path(__file__).parent
TINY = HERE / "hub_cards" / "tiny"
PROBLEMS = HERE / "hub_cards" / "prompts" / "word_problems.jsonl"
COLOURS = ("green", "cyan", "yellow", "magenta")

Passes = Annotated[int | None, typer.Option(min=0, help="Jacobi passes K; the drafter's own where omitted.")]
Target = Annotated[str, typer.Option(help="Hub id or folder of the target.")]
Drafter = Annotated[str, typer.Option(help="Hub id or folder of its drafter.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")]


class RoundStreamer:
    """Prints tokens as they come, every round's accepted run in a colour of its own."""

    def __init__(self, tokenizer, drafting: DraftingStatistics):
        self.tokenizer, self.drafting = tokenizer, drafting
        self.tokens, self.shown, self.prompt_seen = [], "", False

    def put(self, tokens: torch.Tensor):
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.tokens += tokens.flatten().tolist()
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # inside a character of several tokens
            return
        colour = COLOURS[len(self.drafting.rounds) % len(COLOURS)]
        console.print(Text(text[len(self.shown) :], style=colour), end="", soft_wrap=True)
        self.shown = text

    def end(self):
        console.print()


def torch_dtype(name: str) -> torch.dtype:
    if name not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"--dtype is {name!r}, expected float32 or bfloat16.")
    if name == "bfloat16":
        warn_of_slow_bf16("--dtype is bfloat16", "--dtype float32")
    return getattr(torch, name)


def load_pair(target: str, drafter: str, dtype: torch.dtype):
    """Tokenizer, target and drafter, loaded as any user would; an unusable folder ends the command."""
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        return tokenizer, model, AutoModel.from_pretrained(drafter, dtype=dtype).eval()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def encode(tokenizer, prompt: str) -> torch.Tensor:
    """The prompt as `input_ids` `[1, n]`, through the chat template where there is one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def stream_answer(tokenizer, target, drafter, prompt: str, **generate) -> None:
    """Prints one answer in the colours of its rounds, and what drafting did."""
    inputs = encode(tokenizer, prompt)
    with track_drafting() as drafting:
        streamer = RoundStreamer(tokenizer, drafting)
        target.generate(inputs, assistant_model=drafter, streamer=streamer, **generate)
    tokens = len(streamer.tokens)
    copied = f", {drafting.copied} of them copied" if drafting.copied else ""
    console.print(
        f"[dim]{tokens} tokens in {len(drafting.rounds)} rounds{copied}; tau {drafting.tau:.2f} tokens per round (accepted + 1); "
        f"{tokens / drafting.seconds['total']:.0f} tokens/s; {drafting.overhead:.0%} of the time outside forwards and "
        "refinement[/dim]"
    )


def arms_table(rows: list[dict], title: str) -> Table:
    table = Table(title=title)
    for column in ("", "tau", "tokens/s", "speed-up", "identical"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        same = "yes" if row["identical"] == row["prompts"] else f"{row['identical']} of {row['prompts']}"
        speed = f"{row['speed_up']:.2f}x"
        table.add_row(row["arm"], f"{row['tau']:.2f}", f"{row['tokens_per_second']:.0f}", speed, same)
    return table


def read_prompts(path: Path) -> list[str]:
    """The first user turn of every row of a JSONL file."""
    try:
        conversations = read_conversations(str(path))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return [next(turn["content"] for turn in turns if turn["role"] == "user") for turns in conversations]


def show_comparison(tokenizer, target, drafter, prompts: list[str], max_new_tokens: int) -> list[dict]:
    """Runs and prints the comparison; returns its rows."""
    inputs = [encode(tokenizer, prompt) for prompt in prompts]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing", total=len(inputs))
        results = compare(
            target,
            inputs,
            pass_arms(drafter, [1, 2, 4, 6]),
            on_prompt=lambda done: progress.update(task, completed=done),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    rows = [result.as_row(results[0]) for result in results]
    precision = str(target.dtype).removeprefix("torch.")
    console.print(arms_table(rows, f"{len(inputs)} prompts, greedy, {precision}, {torch.get_num_threads()} threads"))
    console.print(
        "[dim]tau: tokens per round, accepted + 1. tokens/s: median over prompts, arms interleaved. speed-up: median of "
        "per-prompt ratios. identical: the same tokens as plain.[/dim]"
    )
    return rows


@app.command()
def demo(max_new_tokens: MaxNewTokens = 96):
    """The shipped pair at work: one streamed answer, then 20 word problems with and without the drafter."""
    tokenizer, target, drafter = load_pair(str(TINY / "target"), str(TINY / "drafter"), torch.float32)
    problems = read_prompts(PROBLEMS)
    console.print(f"[bold]{problems[0]}[/bold]\n[dim]one colour per round: the tokens of a round came together[/dim]")
    stream_answer(tokenizer, target, drafter, problems[0], max_new_tokens=max_new_tokens, do_sample=False)
    show_comparison(tokenizer, target, drafter, problems, max_new_tokens)


@app.command()
def generate(
    prompt: str,
    target: Target = str(TINY / "target"),
    drafter: Drafter = str(TINY / "drafter"),
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    passes: Passes = None,
    lookup: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens to copy, at most, where the last two came before (prompt lookup); drafts elsewhere."
        ),
    ] = None,
    confidence_threshold: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Where drafts end, 0 for whole blocks; the drafter's own where omitted."),
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Dtype = "float32",
):
    """Streams one answer of any target with its drafter."""
    tokenizer, model, assistant = load_pair(target, drafter, torch_dtype(dtype))
    torch.manual_seed(seed)
    options = {"max_new_tokens": max_new_tokens, "prompt_lookup_num_tokens": lookup}
    options |= {"num_passes": passes, "confidence_threshold": confidence_threshold}
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    try:
        stream_answer(tokenizer, model, assistant, prompt, **options, **sampling)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command("compare")
def compare_arms(
    prompts: Annotated[Path, typer.Argument(exists=True, help="JSONL: messages, prompt, question or turns.")],
    target: Target = str(TINY / "target"),
    drafter: Drafter = str(TINY / "drafter"),
    limit: Annotated[int, typer.Option(min=1, help="First prompts of the file.")] = 20,
    max_new_tokens: MaxNewTokens = 128,
    dtype: Dtype = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
):
    """Any pair on prompts of your own: plain, DFlash and xPress, interleaved."""
    texts = read_prompts(prompts)[:limit]
    pair = load_pair(target, drafter, torch_dtype(dtype))
    rows = show_comparison(*pair, texts, max_new_tokens)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1))


@app.command()
def build_tiny(
    data: Annotated[Path, typer.Argument(exists=True, help="gsm8k-train.jsonl: rows of question and answer.")],
    test: Annotated[Path, typer.Argument(exists=True, help="gsm8k-test.jsonl: 20 of it are measured on.")],
    out: Annotated[Path, typer.Argument(help="Folder for the pair; a killed run goes on in it.")],
    seed: int = 0,
):
    """Rebuilds the shipped pair from GSM8K's text, measures it and writes its cards."""
    from .hub_cards.cards import write_tiny_cards
    from .trainer.tiny_pair import build_tiny as build

    questions = read_prompts(test)[:20]
    build(data, out, seed)
    tokenizer, target, drafter = load_pair(str(out / "target"), str(out / "drafter"), torch.float32)
    rows = show_comparison(tokenizer, target, drafter, questions, max_new_tokens=128)
    on = (
        f"The first {len(questions)} questions of GSM8K's test split, greedy, at most 128 new tokens, "
        f"fp32, {torch.get_num_threads()} CPU threads, torch {torch.__version__}, transformers {transformers.__version__}."
    )
    write_tiny_cards(out, rows, drafter.num_parameters(), on)
    console.print(f"The pair lies in {out / 'target'} and {out / 'drafter'}.")


if __name__ == "__main__":
    app()
