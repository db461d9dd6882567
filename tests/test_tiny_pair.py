"""The shipped pair: small, loadable as anybody loads it, lossless, and worth its while."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from xpress_drafter import track_drafting
from xpress_drafter.cli import PROBLEMS, TINY, encode, read_prompts
from xpress_drafter.generation.drafter_xpress import code_files


@pytest.fixture(scope="module")
def pair():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    target = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    drafter = AutoModel.from_pretrained(TINY / "drafter", dtype=torch.float32).eval()
    return tokenizer, target, drafter


def test_it_is_small_and_holds_nothing_of_the_target():
    files = [path for path in TINY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    with safe_open(TINY / "drafter" / "model.safetensors", "pt") as weights:
        assert not [key for key in weights.keys() if "embed_tokens" in key or "lm_head" in key]
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}


def test_its_code_is_this_package_s_code():
    """The folder is exactly what `save_pretrained` writes today."""
    for name, source in code_files().items():
        assert (TINY / "drafter" / name).read_text(encoding="utf-8") == source, f"{name}: save the drafter again"


def test_greedy_text_is_plain_and_drafts_are_kept(pair):
    tokenizer, target, drafter = pair
    taus = {}
    for passes in (0, 6, 7):
        with track_drafting() as drafting:
            for problem in read_prompts(PROBLEMS)[:4]:
                inputs = encode(tokenizer, problem)
                plain = target.generate(inputs, max_new_tokens=48, do_sample=False)
                drafted = target.generate(
                    inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter, num_passes=passes
                )
                assert torch.equal(plain, drafted)
        taus[passes] = drafting.tau
    measured = {row["arm"]: row["tau"] for row in json.loads((TINY / "measured.json").read_text())}
    assert taus[7] > 0.9 * measured["xPress fixed point"], f"the card promises more than {taus}"
    assert taus[7] > 2.8 and taus[7] > 1.1 * taus[0], taus
    assert taus[6] == pytest.approx(taus[7], rel=0.01)


def test_answers_read_like_answers(pair):
    """Words of the training text, an end, and a final answer line: no noise."""
    tokenizer, target, drafter = pair
    ended = 0
    for problem in read_prompts(PROBLEMS)[:6]:
        inputs = encode(tokenizer, problem)
        output = target.generate(inputs, max_new_tokens=160, do_sample=False, assistant_model=drafter)
        text = tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
        assert "=" in text and len(text.split()) >= 5
        ended += "####" in text
    assert ended >= 4


def test_sampling_with_the_pair_keeps_more_than_independent_guesses(pair):
    """CASES B7: shared noise and refinement at temperature 1 keep more than the base's independent draws."""
    tokenizer, target, drafter = pair
    taus = {}
    for passes in (0, 7):
        torch.manual_seed(0)
        with track_drafting() as drafting:
            for problem in read_prompts(PROBLEMS)[:6]:
                target.generate(
                    encode(tokenizer, problem),
                    max_new_tokens=48,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    assistant_model=drafter,
                    num_passes=passes,
                )
        taus[passes] = drafting.tau
    assert taus[7] > 1.1 * taus[0], taus


@pytest.mark.parametrize("card", ["drafter/README.md", "target/README.md"])
def test_cards_state_what_was_measured(card):
    text = (TINY / card).read_text(encoding="utf-8")
    assert "GSM8K" in text and "MIT" in text and "xpress build-tiny" in text
    if card.startswith("drafter"):
        measured = json.loads((TINY / "measured.json").read_text())
        for row in measured:
            assert f"| {row['arm']} | {row['tau']:.2f} | {row['tokens_per_second']:.0f} |" in text
            assert row["tokens"] == row["prompts"] + row["accepted"] + row["rounds"] or row["arm"] == "plain"


def test_a_prompt_file_that_is_not_one_is_named(tmp_path: Path):
    bad = tmp_path / "prompts.jsonl"
    bad.write_text('{"text": "hello"}\n')
    with pytest.raises(Exception, match="row 1: expected a key .*'prompt', 'question', 'turns', got \\['text'\\]"):
        read_prompts(bad)
