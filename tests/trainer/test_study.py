"""The study of variants, and the objective's benchmark, on shapes that take no time."""

import json

import pytest
import torch
from datasets import Dataset
from rig import MASK_TOKEN, target
from training import make_rows
from xpress_drafter.trainer import study
from xpress_drafter.trainer.benchmark import measure, objective_ways
from xpress_drafter.trainer.study import ABLATION, CHOICES, Variant, run_study, study_table


@pytest.fixture
def small(monkeypatch):
    """The study's drafter cut down to the tests' target."""
    sizes = {"num_hidden_layers": 1, "target_layer_ids": [1], "block_size": 4, "xpress_rank": 8, "xpress_mlp_hidden": 8}
    monkeypatch.setattr(study, "DRAFTER", sizes)
    monkeypatch.setattr(study, "ARGS", {"per_device_train_batch_size": 2, "num_anchors": 4})
    return {
        "target": target(),
        "mask_token_id": MASK_TOKEN,
        "rows": Dataset.from_list(make_rows(8)),
        "held_out": Dataset.from_list(make_rows(4, seed=1)),
    }


def test_every_variant_trains_and_a_killed_study_goes_on(small, tmp_path):
    told = []
    runs = run_study(ABLATION, [0], **small, steps=2, out=tmp_path, on_run=told.append)
    assert [run["variant"] for run in runs] == [run["variant"] for run in told] == list(ABLATION)
    by_name = {run["variant"]: run for run in runs}
    assert all(run["tau"] >= 1 and run["tau_base"] >= 1 for run in runs)
    assert by_name["backbone only"]["parameters"] < by_name["Markov head"]["parameters"]
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    again = run_study(ABLATION, [0], **small, steps=2, out=tmp_path, on_run=told.append)
    assert told[len(ABLATION) :] == [again[-1]] and again[-1]["variant"] == "backbone only"
    measured = ("variant", "seed", "tau", "tau_base")
    assert [again[-1][key] for key in measured] == [json.loads(lines[-1])[key] for key in measured]


def test_no_mixer_means_none(small, tmp_path):
    torch.manual_seed(0)
    kept = {}

    class Keeping(study.XPressTrainer):
        def __init__(self, drafter, *args, **kwargs):
            super().__init__(drafter, *args, **kwargs)
            kept["drafter"] = drafter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "XPressTrainer", Keeping)
        run_study({"no mixer": ABLATION["no mixer"]}, [0], **small, steps=2, out=tmp_path)
        assert not kept["drafter"].xpress_head.mix.L.any()
        run_study({"full": Variant()}, [0], **small, steps=2, out=tmp_path)
        assert kept["drafter"].xpress_head.mix.L.any()


def test_table():
    """Mean and standard deviation over seeds, worked by hand; one seed has no spread."""
    run = {"parameters": 1_500_000, "seconds": 10.0}
    runs = [
        {"variant": "a", "seed": 0, "tau_base": 1.0, "tau": 2.0, **run},
        {"variant": "b", "seed": 0, "tau_base": 1.25, "tau": 1.5, **run},
        {"variant": "a", "seed": 1, "tau_base": 2.0, "tau": 4.0, **run},
    ]
    assert study_table(runs).splitlines()[2:] == [
        "| a | 1.500 ± 0.707 | 3.000 ± 1.414 | 1.50 M | 10 |",
        "| b | 1.250 | 1.500 | 1.50 M | 10 |",
    ]


def test_choices_differ_from_what_is_shipped():
    shipped = {**study.DRAFTER, **study.ARGS, "num_rounds": 3}
    for name, variant in CHOICES.items():
        changes = variant.drafter | variant.args
        assert all(shipped[key] != value for key, value in changes.items()), name
        assert bool(changes) == (name != "as shipped")


def test_benchmark_runs_both_forms_on_the_same_blocks():
    ways = objective_ways(97, 16, 8, 16, 4, 5, torch.float32)
    assert list(ways) == ["bounded", "dense"]
    losses = []
    for way in ways.values():
        objective, refiner, h, inputs, _ = way.args
        losses.append(objective(refiner, h, inputs)[0].item())
        seconds, megabytes = measure(way, repeats=1)
        assert seconds > 0 and megabytes > 100
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
