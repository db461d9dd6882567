"""What is measured on is kept out of what is trained on, and known again by hash and by 13-grams (CASES J5)."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner
from xpress_drafter.cli import PROBLEMS, TINY, app
from xpress_drafter.generation.prompt_sets import BOXED, Prompts
from xpress_drafter.trainer.asked import Asked, gram_hashes, turn_hash, without_frame
from xpress_drafter.trainer.held_out import asked_turns, asking, read_sets


QUESTIONS = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()]


def asked(*turns: str) -> list[dict]:
    return [{"role": "user", "content": turn} for turn in turns]


def prompts(*texts: str) -> Prompts:
    """A set as a file gives it."""
    return Prompts("file", [asked(text) for text in texts], without_frame(list(texts)))


def known(prompts: Prompts, *turns: str) -> list[bool]:
    """Which prompts are among these turns."""
    return [bool(found) for found in asked_turns(prompts, Asked.of([asked(*turns)]))]


def test_turns_are_the_same_whatever_their_case_and_white_space():
    answered = [{"role": "system", "content": "s"}, *asked("Why  not?\n"), {"role": "assistant", "content": "a"}]
    assert Asked.of([answered]).turns == [turn_hash("why NOT?")] != [turn_hash("why not")]
    assert len(Asked.of([asked("a", "b"), asked("b")]).turns) == 2


def test_13_grams_do_without_case_and_punctuation():
    words = [f"w{i}" for i in range(15)]
    assert len(gram_hashes(" ".join(words))) == 3 and gram_hashes(" ".join(words[:12])) == set()
    assert gram_hashes("; ".join(words).upper()) == gram_hashes("\n".join(words))


@pytest.mark.parametrize("frame", ["?", "?" + BOXED, "Solve what follows, and be brief:\n\n?\n\nYour answer:"])
def test_a_question_is_known_in_every_frame(frame):
    """A set's frame does not hide a prompt, and a frame alone makes no prompt known."""
    framed = prompts(*(frame.replace("?", question) for question in QUESTIONS[:4]))
    for other in ("?", "?" + BOXED, "Think first.\n?"):
        assert known(framed, other.replace("?", QUESTIONS[1]), other) == [False, True, False, False]
    short = prompts(*(frame.replace("?", text) for text in ("How many pens?", "Why not?")))
    assert known(short, "How many pens?", frame.replace("?", "Who?")) == [True, False]


def test_half_of_a_prompt_in_one_turn_is_not_enough_nor_parts_in_several():
    words = [f"w{i}" for i in range(12 + 10)]  # ten 13-grams
    whole = prompts(" ".join(words), "other")
    assert known(whole, " ".join(words[: 12 + 5])) == [False, False]
    assert known(whole, " ".join(words[: 12 + 6])) == [True, False]
    assert known(whole, " ".join(words[: 12 + 5]), " ".join(words[-12 - 5 :])) == [False, False]


def test_prompts_that_differ_in_a_number_do_not_hide_each_other():
    """What two prompts have in common is most of them, and still no frame to forget them by."""
    text = "Lia has {} boxes of 12 pens each and gives 9 of them to her friends; how many are left?"
    assert known(prompts(text.format(3), text.format(4)), text.format(3)) == [True, False]
    assert known(prompts(text.format(3)), text.format(3)) == [True]


def test_a_set_s_frame_is_what_all_its_prompts_begin_and_end_with():
    assert without_frame(["a b c d", "a x  y d", "a d"]) == ["b c", "x y", ""]
    assert without_frame(["a b"]) == ["a b"] and without_frame(["a", "a"]) == ["a", "a"]


def test_conversations_that_ask_a_prompt_are_found():
    conversations = [asked("a", "B "), asked("c"), asked("ab"), asked("Please: " + QUESTIONS[0])]
    sets = {"set": prompts("b"), "other": prompts("d", QUESTIONS[0] + BOXED)}
    assert asking(conversations, sets) == {0, 3} and asking(conversations, {"other": prompts("d")}) == set()


def test_hashes_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    Asked.of([asked(QUESTIONS[0], "b")]).save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    read = Asked.load(tmp_path)
    assert (read.turns, len(read.grams)) == ([turn_hash(QUESTIONS[0]), turn_hash("b")], len(gram_hashes(QUESTIONS[0])))
    assert sorted(before) == ["turns.npz", "turns.txt"] and read.grams.dtype == np.uint64

    def killed(path, *_, **__):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        Asked.of([asked("c")]).save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_data_leaves_prompt_sets_out_and_keeps_the_hashes_of_the_rest(tmp_path):
    """Rows keep the numbers that they have among all prompts, and the manifest says how many were left out."""
    held_out = tmp_path / "held-out.jsonl"
    lines = ({"turns": [question + BOXED, "And then?"]} for question in (QUESTIONS[1].upper(), "Why?"))
    held_out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["data", str(PROBLEMS), str(tmp_path / "rows"), "--target", str(TINY / "target"), "--limit", "3"]
    command += ["--exclude", str(held_out), "--max-new-tokens", "4", "--dtype", "float32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 rows from 2 prompts" in result.output and "Excluded: 1." in " ".join(result.output.split())
    asked_there = Asked.load(tmp_path / "rows")
    assert asked_there.turns == [turn_hash(QUESTIONS[0]), turn_hash(QUESTIONS[2])]
    assert not any(asked_turns(read_sets([str(held_out)])["held-out"], asked_there))
    rows = [json.loads(line) for line in (tmp_path / "rows" / "rows.jsonl").read_text().splitlines()]
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    assert sorted(row["id"] for row in rows) == ["0", "2"]
    assert (manifest["excluded"], manifest["settings"]["prompts"]) == (1, 2)
