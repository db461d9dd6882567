"""`xpress eval` on the shipped pair: stopped, gone on with, its table read back and checked (CASES J1-J4); bad input."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner
from xpress_drafter import XPressDrafterModel
from xpress_drafter.cli import app
from xpress_drafter.generation import evaluation_runs
from xpress_drafter.generation.evaluation_numbers import quartiles
from xpress_drafter.generation.prompt_sets import HUB_SETS
from xpress_drafter.hub_cards.reports import markdown, write_plots
from xpress_drafter.trainer.row_folder import RowFolder


TINY = Path(__file__).parents[1] / "hub_cards" / "tiny"
PROBLEMS = TINY.parent / "prompts" / "word_problems.jsonl"
PAIR = ["--target", str(TINY / "target"), "--drafter", str(TINY / "drafter")]
SMALL = [str(PROBLEMS), *PAIR, "--limit", "2", "--max-new-tokens", "10", "--dtype", "float32", "--passes", "2"]
ARMS = ["plain", "prompt lookup", "DFlash in Transformers", "DFlash (K = 0)", "xPress K = 2", "xPress fixed point"]
ARMS += ["xPress and prompt lookup"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def message(result) -> str:
    """What an error box says, without its frame and line ends."""
    assert result.exit_code == 2, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory):
    """A run that is stopped in its second prompt and started again: its folder, what it printed, and its first row."""
    folder, measure, seen = tmp_path_factory.mktemp("eval") / "run", evaluation_runs.measure, []

    def stops(target, prompt, *rest):
        seen.append(prompt.index)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return measure(target, prompt, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation_runs, "measure", stops)
        stopped = invoke(*SMALL, "--out", folder)
        assert stopped.exit_code != 0 and not (folder / "summary.json").exists()
        first = (folder / "rows.jsonl").read_text()
        result = invoke(*SMALL, "--out", folder)
    assert result.exit_code == 0, result.output
    assert seen == [0, 1, 1] and first.count("\n") == 1
    return folder, result.output, first


def report_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def tables(text: str) -> list[list[dict]]:
    """The Markdown tables, each row by its header."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def test_a_stopped_run_goes_on(stopped_and_resumed):
    folder, output, first = stopped_and_resumed
    rows = (folder / "rows.jsonl").read_text()
    assert rows.startswith(first) and rows.count("\n") == 2
    assert (folder / "report.md").read_text() in output.replace("In " + str(folder), "")
    assert "1 of 2 prompts measured\n2 of 2 prompts measured\n" in output  # of a log, which has no bar


def test_the_table_says_what_the_rows_hold(stopped_and_resumed):
    """tokens = prompts + accepted + rounds, tau, speed-ups and identity, from the raw rows by hand to the Markdown."""
    folder, _, _ = stopped_and_resumed
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    passes, speeds, slots, times = tables((folder / "report.md").read_text())
    assert [row["arm"] for row in speeds] == ARMS == [row["arm"] for row in times]
    assert [row["arm"] for row in slots] == ARMS[1:]
    for shown, share in zip(speeds, times):
        runs, plain = ([row["arms"][name] for row in rows] for name in (shown["arm"], "plain"))
        accepted, rounds = sum(r[1] for run in runs for r in run["rounds"]), sum(len(run["rounds"]) for run in runs)
        assert sum(run["tokens"] for run in runs) == sum(run["first_tokens"] for run in runs) + accepted + rounds == 20
        assert shown["tau (95 %)"].startswith(f"{accepted / rounds + 1:.2f} (")
        ratios = quartiles([p["seconds"] / run["seconds"] for run, p in zip(runs, plain)])  # ten tokens each
        assert shown["speed-up"].startswith("{1:.2f} ({0:.2f} to {2:.2f})".format(*ratios))
        assert ("slower" in shown["speed-up"]) == (ratios[1] < 1)
        assert (shown["identical"], shown["rounding"], shown["different"]) == ("2 of 2", "0", "0")
        assert sum(float(share[step].rstrip("%")) for step in ("draft", "refine", "verify", "rest")) == pytest.approx(
            100, abs=0.3
        )
    taus = {arm["arm"]: arm["tau"] for arm in report_of(folder)["arms"]}
    end = taus["xPress fixed point"]
    shown = {f"K = {k}": f"{taus[name]:.2f} ({taus[name] / end - 1:+.1%})" for k, name in ((0, ARMS[3]), (2, ARMS[4]))}
    assert passes == [
        {"set": name, **shown, "fixed point (K = 7)": f"{end:.2f}"} for name in ("word_problems", "mean")
    ]


def test_native_dflash_and_ours_without_passes_agree_in_tau(stopped_and_resumed):
    taus = {arm["arm"]: arm["tau"] for arm in report_of(stopped_and_resumed[0])["arms"]}
    assert taus["DFlash in Transformers"] == pytest.approx(taus["DFlash (K = 0)"], abs=0.2)  # the last round's cut


def test_what_was_run_and_where_is_stated_without_a_host(stopped_and_resumed):
    report = report_of(stopped_and_resumed[0])
    settings = report["settings"]
    assert settings["arms"] == dict(zip(ARMS, [None, None, None, 0, 2, 7, None])) and list(settings["arms"]) == ARMS
    assert settings["environment"]["threads"] == torch.get_num_threads()
    assert {"device", "cpu_capability", "python", "torch", "transformers", "xpress_drafter"} < set(
        settings["environment"]
    )
    text = (stopped_and_resumed[0] / "report.md").read_text()
    assert f"rendered-prompt hash `{settings['prompts']['word_problems']}`" in text and "greedy" in text
    assert set(settings["weights"]) == {"target", "drafter"}


def save_rows(folder: Path, turns: list[str]) -> Path:
    """As much of a folder of `xpress data` as tells what was trained on."""
    rows = RowFolder(folder, {"prompts_sha256": "p"}, {})
    rows.note_turns([[{"role": "user", "content": turn}] for turn in turns])
    return folder


def test_prompts_that_were_trained_on_are_refused_and_others_said_to_be_new(stopped_and_resumed, tmp_path):
    """Asked afterwards, it measures nothing again."""
    folder = shutil.copytree(stopped_and_resumed[0], tmp_path / "run")
    before = (folder / "rows.jsonl").read_text()
    asked = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()]
    trained = save_rows(tmp_path / "trained", ["Other?", "  ".join(asked[1].upper().split())])
    said = message(invoke(*SMALL, "--out", folder, "--trained-on", trained))
    assert "1 of the 2 prompts of word_problems are asked in the rows of" in said and "prompts [2]" in said
    result = invoke(*SMALL, "--out", folder, "--trained-on", save_rows(tmp_path / "rows", ["Other?", asked[2]]))
    assert result.exit_code == 0, result.output
    assert "None of the 2 prompts was trained on: checked by hash" in result.output
    grams = len(asked[2].split()) - 12
    assert report_of(folder)["held_out"] == [{"rows": "rows", "turns": 2, "grams": grams, "prompts_sha256": "p"}]
    assert (folder / "rows.jsonl").read_text() == before
    (tmp_path / "rows" / "turns.npz").unlink()
    said = message(invoke(*SMALL, "--out", folder, "--trained-on", tmp_path / "rows"))
    assert "holds no turns.npz, expected" in said and "run the same `xpress data` again" in said


def test_the_hub_s_prompts_are_refused_where_their_bare_questions_were_trained_on(tmp_path, monkeypatch):
    """Also in an instruction of the rows' own, where a question is long enough for 13-grams."""
    questions = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()]
    questions = [*questions[:3], "How many pens has Lia?"]
    held = tmp_path / "gsm" / "test.jsonl"
    held.parent.mkdir()
    held.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(HUB_SETS, "gsm8k", replace(HUB_SETS["gsm8k"], source=str(held.parent), subset=None))
    monkeypatch.setattr("xpress_drafter.cli_eval.load_models", lambda choice: pytest.fail("a model was loaded"))
    for name, turns in (
        ("bare", [questions[0], questions[3]]),
        ("other", [f"Solve: {questions[1]} Be brief.", f"Be exact. {questions[2]}"]),
    ):
        trained = save_rows(tmp_path / name, turns)
        said = message(invoke("gsm8k", *PAIR, "--out", tmp_path / "run", "--trained-on", trained))
        assert "2 of the 4 prompts of gsm8k are asked in the rows of" in said


def test_a_folder_whose_times_were_split_otherwise_is_refused(stopped_and_resumed, tmp_path):
    folder = shutil.copytree(stopped_and_resumed[0], tmp_path / "run")
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["sources"] == {"word_problems": "word_problems.jsonl"}
    del settings["timing"]  # as before 2026-11-30
    (folder / "settings.json").write_text(json.dumps(settings))
    assert "`timing` is 2, there 'not set'" in message(invoke(*SMALL, "--out", folder))


def test_other_settings_in_its_folder_are_refused(stopped_and_resumed):
    folder, _, _ = stopped_and_resumed
    before = (folder / "rows.jsonl").read_text()
    said = message(invoke(*SMALL, "--out", folder, "--max-new-tokens", "11", "--seed", "3"))
    assert "`generate.max_new_tokens` is 11, there 10; `seed` is 3, there 0" in said
    assert (folder / "rows.jsonl").read_text() == before


def test_a_report_with_a_planted_error_is_not_written(stopped_and_resumed):
    report = report_of(stopped_and_resumed[0])
    report["arms"][-1]["accepted"] += 1
    for write in (markdown, lambda planted: write_plots(planted, stopped_and_resumed[0])):
        with pytest.raises(ValueError, match="word_problems, xPress and prompt lookup: 20 tokens"):
            write(report)


def test_sampling_with_a_backbone_beside(tmp_path):
    """T = 1, two sets, and a drafter without refiner next to the pair's own."""
    drafter = XPressDrafterModel.from_pretrained(TINY / "drafter")
    config = type(drafter.config)(**{**drafter.config.to_dict(), "xpress_rank": None})
    XPressDrafterModel(config).save_pretrained(tmp_path / "backbone")
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": ["How many pens?", "Sure?"]}) + "\n")
    result = invoke(
        tmp_path / "one.jsonl",
        tmp_path / "two.jsonl",
        *PAIR,
        *("--dflash", tmp_path / "backbone", "--arms", "dflash k0", "--temperature", "1", "--max-new-tokens", "6"),
        *("--out", tmp_path / "run"),
    )
    assert result.exit_code == 0, result.output
    means, shares, *by_set = tables((tmp_path / "run" / "report.md").read_text())
    assert [row["arm"] for row in means] == ["plain", "DFlash (K = 0)", "DFlash, trained alone"]
    assert [row["arm"] for row in shares] == [row["arm"] for row in means]
    assert len(by_set) == 6 and "identical" not in by_set[0][0] and "temperature 1, seed 0" in result.output


def test_a_confidence_threshold_ends_the_drafts_of_our_arms(tmp_path):
    how = [PROBLEMS, *PAIR, "--arms", "lookup k0", "--limit", "1", "--max-new-tokens", "12", "--out", tmp_path / "run"]
    how += ["--dtype", "float32"]
    result = invoke(*how, "--confidence-threshold", "0.999")
    assert result.exit_code == 0, result.output
    assert "Confidence threshold of our own arms: drafter 0.999." in result.output
    (row,) = (json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines())
    drafted = {name: [r[0] for r in arm["rounds"]] for name, arm in row["arms"].items()}
    assert max(drafted["DFlash (K = 0)"]) == 1 < max(drafted["prompt lookup"])
    assert "`confidence_threshold.drafter` is 0.0, there 0.999" in message(invoke(*how))


def save_assistant(folder: Path, vocab_size: int) -> Path:
    """A random autoregressive model with tokens of its own."""
    bytes_alone = Tokenizer(models.BPE())
    bytes_alone.pre_tokenizer, bytes_alone.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = {"special_tokens": ["<end>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    bytes_alone.train_from_iterator([], trainers.BpeTrainer(**alphabet))
    PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=vocab_size, num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_an_assistant_of_another_vocabulary(tmp_path):
    assistant = save_assistant(tmp_path / "assistant", vocab_size=257)
    choice = [
        "--assistant",
        assistant,
        "--dtype",
        "float32",
        "--limit",
        "1",
        "--max-new-tokens",
        "6",
        "--arms",
        "assistant",
    ]
    result = invoke(PROBLEMS, *PAIR[:2], *choice, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    _, shown = tables((tmp_path / "run" / "report.md").read_text())[0]
    assert (shown["arm"], shown["identical"]) == ("AR assistant", "1 of 1")
    said = message(
        invoke(PROBLEMS, *PAIR[:2], "--assistant", save_assistant(tmp_path / "same", 2048), "--out", tmp_path / "no")
    )
    assert "has 2048 tokens like the target, but other ones" in said and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-such-set"], "'no-such-set' is neither a file nor a known set, expected a JSONL file or one of gsm8k"),
        ([PROBLEMS, PROBLEMS], "two prompt sets are named 'word_problems'"),
        (
            [PROBLEMS, "--arms", "native-dflash", "--confidence-threshold", "0.2"],
            "no arm of ['native-dflash'] reads it, expected one of k0",
        ),
        ([PROBLEMS, "--arms", "eagle"], "names ['eagle'], expected some of lookup"),
        ([PROBLEMS, "--arms", "markov"], "names 'markov' without `--markov`"),
        ([PROBLEMS, "--markov", TINY / "drafter"], "refiner is 'markov', but that of `--markov` is 'xpress'"),
        ([PROBLEMS, "--passes", "1 7"], "`--passes` has [7], expected 1 to 6 with this drafter"),
        ([PROBLEMS, "--passes", "two"], "`--passes` is 'two', expected whole numbers"),
        ([PROBLEMS, "--arms", "k0", "--passes", "2"], "without the arm xpress"),
        ([PROBLEMS, "--max-new-tokens", "1000"], "expected at most 24: what the target's positions leave"),
        ([PROBLEMS, "--device", "tpu"], "`--device` is 'tpu', expected cpu, or cuda"),
        ([PROBLEMS, "--drafter", "no/such/folder"], "`--drafter` no/such/folder cannot be read, expected a folder"),
        ([PROBLEMS, "--markov", TINY / "target"], "`mask_token_id`"),
        ([PROBLEMS, "--plots"], "plots need matplotlib, which is not installed"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)
def test_bad_input_is_refused_before_a_model_is_loaded(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("xpress_drafter.cli_eval.load_models", lambda choice: pytest.fail("a model was loaded"))
    assert expected in message(invoke(*PAIR, *arguments, "--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_drafter_of_another_target_is_refused_by_its_shapes(tmp_path):
    drafter = XPressDrafterModel.from_pretrained(TINY / "drafter")
    drafter.config.num_target_layers = 20
    drafter.save_pretrained(tmp_path / "other")
    said = message(invoke(PROBLEMS, *PAIR[:2], "--drafter", tmp_path / "other", "--out", tmp_path / "run"))
    assert "the drafter was made for a target with num_target_layers=20" in said and "has 10" in said


def test_plots(stopped_and_resumed, tmp_path):
    pytest.importorskip("matplotlib")
    files = write_plots(report_of(stopped_and_resumed[0]), tmp_path)
    assert [file.name for file in files] == ["tau.png", "speed-up.png", "acceptance.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
