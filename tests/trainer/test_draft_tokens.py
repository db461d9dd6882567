"""Training a drafter that drafts some of the target's tokens: which are chosen, which slots are learned, what is logged."""

import pytest
import torch
from rig import VOCAB, drafted, make_drafter, plain, prompt, target
from training import EVERY, Stop, batch_of, losses, make_rows, make_trainer
from transformers import AutoModel, AutoModelForCausalLM
from xpress_drafter.cli import TINY
from xpress_drafter.modeling_xpress import DraftVocabulary
from xpress_drafter.trainer.blocks import cut_blocks
from xpress_drafter.trainer.draft_tokens import most_used_tokens
from xpress_drafter.trainer.metrics import kept
from xpress_drafter.trainer.walking import walked_tau


REFINERS = {"xpress": {}, "none": {"xpress_rank": None}, "markov": {"xpress_rank": None, "markov_rank": 16}}


def test_the_most_used_are_chosen_and_the_lowest_fill_up():
    rows = [
        {"input_ids": [9, 9, 9, 7, 7, 5], "loss_mask": [0, 0, 0, 1, 1, 1]},  # the prompt does not count
        {"input_ids": [1, 7, 5, 8], "loss_mask": [0, 1, 1, 1]},
    ]
    assert most_used_tokens(rows, 2, 10) == [5, 7]
    assert most_used_tokens(rows, 3, 10) == [5, 7, 8]
    assert most_used_tokens(rows, 5, 10) == [0, 1, 5, 7, 8]
    assert most_used_tokens(rows, 10, 10) == list(range(10))
    for size in (0, 11, "many", True):
        with pytest.raises(ValueError, match=f"`draft_vocab_size` is {size!r}, expected a whole number from 1 to"):
            most_used_tokens(rows, size, 10)


def test_nothing_is_learned_from_a_label_on_that_cannot_be_drafted():
    """It and what follows it still count, as slots that fail; an anchor may be any token."""
    ids = torch.tensor([[4, 5, 6, 7, 8, 9, 4, 5, 6]])
    mask, anchors = torch.ones_like(ids).bool(), torch.tensor([[0, 2, 3, 5]])
    vocabulary = DraftVocabulary(10, torch.tensor([4, 5, 6, 8, 9]))
    blocks = cut_blocks(ids, mask, anchors, torch.ones_like(anchors).bool(), 4, vocabulary=vocabulary)
    assert blocks.learned[0].int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert blocks.counted[0, :, 1:].all()
    whole = cut_blocks(ids, mask, anchors, torch.ones_like(anchors).bool(), 4)
    assert torch.equal(whole.learned, whole.counted)


@pytest.mark.parametrize("refiner", REFINERS)
def test_what_is_logged_is_what_all_slots_say(refiner):
    """Tau and acceptance over the slots that count, losses over those that are learned."""
    drafter = make_drafter(target(), draft_token_ids=range(0, VOCAB, 2), **REFINERS[refiner])
    trainer = make_trainer(drafter, rows=make_rows(4), num_anchors=EVERY)
    batch = batch_of(trainer, make_rows(4))
    blocks = trainer.cut_blocks(batch)
    assert 0 < blocks.learned.sum() < blocks.counted.sum()
    assert torch.equal(trainer.totals(blocks.learned)[0], trainer.slot_weights(blocks.learned).sum())
    loss, terms = trainer.objective(drafter, batch)
    loss.backward()
    assert terms.weight == pytest.approx(trainer.slot_weights(blocks.learned).sum().item())
    labels, counted = blocks.tokens[blocks.valid][:, 1:], blocks.counted[blocks.valid][:, 1:]
    assert all((guess % 2 == 0).all() for guess in terms.guesses)
    means = trainer._sums.means(trainer.accelerator)
    for j, guess in enumerate(terms.guesses):
        expected = 1 + kept(guess, labels, counted).sum().item() / counted[:, 0].sum().item()
        assert means[f"tau_pass_{j}"] == pytest.approx(expected)


@torch.no_grad()
@pytest.mark.parametrize("refiner", REFINERS)
def test_walked_tau_is_what_generate_reaches(refiner):
    """The trainer's drafts are those of `generate`, on texts half of whose tokens can be drafted."""
    model, walked, rounds = target(), [], []
    texts = [plain(model, prompt(seed=seed), 24) for seed in range(6)]
    ids = sorted({token for text in texts for token in text[0, 7:].tolist()})[::2]
    drafter = make_drafter(model, draft_token_ids=ids, **REFINERS[refiner])
    rows = [{"input_ids": text[0].tolist(), "loss_mask": [0] * 7 + [1] * 24} for text in texts]
    walked = walked_tau(make_trainer(drafter, model, rows), rows, [None])[None]
    for seed, text in enumerate(texts):
        output, drafting = drafted(model, prompt(seed=seed), drafter, 24)
        assert torch.equal(output, text)
        rounds += drafting.rounds
    accepted = sum(round.accepted for round in rounds)
    assert walked == pytest.approx(1 + accepted / len(rounds), rel=1e-6) and accepted > 0


def test_it_learns():
    """A few steps of the objective on one row lower the loss and move the readout's rows."""
    drafter = make_drafter(target(), draft_token_ids=range(0, VOCAB, 2))
    before = drafter.xpress_head.w2.weight.clone()
    trainer = make_trainer(drafter, rows=make_rows(4), num_anchors=EVERY, max_steps=8, learning_rate=1e-2)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < 0.9 * logged[0] and not torch.equal(drafter.xpress_head.w2.weight, before)


@pytest.mark.parametrize("undecayed", [False, True])
def test_a_batch_without_a_label_that_can_be_drafted(undecayed):
    """Its loss and gradient are 0, and what is logged and evaluated are numbers."""
    rows = [{"input_ids": [4, 4, 50, 51, 52], "loss_mask": [0, 1, 1, 1, 1]}] * 2
    drafter = make_drafter(target(), draft_token_ids=[0, 1, 2])
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    trainer = make_trainer(
        drafter, rows=rows, eval_dataset=rows, max_steps=2, optim="sgd", undecayed_anchor=undecayed, num_anchors=EVERY
    )
    trainer.train()
    assert all(
        entry["loss"] == 0 and entry["grad_norm"] == 0 for entry in trainer.state.log_history if "loss" in entry
    )
    assert all(torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())
    found = trainer.evaluate()
    assert found["eval_tau"] == 1 and found["eval_loss"] == 0


def test_a_resumed_run_keeps_the_vocabulary_of_its_checkpoint(tmp_path):
    """Also where the rows, and with them a fresh drafter's tokens, are others by now."""
    straight = make_trainer(make_drafter(target(), draft_token_ids=range(0, 40)), num_anchors=EVERY, max_steps=3)
    straight.train()
    own = {"num_anchors": EVERY, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    begun = make_trainer(
        make_drafter(target(), draft_token_ids=range(0, 40)), folder=tmp_path, callbacks=[Stop(2)], **own
    )
    begun.train()
    resumed = make_trainer(make_drafter(target(), draft_token_ids=range(40, 80)), folder=tmp_path, **own)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.vocabulary.ids_D.tolist() == list(range(40))
    assert losses(resumed)[-1]["loss"] == losses(straight)[-1]["loss"]
    assert torch.equal(resumed.model.xpress_head.w2.weight, straight.model.xpress_head.w2.weight)


def test_a_shipped_target_takes_one(tmp_path):
    """Saved, loaded by remote code's way and run: the text is plain's."""
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    drafter = make_drafter(model, draft_token_ids=range(600), target_layer_ids=[1, 2], initializer_range=0.05)
    drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    ids = torch.arange(5, 30)[None]
    assert torch.equal(plain(model, ids, 20), plain(model, ids, 20, assistant_model=loaded))
