"""What is measured: tau of the drafter's own passes, acceptance by slot, the best checkpoint; streams and defaults."""

import json

import pytest
import torch
from checkpoints import agreeing_pair
from rig import BLOCK, HIDDEN, make_drafter, plain, prompt, target
from safetensors.torch import load_file
from test_data import Stream
from training import EVERY, batch_of, losses, make_rows, make_trainer
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from xpress_drafter.trainer import XPressTrainer, XPressTrainingArguments
from xpress_drafter.trainer.blocks import sample_anchors, spread_anchors


P = BLOCK - 1


def text_rows(model, n: int = 3) -> list[dict]:
    """What the model itself says, so that some drafts are right."""
    texts = [plain(model, prompt(5, seed), 16)[0].tolist() for seed in range(n)]
    return [{"input_ids": text, "loss_mask": [0] * 5 + [1] * 16} for text in texts]


@pytest.mark.parametrize("passes", [0, 1, 4, 20])
def test_tau_is_that_of_the_drafters_own_passes(passes):
    """However many rounds are trained: the tau of that pass where as many are, or of the fixed point."""
    model, drafter = agreeing_pair()
    drafter.config.xpress_num_passes, rows = passes, text_rows(model)
    metrics = [
        make_trainer(drafter, model, rows, eval_dataset=rows, num_rounds=rounds, num_anchors=EVERY).evaluate()
        for rounds in (1, P)
    ]
    assert metrics[0]["eval_tau"] == metrics[1]["eval_tau"] == metrics[1][f"eval_tau_pass_{min(passes, P)}"]
    taus = [metrics[1][f"eval_tau_pass_{j}"] for j in range(P + 1)]
    assert taus == sorted(taus) and taus[0] + 1 < taus[-1]  # so that passes tell


def test_tau_without_passes():
    """Plain DFlash drafts the base's tokens; a Markov head left to right, here one that knows the target's next token."""
    model, _ = agreeing_pair()
    rows, taus = text_rows(model), []
    for config in ({}, {"markov_rank": HIDDEN}):
        drafter = make_drafter(model, xpress_rank=None, **config)
        if config:
            drafter.refiner.w1.weight.data = model.model.norm(model.get_input_embeddings().weight).detach()
            drafter.refiner.w2.weight.data = 1000 * model.lm_head.weight
        trainer = make_trainer(drafter, model, rows, eval_dataset=rows, num_rounds=P, num_anchors=EVERY)
        metrics = trainer.evaluate()
        taus.append(metrics["eval_tau"])
        assert metrics["eval_tau"] == metrics[f"eval_tau_pass_{P if config else 0}"]
    assert taus[0] + 1 < taus[1]


def test_tau_of_a_shortlist():
    """Half of the vocabulary refined drafts otherwise than all of it, and all of it as without a shortlist."""
    model, drafter = agreeing_pair()
    rows, taus = text_rows(model), []
    for size in (0, 96, 4):
        drafter.config.xpress_topc = size
        taus.append(make_trainer(drafter, model, rows, eval_dataset=rows).evaluate()["eval_tau"])
    assert taus[0] == taus[1] > taus[2]


def test_acceptance_by_slot():
    """Of the blocks that have the slot, the share whose tokens up to it are the labels; they add up to tau."""
    model, drafter = agreeing_pair()
    rows = text_rows(model)
    trainer = make_trainer(drafter, model, rows, eval_dataset=rows, num_anchors=EVERY, num_rounds=P)
    metrics = trainer.evaluate()
    with torch.no_grad():
        _, terms = trainer.objective(drafter, batch_of(trainer, rows))
    blocks = trainer.cut_blocks(batch_of(trainer, rows))
    labels, counted = (table[blocks.valid][:, 1:] for table in (blocks.tokens, blocks.counted))
    kept = 0
    for k in range(1, P + 1):
        right = (terms.guesses[P][:, :k] == labels[:, :k]).all(dim=1) & counted[:, k - 1]
        kept += right.sum().item()
        assert metrics[f"eval_acceptance_slot_{k}"] == pytest.approx((right.sum() / counted[:, k - 1].sum()).item())
    assert metrics["eval_tau"] == pytest.approx(kept / len(labels) + 1)
    assert f"eval_acceptance_slot_{P + 1}" not in metrics
    short = make_trainer(drafter, model, eval_dataset=[{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]).evaluate()
    assert "eval_acceptance_slot_1" in short and "eval_acceptance_slot_2" not in short


def test_evaluated_anchors_do_not_depend_on_the_batch():
    rows, results = make_rows(5, seed=1), []
    for size in (1, 2, 5):
        trainer = make_trainer(eval_dataset=rows, num_anchors=2, per_device_eval_batch_size=size)
        results += [trainer.evaluate(), trainer.evaluate()]
    for name in ("eval_loss", "eval_loss_anchor", "eval_tau", "eval_acceptance_slot_1"):
        assert [result[name] for result in results] == pytest.approx([results[0][name]] * 6, rel=1e-6)


def test_spread_anchors():
    """Evenly, as many as wanted where there are as many, and all of them where not."""
    mask = torch.tensor([[1] * 9, [0, 0, 0, 1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0, 1]]).bool()
    anchors, valid = spread_anchors(mask, 3)
    assert valid.sum(dim=1).tolist() == [3, 3, 0]
    assert anchors.tolist() == [[1, 3, 6], [3, 4, 5], [0, 0, 0]]
    assert spread_anchors(mask, 1)[0].tolist() == [[3], [4], [0]]
    for ours, theirs in zip(spread_anchors(mask, EVERY), sample_anchors(mask, EVERY)):
        assert torch.equal(ours, theirs)


def test_best_checkpoint_by_tau(tmp_path):
    """A drafter that training only spoils: the best step is the first, and its weights are what is left."""
    model, drafter = agreeing_pair()
    rows = text_rows(model)
    trainer = make_trainer(
        drafter,
        model,
        make_rows(8),
        tmp_path,
        eval_dataset=rows,
        max_steps=3,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        metric_for_best_model="eval_tau",
        load_best_model_at_end=True,
    )
    assert trainer.args.greater_is_better
    trainer.train()
    taus = [entry["eval_tau"] for entry in trainer.state.log_history if "eval_tau" in entry]
    assert trainer.state.best_metric == max(taus) == taus[0] > taus[2]
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(tensor, best[name]) for name, tensor in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_tau"] == taus[0]


class Logs(TrainerCallback):
    """What Trainer hands to TensorBoard, W&B or trackio."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.seen.append(dict(logs))


def test_what_is_reported():
    """Through Trainer's own callbacks, as plain numbers, in training and in evaluation; arguments and config as JSON."""
    logs = Logs()
    trainer = make_trainer(
        eval_dataset=make_rows(3, seed=1), callbacks=[logs], max_steps=2, eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    training, _, evaluation = logs.seen[:3]
    names = {"loss", "loss_teacher_forced", "loss_consistency", "loss_anchor", "anchors_per_second"}
    names |= {f"tau_pass_{j}" for j in range(4)} | {f"acceptance_slot_{k}" for k in range(1, BLOCK)}
    assert training.keys() == names | {"grad_norm", "learning_rate", "epoch"}
    assert evaluation.keys() >= {f"eval_{name}" for name in (*names, "tau")}
    assert all(type(value) in (int, float) for entry in logs.seen for value in entry.values())
    assert 1 < training["anchors_per_second"] < 1e6 and training["grad_norm"] > 0
    described = json.loads(json.dumps({**trainer.model.config.to_dict(), **trainer.args.to_dict()}))
    assert (described["num_anchors"], described["block_size"], described["dpace_alpha"]) == (4, BLOCK, None)


def test_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = make_trainer(folder=tmp_path, max_steps=1)
    trainer.add_callback(TensorBoardCallback())
    trainer.train()
    assert any((tmp_path / "logs").iterdir())


@pytest.mark.parametrize("stream", [False, True])
def test_default_arguments(tmp_path, stream):
    """Nothing set but where to write and how long: columns of our own survive, streams too; evaluation says tau."""
    train, held_out = make_rows(8), make_rows(3, seed=1)
    args = XPressTrainingArguments(str(tmp_path), max_steps=2, logging_steps=1)
    trainer = XPressTrainer(
        make_drafter(target()),
        target(),
        args,
        train_dataset=Stream(train * 2) if stream else train,
        eval_dataset=Stream(held_out) if stream else held_out,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert len(losses(trainer)) == 2 and metrics["eval_loss"] > 0 and metrics["eval_tau"] >= 1
    assert metrics["eval_tau"] == make_trainer(trainer.model, eval_dataset=held_out).evaluate()["eval_tau"]
