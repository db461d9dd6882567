"""The tau that training logs is the one that `generate` reaches: the shipped pair on 32 prompts, for every K."""

import pytest
import torch
from training import make_args
from transformers import AutoModelForCausalLM, AutoTokenizer
from xpress_drafter import XPressDrafterModel, track_drafting
from xpress_drafter.cli import PROBLEMS, TINY, encode, read_prompts
from xpress_drafter.trainer import XPressTrainer
from xpress_drafter.trainer.tiny_pair import vary_questions


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


def walk(accepted_of, start: int, end: int) -> tuple[int, int]:
    """Rounds from the anchor at `start` on, each behind the tokens of the last one; those whose block ends before `end`."""
    total, rounds, anchor = 0, 0, start
    while anchor < end:
        accepted = accepted_of(anchor, rounds)
        total, rounds = total + accepted, rounds + 1
        anchor += accepted + 1
    return total, rounds


@torch.no_grad()
def test_simulated_tau_is_what_generate_reaches(answered):
    """Within 2 %, for the base, one pass, two and the fixed point."""
    target, drafter, prompts, texts = answered
    P = drafter.config.num_draft_tokens
    trainer = XPressTrainer(
        drafter,
        target,
        make_args(num_rounds=P, num_anchors=NEW),
        train_dataset=[{"input_ids": [1, 2], "loss_mask": [1, 1]}],
    )
    simulated, measured = ({passes: [0, 0] for passes in (0, 1, 2, P)} for _ in range(2))
    for ids, text in zip(prompts, texts):
        start, end = ids.shape[1], text.shape[1] - P - 1  # later blocks are cut by the text's end
        batch = {"input_ids": text, "loss_mask": torch.arange(text.shape[1])[None] >= start}
        batch["attention_mask"] = torch.ones_like(text)
        trainer.draw_anchors(batch, torch.Generator())
        assert batch["anchors"][0].tolist() == list(range(start, text.shape[1] - 1))
        blocks = trainer.cut_blocks(batch)
        _, terms = trainer.objective(drafter, batch)
        for passes in simulated:
            kept = (terms.guesses[passes] == blocks.tokens[0, :, 1:]) & blocks.counted[0, :, 1:]
            accepted = kept.cumprod(dim=-1).sum(dim=-1).tolist()
            with track_drafting() as drafting:
                options = {"max_new_tokens": NEW, "do_sample": False, "num_passes": passes}
                assert torch.equal(target.generate(ids, assistant_model=drafter, **options), text)
            found = walk(lambda anchor, _: accepted[anchor - start], start, end)  # noqa: B023
            seen = walk(lambda _, n: drafting.rounds[n].accepted, start, end)  # noqa: B023
            simulated[passes] = [a + b for a, b in zip(simulated[passes], found)]
            measured[passes] = [a + b for a, b in zip(measured[passes], seen)]
    for passes, (accepted, rounds) in simulated.items():
        tau = measured[passes][0] / measured[passes][1] + 1
        print(f"K = {passes}: simulated {accepted / rounds + 1:.4f}, measured {tau:.4f}, {rounds} rounds")
        assert accepted / rounds + 1 == pytest.approx(tau, rel=0.02)
        assert tau > 1.5
