"""Model cards that tell the truth: typed facts, a template, every number from a file that a command wrote."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..modeling_xpress import XPressDrafterConfig
from .results import compared, evaluated, learning_curve, metrics, walked


HERE = Path(__file__).parent
TEMPLATES, FACTS = HERE / "templates", HERE / "facts"
WALKED = (
    "Walked over the target's greedy answers, in which many positions are drafted from at once: the tau that greedy `generate` "
    "reaches on such a text with whole blocks, to the last round. In parentheses: how many rows of each set, the same for all drafters."
)
KINDS = {
    "xpress": "a causal refiner (xPress, arXiv 2608.02438)",
    "markov": "a Markov head (DSpark)",
    None: "no refiner",
}


@dataclass
class Facts:
    """
    What somebody must say, in a YAML, because no command knows it. Numbers come from commands; unknowns stay out of the card.

    Args:
        name (`str`), target (`str`): Hub ids, or folders, of the drafter and of its target.
        dtype (`str`): In which the example loads both.
        data (`str`): A sentence on the prompts, with their licence; `datasets` are those with a Hub id.
        commands (`str`): What made rows and drafter, from the start.
        weights (`str`, *optional*): Which weights of the target the numbers come from.
    """

    name: str
    target: str
    licence: str
    dtype: str
    data: str
    commands: str
    weights: str | None = None
    datasets: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def __post_init__(self):
        for each in fields(self):
            value, many = getattr(self, each.name), each.type == list[str]
            texts = value if many and isinstance(value, list) else [value]
            optional = each.default is None and value is None
            if isinstance(value, list) != many or not (optional or all(isinstance(text, str) for text in texts)):
                expected = "a list of texts, each behind a dash" if many else "a text"
                raise TypeError(f"`{each.name}` is {value!r}, expected {expected}")


@dataclass
class Training:
    """What the training wrote: a sentence on its rows, the trainer's log, and the recipe's values where it had one."""

    rows: str
    history: list[dict]
    recipe: dict = field(default_factory=dict)


def read_facts(path: Path) -> Facts:
    """The facts of a YAML; a `ValueError` names keys that are missing, that nothing reads or that are of another kind."""
    known = ", ".join(sorted(each.name for each in fields(Facts)))
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError(f"it holds {str(values)[:60]!r} and no `key: value` lines")
        return Facts(**values)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML, expected `key: value` lines of {known}: {error}") from error
    except TypeError as error:
        raise ValueError(f"{path}: {error}. Expected keys of {known}.") from error


def drafter_card(
    facts: Facts,
    config: XPressDrafterConfig,
    parameters: int,
    training: Training,
    results: list[str],
    told: list[EvalResult],
) -> ModelCard:
    """The card of a drafter, with the metadata by which the Hub finds it; `told` are the numbers that it is told."""
    data = ModelCardData(
        base_model=facts.target,
        license=facts.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "block-diffusion", "dflash", "xpress", "drafter"],
        datasets=facts.datasets or None,
        **({"model_name": Path(facts.name).name, "eval_results": told} if told else {}),
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "drafter.md"),
        facts=facts,
        config=config,
        refiner=KINDS[config.refiner_type],
        millions=f"{parameters / 1e6:.1f}",
        training=training,
        curve=learning_curve(training.history),
        recipe=yaml.safe_dump(training.recipe, sort_keys=False).strip() if training.recipe else None,
        results="\n\n".join(results),
    )


def evaluated_card(
    facts: Facts,
    config: XPressDrafterConfig,
    parameters: int,
    training: Training,
    reports: list[dict],
    walks: list[dict] | None = None,
) -> ModelCard:
    """The card of a drafter that `xpress eval` measured, and `xpress walk`; the Hub is told the numbers of the first report."""
    results = [evaluated(report) for report in reports]
    if walks:
        results.append(f"### tau on more prompts, {walks[0]['dtype']}\n\n{WALKED}\n\n{walked(walks)}")
    return drafter_card(facts, config, parameters, training, results, metrics(reports[0]))


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
    facts, log = read_facts(FACTS / "tiny.yaml"), json.loads((out / "log.json").read_text())
    rows = f"{log['answers']['rows']} greedy answers ({log['answers']['tokens']} tokens) of the target itself."
    results = compared(measured, "xpress compare gsm8k-test.jsonl --limit 20 --max-new-tokens 128", measured_on)
    config = XPressDrafterConfig.from_pretrained(out / "drafter")
    card = drafter_card(facts, config, parameters, Training(rows, log["drafter"]), [results], told=[])
    (out / "measured.json").write_text(json.dumps(measured, indent=1))
    card.save(out / "drafter" / "README.md")
    target_card(log["target"], facts.commands).save(out / "target" / "README.md")
