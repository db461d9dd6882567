"""`xpress eval`: any target and drafter beside everything else that `generate` offers, on the paper's prompts or one's own."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn


eval_app = typer.Typer()
console = Console(highlight=False)
SUMMARY, REPORT = "summary.json", "report.md"
# What the time shares mean: since 2 "draft" has the target's head on the backbone's states, before "refine" had it.
TIMING = 2
DRAFTERS = ("drafter", "markov", "dflash")  # roles of models that our loop decodes with

Drafter = Annotated[str | None, typer.Option(help="Hub id or folder of its xPress drafter.")]
Arms = Annotated[
    str | None,
    typer.Option(
        help='Of lookup, native-dflash, k0, xpress, xpress-lookup, markov, dflash, assistant, as "lookup xpress"; all that '
        "the given models allow if omitted. plain is always run."
    ),
]


@dataclass
class Choice:
    """What to measure. `models` are Hub ids or folders by role: drafter, markov, dflash, assistant."""

    prompts: list[str]
    trained_on: list[str] | None
    target: str
    models: dict[str, str]
    arms: list[str]
    passes: list[int] | None
    confidence_threshold: float | None
    limit: int
    seed: int
    dtype: str
    device: torch.device
    generate: dict


@eval_app.command("eval")
def evaluate_pair(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="JSONL files, each a set (prompt, question, turns or messages; the first turn counts), or sets of the "
            "Hub: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench (shuffled with seed 0)."
        ),
    ],
    target: Annotated[str, typer.Option(help="Hub id or folder of the target.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, summary, report and plots; a killed run goes on in it.")],
    drafter: Drafter = None,
    markov: Annotated[str | None, typer.Option(help="The same of a drafter with a Markov head.")] = None,
    dflash: Annotated[str | None, typer.Option(help="The same of a drafter that is a backbone alone.")] = None,
    assistant: Annotated[str | None, typer.Option(help="The same of an autoregressive assistant.")] = None,
    arms: Arms = None,
    passes: Annotated[
        str | None, typer.Option(help='K of the arm xpress, as "1 2 4 6"; the fixed point is always run.')
    ] = None,
    confidence_threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Where drafts of our own arms end, 0 for whole blocks; each drafter's own if omitted.",
        ),
    ] = None,
    trained_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of rows (`xpress data`) that a drafter was trained on: prompts that are among them are refused, and "
            "the report says so. May be given several times."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="First prompts of each set, or all if it has fewer.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of an answer, at most.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above, nothing is cut off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of all models.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="As torch names it; a GPU, if there is one, if omitted.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots too; needs matplotlib.")] = False,
):
    """Drafters beside plain `generate` and its other ways, prompt by prompt in one process; resumable."""
    from .hub_cards.reports import plotting
    from .trainer.bfloat16 import warn_of_slow_bf16

    roles = {"drafter": drafter, "markov": markov, "dflash": dflash, "assistant": assistant}
    models = {role: name for role, name in roles.items() if name is not None}
    sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    try:
        if plots:
            plotting()
        if dtype == "bfloat16":
            warn_of_slow_bf16("--dtype is bfloat16", "--dtype float32", place(device))
        choice = Choice(
            prompts=prompts,
            trained_on=trained_on,
            target=target,
            models=models,
            arms=default_arms(models) if arms is None else arms.replace(",", " ").split(),
            passes=None if passes is None else whole_numbers(passes),
            confidence_threshold=confidence_threshold,
            limit=limit,
            seed=seed,
            dtype=dtype,
            device=place(device),
            generate={"max_new_tokens": max_new_tokens, **(sampling if temperature else {"do_sample": False})},
        )
        text, files = measure(choice, out, plots)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    console.print(text, soft_wrap=True, markup=False)
    console.print(f"In {out}: {', '.join(files)}.", soft_wrap=True)


def default_arms(models: dict[str, str]) -> list[str]:
    """All arms that need no other model than these."""
    own = ["native-dflash", "k0", "xpress", "xpress-lookup"] if "drafter" in models else []
    return ["lookup", *own, *(role for role in ("markov", "dflash", "assistant") if role in models)]


def place(device: str | None) -> torch.device:
    """Where the models go."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise ValueError(f"`--device` is {device!r}, expected cpu, or cuda on a machine where torch finds a GPU.")
    return torch.device(device)


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f'`--passes` is {text!r}, expected whole numbers, as in "1 2 4 6".') from error


def measure(choice: Choice, out: Path, plots: bool) -> tuple[str, list[str]]:
    """Runs what the folder lacks and writes what follows from it: the report's text, and the names of the files."""
    from transformers.utils import logging

    from .generation.arms import make_arms
    from .generation.evaluation_numbers import mean_over_sets, summarise
    from .generation.evaluation_runs import RunFolder, write_json
    from .hub_cards.reports import markdown, write_plots

    logging.disable_progress_bar()
    rendered, asked, passes, held_out = prepare(choice)
    models = load_models(choice)
    arms = make_arms(choice.arms, models, passes, other_tokenizers(choice, models), choice.confidence_threshold)
    settings = {"arms": {arm.name: arm.passes for arm in arms}, **asked, **settings_of(choice, rendered)}
    settings["weights"] = fingerprints(models)
    settings["shortlist"] = {role: models[role].config.xpress_topc for role in DRAFTERS if role in models}
    given = choice.confidence_threshold
    settings["confidence_threshold"] = {
        role: models[role].config.confidence_threshold if given is None else given
        for role in DRAFTERS
        if role in models
    }
    folder = RunFolder(out, settings)
    run(models["target"], rendered, arms, folder, choice)
    numbers = summarise(folder.rows, [arm.name for arm in arms], choice.dtype, not choice.generate["do_sample"])
    report = {"command": shlex.join(["xpress", *sys.argv[1:]]), "settings": settings, "held_out": held_out}
    report |= {"arms": numbers, "means": mean_over_sets(numbers)}
    text = markdown(report)
    write_json(out / SUMMARY, report)
    (out / REPORT).write_text(text, encoding="utf-8")
    return text, [REPORT, SUMMARY, "rows.jsonl", *((file.name for file in write_plots(report, out)) if plots else ())]


def prepare(choice: Choice) -> tuple[dict[str, list[list[int]]], dict, list[int], list[dict] | None]:
    """
    All that can be wrong without a weight being loaded: the rendered prompts, the template's variables and where the
    prompts are from, K, and what rows the prompts are not among.
    """
    from transformers import AutoConfig, AutoTokenizer

    from .generation.arms import OWN_ARMS, check_arms, choose_passes
    from .generation.prompt_sets import render_sets, template_arguments
    from .modeling_xpress import XPressDrafterConfig
    from .trainer.held_out import check_untrained, read_sets

    sets = read_sets(choice.prompts, choice.limit)
    held_out = None if choice.trained_on is None else check_untrained(sets, choice.trained_on)
    configs = {
        role: read(role, XPressDrafterConfig if role in DRAFTERS else AutoConfig, name)
        for role, name in choice.models.items()
    }
    check_arms(choice.arms, configs)
    if choice.passes is not None and "xpress" not in choice.arms:
        raise ValueError(f"`--passes` is {choice.passes} without the arm xpress, which alone reads it: leave one out.")
    if choice.confidence_threshold is not None and not set(choice.arms) & set(OWN_ARMS):
        raise ValueError(
            f"`--confidence-threshold` is {choice.confidence_threshold}, but no arm of {choice.arms} reads it, expected one of "
            f"{', '.join(OWN_ARMS)}: add one, or leave the option out."
        )
    passes = choose_passes(choice.passes, configs["drafter"].num_draft_tokens) if "xpress" in choice.arms else []
    target_config, tokenizer = (read("target", loader, choice.target) for loader in (AutoConfig, AutoTokenizer))
    check_models(target_config, tokenizer, configs, choice.models)
    positions = target_config.get_text_config(decoder=True).max_position_embeddings
    rendered = render_sets(tokenizer, sets, positions - choice.generate["max_new_tokens"])
    asked = {"template": template_arguments(tokenizer), "sources": {name: each.source for name, each in sets.items()}}
    return rendered, asked, passes, held_out


def read(role: str, loader, name: str, **how):
    """What `loader` makes of a Hub id or folder; a `ValueError` that says whose it is if it cannot."""
    try:
        return loader.from_pretrained(name, **how)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`--{role}` {name} cannot be read, expected a folder of such a model or the id of one on the Hub: {error}"
        ) from error


def check_models(target_config, tokenizer, configs: dict, names: dict[str, str]) -> None:
    """Raises for a model that cannot draft for this target, from shapes alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .generation import XPressDrafterModel
    from .generation.pairing_xpress import check_pair

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config)
        for role, config in configs.items():
            if role in DRAFTERS:
                check_pair(XPressDrafterModel(config), target)
    if "assistant" in names:
        theirs = read("assistant", AutoTokenizer, names["assistant"])
        ours, size = tokenizer.get_vocab(), target_config.get_text_config(decoder=True).vocab_size
        if configs["assistant"].get_text_config().vocab_size == size and theirs.get_vocab() != ours:
            raise ValueError(
                f"`--assistant` {names['assistant']} has {size} tokens like the target, but other ones: Transformers takes them "
                "for the same, expected equal tokens or another number of them. Choose another assistant."
            )


def other_tokenizers(choice: Choice, models: dict[str, nn.Module]) -> dict:
    """What `generate` asks for beside an assistant of another vocabulary."""
    from transformers import AutoTokenizer

    if "assistant" not in models:
        return {}
    sizes = {models[role].config.get_text_config().vocab_size for role in ("target", "assistant")}
    names = {"tokenizer": choice.target, "assistant_tokenizer": choice.models["assistant"]}
    return {key: AutoTokenizer.from_pretrained(name) for key, name in names.items()} if len(sizes) > 1 else {}


def load_models(choice: Choice) -> dict[str, nn.Module]:
    """Target, drafters and assistant by role. The target generates by our settings and by no default of its own."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from .generation import XPressDrafterModel

    models = {}
    for role, name in {"target": choice.target, **choice.models}.items():
        loader = XPressDrafterModel if role in DRAFTERS else AutoModelForCausalLM
        models[role] = read(role, loader, name, dtype=getattr(torch, choice.dtype)).to(choice.device).eval()
    target = models["target"]
    stops = target.generation_config.eos_token_id
    pad = stops[0] if isinstance(stops, list) else stops
    target.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=pad)
    return models


def fingerprints(models: dict[str, nn.Module]) -> dict[str, str]:
    """What tells these weights from others, whatever they are called."""
    from .trainer.row_folder import weights_fingerprint

    return {role: weights_fingerprint(model) for role, model in models.items()}


def settings_of(choice: Choice, rendered: dict[str, list[list[int]]]) -> dict:
    """What the numbers depend on besides the arms and the weights."""
    from . import __version__
    from .generation.arms import LOOKUP_TOKENS
    from .generation.evaluation_runs import environment
    from .generation.prompt_sets import set_hashes

    return {
        "prompts": set_hashes(rendered),
        "generate": choice.generate,
        "seed": choice.seed,
        "dtype": choice.dtype,
        "lookup_tokens": LOOKUP_TOKENS,
        "timing": TIMING,
        "environment": {"xpress_drafter": __version__, **environment(choice.device)},
    }


def run(target: nn.Module, rendered: dict[str, list[list[int]]], arms: list, folder, choice: Choice) -> None:
    """Measures behind a bar with the time left, or with a line a prompt."""
    from .generation.evaluation_runs import evaluate, round_the_sets

    prompts = round_the_sets(rendered)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    with Progress(TextColumn("measuring"), *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(prompts))

        def on_prompt(done: int) -> None:
            bar.update(task, completed=done)
            if not console.is_terminal:  # a log shows no bar
                console.print(f"{done} of {len(prompts)} prompts measured")

        evaluate(target, prompts, arms, folder, choice.seed, on_prompt=on_prompt, **choice.generate)
