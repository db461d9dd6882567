"""Every arm measured alike, on prompts that are known, in a folder that goes on (CASES J2, J3)."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rig import BLOCK, PATTERNS, make_drafter, make_target, oracle, prompt, ref, target
from xpress_drafter.generation import evaluation_runs
from xpress_drafter.generation.arms import Arm, ArmRun, check_arms, choose_passes, make_arms, run_arm
from xpress_drafter.generation.evaluation_runs import Prompt, RunFolder, evaluate, round_the_sets
from xpress_drafter.generation.prompt_sets import (
    HUB_SETS,
    Prompts,
    PromptSet,
    hub_prompts,
    render,
    render_sets,
    set_hashes,
)
from xpress_drafter.generation.statistics_xpress import Round


def check_counts(run: ArmRun):
    assert len(run.new_ids) == run.first_tokens + sum(r.accepted for r in run.rounds) + len(run.rounds)
    assert 0 < run.prefill_seconds < run.seconds and 0 < sum(run.split.values()) < run.seconds - run.prefill_seconds
    assert all(r.accepted <= r.drafted for r in run.rounds)


def test_every_arm_is_counted_by_one_rule():
    """The same text, prompt and rule for all; native DFlash keeps what ours keeps at K = 0; no hook is left behind."""
    model = target()
    models = {
        "drafter": make_drafter(model),
        "markov": make_drafter(model, xpress_rank=None, markov_rank=8),
        "dflash": make_drafter(model, xpress_rank=None),
        "assistant": make_target(seed=3),
    }
    names = ["lookup", "native-dflash", "k0", "xpress", "xpress-lookup", "markov", "dflash", "assistant"]
    runs = {
        arm.name: run_arm(model, prompt(), arm, max_new_tokens=24, do_sample=False)
        for arm in make_arms(names, models, passes=[2])
    }
    for run in runs.values():
        check_counts(run)
        assert run.new_ids == ref()[0, 7:31].tolist() and run.prompt_hash == runs["plain"].prompt_hash
    assert runs["plain"].rounds == [Round(0, 0, 0)] * 23
    native, ours = runs["DFlash in Transformers"], runs["DFlash (K = 0)"]
    assert [r.accepted for r in native.rounds] == [r.accepted for r in ours.rounds] and native.split["draft"] > 0
    assert max(r.passes for r in runs["xPress K = 2"].rounds) <= 2
    assert any(r.drafted for r in runs["AR assistant"].rounds) and runs["AR assistant"].split["draft"] > 0
    for module in (model, *models.values()):
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_rounds_are_those_of_an_oracle():
    model, pattern = target(), PATTERNS[-1]
    run = run_arm(
        model,
        prompt(),
        Arm("ours", {"assistant_model": oracle(model, ref(), pattern)}, own=True),
        max_new_tokens=24,
        do_sample=False,
    )
    check_counts(run)
    assert [r.accepted for r in run.rounds][:6] == [0, 3, BLOCK - 1] * 2


def test_what_is_drafted_before_the_prompt_s_forward_is_no_round():
    """Prompt lookup drafts at once where the prompt repeats itself: those tokens come with the first one."""
    known = ref(n=200)[:, :180]  # the text runs in a circle by then
    run = run_arm(target(), known, Arm("lookup", {"prompt_lookup_num_tokens": 5}), max_new_tokens=12, do_sample=False)
    check_counts(run)
    assert (len(run.new_ids), run.first_tokens, len(run.rounds)) == (12, 6, 1)


def test_sampling_counts_alike():
    model = target()
    arms = make_arms(["k0", "xpress", "native-dflash"], {"drafter": make_drafter(model)}, passes=[1])
    for arm in arms:
        check_counts(run_arm(model, prompt(), arm, max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0))


@pytest.mark.parametrize(
    ("arms", "configs", "message"),
    [
        (["lookup", "eagle"], {}, r"names \['eagle'\], expected some of lookup, native-dflash"),
        (["xpress"], {}, "names 'xpress' without `--drafter`"),
        (["assistant"], {}, "names 'assistant' without `--assistant`"),
        (["xpress"], {"drafter": None}, "needs a drafter whose refiner is 'xpress', but that of `--drafter` is None"),
        (["markov"], {"markov": "xpress"}, "refiner is 'markov', but that of `--markov` is 'xpress'"),
        (["dflash"], {"dflash": "xpress"}, "refiner is None, but that of `--dflash` is 'xpress'"),
        (["lookup"], {"markov": "markov"}, "`--markov` was given, but no arm"),
    ],
)
def test_arms_that_cannot_run_are_named(arms, configs, message):
    with pytest.raises(ValueError, match=message):
        check_arms(arms, {role: SimpleNamespace(refiner_type=kind) for role, kind in configs.items()})


def test_passes_lie_below_the_fixed_point():
    assert choose_passes(None, 7) == [1, 2, 4, 6] and choose_passes(None, 3) == [1, 2]
    assert choose_passes([4, 1, 4], 7) == [1, 4]
    for wrong in (0, 7):
        with pytest.raises(ValueError, match=rf"has \[{wrong}\], expected 1 to 6 with this drafter"):
            choose_passes([2, wrong], 7)


def test_prompts_go_round_the_sets():
    order = round_the_sets({"a": [[1], [2]], "b": [[3], [4], [5]]})
    assert [(p.set, p.index, p.ids) for p in order] == [
        ("a", 0, [1]),
        ("b", 0, [3]),
        ("a", 1, [2]),
        ("b", 1, [4]),
        ("b", 2, [5]),
    ]


def test_a_killed_run_goes_on_at_the_next_prompt(tmp_path, monkeypatch):
    """Each prompt begins with another arm; half a line is dropped; a finished row is left as it is."""
    calls, killed_at = [], ([2], "a", 9)

    def counted(model, ids, arm, max_new_tokens, do_sample):
        calls.append((ids.tolist()[0], arm.name, max_new_tokens))
        if calls[-1] == killed_at:
            raise KeyboardInterrupt
        return ArmRun([7], "p", 1.0, 0.5, 1, [], {})

    def run(on_prompt=lambda done: None) -> list[dict]:
        model, arms = SimpleNamespace(device=torch.device("cpu")), [Arm("plain"), Arm("a")]
        prompts, folder = [Prompt("s", i, [i]) for i in range(4)], RunFolder(tmp_path, {"x": 1})
        return evaluate(model, prompts, arms, folder, on_prompt=on_prompt, max_new_tokens=9, do_sample=False)

    monkeypatch.setattr(evaluation_runs, "run_arm", counted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [name for _, name, tokens in calls if tokens == 9] == ["plain", "a", "a", "plain", "plain", "a"]
    finished = (tmp_path / "rows.jsonl").read_bytes()
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"set": "s", "ind')
    killed_at, done = None, []
    calls.clear()
    rows = run(done.append)
    assert done == [2, 3, 4] and [row["index"] for row in rows] == [0, 1, 2, 3]
    assert (tmp_path / "rows.jsonl").read_bytes().startswith(finished)
    assert [(ids, tokens) for ids, _, tokens in calls] == [([2], 8)] * 2 + [([2], 9)] * 2 + [([3], 9)] * 2
    assert run() == rows and len(calls) == 6  # nothing is left to do, not even a warm-up


def test_a_folder_of_other_settings_is_refused(tmp_path):
    RunFolder(tmp_path, {"seed": 0, "environment": {"torch": "1", "threads": 2}})
    with pytest.raises(ValueError) as error:
        RunFolder(tmp_path, {"seed": 1, "environment": {"torch": "1", "threads": 1}})
    assert "`environment.threads` is 1, there 2; `seed` is 1, there 0. Give the same" in str(error.value)
    with pytest.raises(ValueError, match="`arms.new` is None, there 'not set'"):
        RunFolder(tmp_path, {"seed": 0, "environment": {"torch": "1", "threads": 2}, "arms": {"new": None}})
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match="holds rows.jsonl but no settings.json"):
        RunFolder(tmp_path, {})


def test_sets_of_the_hub_are_shuffled_with_seed_0_and_worded(tmp_path, monkeypatch):
    """A folder stands in for the Hub, read by the same loader."""
    from datasets import load_dataset

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "gsm" / "test.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "a"}) + "\n" for i in range(9)))
    monkeypatch.setitem(HUB_SETS, "gsm8k", replace(HUB_SETS["gsm8k"], source=str(file.parent), subset=None))
    shuffled = load_dataset(str(file.parent), split="test").shuffle(seed=0)["question"]
    first = hub_prompts("gsm8k", 3)
    assert first.bare == list(shuffled)[:3] != ["q0", "q1", "q2"] and first.source == str(file.parent)
    assert first.messages[0] == [
        {
            "role": "user",
            "content": shuffled[0] + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
        }
    ]
    assert len(hub_prompts("gsm8k", 100).messages) == 9
    monkeypatch.setitem(
        HUB_SETS, "files", PromptSet("a/b", "train", lambda row: row["question"], files=(str(file), str(file)))
    )
    files = hub_prompts("files", 100)
    assert files.bare == [messages[0]["content"] for messages in files.messages] and len(files.bare) == 18


def test_code_prompts_keep_their_frame():
    row = {"question_content": "Add.", "starter_code": ""}
    assert "### Question:\nAdd.\n\n### Format: Write your code" in HUB_SETS["livecodebench"].prompt(row)
    row["starter_code"] = "def f():"
    assert "Use the following code structure:\n```python\ndef f():\n```" in HUB_SETS["livecodebench"].prompt(row)
    assert HUB_SETS["humaneval"].prompt({"prompt": "def g():"}).endswith("```python\ndef g():\n```")
    assert HUB_SETS["mt-bench"].worded({"prompt": ["one", "two"]}) == "one"


def test_every_set_knows_its_bare_prompts():
    """The instruction is around what is asked, and the Hub's id is that of the benchmark, not of a loader."""
    row = {"question": "q", "problem": "q", "prompt": "q", "question_content": "q", "starter_code": ""}
    for name, chosen in HUB_SETS.items():
        assert chosen.bare(row) == "q" and "q" in chosen.worded(row) and "/" in chosen.source, name
        assert (chosen.worded(row) == "q") == (name in ("mbpp", "mt-bench"))


def test_thinking_is_off_where_the_template_can_think():
    given = []

    class Tokenizer:
        chat_template = "{% if enable_thinking %}<think>{% endif %}"

        def apply_chat_template(self, messages, **arguments):
            given.append(arguments)
            return {"input_ids": [1, 2]}

        def __call__(self, text):
            return {"input_ids": [len(text)]}

    messages, tokenizer = [{"role": "user", "content": "hey"}], Tokenizer()
    assert render(tokenizer, messages) == [1, 2]
    tokenizer.chat_template = "{{ messages }}"
    render(tokenizer, messages)
    assert given == [{"add_generation_prompt": True, "enable_thinking": False}, {"add_generation_prompt": True}]
    tokenizer.chat_template = None
    assert render(tokenizer, messages) == [3]


def test_a_prompt_without_room_is_named_and_hashes_tell_prompts_apart():
    tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=lambda messages, **_: {"input_ids": messages})
    with pytest.raises(ValueError, match="b, prompt 2 has 3 tokens, expected at most 2"):
        render_sets(tokenizer, {"a": Prompts("a", [[1]], []), "b": Prompts("b", [[1], [1, 2, 3]], [])}, longest=2)
    hashes = set_hashes({"a": [[1, 2]], "b": [[1, 3]], "c": [[1, 2]]})
    assert hashes["a"] == hashes["c"] != hashes["b"]
