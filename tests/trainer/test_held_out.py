"""What is measured on is kept out of what is trained on, and known again by hash (CASES J5)."""

import json

from typer.testing import CliRunner
from xpress_drafter.cli import PROBLEMS, TINY, app
from xpress_drafter.trainer.held_out import leave_out, read_sets
from xpress_drafter.trainer.row_folder import turn_hashes


def asked(*turns: str) -> list[dict]:
    return [{"role": "user", "content": turn} for turn in turns]


def test_turns_are_the_same_whatever_their_case_and_white_space():
    answered = [{"role": "system", "content": "s"}, *asked("Why  not?\n"), {"role": "assistant", "content": "a"}]
    assert turn_hashes([answered]) == turn_hashes([asked("why NOT?")]) != turn_hashes([asked("why not")])
    assert len(turn_hashes([asked("a", "b"), asked("b")])) == 2


def test_a_conversation_with_a_held_out_turn_is_left_out():
    one, two, three = asked("a", "B "), asked("c"), asked("ab")
    assert leave_out([one, two, three], {"set": [asked("b")], "other": [asked("d")]}) == [two, three]
    assert leave_out([one, two], {}) == [one, two]


def test_data_leaves_prompt_sets_out_and_keeps_the_hashes_of_the_rest(tmp_path):
    questions = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()[:3]]
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"turns": [questions[1].upper(), "And then?"]}) + "\n")
    command = ["data", str(PROBLEMS), str(tmp_path / "rows"), "--target", str(TINY / "target"), "--limit", "3"]
    command += ["--exclude", str(held_out), "--max-new-tokens", "4", "--dtype", "float32"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 rows from 2 prompts" in result.output and "Excluded: 1." in " ".join(result.output.split())
    turns = (tmp_path / "rows" / "turns.txt").read_text().split()
    assert set(turns) == turn_hashes([asked(questions[0]), asked(questions[2])])
    assert not set(turns) & turn_hashes(read_sets([str(held_out)])["held-out"])
