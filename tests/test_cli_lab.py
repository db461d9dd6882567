"""`xpress bench-objective` and `xpress study`, as typed, on shapes that take no time."""

import shutil

from typer.testing import CliRunner
from xpress_drafter.cli import TINY, app
from xpress_drafter.trainer import study
from xpress_drafter.trainer.tiny_pair import answer


def run(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_bench_objective():
    shown = run("bench-objective", "--vocab-size", 256, "--hidden-size", 32, "--anchors", 8, "--repeats", 1)
    assert shown.count("bounded") == 4 and "times as fast" in shown


def test_study_of_a_built_folder(tmp_path, monkeypatch):
    """Its answers are the target's, its table the runs'; a second call trains nothing."""
    shutil.copytree(TINY / "target", tmp_path / "target")
    questions = ["Ann has 3 pens and buys 4 more. How many pens has she?", "Bo eats 2 of 9 figs. How many are left?"]
    for name in ("answers", "held-out"):
        rows, _ = answer(questions, tmp_path, name)
        assert len(rows) == 2
    monkeypatch.setattr(study, "ABLATION", {"backbone only": study.ABLATION["backbone only"]})
    first = run("study", tmp_path, "ablation", "--steps", 1, "--seeds", 1)
    assert first.count("backbone only") == 2  # the run, and its line of the table
    again = run("study", tmp_path, "ablation", "--steps", 1, "--seeds", 1)
    assert again.count("backbone only") == 1 and again.splitlines()[-1] in first
