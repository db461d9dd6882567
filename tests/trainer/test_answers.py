"""`xpress data`: rows that a target wrote, what is kept out of them, kills, and what is refused."""

import hashlib
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from chatting import END, PLAIN, THINKING, WORDS, chat, spoken, word_tokenizer
from datasets import Dataset
from rig import make_target, plain
from training import make_trainer
from transformers import AutoTokenizer
from typer.testing import CliRunner
from xpress_drafter.cli import PROBLEMS, TINY, app
from xpress_drafter.trainer.answers import AnswerSettings, TargetAnswers, user_turns, write_rows
from xpress_drafter.trainer.chat_rows import prompt_ids
from xpress_drafter.trainer.data import check_rows
from xpress_drafter.trainer.prompts import read_conversations
from xpress_drafter.trainer.row_folder import load_rows, sha256, weights_fingerprint


BAD_WORD = "w90"  # its embedding is NaN
TOKENIZER = word_tokenizer()


def prompts(n: int, turns: int = 1) -> list[list[dict]]:
    """Conversations of 1 to 6 words a turn, without answers."""
    draw = random.Random(0)
    texts = [[" ".join(draw.choices(WORDS[8:89], k=draw.randint(1, 6))) for _ in range(turns)] for _ in range(n)]
    return [[{"role": "user", "content": text} for text in turns] for turns in texts]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    """A target of random weights that ends some of its answers."""
    folder = str(tmp_path_factory.mktemp("target"))
    model = make_target(eos_token_id=END, pad_token_id=0)
    with torch.no_grad():
        model.get_input_embeddings().weight[WORDS.index(BAD_WORD)] = torch.nan
        model.get_output_embeddings().weight[WORDS.index(BAD_WORD)] = 0  # and it is never said
        model.get_output_embeddings().weight[END] *= 1.5  # so that it does end some
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(target_folder):
    model = make_target(eos_token_id=END, pad_token_id=0)
    return model.from_pretrained(target_folder).eval()


def make(target_folder, folder: Path, conversations, **settings) -> tuple[list[dict], dict]:
    """Rows and manifest of a folder, straight from the files."""
    defaults = {"max_new_tokens": 12, "max_length": 64, "batch_size": 4, "dtype": "float32"}
    write_rows(conversations, folder, AnswerSettings(target_folder, **{**defaults, **settings}))
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "manifest.json").read_text())


def test_rows_are_the_target_s_greedy_text(target_folder, model, tmp_path):
    """However they are batched; supervised from the answer's first token to its end; every prompt once."""
    conversations = prompts(11)
    rows, manifest = make(target_folder, tmp_path, conversations)
    assert sorted(int(row["id"]) for row in rows) == list(range(11))
    ended = 0
    for row in rows:
        prompt = prompt_ids(TOKENIZER, conversations[int(row["id"])])
        text = plain(model, torch.tensor([prompt]), 12)[0].tolist()
        assert row["input_ids"] == text
        assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(text) - len(prompt))
        ended += text[-1] == END
    assert 0 < ended < 11, "both kinds of answers are wanted here"
    lengths = [row["loss_mask"].index(1) for row in rows]
    assert lengths == sorted(lengths)
    assert manifest["counts"] == {
        "prompts": 11,
        "rows": 11,
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "supervised_tokens": sum(sum(row["loss_mask"]) for row in rows),
        "unfinished_answers": 11 - ended,
        "dropped": {},
    }


def test_every_turn_is_answered_in_order(target_folder, model, tmp_path):
    """By what the target said before; the system prompt stays, answers of the data set go."""
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"messages": chat("w8", "w9 w10", "w11 w12", system="w13")}) + "\n")
    rows, _ = make(target_folder, tmp_path / "rows", read_conversations(str(source)))
    (row,) = rows
    ids = TOKENIZER("sys: w13 ; user: w8 ; bot:")["input_ids"]
    mask = []
    for question in ("", " user: w11 w12 ; bot:"):
        ids += TOKENIZER(question)["input_ids"]
        mask += [0] * (len(ids) - len(mask))
        ids = plain(model, torch.tensor([ids]), 12)[0].tolist()
        mask += [1] * (len(ids) - len(mask))
        if not question and ids[-1] != END:  # the history ends the turn that the target did not
            ids += [END]
    assert (row["input_ids"], row["loss_mask"]) == (ids, mask)


def test_a_template_that_rewrites_history_gives_a_row_a_turn(target_folder, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    word_tokenizer(THINKING).save_pretrained(folder)
    rows, manifest = make(
        str(folder), tmp_path / "rows", prompts(3, turns=2), template_args={"enable_thinking": False}
    )
    assert sorted(row["id"] for row in rows) == ["0", "0.1", "1", "1.1", "2", "2.1"]
    assert all("bot: <think> </think> W" in spoken(TOKENIZER, row) for row in rows)
    assert manifest["counts"]["prompts"] == 3 and manifest["settings"]["template_args"] == {"enable_thinking": False}


# Kept out.


def test_what_is_kept_out_is_counted(target_folder, model, tmp_path):
    """Logits that are not finite, nothing said, no room: the rest of their batch is as it would be without them."""
    good = prompts(4)
    long = [{"role": "user", "content": "w8 " * 60}]
    broken = [{"role": "user", "content": BAD_WORD}]
    first = plain(model, torch.tensor([prompt_ids(TOKENIZER, good[0])]), 1)[0, -1].item()
    silent = tmp_path / "target"
    shutil.copytree(target_folder, silent)
    config = json.loads((silent / "generation_config.json").read_text())
    (silent / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [END, first]}))
    for sampling in ({}, {"temperature": 1.0}):
        rows, manifest = make(
            str(silent), tmp_path / str(len(sampling)), [*good, long, broken], batch_size=8, **sampling
        )
        if not sampling:
            assert [row["id"] for row in rows if row["id"] in "045"] == []
            assert manifest["counts"]["dropped"]["empty_answer"] == 1
        assert manifest["counts"]["dropped"] | {"empty_answer": 1} == {
            "empty_answer": 1,
            "not_finite": 1,
            "prompt_too_long": 1,
        }
        assert manifest["counts"]["prompts"] == 6


def test_a_conversation_that_ends_early_keeps_its_first_turns(target_folder, tmp_path):
    conversations = [chat("w8", "w9", f"{BAD_WORD}")[::2], [*chat("w8")[:1], {"role": "user", "content": "w9 " * 60}]]
    rows, manifest = make(target_folder, tmp_path, conversations)
    assert len(rows) == 2 and rows[0]["input_ids"] == rows[1]["input_ids"]
    assert manifest["counts"]["dropped"] == {"not_finite": 1, "prompt_too_long": 1}


def test_no_row_at_all_is_an_error(target_folder, tmp_path):
    with pytest.raises(ValueError, match="no prompt gave a row.*'dropped_not_finite': 2"):
        make(target_folder, tmp_path, [[{"role": "user", "content": BAD_WORD}]] * 2)


# Kills.

SETTINGS = {"max_new_tokens": 12, "max_length": 64, "batch_size": 4, "dtype": "float32"}
SAMPLED = {**SETTINGS, "temperature": 5.0, "top_p": 0.95, "top_k": 20, "seed": 3}


def test_a_killed_run_goes_on(target_folder, tmp_path):
    """SIGKILL behind the second batch, and the begun lines of a third: the files are those of a run that was not killed."""
    conversations = prompts(14, turns=2)
    (tmp_path / "prompts.json").write_text(json.dumps(conversations))
    settings = json.dumps({"target": target_folder, **SAMPLED})
    script = [sys.executable, Path(__file__).parent / "killed_data.py", tmp_path / "prompts.json"]
    killed = subprocess.run([*script, tmp_path / "killed", settings], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    straight, manifest = make(target_folder, tmp_path / "straight", conversations, **SAMPLED)
    whole = {
        name: (tmp_path / "straight" / name).read_text() for name in ("rows.jsonl", "progress.jsonl", "manifest.json")
    }
    part = (tmp_path / "killed" / "rows.jsonl").read_text()
    assert 0 < len(part) < len(whole["rows.jsonl"]) and whole["rows.jsonl"].startswith(part)
    with pytest.raises(ValueError, match="is not complete"):
        load_rows(tmp_path / "killed")
    (tmp_path / "killed" / "rows.jsonl").write_text(part + '{"id": "3", "input_ids": [1, 2')
    with (tmp_path / "killed" / "progress.jsonl").open("a") as file:
        file.write('{"size": 12')
    make(target_folder, tmp_path / "killed", conversations, **SAMPLED)
    assert {name: (tmp_path / "killed" / name).read_text() for name in whole} == whole
    ids = [row["id"] for row in straight]
    assert len(set(ids)) == len(ids) and len({i.split(".")[0] for i in ids}) == 14


@pytest.mark.parametrize("settings", [SETTINGS, SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_were_cut_off_are_made_again(target_folder, tmp_path, settings, monkeypatch):
    """A file that ends inside its last line loses that batch, and gets it back the same; a whole one is left alone."""
    conversations = prompts(10)
    make(target_folder, tmp_path, conversations, **settings)
    path = tmp_path / "rows.jsonl"
    whole = path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(TargetAnswers, "rows_of", None)  # nothing is answered again
        make(target_folder, tmp_path, conversations, **settings)
    path.write_text(whole[:-20])
    make(target_folder, tmp_path, conversations, **settings)
    assert path.read_text() == whole
    assert len((tmp_path / "progress.jsonl").read_text().splitlines()) == 3


def test_seeds(target_folder, tmp_path):
    texts = [
        json.dumps(make(target_folder, tmp_path / str(seed), prompts(4), **{**SAMPLED, "seed": seed})[0])
        for seed in (0, 1)
    ]
    assert texts[0] != texts[1]
    state = torch.random.get_rng_state()
    make(target_folder, tmp_path / "again", prompts(4), **SAMPLED)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_sampling_is_from_the_whole_distribution_and_anew_in_every_batch(target_folder, tmp_path):
    """At a temperature that levels it: all of the vocabulary comes, and no two batches draw the same."""
    settings = {**SETTINGS, "temperature": 100.0, "max_new_tokens": 3, "batch_size": 100}
    rows, _ = make(target_folder, tmp_path, prompts(1) * 300, **settings)
    first = len(prompt_ids(TOKENIZER, prompts(1)[0]))
    assert len({row["input_ids"][first] for row in rows}) > 80  # of 96; Transformers' default keeps 50
    by_id = {int(row["id"]): row["input_ids"] for row in rows}
    same = [by_id[i] == by_id[i + 100] for i in range(200) if {i, i + 100} <= by_id.keys()]
    assert len(same) > 100 and sum(same) < 10


# Settings.


def test_another_run_in_the_same_folder_is_refused(target_folder, tmp_path):
    """Every value that differs is named; where the target lies is not one of them."""
    make(target_folder, tmp_path / "rows", prompts(3))
    with pytest.raises(ValueError) as error:
        make(target_folder, tmp_path / "rows", prompts(4), temperature=0.5, top_k=5, batch_size=2)
    for text in (
        "`temperature` is 0.5, there 0.0",
        "`top_k` is 5, there 0",
        "`batch_size` is 2, there 4",
        "`prompts` is 4, there 3",
    ):
        assert text in str(error.value)
    assert "seed" not in str(error.value) and "choose a new folder" in str(error.value)
    moved = tmp_path / "moved"
    shutil.copytree(target_folder, moved)
    make(str(moved), tmp_path / "rows", prompts(3))
    make_target(seed=5, eos_token_id=END, pad_token_id=0).save_pretrained(moved)
    with pytest.raises(ValueError, match="begun with other settings: `weights` is"):
        make(str(moved), tmp_path / "rows", prompts(3))
    config = json.loads((moved / "generation_config.json").read_text())
    (moved / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [9, END]}))
    with pytest.raises(ValueError, match=r"`end_tokens` is \[1, 9\], there \[1\]; `weights` is"):
        make(str(moved), tmp_path / "rows", prompts(3))
    word_tokenizer(THINKING).save_pretrained(moved)
    with pytest.raises(ValueError, match="`chat_template` is .*`weights` is"):
        make(str(moved), tmp_path / "rows", prompts(3))


def test_manifest_says_what_the_rows_were_made_from(target_folder, tmp_path):
    _, manifest = make(target_folder, tmp_path, prompts(3), **SAMPLED)
    assert manifest["complete"] and manifest["target"] == target_folder
    assert manifest["revision"] is None and manifest["commit"] is None and manifest["torch"] == torch.__version__
    settings = manifest["settings"]
    assert {key: settings[key] for key in SAMPLED} == SAMPLED
    assert settings["answers"] == "regenerated" and settings["prompts"] == 3
    for key in ("weights", "tokenizer", "chat_template", "prompts_sha256"):
        assert len(settings[key]) == 64


def test_no_default_of_the_target_shapes_the_answers(target_folder, tmp_path):
    """A greedy run is greedy although the target's own settings sample and penalise; top-k 0 is all."""
    rows, _ = make(target_folder, tmp_path / "plain", prompts(4))
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 2.0, "repetition_penalty": 5.0, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert make(str(folder), tmp_path / "own", prompts(4))[0] == rows


FAULTS = [
    ({"temperature": 0.0, "top_k": 20}, "`top_p`=1.0 and `top_k`=20 were given with `temperature`=0"),
    ({"answers": "given", "temperature": 0.7}, "`temperature` is 0.7 with given answers"),
    ({"answers": "none"}, "`answers` is 'none', expected one of regenerated, given"),
    ({"dtype": "int8"}, "`dtype` is 'int8', expected one of float32"),
    ({"max_length": 12}, "`max_length` is 12, expected more than `max_new_tokens`=12"),
    ({"max_length": 2048}, "`max_length` is 2048, expected at most 1024"),
]


@pytest.mark.parametrize(("settings", "message"), FAULTS)
def test_settings_that_are_refused(target_folder, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make(target_folder, tmp_path, prompts(2), **settings)


def test_a_target_without_a_chat_template_is_refused(target_folder, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template, expected one"):
        make(str(folder), tmp_path / "rows", prompts(2))


def test_a_target_that_is_an_adapter_is_refused(target_folder, tmp_path):
    """By both commands, which begin with its tokenizer."""
    shutil.copytree(target_folder, tmp_path / "adapter")
    (tmp_path / "adapter" / "config.json").rename(tmp_path / "adapter" / "adapter_config.json")
    with pytest.raises(ValueError, match="adapter is a PEFT adapter, expected a whole model: merge it"):
        make(str(tmp_path / "adapter"), tmp_path / "rows", prompts(2))


# Left out.


@pytest.mark.parametrize("answers", ["regenerated", "given"])
def test_rows_keep_their_numbers_beside_excluded_ones(target_folder, tmp_path, answers):
    """In names, in errors and in what the folder is known by, whoever answers."""
    conversations = [chat("w8", "w9 w10"), chat("w11", "w12 w13"), chat("w11", "w12 w13")]
    settings = AnswerSettings(target_folder, answers=answers, max_new_tokens=4, max_length=64, dtype="float32")
    manifest = write_rows(conversations, tmp_path / "rows", settings, excluded={0, 1})
    (row,) = load_rows(tmp_path / "rows")[0]
    assert (row["id"], manifest["excluded"], manifest["settings"]["prompts"]) == ("2", 2, 1)
    with pytest.raises(ValueError, match="begun with other settings: `prompts_sha256` is"):
        write_rows(conversations, tmp_path / "rows", settings, excluded={0, 2})
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    word_tokenizer(
        PLAIN + "{% if messages[0].content == 'w11' %}{{ raise_exception('no w11') }}{% endif %}"
    ).save_pretrained(folder)
    with pytest.raises(ValueError, match="row 2: the chat template cannot be used on it. no w11"):
        write_rows(conversations, tmp_path / "no", replace(settings, target=str(folder)), excluded={0})


def test_where_nothing_is_left_out_a_folder_is_known_by_its_prompts_alone(target_folder, tmp_path):
    """As before there was anything to leave out: folders that were begun then go on."""
    _, manifest = make(target_folder, tmp_path, prompts(2))
    assert manifest["settings"]["prompts_sha256"] == sha256(json.dumps(prompts(2)))


# Given answers.


def test_given_answers(target_folder, tmp_path, caplog, monkeypatch):
    """The data set's own, without the target's weights, and one warning of what that costs."""
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in (
                {"question": "w8", "answer": "w9 w10"},
                {"messages": chat("w11", "w12", "w13", "w14", "w15")},
                {"prompt": "w8 " * 70, "answer": "w9"},
                {"prompt": "w8", "answer": "<think>\n\n</think>\n\n"},
            )
        )
    )
    conversations = read_conversations(str(source), given_answers=True)
    rows, manifest = make(str(folder), tmp_path / "rows", conversations, answers="given")
    assert [spoken(TOKENIZER, row) for row in rows] == [
        "user: w8 ; bot: W9 W10 ;",
        "user: w11 ; bot: W12 ; user: w13 ; bot: W14 ;",
    ]
    assert [row["loss_mask"][-1] for row in rows] == [1, 1]
    assert caplog.text.count("the drafter learns another distribution than the target's") == 1
    assert manifest["counts"]["dropped"] == {"row_too_long": 1, "empty_answer": 1}
    assert manifest["settings"]["weights"] is None
    check_rows(load_rows(tmp_path / "rows")[0])


# Prompts.

BAD_ROWS = [
    ('{"text": "w8"}', r"expected a key 'messages', 'prompt', 'question', 'turns', got \['text'\]"),
    ("w8", "expected a JSON object, got 'w8"),
    ("[1]", "expected a key .*, got list"),
    ('{"prompt": ""}', "`prompt` is '', expected text that is not empty"),
    ('{"prompt": 3}', "`prompt` is '3', expected text"),
    ('{"turns": []}', r"`turns` is '\[\]', expected a list of the user's turns"),
    ('{"turns": "w8"}', "`turns` is 'w8', expected a list"),
    ('{"messages": "w8"}', "`messages` is 'w8', expected a list of messages"),
    ('{"messages": [{"role": "tool", "content": "w8"}]}', "message 1 is .*'tool'.*, expected a `role` of system, user, assistant"),
    ('{"messages": [{"role": "user", "content": null}]}', "message 1: `content` is 'None', expected text"),
    ('{"messages": [{"role": "system", "content": "w8"}]}', r"the roles are \['system'\], expected a 'user' to answer"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_ROWS)
def test_rows_that_are_no_prompts_are_named(tmp_path, line, message):
    """With file and number, and before the target is looked for: this one does not exist."""
    source = tmp_path / "prompts.jsonl"
    source.write_text(f'{{"prompt": "w8"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"prompts.jsonl, row 2: {message}"):
        read_conversations(str(source))
    result = CliRunner().invoke(app, ["data", str(source), str(tmp_path / "rows"), "--target", "no/such-target"])
    assert result.exit_code == 2 and "row 2" in result.output


def test_given_answers_that_are_not_there(tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "w8"}\n')
    with pytest.raises(ValueError, match=r"row 1: the roles are \['user'\], expected an 'assistant' after a prompt"):
        read_conversations(str(source), given_answers=True)


def test_prompts_of_every_kind(tmp_path):
    rows = [
        {"prompt": "w8"},
        {"question": "w8", "answer": "w9"},
        {"turns": ["w8", "w9"]},
        {"messages": chat("w8", "w9", "w10", "w11", system="w12"), "prompt": "not read"},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [
        [("user", "w8")],
        [("user", "w8")],
        [("user", "w8"), ("user", "w9")],
        [("system", "w12"), ("user", "w8"), ("user", "w10")],
    ]
    conversations = read_conversations(str(source))
    assert [[tuple(message.values()) for message in messages] for messages in conversations] == expected
    assert [len(turns) for turns in map(user_turns, conversations)] == [1, 1, 2, 2]
    assert len(read_conversations(str(source), limit=2)) == 2
    source.write_text("")
    with pytest.raises(ValueError, match="has no rows, expected at least one prompt"):
        read_conversations(str(source))


def test_a_data_set_of_the_hub_library(tmp_path):
    Dataset.from_list([{"messages": chat("w8", "w9"), "prompt": None}]).to_json(tmp_path / "train.jsonl")
    assert read_conversations(str(tmp_path)) == [chat("w8")[:1]]
    (tmp_path / "train.jsonl").write_text('{"text": "w8"}\n')
    with pytest.raises(ValueError, match=r"\(train\), row 1: expected a key 'messages'"):
        read_conversations(str(tmp_path))


# Loading, and the command.


def test_the_fingerprint_of_weights():
    """Is that of the state dict, wherever the weights lie, and another after any step."""
    model = make_target()
    direct = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        spread = torch.linspace(0, tensor.numel() - 1, 64, dtype=torch.float64).long()
        direct.update(f"{name} {list(tensor.shape)}".encode() + tensor.flatten()[spread].double().numpy().tobytes())
    assert weights_fingerprint(model) == direct.hexdigest()
    offloaded = cpu_offload(make_target(), execution_device="cpu")
    assert offloaded.get_input_embeddings().weight.is_meta
    assert weights_fingerprint(offloaded) == direct.hexdigest()
    assert offloaded.get_input_embeddings().weight.is_meta
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1e-3)
    assert weights_fingerprint(model) != direct.hexdigest()


def test_rows_train(target_folder, tmp_path):
    make(target_folder, tmp_path, prompts(8))
    rows, manifest = load_rows(tmp_path)
    assert len(rows) == manifest["counts"]["rows"] == 8
    trainer = make_trainer(rows=rows, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def test_folders_that_are_not_whole_do_not_load(target_folder, tmp_path):
    with pytest.raises(ValueError, match="holds no manifest.json, expected a folder that `xpress data` made"):
        load_rows(tmp_path)
    make(target_folder, tmp_path, prompts(4))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write((tmp_path / "rows.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="has 5 rows, its manifest says 4"):
        load_rows(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds rows.jsonl but no manifest.json"):
        make(target_folder, tmp_path, prompts(4))


def test_the_command_on_the_shipped_target(tmp_path):
    """Also the chat template of a real tokenizer: rows end with its end-of-turn token or are full."""
    options = "--max-new-tokens 24 --batch-size 4 --limit 4 --dtype float32".split()
    command = ["data", str(PROBLEMS), str(tmp_path / "rows"), "--target", str(TINY / "target"), *options]
    for _ in range(2):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        rows, manifest = load_rows(tmp_path / "rows")
        assert f"which {manifest['counts']['supervised_tokens']} (" in " ".join(result.output.split())
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    for row in rows:
        text = tokenizer.decode(row["input_ids"])
        assert text.startswith("<|user|>") and text.count("<|end|>") == 1 + (sum(row["loss_mask"]) < 24)
    result = CliRunner().invoke(app, [*command, "--seed", "1"])
    assert result.exit_code == 2 and "`seed` is 1, there 0" in " ".join(result.output.replace("│", "").split())
