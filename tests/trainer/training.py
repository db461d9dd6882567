"""Rows, trainers and slow references for the tests of training."""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rig import MASK_TOKEN, make_drafter, target
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from xpress_drafter.trainer import XPressTrainer, XPressTrainingArguments


EVERY = 64  # more anchors than any test row holds: all of them are drawn, whatever the seed


def make_rows(n: int, seed: int = 0) -> list[dict]:
    """Random rows of 10 to 24 tokens behind a prompt of 2 to 6, so that no two batches supervise alike."""
    draw, rows = random.Random(seed), []
    for _ in range(n):
        length, prompt = draw.randint(10, 24), draw.randint(2, 6)
        ids = [draw.randrange(MASK_TOKEN) for _ in range(length)]
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt)})
    return rows


def fresh_process(module: str, function: str, *args) -> subprocess.Popen:
    """`function(*args)` of a test module here, in an interpreter of its own: a fork would wait for threads it lacks."""
    here = str(Path(__file__).parent)
    start = "import sys, torch; sys.path[:0] = sys.argv[1:3]; torch.set_num_threads(1); "  # as in this process
    start += f"import {module}; {module}.{function}(*sys.argv[3:])"
    return subprocess.Popen([sys.executable, "-c", start, here, str(Path(here).parent), *map(str, args)])


def hashes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def losses(trainer) -> list[dict]:
    """The training logs, without what no two runs share."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: value for key, value in entry.items() if key != "anchors_per_second"} for entry in logs]


def make_args(folder=None, **kwargs) -> XPressTrainingArguments:
    defaults = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_anchors": 4,
        "logging_steps": 1,
        "warmup_steps": 0,
        "save_strategy": "no",
    }
    folder = str(folder or tempfile.gettempdir())
    defaults |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return XPressTrainingArguments(folder, **{**defaults, **kwargs})


PARTS = ("eval_dataset", "callbacks", "data_collator", "optimizers", "peft_config")


def make_trainer(drafter=None, model=None, rows=None, folder=None, **kwargs) -> XPressTrainer:
    """A trainer of a random drafter; what is no argument of `XPressTrainer` is one of its `args`."""
    model = target() if model is None else model
    drafter = make_drafter(model) if drafter is None else drafter
    parts = {key: kwargs.pop(key) for key in PARTS if key in kwargs}
    args = make_args(folder, **kwargs)
    return XPressTrainer(drafter, model, args, train_dataset=make_rows(8) if rows is None else rows, **parts)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class Stop(TrainerCallback):
    """Ends the run after that many steps."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


class Gradients(TrainerCallback):
    """Keeps what the optimiser is about to be given, step by step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append(gradients(model))


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made inside held at a time; what one operation takes for itself alone is not seen."""

    def __init__(self):
        super().__init__()
        self.sizes, self.bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.bytes = max(self.bytes, sum(self.sizes.values()))
        return result


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-6):
    """The same names, and the same values measured by the norm of all of them."""
    assert ours.keys() == theirs.keys()
    norm = sum(value.double().pow(2).sum() for value in theirs.values()).sqrt()
    assert norm > 0
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= tolerance * norm, name


def batch_of(trainer: XPressTrainer, rows: list[dict], anchors=None) -> dict[str, torch.Tensor]:
    """The rows as the trainer's step gets them; `anchors` is a list of positions for each row, all where omitted."""
    batch = trainer.data_collator(rows)
    trainer.draw_anchors(batch, torch.Generator().manual_seed(0))
    if anchors is not None:
        longest = max(map(len, anchors))
        batch["anchors"] = torch.tensor([list(row) + [0] * (longest - len(row)) for row in anchors])
        batch["anchor_valid"] = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in anchors])
    return batch
