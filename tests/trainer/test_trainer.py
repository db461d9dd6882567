"""`XPressTrainer`: what a run moves and what it must not, its schedule, evaluation, checkpoints."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from rig import MASK_TOKEN, TAPS, make_drafter, make_target, plain, prompt, target
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from training import (
    EVERY,
    Gradients,
    assert_close,
    batch_of,
    hashes,
    losses,
    make_args,
    make_rows,
    make_trainer,
    moved,
)
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from xpress_drafter import XPressDrafterModel
from xpress_drafter.trainer import XPressTrainer
from xpress_drafter.trainer.optimizer import MuonAdamW


PINNED = [12.926817, 11.051906, 10.308657]

# What moves.


@pytest.mark.parametrize("refiner", [{}, {"xpress_rank": None, "markov_rank": 16}, {"xpress_rank": None}])
def test_a_step_moves_every_weight_of_the_drafter_and_none_of_the_target(refiner):
    """From a fresh drafter, whose mixer is zero; whatever the target's flags were."""
    model = make_target(attention_dropout=0.5).train()
    drafter = XPressDrafterModel.for_target(
        model,
        mask_token_id=MASK_TOKEN,
        num_hidden_layers=2,
        target_layer_ids=TAPS,
        block_size=6,
        **{"xpress_rank": 16, **refiner},
    )
    before, target_before, seen = hashes(drafter), hashes(model), []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    trainer = make_trainer(drafter, model, make_rows(4))
    trainer.train()
    assert moved(drafter, before) == set(before) and drafter.training
    assert moved(model, target_before) == set()
    assert seen and not any(seen) and not any(module.training for module in model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    batch = batch_of(trainer, make_rows(2))
    for first, second in zip(trainer.read_target(batch), trainer.read_target(batch)):
        assert torch.equal(first, second) and not first.requires_grad


def test_loss_falls_and_its_course_is_pinned():
    """Three steps on one batch, seeded: a change of the objective, of the schedule or of the drawing shows here."""
    trainer = make_trainer(rows=make_rows(4), max_steps=3, learning_rate=1e-3, num_anchors=8)
    trainer.train()
    assert [entry["loss"] for entry in losses(trainer)] == pytest.approx(PINNED, rel=1e-4)


def test_schedule_of_the_base_terms_weight():
    """From 0.6 to 0.2 in equal steps over the whole run; the other weights stay."""
    trainer = make_trainer(max_steps=4, learning_rate=1e-4)
    trainer.train()
    for entry, weight in zip(losses(trainer), (0.6, 0.5, 0.4, 0.3)):
        expected = entry["loss_teacher_forced"] + 0.3 * entry["loss_consistency"] + weight * entry["loss_anchor"]
        assert entry["loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.lambda_anchor(progress=1.0) == pytest.approx(0.2)


def test_logs_average_over_the_steps_they_cover():
    one, three = (make_trainer(max_steps=3, logging_steps=n) for n in (1, 3))
    one.train(), three.train()
    for name in ("loss", "tau_pass_0", "tau_pass_3"):
        assert name in losses(three)[0]
    assert losses(three)[0]["loss"] == pytest.approx(sum(e["loss"] for e in losses(one)) / 3, rel=1e-5)
    assert all(1 <= entry["tau_pass_0"] <= 6 for entry in losses(one))


def test_length_trained_on_is_kept(tmp_path):
    """The longest row's, of this run or of one before; in checkpoints too. Unknown after a stream, and where it was."""
    longest, rows = max(len(row["input_ids"]) for row in make_rows(8)), {"eval_dataset": make_rows(1, seed=2)}
    trainer = make_trainer(folder=tmp_path, save_strategy="steps", save_steps=1, **rows)
    assert trainer.model.config.trained_length == 0
    trainer.train()
    assert AutoModel.from_pretrained(tmp_path / "checkpoint-1").config.trained_length == longest
    ended = make_trainer(make_drafter(target()), folder=tmp_path)
    ended.train(resume_from_checkpoint=True)
    assert ended.model.config.trained_length == longest
    runs = [(99, make_rows(8), 99), (7, make_rows(8), longest), (None, make_rows(8), None)]
    for before, rows, after in (*runs, (7, Stream(make_rows(8)), None), (0, Stream(make_rows(8)), None)):
        trainer = make_trainer(make_drafter(target(), trained_length=before), rows=rows)
        trainer.train()
        assert trainer.model.config.trained_length == after


class Stream(IterableDataset):
    def __init__(self, rows: list[dict]):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_drafters_are_refused(dtype):
    with pytest.raises(ValueError, match=f"parameters are .*{dtype}.*expected torch.float32.*`bf16=True`"):
        make_trainer(make_drafter(target()).to(dtype))


def test_other_arguments_that_are_refused():
    with pytest.raises(ValueError, match="`num_anchors` is 0, expected at least 1"):
        make_trainer(num_anchors=0)
    with pytest.raises(ValueError, match="made for a target with num_target_layers=4, but Qwen3ForCausalLM has 5"):
        make_trainer(make_drafter(target()), make_target(num_hidden_layers=5))


def test_muon_under_deepspeed_is_refused(monkeypatch):
    """Before anything is sharded: ZeRO would hand it flat pieces."""
    drafter = make_drafter(target())
    args = make_args()
    monkeypatch.setattr(args, "deepspeed_plugin", object())
    optimizer = MuonAdamW(drafter.named_parameters(), 0.02, 1e-3)
    with pytest.raises(ValueError, match="Muon, which needs whole matrices, but DeepSpeed.*`fsdp_version: 2`"):
        XPressTrainer(drafter, target(), args, train_dataset=make_rows(2), optimizers=(optimizer, None))


@pytest.mark.parametrize("dtype, bf16", [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_targets_and_arithmetic_in_bf16(dtype, bf16):
    """With and without autocast; the drafter's weights stay fp32, and the loss is near that of fp32 throughout."""
    trainer, full = make_trainer(model=make_target().to(dtype), bf16=bf16), make_trainer()
    trainer.train(), full.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    half, whole = losses(trainer)[0]["loss"], losses(full)[0]["loss"]
    assert half == pytest.approx(whole, rel=0.05) and half != whole


def test_activation_checkpointing():
    """The same loss and gradients, and every drafter layer computed twice."""
    recorded, computed, logged = Gradients(), [], []
    for kwargs in ({}, {"gradient_checkpointing": True}):
        trainer = make_trainer(callbacks=[recorded], max_grad_norm=0.0, **kwargs)
        for layer in trainer.model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, args, kwargs=kwargs: computed.append(len(kwargs)))
        trainer.train()
        logged.append(losses(trainer)[0]["loss"])
    assert computed == [0] * 2 + [1] * 4 and logged[0] == pytest.approx(logged[1], rel=1e-6)
    assert_close(recorded.steps[1], recorded.steps[0])


# Evaluation.


def test_evaluation():
    """One quotient over all rows, however they are batched, and the same at every call."""
    held_out, results = make_rows(5, seed=1), []
    for batch_size in (1, 2, 5):
        trainer = make_trainer(eval_dataset=held_out, num_anchors=EVERY, per_device_eval_batch_size=batch_size)
        results += [trainer.evaluate(), trainer.evaluate()]
    names = ["loss", *(f"loss_{term}" for term in ("teacher_forced", "consistency", "anchor"))]
    names += [f"tau_pass_{j}" for j in range(4)]
    for name in names:
        assert len({round(result[f"eval_{name}"], 4) for result in results}) == 1, name
    with torch.no_grad():
        _, terms = trainer.objective(trainer.model, batch_of(trainer, held_out))
    assert results[0]["eval_loss"] == pytest.approx((terms.loss(0.3, 0.2) / terms.weight).item(), rel=1e-5)
    assert set(trainer.predict(held_out).metrics) >= {"test_loss", "test_tau_pass_0"}


def test_few_anchors_are_evaluated_on_the_same_ones_every_time():
    trainer = make_trainer(eval_dataset=make_rows(5, seed=1), num_anchors=2)
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


def test_evaluation_leaves_training_as_it_was(tmp_path):
    runs = []
    for kwargs in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        trainer = make_trainer(eval_dataset=make_rows(3, seed=1), max_steps=4, logging_steps=2, **kwargs)
        trainer.train()
        runs.append(trainer)
    assert sum("eval_loss" in entry for entry in runs[1].state.log_history) == 4
    logs = [[{k: v for k, v in e.items() if k != "epoch"} for e in losses(trainer)] for trainer in runs]
    assert logs[0] == logs[1]
    assert moved(runs[0].model, hashes(runs[1].model)) == set()


# Checkpoints.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run of three steps that saved itself, and its folder."""
    trainer = make_trainer(
        folder=tmp_path_factory.mktemp("run"), max_steps=3, save_strategy="steps", save_steps=3, num_anchors=8
    )
    trainer.train()
    return trainer, trainer.args.output_dir + "/checkpoint-3"


def test_checkpoint_holds_the_drafter_and_nothing_of_the_target(checkpoint):
    trainer, folder = checkpoint
    tensors = load_file(f"{folder}/model.safetensors")
    parameters = dict(trainer.model.named_parameters())
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in tensors.items())
    borrowed = {p.data_ptr() for p in trainer.target.parameters()}
    assert not borrowed & {p.data_ptr() for p in parameters.values()}
    optimizer = torch.load(f"{folder}/optimizer.pt")["state"]
    moments = sum(state[key].numel() for state in optimizer.values() for key in ("exp_avg", "exp_avg_sq"))
    assert moments == 2 * sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize("code", ["ours", "the folder's"])
def test_checkpoint_loads_for_generation(checkpoint, code, tmp_path, monkeypatch):
    """`AutoModel` takes the installed package where there is one; its own code is what everybody else runs."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    trainer, folder = checkpoint
    loader = AutoModel if code == "ours" else get_class_from_dynamic_module(auto_map(folder), folder)
    loaded = loader.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded).__module__.startswith("xpress_drafter." if code == "ours" else "transformers_modules.")
    outputs = [
        target().generate(prompt(), assistant_model=model.eval(), max_new_tokens=20, return_dict_in_generate=True)
        for model in (loaded, trainer.model)
    ]
    assert torch.equal(outputs[0].sequences, plain(target(), prompt(), 20))
    rounds = [[tuple(round) for round in output.drafting.rounds] for output in outputs]
    assert rounds[0] == rounds[1] and len(rounds[0]) > 1


def auto_map(folder: str) -> str:
    return json.loads(Path(folder, "config.json").read_text())["auto_map"]["AutoModel"]


def test_the_same_anchors_are_not_drawn_twice():
    trainer, seen = make_trainer(num_anchors=2), []
    for step in (0, 0, 1, 2):
        trainer.state.global_step = step
        fetched = iter([trainer.data_collator(make_rows(4)) for _ in range(2)])
        batches, _ = trainer.get_batch_samples(fetched, 2, torch.device("cpu"))
        seen.append([batch["anchors"].tolist() for batch in batches])
    assert seen[0] == seen[1] and len({str(batch) for step in seen for batch in step}) == 6
