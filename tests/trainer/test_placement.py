"""Targets that stand where they were put: split, offloaded, quantised."""

import pytest
import torch
from rig import make_drafter, make_target, target
from training import EVERY, assert_close, batch_of, gradients, hashes, make_rows, make_trainer, moved
from transformers import AutoModelForCausalLM


def losses_and_gradients(model) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = make_trainer(make_drafter(target()), model, num_anchors=EVERY)
    loss = trainer.compute_loss(trainer.model, batch_of(trainer, make_rows(3)))
    loss.backward()
    return loss.item(), gradients(trainer.model)


def forbid_moving(model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the target was moved")

    monkeypatch.setattr(model, "to", refuse)


@pytest.mark.parametrize("head", ["cpu", "disk"])
def test_split_target(head, tmp_path, monkeypatch):
    """Every other layer, and once embedding and head too, on the disk: the same loss, gradients and steps."""
    make_target().save_pretrained(tmp_path / "target")
    device_map = {"model.embed_tokens": head, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": head}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    forbid_moving(model, monkeypatch)
    loss, found = losses_and_gradients(model)
    expected, theirs = losses_and_gradients(target())
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_close(found, theirs)
    drafter = make_drafter(target())
    before = hashes(drafter)
    trainer = make_trainer(drafter, model, eval_dataset=make_rows(2, seed=1))
    trainer.train()
    assert moved(drafter, before) == set(before) and trainer.evaluate()["eval_tau"] >= 1


class PackedLinear(torch.nn.Module):
    """A head without a float weight, as quantisers leave it."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        self.register_buffer("packed", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.packed * self.scale)


def test_quantised_target(monkeypatch):
    """It is called, never read, and not moved; gradients pass through its head as through one of the same values."""
    plain, packed = make_target(), make_target()
    packed.lm_head = PackedLinear(packed.lm_head)
    plain.lm_head.weight.data = packed.lm_head.packed * packed.lm_head.scale
    packed.hf_quantizer = object()
    forbid_moving(packed, monkeypatch)
    (loss, found), (expected, theirs) = losses_and_gradients(packed), losses_and_gradients(plain)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_close(found, theirs)


def test_other_targets_are_moved(monkeypatch):
    model, devices = make_target(), []
    to = model.to
    monkeypatch.setattr(model, "to", lambda device: devices.append(device) or to(device))
    make_trainer(make_drafter(model), model)
    assert devices == [torch.device("cpu")]
