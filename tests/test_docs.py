"""Every code block of the training page runs, in order, as a reader would run it; what needs the Hub is planned or parsed."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner
from xpress_drafter.cli import app


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "train-a-drafter.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)


def commands(*languages: str) -> list[list[str]]:
    """The arguments of every `xpress` line in blocks of these languages."""
    blocks = (block.replace("\\\n", " ") for language, block in BLOCKS if language in languages)
    lines = (shlex.split(line) for block in blocks for line in block.splitlines())
    return [line[1:] for line in lines if line[:1] == ["xpress"]]


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
    rows, plan, trained, own, compared = outputs
    assert (
        "are supervised" in rows and "memory a device, in all" in plan and "10 steps; the drafter lies in" in trained
    )
    assert "4 steps; the drafter lies in my-drafter/drafter" in own and "xPress fixed point" in compared
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


def test_every_shipped_recipe_is_on_the_page():
    shipped = {path.stem for path in (ROOT / "trainer" / "recipes").glob("*.yaml")}
    assert set(re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.MULTILINE)) == shipped
    assert {line[1] for line in commands("bash", "sh") if line[0] == "train"} <= shipped | {"mine.yaml"}
