"""The tau that the trainer walks is the one that `generate` reaches: the shipped pair on 32 prompts, for every K."""

import pytest
import torch
from rig import make_drafter
from rig import target as rig_target
from training import make_args, make_rows, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from xpress_drafter import XPressDrafterModel, track_drafting
from xpress_drafter.cli import PROBLEMS, TINY, encode, read_prompts
from xpress_drafter.trainer import XPressTrainer, walking
from xpress_drafter.trainer.tiny_pair import vary_questions
from xpress_drafter.trainer.walking import spans, walk, walked_tau


NEW = 24


@pytest.fixture(scope="module")
def answered():
    """The pair, and the target's own answers to 32 word problems."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    target = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    drafter = XPressDrafterModel.from_pretrained(TINY / "drafter", dtype=torch.float32).eval()
    problems = read_prompts(PROBLEMS)
    prompts = [encode(tokenizer, problem) for problem in (problems + vary_questions(problems, 1, seed=0))[:32]]
    assert len(prompts) == 32
    return target, drafter, prompts, [target.generate(ids, max_new_tokens=NEW, do_sample=False) for ids in prompts]


@torch.no_grad()
def test_walked_tau_is_what_generate_reaches(answered, monkeypatch):
    """For the base, one pass, two and the fixed point: to the last round, ends included (the bar was 2 %)."""
    target, drafter, prompts, texts = answered
    monkeypatch.setattr(walking, "ANCHORS", 10)  # three chunks of every row's 23
    rows = [
        {"input_ids": text[0].tolist(), "loss_mask": [0] * ids.shape[1] + [1] * (text.shape[1] - ids.shape[1])}
        for ids, text in zip(prompts, texts)
    ]
    trainer = XPressTrainer(drafter, target, make_args(), train_dataset=rows)
    passes = (0, 1, 2, drafter.config.num_draft_tokens)
    walked = walked_tau(trainer, rows, passes)
    for number in passes:
        with track_drafting() as drafting:
            for ids, text in zip(prompts, texts):
                options = {"max_new_tokens": NEW, "do_sample": False, "num_passes": number}
                assert torch.equal(target.generate(ids, assistant_model=drafter, **options), text)
        print(f"K = {number}: walked {walked[number]:.4f}, measured {drafting.tau:.4f}, {len(drafting.rounds)} rounds")
        assert walked[number] == pytest.approx(drafting.tau, rel=1e-6) and drafting.tau > 1.5


def test_every_turn_is_walked_to_its_last_token():
    mask = [False, True, True, True, False, True, True]
    assert spans(mask) == [(1, 3), (5, 6)] and spans([]) == spans([False]) == [] and spans([True]) == [(0, 0)]
    assert walk([9, 9, 9, 9], 0, 3) == [2]  # the last token is the target's own
    assert walk([9, 1, 9, 0, 2, 9, 9], 1, 6) == [1, 0, 1]


def test_passes_of_a_drafter_without_any_are_refused():
    drafter = make_drafter(rig_target(), xpress_rank=None, markov_rank=16)
    trainer = make_trainer(drafter)
    with pytest.raises(ValueError, match="`num_passes`=1 was given, but this drafter's refiner is 'markov'"):
        walked_tau(trainer, make_rows(2), (1,))
    assert walked_tau(trainer, make_rows(2), (None,))[None] >= 1 and not drafter.training
