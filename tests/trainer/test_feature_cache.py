"""The target's states on the disk: known size, the same training, and never another's."""

import shutil
from threading import Thread

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
    tables = [(rows, kwargs.pop("manifest", None))]
    (cached,) = cache_features(model, config, tables, folder, **{"max_bytes": GIGABYTE, **kwargs})
    return cached


def states(folder) -> list:
    """The whole files; the folder's lock may lie beside them."""
    return sorted(folder.glob("*.states"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_is_known_beforehand(tmp_path, dtype):
    """By hand, by the estimate, and on the disk."""
    rows, drafter = make_rows(4), make_drafter(target())
    tokens = sum(len(row["input_ids"]) for row in rows)
    size = tokens * (len(TAPS) + 1) * HIDDEN * dtype.itemsize
    assert cache_bytes(tokens, drafter.config, dtype) == size
    make_cache(tmp_path, make_target().to(dtype), rows)
    assert sum(path.stat().st_size for path in states(tmp_path)) == pytest.approx(size, rel=0.05)


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
    assert len(states(tmp_path)) == 7
    make_cache(tmp_path, model)
    assert len(states(tmp_path)) == 7


def test_a_cache_that_was_cut_off_is_written_again(tmp_path, monkeypatch):
    """What is left of it, and of one begun by an earlier version, is gone before the space is measured."""
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
    left = tmp_path / "cut" / states(tmp_path / "whole")[0].with_suffix(".partial").name
    left.write_bytes(bytes(100))
    assert len(list((tmp_path / "cut").glob("*.partial"))) == 2 and not states(tmp_path / "cut")
    measured, usage = [], shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: measured.append(left.exists()) or usage(folder))
    again = make_cache(tmp_path / "cut", model)
    assert measured == [False] and len(states(tmp_path / "cut")) == 1
    assert not list((tmp_path / "cut").glob("*.partial"))
    assert_same(again, expected)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one["features"], other["features"]) and torch.equal(one["states"], other["states"])


def test_another_run_waits_for_the_one_that_writes(tmp_path, monkeypatch):
    """One that begins while another is half through takes its file, whole, and reads nothing itself."""
    expected = make_cache(tmp_path / "alone", batch_size=2)
    reader, second = make_target(), []
    forbid_layers(reader, monkeypatch)
    thread = Thread(target=lambda: second.append(make_cache(tmp_path / "shared", reader)))
    model = make_target()
    calls = []

    def begin_the_second(module, args):
        calls.append(1)
        if len(calls) == 2:
            thread.start()
            thread.join(timeout=2)  # long enough for it to find no file
            assert thread.is_alive() and not second

    model.model.layers[3].register_forward_pre_hook(begin_the_second)
    first = make_cache(tmp_path / "shared", model, batch_size=2)
    thread.join(timeout=60)
    assert_same(first, expected)
    assert_same(second[0], expected)


def test_too_large(tmp_path):
    """Refused with the numbers, before a file is there: all tables together, beside what lies there already."""
    drafter, tables = make_drafter(target()), [(make_rows(4, seed), None) for seed in (0, 1)]
    sizes = [
        cache_bytes(sum(len(row["input_ids"]) for row in rows), drafter.config, torch.float32) for rows, _ in tables
    ]
    folder = tmp_path / "cache"

    def cache(tables, max_bytes):
        return cache_features(target(), drafter.config, tables, folder, max_bytes=max_bytes)

    with pytest.raises(ValueError, match=f"would take {sum(sizes):,} bytes beside 0 .* allowed are {max(sizes):,}"):
        cache(tables, max(sizes))
    assert not states(folder) and not list(folder.glob("*.partial"))
    cache(tables[:1], sum(sizes) - 1)
    with pytest.raises(ValueError, match=f"would take {sizes[1]:,} bytes beside {sizes[0]:,} that lie in"):
        cache(tables, sum(sizes) - 1)
    assert [path.stat().st_size for path in states(folder)] == [sizes[0]]
    cache(tables, sum(sizes))
    assert sum(path.stat().st_size for path in states(folder)) == sum(sizes)
    cache(tables, 0)  # nothing is written
