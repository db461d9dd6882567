"""Every code block of the README runs, in order, as a reader would run it."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner
from xpress_drafter.cli import app


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def shell_lines() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line]


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    (tmp_path / "hub_cards").symlink_to(ROOT / "hub_cards")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "<|assistant|>" in printed and "tau" in printed
    assert names["drafting"].accepted > 0
    assert (tmp_path / "my-drafter" / "checkpoint-2" / "model.safetensors").exists()


def test_the_example_of_a_real_model_is_the_same_with_other_names():
    """The target is on the Hub, so it is not run; the drafter is here, and everything else is as in the block that runs."""
    (real,), offline = blocks("py"), blocks("python")[0]
    drafter = "hub_cards/xpress-smollm2-135m-b8"
    for theirs, ours in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "hub_cards/tiny/target"),
        (drafter, "hub_cards/tiny/drafter"),
    ):
        assert theirs in real
        real = real.replace(theirs, ours)
    assert real == offline and (ROOT / drafter / "model.safetensors").exists()


@pytest.mark.parametrize("line", [line for line in shell_lines() if line.startswith("xpress ")])
def test_commands_run(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line)[1:]
    if arguments == ["demo"]:  # .ci/run runs it whole
        arguments += ["--max-new-tokens", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "tau" in result.output


def test_other_lines_are_the_ones_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    others = [line for line in shell_lines() if not line.startswith("xpress ")]
    assert "xpress demo" in ci
    assert set(others) == {"pip install -e .", 'pip install -e ".[test]"', "pytest -n 2 -q"}
    assert 'pip install --quiet -e ".[test]"' in ci and "pytest -n 2 -q" in ci


@pytest.mark.parametrize(
    "page", ["README.md", "docs/train-a-drafter.md", "docs/choices.md", "docs/smollm2.md", "NOTES.md"]
)
def test_links_and_commands_of_every_page(page):
    """Every relative link leads somewhere; every `xpress` command and option in a block exists."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), link
    for block in re.findall(r"```(?:ba)?sh\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:1] == ["xpress"]:
                shown = CliRunner().invoke(
                    app, [words[1], "--help"], env={"COLUMNS": "200"}
                )  # else long names are cut
                assert shown.exit_code == 0, line
                assert [w for w in words if w.startswith("--") and w not in shown.output] == [], line


def test_nothing_private_is_committed():
    """No path of one machine in a product file (the pattern is split so that it does not find itself)."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a checkout")
    pattern = re.compile(r"(?<![\w.:/])/(?:home|ro" + "ot|wo" + r"rk)/\w")
    names = [n for n in tracked.stdout.splitlines() if n.endswith((".py", ".md", ".cfg", ".toml", ".json"))]
    assert [n for n in names if pattern.search((ROOT / n).read_text(encoding="utf-8"))] == []
