"""From prompts to a card, as a user goes: rows, a drafter, its evaluation, and what the card says of all that."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from published import check_published
from typer.testing import CliRunner
from xpress_drafter import XPressDrafterConfig, XPressDrafterModel
from xpress_drafter.cli import PROBLEMS, TINY, app
from xpress_drafter.cli_card import describe_rows
from xpress_drafter.hub_cards.cards import FACTS, read_facts
from xpress_drafter.hub_cards.results import evaluated, learning_curve, metrics


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


def write(made: Path, *results: str, drafter: str = "run/drafter", code: int = 0) -> str:
    chosen = [word for name in results for word in ("--results", made / name)]
    return invoke("card", made / drafter, made / "facts.yaml", *chosen, "--training", made / "run", code=code)


def test_the_card_says_what_was_measured_and_how_it_was_made(made):
    write(made, "greedy", "sampled")
    card = ModelCard.load(made / "run" / "drafter" / "README.md")
    text, reports = str(card), json.loads((made / "run" / "drafter" / "results.json").read_text())
    assert "### Greedy, float32" in text and "### Temperature 1, float32" in text
    assert text.count("None of the 2 prompts was trained on: checked by hash") == 2
    assert text.count("Prompts: asked from `asked.jsonl`.") == 2
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
    assert {result.dataset_type for result in card.data.eval_results} == {"asked.jsonl"}
    assert all("; 2 prompts, at most 8 tokens each)" in result.metric_name for result in card.data.eval_results)
    refined = [arm for arm in reports[0]["arms"] if reports[0]["settings"]["arms"][arm["arm"]]]
    fastest = max(refined, key=lambda arm: arm["speed_up"][1])
    assert told == {
        ("asked", "tau"): round(fastest["tau"], 3),
        ("asked", "speed-up"): round(fastest["speed_up"][1], 3),
    }
    assert re.search(r"^- Trained on rows of at most \d+ tokens", text, flags=re.MULTILINE) and text.endswith(
        "warns.\n"
    )
    check_published(made / "run" / "drafter")


def test_walked_tau_is_on_the_card(made, tmp_path):
    """Of this drafter and of another one, on the target's own answers to the prompts that were measured."""
    rows, other = tmp_path / "asked", tmp_path / "other"
    invoke("data", made / "asked.jsonl", rows, "--target", TARGET, "--dtype", "float32", "--max-new-tokens", "8")
    shutil.copytree(TINY / "drafter", other)
    files = []
    for drafter in (made / "run" / "drafter", other):
        files.append(tmp_path / f"{len(files)}.json")
        walk = ["walk", rows, "--target", TARGET, "--drafter", drafter, "--passes", "0", "--passes", "7"]
        printed = invoke(*walk, "--out", files[-1])
        (found,) = json.loads(files[-1].read_text())["walks"]
        assert found["count"] == 2 and found["tau"].keys() == {"0", "7"} and min(found["tau"].values()) >= 1
        assert f"K = 7 | {found['tau']['7']:.2f} |" in printed
    assert found["tau"]["7"] > 1.5  # the shipped drafter
    card = [
        "card",
        made / "run" / "drafter",
        made / "facts.yaml",
        "--results",
        made / "greedy",
        "--training",
        made / "run",
    ]
    invoke(*card, "--walked", files[0], "--walked", files[1])
    text = (made / "run" / "drafter" / "README.md").read_text()
    assert "tau on more prompts, float32" in text and f"| {other}, K = 7 | {found['tau']['7']:.2f} |" in text
    walks = json.loads((made / "run" / "drafter" / "walked.json").read_text())
    assert [walk["drafter"] for walk in walks] == [str(made / "run" / "drafter"), str(other)]
    assert "expected the weights of" in invoke(*card, "--walked", files[1], code=2)
    for key, value, expected in (
        ("dtype", "bfloat16", "the walks differ in their dtype"),
        ("complete", False, "is not of an `xpress walk --out` that came to its end"),
    ):
        (tmp_path / "changed.json").write_text(json.dumps(walks[1] | {key: value}))
        assert expected in invoke(*card, "--walked", files[0], "--walked", tmp_path / "changed.json", code=2)
    invoke("walk", made / "rows", *walk[2:], "--drafter", made / "run" / "drafter", "--out", files[0])
    assert "2 questions of" in invoke(*card, "--walked", files[0], code=2)
    invoke(*card)
    assert not (made / "run" / "drafter" / "walked.json").exists()


def test_rows_that_cannot_be_walked(made, tmp_path):
    """Sampled ones, ones of another tokenizer; passes of a drafter without any; a file where there is no folder."""
    options = ["--target", TARGET, "--drafter", TINY / "drafter"]
    shutil.copytree(made / "rows", tmp_path / "rows")
    manifest = tmp_path / "rows" / "manifest.json"
    written = json.loads(manifest.read_text())
    for change, expected in (
        ({"temperature": 0.7}, "are not the target's greedy answers"),
        ({"answers": "given"}, "are not the target's greedy answers"),
        ({"tokenizer": "0"}, "were made with the tokenizer"),
    ):
        manifest.write_text(json.dumps({**written, "settings": {**written["settings"], **change}}))
        assert expected in invoke("walk", tmp_path / "rows", *options, code=2)
    assert "whose folder is not there" in invoke(
        "walk", made / "rows", *options, "--out", tmp_path / "no" / "f.json", code=2
    )
    plain = XPressDrafterModel.from_pretrained(TINY / "drafter").config.to_dict() | {
        "xpress_rank": None,
        "xpress_mlp_hidden": None,
    }
    XPressDrafterModel(XPressDrafterConfig.from_dict(plain)).save_pretrained(tmp_path / "plain")
    options[-1] = tmp_path / "plain"
    assert "makes no Jacobi passes" in invoke("walk", made / "rows", *options, "--limit", "1", "--passes", "1", code=2)
    assert "own passes | 1.0" in invoke("walk", made / "rows", *options, "--limit", "1")


def test_numbers_of_other_weights_or_rows_are_refused(made, tmp_path):
    summary = made / "greedy" / "summary.json"
    before = summary.read_text()
    for change, expected in (
        (lambda report: report["settings"]["weights"].update(drafter="0"), "did not measure the weights of"),
        (lambda report: report["held_out"].clear(), "were not held against 1 of the 1 folders of rows"),
        (lambda report: report.update(held_out=None), "were held against no rows, expected those that"),
        (lambda report: report.pop("held_out"), "is of another version of `xpress eval`, or lacks a part (held_out)"),
        (lambda report: report["means"][0].pop("prompts"), "is of another version of `xpress eval`"),
        (lambda report: report["settings"].pop("timing"), "is of another version of `xpress eval`"),
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


def test_a_training_of_another_drafter_is_refused(made, tmp_path):
    """Its rows are the same, so that only the weights tell."""
    other = XPressDrafterModel.from_pretrained(made / "run" / "drafter")
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.save_pretrained(tmp_path / "other")
    said = write(made, "greedy", drafter=tmp_path / "other", code=2)
    assert "holds other weights than" in said and "name the training that made it" in said
    shutil.copytree(made / "run", tmp_path / "run", ignore=shutil.ignore_patterns("drafter"))
    command = ["card", made / "run" / "drafter", made / "facts.yaml", "--results", made / "greedy"]
    manifest = made / "rows" / "manifest.json"
    before = manifest.read_text()
    manifest.write_text(before.replace('"complete": true', '"complete": false'))  # as while its command runs again
    assert "rows: not complete, expected rows that are" in invoke(*command, "--training", made / "run", code=2)
    manifest.write_text(before)
    assert "holds no drafter, expected the `output_dir`" in invoke(*command, "--training", tmp_path / "run", code=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\ncolour: red\n", "unexpected keyword argument 'colour'. Expected keys of commands, data"),
        ("name: x\n", "missing 5 required positional arguments"),
        ("name: [x\n", "facts.yaml is no YAML, expected `key: value` lines of commands, data"),
        ("- name\n", r"holds \"\['name'\]\" and no `key: value` lines. Expected keys"),
        ("", "holds 'None' and no `key: value` lines"),
        ("limits: All are known.\n", "`limits` is 'All are known.', expected a list of texts, each behind a dash"),
        ("limits: [1]\n", r"`limits` is \[1\], expected a list of texts"),
        ("name: 7\n", "`name` is 7, expected a text. Expected keys of"),
        ("licence: [mit]\n", r"`licence` is \['mit'\], expected a text"),
        ("weights: 1.5\n", "`weights` is 1.5, expected a text"),
    ],
)
def test_facts_that_are_none_are_named(text, expected, tmp_path):
    kind = text.partition(":")[0]
    whole = (FACTS / "tiny.yaml").read_text()
    if kind in ("limits", "licence", "weights") or text == "name: 7\n":  # in the place of its own, or besides
        whole = re.sub(rf"^{kind}:.*\n(  - .*\n)*", "", whole, flags=re.MULTILINE) + text
    else:
        whole = text
    (tmp_path / "facts.yaml").write_text(whole)
    with pytest.raises(ValueError, match=expected):
        read_facts(tmp_path / "facts.yaml")


def test_rows_are_described_by_setting():
    """Of three folders, two were answered alike."""
    settings = {"answers": "regenerated", "temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 160}
    settings["dtype"] = "float32"
    sampled = settings | {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    manifests = [
        {"settings": each, "counts": {"rows": rows, "supervised_tokens": 1000, "dropped": {}}}
        for each, rows in ((settings, 2), (sampled, 5), (settings, 3), ({"answers": "given"}, 7))
    ]
    assert describe_rows(manifests) == (
        "5 rows with 2,000 supervised tokens, answered by the target itself, greedily, in at most 160 tokens (float32); 5 "
        "rows with 1,000 supervised tokens, answered by the target itself, at temperature 0.7 (top-p 0.8, top-k 20), in at "
        "most 160 tokens (float32); 7 rows with 1,000 supervised tokens, the data set's own answers."
    )


def test_the_card_takes_the_means_that_the_report_holds(made):
    report = json.loads((made / "greedy" / "summary.json").read_text())
    *_, first, last = report["means"]
    for mean, speed in ((first, 77.0), (last, 66.0)):  # both refine; the arms say otherwise, or not
        mean["speed_up"] = speed
    assert "77.00 |" in evaluated(report) and {first["arm"]} == {
        result.metric_name.split("(")[1].split(";")[0] for result in metrics(report)
    }


@pytest.mark.parametrize("path", sorted(FACTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_facts_are_read(path):
    assert read_facts(path).limits


def test_a_learning_curve_has_first_and_last_and_what_was_held_out():
    history = [{"step": step, "loss": 3.0, "tau_pass_0": 1.5, "tau_pass_1": step / 10} for step in range(1, 101)]
    history[50:50] = [{"step": 100, "eval_tau": 2.25}]
    lines = learning_curve(history).splitlines()
    assert lines[0] == "| step | loss | tau, K = 0 | tau, K = 1 | tau on held-out answers |" and len(lines) == 12
    assert lines[2] == "| 1 | 3.000 | 1.50 | 0.10 | - |" and lines[-1] == "| 100 | 3.000 | 1.50 | 10.00 | 2.25 |"


def test_a_learning_curve_goes_by_what_was_held_out():
    """Evaluated at every tenth logged step, all but the first row have it; without an evaluation there is no column."""
    history = [{"step": step, "loss": 3.0, "tau_pass_0": 1.5} for step in range(50, 6001, 50)]
    tested = [{"step": step, "eval_tau": 2.0} for step in range(500, 6001, 500)]
    rows = [line.split(" | ") for line in learning_curve(history + tested).splitlines()[2:]]
    assert [row[-1] for row in rows] == ["- |"] + ["2.00 |"] * 9 and rows[-1][0] == "| 6000"
    assert learning_curve(history).splitlines()[0] == "| step | loss | tau, K = 0 |"
    assert len(learning_curve(history[:1]).splitlines()) == 3
    with pytest.raises(ValueError, match="holds no `tau_pass_0`, expected some points"):
        learning_curve(tested)
