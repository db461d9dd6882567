"""How rows are batched changes nothing: padding, packing, gradient accumulation."""

from functools import partial

import pytest
import torch
from rig import MASK_TOKEN, make_drafter, target
from training import (
    EVERY,
    Gradients,
    assert_close,
    batch_of,
    gradients,
    make_rows,
    make_trainer,
)
from xpress_drafter.modeling_xpress import DraftVocabulary, base_logits
from xpress_drafter.trainer import ObjectiveInputs, XPressCollator, cut_blocks, position_weights, sample_anchors
from xpress_drafter.trainer.blocks import teacher_positions
from xpress_drafter.trainer.bounded import bounded_objective
from xpress_drafter.trainer.drafting import draft_blocks


TERMS = ("teacher_forced", "consistency", "anchor", "weight")
SPLITS = {"one batch of 4": (4, 1), "4 of 1": (1, 4), "2 of 2": (2, 2)}


def summed(trainer, batches: list[dict]) -> tuple[dict, dict]:
    """The sums of all terms over the batches, and the gradients of the loss's numerator."""
    trainer.model.zero_grad()
    sums = dict.fromkeys(TERMS, 0.0)
    for batch in batches:
        loss, terms = trainer.objective(trainer.model, batch)
        loss.backward()
        sums = {name: sums[name] + getattr(terms, name).item() for name in TERMS}
    return sums, gradients(trainer.model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("pad_token_id", [0, MASK_TOKEN, "eos"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_padding(kind, pad_token_id, attention):
    """Rows of unequal length together and alone; the padding may be a token that the text holds and that ends it."""
    rows = make_rows(3)
    assert len({len(row["input_ids"]) for row in rows}) == 3
    if pad_token_id == "eos":
        pad_token_id = rows[0]["input_ids"][-1]
        rows[1]["input_ids"][4] = pad_token_id
    drafter = make_drafter(target(kind))
    drafter.set_attn_implementation(attention)
    trainer = make_trainer(drafter, target(kind), rows, num_anchors=EVERY, data_collator=XPressCollator(pad_token_id))
    together, gradients_together = summed(trainer, [batch_of(trainer, rows)])
    alone, gradients_alone = summed(trainer, [batch_of(trainer, [row]) for row in rows])
    assert together == pytest.approx(alone, rel=1e-5)
    assert_close(gradients_together, gradients_alone, 1e-5)


def test_packed_documents():
    """[A ; B] in one row and A, B in two: the same sums and gradients, though B's anchors stand behind A's tokens."""
    torch.manual_seed(0)
    drafter, model = make_drafter(target()), target()
    trainer = make_trainer(drafter, num_anchors=EVERY)
    rows = make_rows(2)
    batches = [batch_of(trainer, [row]) for row in rows]
    separate, separate_gradients = summed(trainer, batches)

    reads = [trainer.read_target(batch) for batch in batches]
    features, states = (torch.cat(parts, dim=1) for parts in zip(*reads))
    ids, mask = (torch.cat([batch[key] for batch in batches], dim=1) for key in ("input_ids", "loss_mask"))
    lengths = [len(row["input_ids"]) for row in rows]
    documents = torch.tensor([[4] * lengths[0] + [2] * lengths[1]])
    anchors = torch.cat([batches[0]["anchors"], batches[1]["anchors"] + lengths[0]], dim=1)
    blocks = cut_blocks(ids, mask, anchors, torch.ones_like(anchors).bool(), drafter.config.block_size, documents)
    h = draft_blocks(drafter, model, features, blocks, torch.ones_like(ids), documents)[0]
    drafter.zero_grad()
    inputs = ObjectiveInputs(
        head=partial(base_logits, model),
        vocabulary=DraftVocabulary(model.config.vocab_size),
        tokens_MB=blocks.tokens[0],
        predecessors_M=blocks.predecessors[0],
        teacher_states_SH=states[0],
        teacher_index_MP=teacher_positions(blocks, states.shape[1]),
        weights_MP=blocks.counted[0, :, 1:] * position_weights(drafter.config.block_size, 4.0),
        num_rounds=3,
        ce_weight=0.1,
        lambda_c=0.3,
        lambda_b=0.6,
    )
    loss, terms = bounded_objective(drafter.refiner, h, inputs)
    loss.backward()
    assert {name: getattr(terms, name).item() for name in TERMS} == pytest.approx(separate, rel=1e-5)
    assert_close(gradients(drafter), separate_gradients, 1e-5)
    drawn, valid = sample_anchors(mask, EVERY)
    assert set(anchors[0].tolist()) <= set(drawn[valid].tolist())


@pytest.mark.parametrize("split", SPLITS)
def test_gradient_accumulation(split):
    """Four rows with unequally many supervised tokens, in one step: gradients and logged loss by hand."""
    rows, (batch_size, accumulation) = make_rows(4), SPLITS[split]
    assert len({sum(row["loss_mask"]) for row in rows}) > 2
    recorded = Gradients()
    trainer = make_trainer(
        rows=rows,
        callbacks=[recorded],
        num_anchors=EVERY,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.0,
    )
    by_hand, expected = summed(trainer, [batch_of(trainer, [row]) for row in rows])
    weight = by_hand["weight"]
    trainer.train()
    assert trainer.state.global_step == len(recorded.steps) == 1
    assert_close(recorded.steps[0], {name: gradient / weight for name, gradient in expected.items()})
    logged = trainer.state.log_history[0]
    loss = by_hand["teacher_forced"] + 0.3 * by_hand["consistency"] + 0.6 * by_hand["anchor"]
    assert logged["loss"] == pytest.approx(loss / weight, rel=1e-6)
    for name in TERMS[:3]:
        assert logged[f"loss_{name}"] == pytest.approx(by_hand[name] / weight, rel=1e-6)


def test_denominator_is_the_weight_of_the_whole_accumulated_batch():
    """By hand: exp(-(k - 1) / gamma) for every slot k of every anchor whose labels are all supervised."""
    rows = [
        {"input_ids": list(range(6)), "loss_mask": [0, 0, 1, 1, 1, 1]},  # anchors 2, 3, 4: slots 1-3, 1-2, 1
        {"input_ids": list(range(9)), "loss_mask": [1, 1, 0, 0, 0, 0, 1, 1, 0]},  # anchors 0, 6: slot 1 each
    ]
    trainer = make_trainer(rows=rows, num_anchors=EVERY, gamma=2.0)
    e = torch.tensor([0.0, -0.5, -1.0]).exp()
    expected = (e[:3].sum() + e[:2].sum() + e[0]) + 2 * e[0]
    for size in (1, 2):
        batches = iter([trainer.data_collator(rows[i : i + size]) for i in range(0, 2, size)])
        seen, weights = trainer.get_batch_samples(batches, 2, torch.device("cpu"))
        assert len(seen) == 2 // size and all(batch["anchor_valid"].any() for batch in seen)
        assert weights.tolist() == pytest.approx([expected.item()] * 2, rel=1e-6)
        losses = [trainer.compute_loss(trainer.model, batch, num_items_in_batch=weights) for batch in seen]
        terms, _ = summed(trainer, seen)
        numerator = terms["teacher_forced"] + 0.3 * terms["consistency"] + 0.6 * terms["anchor"]
        assert sum(losses).item() * expected.item() == pytest.approx(numerator, rel=1e-6)
