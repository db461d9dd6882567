"""Options beyond the paper, each against its formula."""

import math

import pytest
import torch
from rig import BLOCK, VOCAB, make_drafter, target
from training import EVERY, Gradients, assert_close, batch_of, hashes, losses, make_rows, make_trainer, moved
from xpress_drafter.modeling_xpress import base_logits, previous_tokens
from xpress_drafter.trainer import drafting, position_weights
from xpress_drafter.trainer.objective import slot_loss
from xpress_drafter.trainer.weighting import dpace_weights, is_refiner, scheduled


P = BLOCK - 1


def seen_inputs(trainer, rows, monkeypatch):
    """The states that the objective compared, and what it compared them with."""
    seen = []
    weighted = trainer.weighted_objective

    def keep(drafter, h_MBH, inputs):
        seen.append((h_MBH.detach(), inputs))
        return weighted(drafter, h_MBH, inputs)

    monkeypatch.setattr(trainer, "weighted_objective", keep)
    loss, terms = trainer.objective(trainer.model, batch_of(trainer, rows))
    return *seen[0], loss, terms


def all_logits(trainer, h, inputs, guesses) -> list[torch.Tensor]:
    """Base logits, those refined by the true tokens, and those of every round, by the plain modules."""
    base = base_logits(trainer.target, h[:, 1:])
    tokens = [inputs.tokens_MB[:, 1:], *guesses[:-1]]
    anchors = inputs.tokens_MB[:, 0]
    prevs = [previous_tokens(inputs.predecessors_M, anchors, guess) for guess in tokens]
    return [base, *(base + trainer.model.refiner(h, prev)[:, 1:] for prev in prevs)]


def slot_losses(logits, inputs) -> torch.Tensor:
    teacher = inputs.head(inputs.teacher_states_SH)[inputs.teacher_index_MP].float().softmax(dim=-1)
    return slot_loss(logits, inputs.tokens_MB[:, 1:], teacher, 0.1)


# Position weights.


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_by_its_formula(alpha):
    q = torch.rand(4, P)
    counted = torch.tensor([[1] * P, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0] * P]).bool()
    weights = dpace_weights(q, counted, alpha)
    for m in range(4):
        last = int(counted[m].sum())
        for k in range(P):
            products = [math.prod((1 - alpha) * q[m, i].item() + alpha for i in range(j + 1)) for j in range(k, last)]
            assert weights[m, k].item() == pytest.approx(sum(products), abs=1e-6)


@pytest.mark.parametrize("refiner", [{}, {"xpress_rank": None}])
def test_labels_probabilities(refiner, monkeypatch):
    """Of the logits refined by the true tokens, or of the base's without a refiner; whatever the chunks."""
    trainer = make_trainer(make_drafter(target(), **refiner), num_anchors=EVERY)
    h, inputs, _, terms = seen_inputs(trainer, make_rows(3), monkeypatch)
    logits = base_logits(target(), h[:, 1:]) if refiner else all_logits(trainer, h, inputs, terms.guesses)[1]
    expected = logits.softmax(dim=-1).gather(-1, inputs.tokens_MB[:, 1:, None])[..., 0]
    for chunk in (2**23, 7 * P * VOCAB, 1):
        monkeypatch.setattr(drafting, "CHUNK", chunk)
        found = drafting.label_probabilities(trainer.model, h, inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert not found.requires_grad


def test_dpace_in_training(monkeypatch):
    """All terms take the weights, detached; the loss is divided by the number of slots of the whole step."""
    rows, recorded = make_rows(4), Gradients()
    kwargs = {"dpace_alpha": 0.5, "num_anchors": EVERY, "max_grad_norm": 0.0, "callbacks": [recorded]}
    trainer = make_trainer(rows=rows, per_device_train_batch_size=2, gradient_accumulation_steps=2, **kwargs)
    h, inputs, loss, terms = seen_inputs(trainer, rows, monkeypatch)
    base, refined, *rounds = all_logits(trainer, h, inputs, terms.guesses)
    q = refined.softmax(dim=-1).gather(-1, inputs.tokens_MB[:, 1:, None])[..., 0]
    counted = inputs.weights_MP.bool()
    weights = dpace_weights(q, counted, 0.5)
    value = [(slot_losses(logits, inputs) * weights).sum() for logits in (refined, base, *rounds)]
    expected = value[0] + 0.6 * value[1] + 0.3 * torch.stack(value[2:]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    trainer.model.zero_grad()
    loss.backward()
    by_hand = {name: p.grad / counted.sum() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert losses(trainer)[0]["loss"] == pytest.approx((loss / counted.sum()).item(), rel=1e-5)
    assert losses(trainer)[0]["loss_anchor"] == pytest.approx((value[1] / counted.sum()).item(), rel=1e-5)
    assert_close(recorded.steps[0], by_hand)


@pytest.mark.parametrize("size, accumulation", [(4, 1), (1, 4)])
def test_undecayed_anchor(size, accumulation, monkeypatch):
    """The base term is the plain mean over all slots of the step; the other terms are as they were."""
    rows, recorded = make_rows(4), Gradients()
    trainer = make_trainer(
        rows=rows,
        undecayed_anchor=True,
        num_anchors=EVERY,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.0,
        callbacks=[recorded],
    )
    plain = make_trainer(rows=rows, num_anchors=EVERY)
    h, inputs, _, terms = seen_inputs(plain, rows, monkeypatch)
    counted = inputs.weights_MP > 0
    base = slot_losses(base_logits(target(), h[:, 1:]), inputs)[counted].mean().item()
    trainer.train()
    log = losses(trainer)[0]
    assert log["loss_anchor"] == pytest.approx(base, rel=1e-5)
    weight = (position_weights(BLOCK, 4.0) * counted).sum()
    others = (terms.teacher_forced + 0.3 * terms.consistency) / weight
    assert log["loss"] == pytest.approx(others.item() + 0.6 * base, rel=1e-5)
    assert abs(base - (terms.anchor / weight).item()) > 1e-3
    only_base = make_trainer(
        make_drafter(target(), xpress_rank=None), rows=rows, num_anchors=EVERY, gamma=1e9, max_grad_norm=0.0
    )
    only_base.model.load_state_dict({k: v for k, v in plain.model.state_dict().items() if not is_refiner(k)})
    expected = gradients_of(plain, rows, lambda_anchor_start=0.0)
    for name, gradient in gradients_of(only_base, rows).items():
        expected[name] = expected[name] + 0.6 * gradient
    assert_close(recorded.steps[0], expected)


def gradients_of(trainer, rows, **args) -> dict:
    for name, value in args.items():
        setattr(trainer.args, name, value)
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch_of(trainer, rows)).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


# The base term's weight, and rates.


def test_schedules():
    assert [scheduled("linear", 0.6, 0.2, x) for x in (0, 0.25, 1, 2)] == pytest.approx([0.6, 0.5, 0.2, 0.2])
    assert [scheduled("constant", 0.6, 0.2, x) for x in (0, 0.5, 1)] == [0.6] * 3
    cosine = [0.2 + 0.4 * (1 + math.cos(math.pi * x)) / 2 for x in (0, 0.1, 0.5, 1)]
    assert [scheduled("cosine", 0.6, 0.2, x) for x in (0, 0.1, 0.5, 1)] == pytest.approx(cosine)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_schedule_in_training(kind):
    trainer = make_trainer(max_steps=3, lambda_anchor_schedule=kind, eval_dataset=make_rows(2, seed=1))
    trainer.train()
    for step, entry in enumerate(losses(trainer)):
        expected = entry["loss_teacher_forced"] + 0.3 * entry["loss_consistency"]
        expected += scheduled(kind, 0.6, 0.2, step / 3) * entry["loss_anchor"]
        assert entry["loss"] == pytest.approx(expected, rel=1e-5)
    metrics = trainer.evaluate()  # with the last weight
    expected = metrics["eval_loss_teacher_forced"] + 0.3 * metrics["eval_loss_consistency"]
    last = {"constant": 0.6, "cosine": 0.2}[kind]
    assert metrics["eval_loss"] == pytest.approx(expected + last * metrics["eval_loss_anchor"], rel=1e-5)


@pytest.mark.parametrize("refiner", [{}, {"xpress_rank": None, "markov_rank": 16}])
def test_backbone_rate(refiner):
    """Plain gradient descent: after a step the backbone has moved by half of its gradient's, the refiner by its own."""
    drafter, recorded = make_drafter(target(), **refiner), Gradients()
    before = hashes(drafter)
    trainer = make_trainer(
        drafter, optim="sgd", learning_rate=0.01, weight_decay=0.0, backbone_lr_scale=0.5, callbacks=[recorded]
    )
    trainer.args.max_grad_norm = 0.0
    trainer.train()
    assert losses(trainer)[0]["learning_rate"] == 0.01
    for name, parameter in drafter.named_parameters():
        step = 0.01 * (1.0 if is_refiner(name) else 0.5) * recorded.steps[0][name]
        assert step.abs().max() > 0
        torch.testing.assert_close(before[name] - parameter.detach(), step, rtol=1e-3, atol=1e-6)


def test_frozen_backbone(tmp_path):
    """The refiner moves, all of it, and nothing else; what is saved is whole; moments are the refiner's alone."""
    drafter = make_drafter(target())
    before = hashes(drafter)
    trainer = make_trainer(drafter, folder=tmp_path, freeze_backbone=True, save_strategy="steps", save_steps=1)
    trainer.train()
    assert moved(drafter, before) == {name for name in before if is_refiner(name)}
    assert len(trainer.optimizer.state) == sum(is_refiner(name) for name in before)
    loaded = type(drafter).from_pretrained(tmp_path / "checkpoint-1")
    assert moved(loaded, hashes(drafter)) == set()


def test_what_is_refused(tmp_path):
    plain = make_drafter(target(), xpress_rank=None)
    with pytest.raises(ValueError, match="`freeze_backbone` is set, but the drafter has no refiner"):
        make_trainer(plain, freeze_backbone=True)
    with pytest.raises(ValueError, match="`undecayed_anchor` is set, but without a refiner"):
        make_trainer(plain, undecayed_anchor=True)
    with pytest.raises(ValueError, match=r"`lambda_anchor_schedule` is 'exp', expected one of \['constant', 'cosine'"):
        make_trainer(lambda_anchor_schedule="exp")
    with pytest.raises(ValueError, match="`dpace_alpha` is 1.5, expected 0 to 1"):
        make_trainer(dpace_alpha=1.5)
    with pytest.raises(
        ValueError, match="`backbone_lr_scale` is 0.0, expected more than 0; set `freeze_backbone=True`"
    ):
        make_trainer(backbone_lr_scale=0.0)
    with pytest.raises(ValueError, match="`backbone_lr_scale` is 0.5, but `freeze_backbone` is set"):
        make_trainer(backbone_lr_scale=0.5, freeze_backbone=True)
    drafter = make_drafter(target())
    optimizers = torch.optim.SGD(drafter.parameters()), None
    with pytest.raises(ValueError, match="`backbone_lr_scale` is 0.5, but `optimizers` brings its own rates"):
        make_trainer(drafter, backbone_lr_scale=0.5, optimizers=optimizers)
