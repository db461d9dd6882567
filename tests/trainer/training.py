"""Rows, trainers and slow references for the tests of training."""

import random
import tempfile

import torch
from rig import MASK_TOKEN, make_drafter, target
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
    return XPressTrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **{**defaults, **kwargs})


def make_trainer(drafter=None, model=None, rows=None, folder=None, **kwargs) -> XPressTrainer:
    """A trainer of a random drafter; what is no argument of `XPressTrainer` is one of its `args`."""
    model = target() if model is None else model
    drafter = make_drafter(model) if drafter is None else drafter
    parts = {key: kwargs.pop(key) for key in ("eval_dataset", "callbacks", "data_collator") if key in kwargs}
    args = make_args(folder, **kwargs)
    return XPressTrainer(drafter, model, args, train_dataset=make_rows(8) if rows is None else rows, **parts)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class Gradients(TrainerCallback):
    """Keeps what the optimiser is about to be given, step by step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append(gradients(model))


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
