"""A run that was stopped or killed goes on as if it had not been; and what of it lies on the disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rig import make_drafter, plain, prompt, target
from training import Stop, fresh_process, hashes, losses, make_rows, make_trainer, moved
from xpress_drafter.trainer import checkpoints
from xpress_drafter.trainer.optimizer import MuonAdamW


# Epochs of seven batches, so that steps of two batches straddle them, and averages of two steps straddle checkpoints.
RUN = {
    "max_steps": 10,
    "per_device_train_batch_size": 2,
    "warmup_steps": 3,
    "num_anchors": 3,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 5,
}


def make_run(folder, drafter=None, **kwargs):
    """A trainer, and a file that what it reads is written to: step, tokens and anchors of every batch."""
    trainer = make_trainer(drafter, rows=make_rows(14), folder=folder, **{**RUN, **kwargs})
    objective, path = trainer.objective, Path(folder, "seen.jsonl")

    def recorded(model, inputs, *args):
        with path.open("a") as file:
            entry = [trainer.state.global_step, inputs["input_ids"].tolist(), inputs["anchors"].tolist()]
            file.write(json.dumps(entry) + "\n")
        return objective(model, inputs, *args)

    trainer.objective = recorded
    return trainer, path


def seen(path: Path, start: int = 0) -> list:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry[0] >= start]


def assert_same_run(resumed, straight):
    """Losses, learning rates and all other logs; weights; and what the weights and moments are kept in."""
    assert resumed.state.global_step == straight.state.global_step == 10
    assert losses(resumed) == losses(straight) and len(losses(straight)) == 6  # steps 2, 4, 5, 6, 8, 10
    assert moved(resumed.model, hashes(straight.model)) == set()
    for trainer in (resumed, straight):
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        moments = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim() > 0]
        assert moments and {moment.dtype for moment in moments} == {torch.float32}
        assert all(p.requires_grad for p in trainer.model.parameters())
        assert not any(p.requires_grad or p.grad is not None for p in trainer.target.parameters())
        assert not any(module.training for module in trainer.target.modules())


@pytest.mark.parametrize("bf16, accumulation", [(False, 1), (False, 2), (True, 2)])
def test_stopped_and_resumed(tmp_path, bf16, accumulation):
    """Ten steps, against five, a stop and five by another trainer that began with other weights."""
    kwargs = {"bf16": bf16, "gradient_accumulation_steps": accumulation}
    straight, straight_path = make_run(tmp_path / "straight", **kwargs)
    straight.train()
    stopped, path = make_run(tmp_path / "run", callbacks=[Stop(5)], **kwargs)
    stopped.train()
    resumed, _ = make_run(tmp_path / "run", make_drafter(target(), seed=9), **kwargs)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)
    assert seen(path) == seen(straight_path)  # nothing twice, nothing left out
    assert len({str(entry) for entry in seen(path)}) == {1: 10, 2: 18}[accumulation]  # an epoch's fourth step has one


# What a run that dies is killed at: amid the checkpoint of step 6, weights and optimizer on the disk, or amid step 6 behind
# that of step 5; when checkpoints are written, how many batches each step takes, and from which step a rerun goes on.
KILLED = {"checkpoint": (3, 2, 3), "step": (5, 1, 5)}


def killed_run(folder: str, at: str):
    """Dies by its own hand."""
    save_steps, accumulation, _ = KILLED[at]
    trainer, _ = make_run(folder, save_steps=save_steps, gradient_accumulation_steps=accumulation)
    save, step = trainer._save_rng_state, trainer.compute_loss

    def save_or_die(output_dir: str):
        if at == "checkpoint" and trainer.state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        save(output_dir)

    def step_or_die(*args, **kwargs):
        loss = step(*args, **kwargs)
        if at == "step" and trainer.state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    trainer._save_rng_state, trainer.compute_loss = save_or_die, step_or_die
    trainer.train()


@pytest.mark.parametrize("at", KILLED)
def test_killed_and_resumed(tmp_path, at):
    """By SIGKILL: the rerun passes over what was not written to its end, goes on from the checkpoint before, and ends the same."""
    killed = fresh_process("test_resume", "killed_run", tmp_path / "run", at)
    save_steps, accumulation, start = KILLED[at]
    kwargs = {"save_steps": save_steps, "gradient_accumulation_steps": accumulation}
    straight, straight_path = make_run(tmp_path / "straight", **kwargs)
    straight.train()
    assert killed.wait(timeout=120) == -signal.SIGKILL
    assert (tmp_path / "run" / "checkpoint-6" / "model.safetensors").exists() == (at == "checkpoint")
    assert seen(tmp_path / "run" / "seen.jsonl") == [entry for entry in seen(straight_path) if entry[0] < 6]
    (tmp_path / "run" / "seen.jsonl").unlink()
    resumed, path = make_run(tmp_path / "run", make_drafter(target(), seed=9), **kwargs)
    resumed.train(resume_from_checkpoint=True)
    assert seen(path) == seen(straight_path, start=start)
    assert losses(resumed) == losses(straight)
    assert moved(resumed.model, hashes(straight.model)) == set()
    assert checkpoints.last_whole_checkpoint(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-10")


def test_resumed_with_two_optimizers_in_one(tmp_path):
    """Muon for matrices and AdamW for the rest, and a schedule handed in with it."""

    def run(folder, seed: int, **kwargs):
        drafter = make_drafter(target(), seed=seed)
        optimizer = MuonAdamW(drafter.named_parameters(), muon_lr=0.02, adamw_lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return make_run(folder, drafter, optimizers=(optimizer, schedule), **kwargs)[0]

    straight = run(tmp_path / "straight", 1)
    straight.train()
    run(tmp_path / "run", 1, callbacks=[Stop(5)]).train()
    resumed = run(tmp_path / "run", 9)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)
    assert moved(resumed.model, hashes(straight.model)) == set()


def test_where_a_run_goes_on(tmp_path):
    """From the last whole checkpoint by number, from the start where there is none; never from weights alone."""
    trainer, _ = make_run(tmp_path, max_steps=2, save_steps=1, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    for step in (9, 10):
        shutil.copytree(tmp_path / "checkpoint-2", tmp_path / f"checkpoint-{step}")
    assert checkpoints.last_whole_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 1')
    assert checkpoints.last_whole_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-9" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-9 has no trainer_state.json, expected a checkpoint that"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-2 holds no optimizer, as `save_only_model=True` writes it"):
        trainer.train(resume_from_checkpoint=True)


# What lies on the disk.

DRAFTER_FILES = {"config.json", "model.safetensors", "training_args.bin", "trainer_state.json"}
RESUME_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


def test_what_checkpoints_hold(tmp_path):
    """As many as allowed; with and without what resuming needs; never a tensor of the target."""
    for only in (False, True):
        folder = tmp_path / str(only)
        make_run(folder, max_steps=3, save_steps=1, save_total_limit=2, save_only_model=only)[0].train()
        kept = sorted(path for path in folder.iterdir() if path.is_dir())
        assert [path.name for path in kept] == ["checkpoint-2", "checkpoint-3"]
        files = {path.name: path.stat().st_size for path in kept[-1].iterdir()}
        others = {name for name in files if not name.endswith(".py")}
        assert others == DRAFTER_FILES | (set() if only else RESUME_FILES)
        weights = 4 * sum(p.numel() for p in make_drafter(target()).parameters())
        assert weights < files["model.safetensors"] < weights + 8_000
        assert only or 2 * weights < files["optimizer.pt"] < 2 * weights + 40_000


WITHOUT_US = """
import sys
sys.modules["xpress_drafter"] = None  # importing it raises
import torch
from transformers import AutoModel, AutoModelForCausalLM
drafter = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
target = AutoModelForCausalLM.from_pretrained(sys.argv[2])
ids = torch.load(sys.argv[3])
output = target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
torch.save((output.sequences, [tuple(round) for round in output.drafting.rounds]), sys.argv[3])
"""


def test_a_checkpoint_generates_where_we_are_not_installed(tmp_path):
    trainer, _ = make_run(tmp_path / "run", max_steps=1, save_steps=1, save_only_model=True)
    trainer.train()
    target().save_pretrained(tmp_path / "target")
    torch.save(prompt(), tmp_path / "ids.pt")
    folders = [tmp_path / "run" / "checkpoint-1", tmp_path / "target", tmp_path / "ids.pt"]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_US, *map(str, folders)], check=True, env=environment)
    sequences, rounds = torch.load(tmp_path / "ids.pt")
    ours = target().generate(
        prompt(), assistant_model=trainer.model.eval(), max_new_tokens=20, return_dict_in_generate=True
    )
    assert torch.equal(sequences, plain(target(), prompt(), 20))
    assert rounds == [tuple(round) for round in ours.drafting.rounds] and len(rounds) > 1


def test_a_run_that_ended_takes_no_step_more(tmp_path):
    """Ended inside an epoch: the call that began it only loads what it left."""
    options = {"rows": make_rows(16), "folder": tmp_path, "max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    first, again = make_trainer(**options), make_trainer(**options)
    first.train()
    assert again.train(resume_from_checkpoint=True).global_step == again.state.global_step == 3
    weights = again.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in first.model.state_dict().items())
