"""Model cards that tell the truth: typed data, a template, every number from a file that a command wrote."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData


TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class DrafterFacts:
    """What a drafter's card states. Numbers come from `xpress compare --json`; unknowns stay out of the card."""

    name: str  # Hub id or folder
    target: str
    licence: str
    block_size: int
    parameters: int
    recipe: str  # the command that trained it
    data: str  # a sentence on the data, with its licence
    datasets: list[str]
    measured: list[dict]  # rows of `ArmResult.as_row()`
    measured_by: str  # the command that measured it
    measured_on: str  # prompts, precision, machine
    limits: list[str] = field(default_factory=list)


def results_table(rows: list[dict]) -> str:
    """Measured arms as a Markdown table."""
    lines = ["| arm | tau | tokens/s | speed-up | identical to plain |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['arm']} | {row['tau']:.2f} | {row['tokens_per_second']:.0f} | {row['speed_up']:.2f} | "
            f"{row['identical']} of {row['prompts']} |"
        )
    return "\n".join(lines)


def drafter_card(facts: DrafterFacts) -> ModelCard:
    """The card of a drafter, with the metadata by which the Hub finds it."""
    data = ModelCardData(
        base_model=facts.target,
        license=facts.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "block-diffusion", "dflash", "xpress", "drafter"],
        datasets=facts.datasets,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "drafter.md"),
        facts=facts,
        table=results_table(facts.measured),
        millions=f"{facts.parameters / 1e6:.1f}",
    )


def target_card(log: list[dict], recipe: str) -> ModelCard:
    """The card of the tiny target."""
    data = ModelCardData(
        license="apache-2.0", library_name="transformers", pipeline_tag="text-generation", datasets=["openai/gsm8k"]
    )
    return ModelCard.from_template(
        data, template_path=str(TEMPLATES / "tiny_target.md"), log=log, recipe=recipe, seconds=log[-1]["seconds"]
    )


def write_tiny_cards(out: Path, measured: list[dict], parameters: int, measured_on: str) -> None:
    """The cards of a freshly built tiny pair, and the numbers that they state as `measured.json`."""
    recipe = "xpress build-tiny gsm8k-train.jsonl gsm8k-test.jsonl OUT"
    log = json.loads((out / "log.json").read_text())
    steps = [row for row in log["drafter"] if "tau_pass_0" in row]
    end = log["drafter"][-1]
    facts = DrafterFacts(
        name="tiny/drafter",
        target="tiny/target",
        licence="apache-2.0",
        block_size=8,
        parameters=parameters,
        recipe=recipe,
        data=(
            f"{log['answers']['rows']} greedy answers ({log['answers']['tokens']} tokens) of the target itself to "
            "questions of GSM8K's train split with other numbers and names (Cobbe et al. 2021, MIT licence, "
            "`openai/gsm8k`); "
            f"{int(end['step'])} steps. Simulated tau on the training rows at "
            f"the end: {steps[-1]['tau_pass_0']:.2f} base, {steps[-1]['tau_pass_3']:.2f} after three passes."
        ),
        datasets=["openai/gsm8k"],
        measured=measured,
        measured_by="xpress compare gsm8k-test.jsonl --limit 20 --max-new-tokens 128",
        measured_on=measured_on,
        limits=[
            "Made to show and to test the method: its target is no problem solver.",
            "Trained on answers of at most 160 tokens; later positions are drafted less well.",
            "It drafts for its own target alone; on another model of the same sizes it warns.",
        ],
    )
    (out / "measured.json").write_text(json.dumps(measured, indent=1))
    drafter_card(facts).save(out / "drafter" / "README.md")
    target_card(log["target"], recipe).save(out / "target" / "README.md")
