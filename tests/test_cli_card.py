"""From prompts to a card, as a user goes: rows, a drafter, its evaluation, and what the card says of all that."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner
from xpress_drafter.cli import PROBLEMS, TINY, app
from xpress_drafter.hub_cards.cards import FACTS, read_facts
from xpress_drafter.hub_cards.results import learning_curve


TARGET = str(TINY / "target")


def invoke(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Rows, a drafter of two steps, and two evaluations of it on prompts that it was not trained on."""
    out = tmp_path_factory.mktemp("card")
    lines = PROBLEMS.read_text().splitlines()
    (out / "asked.jsonl").write_text("\n".join(lines[:2]))
    options = ["--target", TARGET, "--dtype", "float32", "--max-new-tokens", "8"]
    invoke("data", PROBLEMS, out / "rows", *options, "--limit", "4", "--exclude", out / "asked.jsonl")
    small = [
        "max_steps=2",
        "logging_steps=1",
        "num_hidden_layers=1",
        "xpress_rank=8",
        "xpress_mlp_hidden=8",
        "bf16=false",
    ]
    folders = [f"target={TARGET}", f"data={out / 'rows'}", f"output_dir={out / 'run'}", "target_dtype=float32"]
    invoke("train", "tiny", *small, *folders)
    measured = ["eval", out / "asked.jsonl", *options, "--drafter", out / "run" / "drafter", "--passes", "2"]
    for name, more in (("greedy", []), ("sampled", ["--temperature", "1", "--arms", "k0 xpress"])):
        invoke(*measured, *more, "--trained-on", out / "rows", "--out", out / name)
    (out / "facts.yaml").write_text((FACTS / "tiny.yaml").read_text() + "weights: They are the shipped ones.\n")
    return out


def write(made: Path, *results: str, code: int = 0) -> str:
    chosen = [word for name in results for word in ("--results", made / name)]
    return invoke(
        "card", made / "run" / "drafter", made / "facts.yaml", *chosen, "--training", made / "run", code=code
    )


def test_the_card_says_what_was_measured_and_how_it_was_made(made):
    write(made, "greedy", "sampled")
    card = ModelCard.load(made / "run" / "drafter" / "README.md")
    text, reports = str(card), json.loads((made / "run" / "drafter" / "results.json").read_text())
    assert "### Greedy, float32" in text and "### Temperature 1, float32" in text
    assert text.count("None of the 2 prompts was trained on: checked by hash") == 2
    assert (
        "They are the shipped ones." in text
        and "2 rows with" in text
        and "answered by the target itself, greedily" in text
    )
    for report in reports:
        for arm in report["arms"]:
            assert f"| {arm['arm']} | {arm['tau']:.2f} |" in text
            assert f"| {arm['arm']} | {arm['tokens_per_second'][1]:.1f} |" in text
            assert (
                f"| {arm['arm']} | {arm['speed_up'][1]:.2f}{' (slower)' if arm['speed_up'][1] < 1 else ''} |" in text
            )
        assert report["command"] in text
    assert (
        text.count("2 of 2") == len(reports[0]["arms"])
        and "max_steps: 2" in text
        and str(made) + "/rows" not in card.content.split("## Training")[1]
    )
    told = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    refined = [arm for arm in reports[0]["arms"] if reports[0]["settings"]["arms"][arm["arm"]]]
    fastest = max(refined, key=lambda arm: arm["speed_up"][1])
    assert told == {
        ("asked", "tau"): round(fastest["tau"], 3),
        ("asked", "speed-up"): round(fastest["speed_up"][1], 3),
    }
    assert re.search(r"^- Trained on rows of at most \d+ tokens", text, flags=re.MULTILINE) and text.endswith(
        "warns.\n"
    )


def test_numbers_of_other_weights_or_rows_are_refused(made, tmp_path):
    summary = made / "greedy" / "summary.json"
    before = summary.read_text()
    for change, expected in (
        (lambda report: report["settings"]["weights"].update(drafter="0"), "did not measure the weights of"),
        (lambda report: report["held_out"].clear(), "were not held against 1 of the 1 folders of rows"),
        (lambda report: report["arms"][-1].update(accepted=99), "tokens and tau"),
    ):
        report = json.loads(before)
        change(report)
        summary.write_text(json.dumps(report))
        assert expected in write(made, "greedy", code=2)
    summary.unlink()
    assert "holds no summary.json" in write(made, "greedy", code=2)
    summary.write_text(before)
    assert "holds no recipe.yaml" in invoke(
        *("card", made / "run" / "drafter", made / "facts.yaml", "--results", made / "greedy", "--training", tmp_path),
        code=2,
    )
    (tmp_path / "facts.yaml").write_text("name: x\ncolour: red\n")
    with pytest.raises(ValueError, match="unexpected keyword argument 'colour'. Expected keys of commands, data"):
        read_facts(tmp_path / "facts.yaml")


@pytest.mark.parametrize("path", sorted(FACTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_facts_are_read(path):
    assert read_facts(path).limits


def test_a_learning_curve_has_first_and_last_and_what_was_held_out():
    history = [{"step": step, "loss": 3.0, "tau_pass_0": 1.5, "tau_pass_1": step / 10} for step in range(1, 101)]
    history[50:50] = [{"step": 100, "eval_tau": 2.25}]
    lines = learning_curve(history).splitlines()
    assert lines[0] == "| step | loss | tau, K = 0 | tau, K = 1 | tau on held-out answers |" and len(lines) == 12
    assert lines[2] == "| 1 | 3.000 | 1.50 | 0.10 | - |" and lines[-1] == "| 100 | 3.000 | 1.50 | 10.00 | 2.25 |"
