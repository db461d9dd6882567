"""
Every code block of the training page runs, in order, as a reader would run it; what needs the Hub is planned or parsed, and so
are the commands of the page on SmolLM2, which the facts of its card repeat.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner
from xpress_drafter.cli import app
from xpress_drafter.generation.prompt_sets import HUB_SETS
from xpress_drafter.hub_cards.cards import FACTS, read_facts
from xpress_drafter.trainer.plan import make_plan
from xpress_drafter.trainer.recipes import parse_overrides, read_recipe


ROOT = Path(__file__).parents[1]
PAGE, SMOLLM2 = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("train-a-drafter", "smollm2"))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
SMOLLM2_BLOCKS = re.findall(r"```(\w+)\n(.*?)```", SMOLLM2, flags=re.DOTALL)


def commands(*languages: str, of: list[tuple[str, str]] = BLOCKS) -> list[list[str]]:
    """The arguments of every `xpress` line in blocks of these languages."""
    blocks = (block.replace("\\\n", " ") for language, block in of if language in languages)
    lines = (line for block in blocks for line in block.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("xpress ")]


def invoke(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_page_runs_from_prompts_to_a_drafter(tmp_path, monkeypatch, capsys):
    (tmp_path / "hub_cards").symlink_to(ROOT / "hub_cards")
    monkeypatch.chdir(tmp_path)
    names, outputs = {}, []
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "train-a-drafter.md", "exec"), names)
        elif language == "bash":
            outputs += [invoke(shlex.split(line)[1:]) for line in block.splitlines()]
    rows, plan, trained, own, walked, compared = outputs
    assert (
        "are supervised" in rows and "memory a device, in all" in plan and "10 steps; the drafter lies in" in trained
    )
    assert "4 steps; the drafter lies in my-drafter/drafter" in own and "xPress fixed point" in compared
    assert "| tiny-drafter/drafter, K = 7 | 1." in walked
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert names["trainer"].state.global_step == 2
    printed = capsys.readouterr().out
    assert "supervised tokens" in printed and re.search(r"^1\.\d+$", printed, flags=re.MULTILINE)


@pytest.mark.parametrize("arguments", commands("sh"), ids=" ".join)
def test_commands_that_need_the_hub(arguments):
    """A plan of each training; of `data`, that every option is there."""
    if arguments[0] == "train":
        assert "memory a device, in all" in invoke([*arguments, "--dry-run"])
        return
    assert arguments[0] == "data"
    known = invoke(["data", "--help"])
    assert [option for option in arguments if option.startswith("--") and option not in known] == []


def test_smollm2_s_commands_are_planned_and_those_of_its_card():
    """Every training of the page, of its three drafters and no others; every word of its script but its downloads."""
    planned = [line for line in commands("sh", of=SMOLLM2_BLOCKS) if line[0] == "train"]
    refiners = []
    for line in planned:
        own = parse_overrides([word for word in line[2:] if not word.startswith("--")])
        plan = make_plan(read_recipe(line[1], own))
        refiners.append(plan.parameters["refiner"])
        assert plan.parameters["backbone"] == make_plan(read_recipe("smollm2-135m")).parameters["backbone"]
    dry_run, *runs = refiners
    assert dry_run == 8_167_424 and runs == 2 * [8_167_424, 128 * (49152 + 12288), 0]
    facts = read_facts(FACTS / "xpress-smollm2-135m-b8.yaml")
    stated = [shlex.split(line)[1:] for line in facts.commands.splitlines() if line.startswith("xpress")]
    data, *trained = stated
    assert [line for line in planned if "--dry-run" not in line] == trained
    recipe = (ROOT / "trainer" / "recipes" / "smollm2-135m.yaml").read_text(encoding="utf-8")
    header = [("sh", re.sub(r"^# *", "", recipe, flags=re.MULTILINE))]
    of_page, of_recipe = (
        [line for line in commands("sh", of=of) if line[0] == "data"] for of in (SMOLLM2_BLOCKS, header)
    )
    assert of_page[:1] == of_recipe == [data]  # the others answer what is walked
    assert [word for word, option in zip(data[1:], data) if option == "--exclude"] == list(HUB_SETS)
    for language, block in SMOLLM2_BLOCKS:
        if language == "python":
            compile(block, "smollm2.md", "exec")


def test_every_shipped_recipe_is_on_the_page():
    shipped = {path.stem for path in (ROOT / "trainer" / "recipes").glob("*.yaml")}
    assert set(re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.MULTILINE)) == shipped
    assert {line[1] for line in commands("bash", "sh") if line[0] == "train"} <= shipped | {"mine.yaml"}
