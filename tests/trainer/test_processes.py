"""Two processes are as one: replicated drafters (DDP), sharded ones (FSDP2), their logs, evaluation and checkpoints."""

import faulthandler
import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from rig import make_drafter, target
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from training import (
    EVERY,
    Gradients,
    assert_close,
    batch_of,
    fresh_process,
    gradients,
    hashes,
    losses,
    make_rows,
    make_trainer,
)
from transformers import AutoModel
from xpress_drafter import trainer as trainer_room
from xpress_drafter.trainer import optimizer as optimizer_module
from xpress_drafter.trainer.optimizer import MuonAdamW


ROWS = make_rows(8)
LAUNCH = Path(trainer_room.__file__).parent / "launch"


def make_run(batch_size: int, folder=None, drafter=None, **kwargs):
    return make_trainer(
        drafter,
        rows=ROWS,
        folder=folder,
        eval_dataset=make_rows(5, seed=1),  # the second process's last batch only repeats rows
        num_anchors=EVERY,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        max_steps=3,
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        **kwargs,
    )


def recorded_run(batch_size: int, folder=None, **kwargs):
    """A run; the gradients that its optimiser was given; how many slots of this process counted in each step."""
    recorded, slots = Gradients(), []
    trainer = make_run(batch_size, folder, callbacks=[recorded], **kwargs)
    cut = trainer.get_batch_samples

    def counting(*args):
        batches, totals = cut(*args)
        slots.append(sum(int(trainer.cut_blocks(batch).counted.sum()) for batch in batches))
        return batches, totals

    trainer.get_batch_samples = counting
    trainer.train()
    return trainer, {"log": losses(trainer), "gradients": recorded.steps, "slots": slots}


def run_process(rank: str, folder: str):
    """One of two processes: half of the rows of every step, of an evaluation, of a resumed run, of a sharded step."""
    faulthandler.dump_traceback_later(240, exit=True)  # a process that waits for ever says where
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # They meet at a file of their own: a port that was free may be another test's by now.
    meeting = {"init_method": Path(folder, "meeting").as_uri(), "rank": int(rank), "world_size": 2}
    torch.distributed.init_process_group("gloo", **meeting)
    trainer, found = recorded_run(2, folder, save_strategy="steps", save_steps=2)
    assert trainer.args.world_size == 2 and trainer.args.process_index == int(rank)
    found |= {"weights": hashes(trainer.model), "metrics": trainer.evaluate()}
    found["accumulated"] = recorded_run(1, gradient_accumulation_steps=2)[1]
    resumed = make_run(2, folder, make_drafter(target(), seed=9))
    resumed.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))
    found["resumed"] = {"log": losses(resumed), "weights": hashes(resumed.model)}
    with pytest.MonkeyPatch.context() as patch:
        multiply_in_fp32(patch)
        found["sharded"] = sharded_step(trainer, Path(folder, "sharded"))
    torch.save(found, Path(folder, f"found-{rank}.pt"))
    sys.stdout.flush()
    os._exit(0)  # taking down the group and the interpreter is not what is tested, and has hung on a busy machine


def multiply_in_fp32(patch: pytest.MonkeyPatch):
    """Muon's steps in fp32 on every processor: in bf16 they turn the last bit of a gradient into half of a step."""
    patch.setattr(optimizer_module, "quick_dtype", lambda device: torch.float32)


def sharded_step(trainer, folder: Path) -> dict:
    """
    The gradients of one step of a drafter that lies in halves, as accelerate shards it on GPUs (it does not on CPUs),
    gathered; that drafter saved; Muon's step, and the optimizer's state as accelerate saves and loads it.
    """
    drafter, rank = make_drafter(target()), trainer.args.process_index
    trainer.state.global_step = 0
    whole = sum(p.numel() for p in drafter.parameters())
    for module in (*drafter.layers, drafter):
        fully_shard(module, reshard_after_forward=True)
    batch = batch_of(trainer, ROWS[2 * rank : 2 * rank + 2])
    totals = trainer.accelerator.reduce(trainer.totals(trainer.cut_blocks(batch).counted))
    loss = trainer.compute_loss(drafter, batch, num_items_in_batch=totals)
    loss.backward()
    state = get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        drafter.save_pretrained(folder, state_dict=state)
    gradients = {name: p.grad.full_tensor() for name, p in drafter.named_parameters()}
    whole_state, steps = StateDictOptions(full_state_dict=True), []
    optimizer = MuonAdamW(drafter.named_parameters(), muon_lr=0.02, adamw_lr=1e-3)
    optimizer.step()
    saved = deepcopy(get_optimizer_state_dict(drafter, optimizer, options=whole_state))
    resumed = MuonAdamW(drafter.named_parameters(), muon_lr=0.5, adamw_lr=0.5)
    held = hashes(drafter)
    for each in (optimizer, resumed):  # from the same weights
        drafter.zero_grad()
        if each is resumed:
            set_optimizer_state_dict(drafter, each, saved, options=whole_state)
        drafter.load_state_dict(held)
        for name, p in drafter.named_parameters():
            p.grad = distribute_tensor(gradients[name], p.device_mesh, p.placements)
        each.step()
        steps.append({name: p.full_tensor() for name, p in drafter.named_parameters()})
    return {
        "loss": trainer.accelerator.reduce(loss.detach()).item() / 2,
        "share": sum(p.to_local().numel() for p in drafter.parameters()) / whole,
        "gradients": gradients,
        "steps": steps,
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What either process found, what one process finds alone, and the folder of the two."""
    folder = tmp_path_factory.mktemp("two")
    processes = [fresh_process("test_processes", "run_process", rank, folder) for rank in (0, 1)]
    alone, expected = recorded_run(4)
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    found = [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return SimpleNamespace(found=found, alone=alone, expected=expected, folder=folder)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_and_logs(both, accumulation):
    """Three steps of two rows on either process, at once or one by one, against four rows on one; to 1e-6 of the logged value,
    and of the norm of the whole gradient."""
    runs = [found if accumulation == 1 else found["accumulated"] for found in both.found]
    slots = list(zip(*(run["slots"] for run in runs)))
    assert [sum(step) for step in slots] == both.expected["slots"] and any(a != b for a, b in slots)
    for ours, theirs in zip(runs[0]["log"], both.expected["log"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for run in runs:
        for ours, theirs in zip(run["gradients"], both.expected["gradients"], strict=True):
            assert_close({name.removeprefix("module."): gradient for name, gradient in ours.items()}, theirs, 1e-6)


def test_weights(both):
    """To the last bits of fp32: a weight near 1 moves by 1e-4 in these steps, and holds 6e-8 of it."""
    for found in both.found:
        for name, tensor in both.alone.model.state_dict().items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=2e-7, atol=1e-7)


def test_evaluation_of_rows_that_do_not_divide(both):
    """Every row counts once, on both processes."""
    expected = both.alone.evaluate()
    for found in both.found:
        for name in ("eval_loss", "eval_loss_consistency", "eval_tau", "eval_tau_pass_0", "eval_acceptance_slot_1"):
            assert found["metrics"][name] == pytest.approx(expected[name], rel=1e-6)


def test_checkpoint(both):
    """Written once, under the names that one process writes, and loadable."""
    tensors = load_file(both.folder / "checkpoint-3" / "model.safetensors")
    assert tensors.keys() == both.alone.model.state_dict().keys()
    assert all(torch.equal(tensor, both.found[0]["weights"][name]) for name, tensor in tensors.items())
    AutoModel.from_pretrained(both.folder / "checkpoint-3")


def test_resumed(both):
    """From step 2 to 3 by new trainers with other weights: bit for bit."""
    for found in both.found:
        assert found["resumed"]["log"] == found["log"]
        for name, tensor in found["weights"].items():
            assert torch.equal(found["resumed"]["weights"][name], tensor)


def test_sharded(both, monkeypatch):
    """Backbone and refiner in halves: the loss, gradients and second Muon step of one process; clean names on the disk."""
    multiply_in_fp32(monkeypatch)
    drafter = make_drafter(target())
    trainer = make_trainer(drafter, num_anchors=EVERY)
    loss = trainer.compute_loss(drafter, batch_of(trainer, ROWS[:4]))
    loss.backward()
    optimizer, found_gradients = MuonAdamW(drafter.named_parameters(), muon_lr=0.02, adamw_lr=1e-3), gradients(drafter)
    saved = AutoModel.from_pretrained(both.folder / "sharded")
    assert all(torch.equal(p, saved.get_parameter(name)) for name, p in drafter.named_parameters())
    optimizer.step(), optimizer.step()
    for found in both.found:
        assert found["sharded"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert found["sharded"]["share"] < 0.6
        assert_close(found["sharded"]["gradients"], found_gradients)
        straight, resumed = found["sharded"]["steps"]
        for name, p in drafter.named_parameters():
            assert torch.equal(resumed[name], straight[name]), name
            torch.testing.assert_close(straight[name], p, rtol=1e-6, atol=1e-6)


def test_launch_files():
    """What accelerate reads of the shipped files; the wrapped layer is the drafter's."""
    fsdp, deepspeed = (load_config_from_file(str(LAUNCH / f"{name}.yaml")) for name in ("fsdp2", "deepspeed_zero2"))
    assert (fsdp.distributed_type, deepspeed.distributed_type) == ("FSDP", "DEEPSPEED")
    layers = fsdp.fsdp_config["fsdp_transformer_layer_cls_to_wrap"].split(",")
    assert layers == [type(make_drafter(target()).layers[0]).__name__]
    assert deepspeed.deepspeed_config["zero_stage"] == 2
