"""The target's states on the disk: known size, the same training, and never another's."""

import pytest
import torch
from rig import HIDDEN, TAPS, make_drafter, make_target, target
from training import EVERY, losses, make_rows, make_trainer
from xpress_drafter.trainer.feature_cache import cache_bytes, cache_features


GIGABYTE = 2**30


def forbid_layers(model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the target's layers were run")

    monkeypatch.setattr(model.get_decoder(), "forward", refuse)


def make_cache(folder, model=None, rows=None, **kwargs):
    model, rows = model or target(), rows or make_rows(4)
    config = kwargs.pop("config", make_drafter(target()).config)
    return cache_features(model, config, rows, folder, **{"max_bytes": GIGABYTE, **kwargs})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_is_known_beforehand(tmp_path, dtype):
    """By hand, by the estimate, and on the disk."""
    rows, drafter = make_rows(4), make_drafter(target())
    tokens = sum(len(row["input_ids"]) for row in rows)
    size = tokens * (len(TAPS) + 1) * HIDDEN * dtype.itemsize
    assert cache_bytes(tokens, drafter.config, dtype) == size
    make_cache(tmp_path, make_target().to(dtype), rows)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_training_is_the_same(tmp_path, batch_size, monkeypatch):
    """Losses, with and without the cache; the target's layers are not run again, nor for a second cache of the same."""
    rows, held_out, model = make_rows(8), make_rows(3, seed=1), make_target()
    kwargs = {"max_steps": 3, "num_anchors": EVERY}
    online = make_trainer(rows=rows, eval_dataset=held_out, **kwargs)
    online.train()
    cached = [make_cache(tmp_path, model, part, batch_size=batch_size) for part in (rows, held_out)]
    forbid_layers(model, monkeypatch)
    trainer = make_trainer(make_drafter(target()), model, cached[0], eval_dataset=cached[1], **kwargs)
    trainer.train()
    for ours, theirs in zip(losses(trainer), losses(online)):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(online.evaluate()["eval_loss"], rel=1e-4)
    assert torch.equal(make_cache(tmp_path, model, rows)[2]["features"], cached[0][2]["features"])


def test_another_cache_is_not_taken_for_ones_own(tmp_path):
    """Other tokens, another target, other layers, another dtype, other rows' manifest: each a file of its own."""
    model = make_target()
    make_cache(tmp_path, model)
    rows = make_rows(4)
    rows[3]["input_ids"][-1] += 1
    make_cache(tmp_path, model, rows)
    make_cache(tmp_path, model, manifest={"temperature": 0.7})
    make_cache(tmp_path, model, manifest={"temperature": 0.0})
    make_cache(tmp_path, model, config=make_drafter(target(), target_layer_ids=[1, 2]).config)
    make_cache(tmp_path, make_target(seed=1))
    make_cache(tmp_path, make_target().bfloat16())
    assert len(list(tmp_path.iterdir())) == 7
    make_cache(tmp_path, model)
    assert len(list(tmp_path.iterdir())) == 7


def test_a_cache_that_was_cut_off_is_written_again(tmp_path, monkeypatch):
    model, expected = make_target(), make_cache(tmp_path / "whole")
    calls = []

    def die_at_the_second(module, args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    hook = model.model.layers[3].register_forward_pre_hook(die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        make_cache(tmp_path / "cut", model, batch_size=2)
    hook.remove()
    assert [path.suffix for path in (tmp_path / "cut").iterdir()] == [".partial"]
    again = make_cache(tmp_path / "cut", model)
    assert [path.suffix for path in (tmp_path / "cut").iterdir()] == [".states"]
    for ours, theirs in zip(again, expected):
        assert torch.equal(ours["features"], theirs["features"]) and torch.equal(ours["states"], theirs["states"])


def test_too_large(tmp_path):
    """Refused with both numbers, before a file is there."""
    size = cache_bytes(
        sum(len(row["input_ids"]) for row in make_rows(4)), make_drafter(target()).config, torch.float32
    )
    with pytest.raises(ValueError, match=f"would take {size:,} bytes; allowed are 1,000"):
        make_cache(tmp_path / "cache", max_bytes=1000)
    assert not list((tmp_path / "cache").iterdir())
