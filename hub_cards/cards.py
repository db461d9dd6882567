"""Model cards that tell the truth: typed data, a template, every number from a file that a command wrote."""

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData


TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class DrafterFacts:
    """What a drafter's card states. Numbers come from `xpress compare --json`; unknowns stay out of the card."""

    repo_id: str
    target_id: str
    target_licence: str
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
        base_model=facts.target_id,
        license=facts.target_licence,
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


def target_card(repo_id: str, log: list[dict], recipe: str, sample: str) -> ModelCard:
    """The card of the tiny target."""
    data = ModelCardData(
        license="apache-2.0", library_name="transformers", pipeline_tag="text-generation", datasets=["openai/gsm8k"]
    )
    return ModelCard.from_template(
        data, template_path=str(TEMPLATES / "tiny_target.md"), repo_id=repo_id, log=log, recipe=recipe, sample=sample
    )
