"""Training computes what generation runs: the same states, logits and drafts for the same anchor and context.

Rounds are recorded in `target.generate(assistant_model=drafter)`; the trainer is then given the text with its blocks
anchored exactly where those rounds were.
"""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import agreeing_pair
from rig import BLOCK, CONFIGS, drafted, make_drafter, make_target, plain, prompt, target
from training import EVERY, batch_of, make_trainer
from xpress_drafter.generation import candidate_generator_xpress
from xpress_drafter.trainer import bounded, xpress_trainer
from xpress_drafter.trainer.metrics import kept


P = BLOCK - 1
NEW = 24


def record_rounds(monkeypatch, model, ids, drafter, n: int = NEW, **kwargs) -> tuple:
    """What the rounds of a `generate` call were (anchor, states, base logits, logits behind every pass, draft), its text."""
    rounds = []
    generator = candidate_generator_xpress.XPressCandidateGenerator
    refine, resolve = generator.refine, candidate_generator_xpress.resolve_block

    def record(self, h, base, input_ids):
        rounds.append(SimpleNamespace(anchor=input_ids.shape[1] - 1, h=h[0], logits=[]))
        draft = refine(self, h, base, input_ids)
        rounds[-1].draft = draft.tokens[0]
        return draft

    def record_logits(*args, warp=None, **options):
        assert warp is None

        def keep(scores_PV):
            rounds[-1].logits.append(scores_PV.clone())
            return scores_PV

        return resolve(*args, warp=keep, **options)

    with monkeypatch.context() as patch:
        patch.setattr(generator, "refine", record)
        patch.setattr(candidate_generator_xpress, "resolve_block", record_logits)
        text, drafting = drafted(model, ids, drafter, n, **kwargs)
    for round, counts in zip(rounds, drafting.rounds):
        round.accepted, round.whole = counts.accepted, counts.drafted == P  # else cut by the text's end
    return rounds, text


class Trained:
    """What the trainer makes of blocks with these anchors; the logits that its objective saw are kept."""

    def __init__(self, monkeypatch, model, drafter, text, prompt_length: int, anchors: list[int], num_rounds: int = P):
        trainer = make_trainer(drafter, model, num_rounds=num_rounds)
        loss_mask = [0] * prompt_length + [1] * (text.shape[1] - prompt_length)
        self.batch = batch_of(trainer, [{"input_ids": text[0], "loss_mask": loss_mask}], [anchors])
        differentiate, run, seen = bounded._Chunk.choose_and_differentiate_, xpress_trainer.bounded_objective, []

        def keep_logits(chunk, logits, coefficient):
            seen.append(logits.clone().unflatten(0, (-1, P)))
            self.teacher = chunk.teacher_UV[chunk.teacher_row_Q].unflatten(0, (-1, P))
            return differentiate(chunk, logits, coefficient)

        def keep_states(refiner, h, inputs):
            self.h = h
            return run(refiner, h, inputs)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(bounded._Chunk, "choose_and_differentiate_", keep_logits)
            patch.setattr(xpress_trainer, "bounded_objective", keep_states)
            _, self.terms = trainer.objective(drafter, self.batch)
        self.base, self.teacher_forced, *self.rounds = seen
        blocks = trainer.cut_blocks(self.batch)
        self.labels, self.counted = blocks.tokens[0, :, 1:], blocks.counted[0, :, 1:]

    def accepted(self, j: int) -> list[int]:
        """Of every block, the draft tokens of round j that would be kept."""
        return kept(self.terms.guesses[j], self.labels, self.counted).sum(dim=-1).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor):
    """Up to what fp32 sums in another order cost; the logits are a hundred times larger than their differences."""
    assert ours.shape == theirs.shape and theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_and_logits_of_every_round(kind, monkeypatch):
    """Slot for slot: the block's states, the base, and every pass; for plain, sliding and soft-capped targets."""
    model, drafter, ids = target(kind), make_drafter(target(kind)), prompt()
    rounds, text = record_rounds(monkeypatch, model, ids, drafter, num_passes=P)
    longer = plain(model, ids, NEW + BLOCK)  # the last blocks reach past the generated text
    assert torch.equal(longer[:, : text.shape[1]], text)
    trained = Trained(monkeypatch, model, drafter, longer, ids.shape[1], [round.anchor for round in rounds])
    assert len(rounds) > NEW / BLOCK and sum(len(round.logits) - 1 for round in rounds) > 2 * len(rounds)
    for n, round in enumerate(rounds):
        assert_close(trained.h[n], round.h)
        for ours, theirs in zip([trained.base, *trained.rounds], round.logits):
            assert_close(ours[n], theirs)
        assert torch.equal(trained.terms.guesses[P][n], round.draft)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_markov_heads_rounds_settle_on_what_it_drafts(kind, monkeypatch):
    """Generation resolves it left to right, training in rounds: after B - 1 of them they agree."""
    model, ids = target(kind), prompt()
    drafter = make_drafter(model, xpress_rank=None, markov_rank=16)
    rounds, text = record_rounds(monkeypatch, model, ids, drafter)
    trained = Trained(monkeypatch, model, drafter, text, ids.shape[1], [round.anchor for round in rounds])
    for n, round in enumerate(rounds):
        assert_close(trained.h[n], round.h)
        assert torch.equal(trained.terms.guesses[P][n], round.draft)
    assert not torch.equal(trained.terms.guesses[1], trained.terms.guesses[P])


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_teacher_is_the_targets_distribution_before_the_slot(kind, monkeypatch):
    model, text = target(kind), plain(target(kind), prompt(), NEW)
    anchors = [0, 6, 7, 20]
    trained = Trained(monkeypatch, model, make_drafter(model), text, 0, anchors)
    p = model(text).logits[0].softmax(dim=-1)
    for n, a in enumerate(anchors):
        for k in range(1, BLOCK):
            torch.testing.assert_close(trained.teacher[n, k - 1], p[a + k - 1], rtol=1e-4, atol=1e-6)
    greedy = trained.teacher[2].argmax(dim=-1)  # the anchor 7 and its block are the target's own greedy text
    assert torch.equal(greedy, text[0, 8 : 8 + P])


@pytest.mark.parametrize("num_passes", [0, 1, 2, P])
def test_simulated_tau_of_a_drafter_that_is_right_k_times(num_passes, monkeypatch):
    """A made pair whose refiner knows the target: at least one more token is kept with every pass."""
    model, drafter = agreeing_pair()
    ids = prompt()
    rounds, text = record_rounds(monkeypatch, model, ids, drafter, num_passes=num_passes)
    compare_tau(monkeypatch, model, drafter, ids, text, rounds, num_passes)
    assert all(round.accepted >= num_passes for round in rounds if round.whole)


def compare_tau(monkeypatch, model, drafter, ids, text, rounds, num_passes: int) -> tuple[int, int]:
    """Every round that the text's end did not cut kept what training would have counted. Returns accepted, rounds."""
    whole = [round for round in rounds if round.whole]
    trained = Trained(
        monkeypatch, model, drafter, text, ids.shape[1], [round.anchor for round in whole], max(num_passes, 1)
    )
    measured = [round.accepted for round in whole]
    assert trained.accepted(num_passes) == measured
    return sum(measured), len(measured)


# A drafter that has learned something.

PROMPT, ANSWER, STEPS = 5, 24, 60


@pytest.fixture(scope="module")
def learned():
    """A small drafter after a short training on a tiny target's own greedy answers, and tau before and after."""
    model = make_target()
    prompts = [prompt(PROMPT, seed) for seed in range(8)]
    rows = [
        {"input_ids": plain(model, ids, ANSWER)[0].tolist(), "loss_mask": [0] * PROMPT + [1] * ANSWER}
        for ids in prompts
    ]
    torch.manual_seed(0)
    drafter = make_drafter(model, initializer_range=0.02)
    torch.nn.init.zeros_(drafter.xpress_head.mix.L)
    trainer = make_trainer(
        drafter,
        model,
        rows,
        eval_dataset=rows,
        per_device_train_batch_size=8,
        max_steps=STEPS,
        num_anchors=16,
        learning_rate=1e-2,
        warmup_steps=0.04,
    )
    before = trainer.evaluate()
    trainer.train()
    trainer.args.num_anchors = EVERY
    return SimpleNamespace(
        model=model, drafter=drafter.eval(), prompts=prompts, before=before, after=trainer.evaluate()
    )


def test_training_raises_tau(learned):
    """Of the base, and of every round above the one before."""
    taus = [[metrics[f"eval_tau_pass_{j}"] for j in range(4)] for metrics in (learned.before, learned.after)]
    assert max(taus[0]) < 1.1
    assert taus[1][0] > 1.4 and taus[1][1] > taus[1][0] + 0.1 and taus[1] == sorted(taus[1])
    assert learned.after["eval_loss"] < 0.7 * learned.before["eval_loss"]


@pytest.mark.parametrize("num_passes", [0, 2])
def test_simulated_tau_is_the_measured_one(learned, num_passes, monkeypatch):
    """Round by round where `generate` drafted; and over all anchors, as the logs show it, near enough."""
    accepted = rounds = 0
    for ids in learned.prompts:
        recorded, text = record_rounds(monkeypatch, learned.model, ids, learned.drafter, ANSWER, num_passes=num_passes)
        counts = compare_tau(monkeypatch, learned.model, learned.drafter, ids, text, recorded, num_passes)
        accepted, rounds = accepted + counts[0], rounds + counts[1]
    measured = accepted / rounds + 1
    assert rounds > 40 and measured > 1.4
    assert measured == pytest.approx(learned.after[f"eval_tau_pass_{num_passes}"], rel=0.15)
