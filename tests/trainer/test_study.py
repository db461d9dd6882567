"""The study of variants, and the objective's benchmark, on shapes that take no time."""

import json
import shutil

import psutil
import pytest
import torch
from typer.testing import CliRunner
from xpress_drafter import cli_lab
from xpress_drafter.cli import TINY, app
from xpress_drafter.trainer import benchmark, bfloat16, study
from xpress_drafter.trainer.benchmark import measure, objective_ways, peak_megabytes
from xpress_drafter.trainer.recipe_runs import make_trainer
from xpress_drafter.trainer.recipes import read_recipe
from xpress_drafter.trainer.study import ABLATION, CHOICES, run_study, study_table
from xpress_drafter.trainer.tiny_pair import answer, arithmetic


QUESTIONS = ["Ann has 3 pens and buys 4 more. How many pens has she?", "Bo eats 2 of 9 figs. How many are left?"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder as `xpress build-tiny` leaves it, of the shipped target and two questions."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(TINY / "target", folder / "target")
    for name in ("answers", "held-out"):
        assert len(answer(QUESTIONS, folder, name)[0]) == 2
    return folder


def test_every_variant_trains_and_a_killed_study_goes_on(built):
    told = []
    runs = run_study(ABLATION, [0], built, 1, told.append)
    assert [run["variant"] for run in runs] == [run["variant"] for run in told] == list(ABLATION)
    by_name = {run["variant"]: run for run in runs}
    assert all(run["tau"] >= 1 and run["tau_base"] >= 1 for run in runs)
    assert by_name["backbone only"]["parameters"] < by_name["Markov head"]["parameters"]
    path = built / "work" / "study" / "runs.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    again = run_study(ABLATION, [0], built, 1, told.append)
    assert told[len(ABLATION) :] == [again[-1]] and again[-1]["variant"] == "backbone only"
    measured = ("variant", "seed", "tau", "tau_base")
    assert [again[-1][key] for key in measured] == [json.loads(lines[-1])[key] for key in measured]


def test_the_command(built, monkeypatch):
    """The runs as they end, then the table; a second call trains nothing."""
    monkeypatch.setattr(study, "ABLATION", {"without consistency": ABLATION["without consistency"]})
    arguments = ["study", str(built), "ablation", "--steps", "2", "--seeds", "1"]
    first, again = (CliRunner().invoke(app, arguments, catch_exceptions=False).output for _ in range(2))
    assert first.count("without consistency") == 2 and again.count("without consistency") == 1
    assert again.splitlines()[-1] in first


def test_no_mixer_means_none(built, monkeypatch):
    monkeypatch.setattr(bfloat16, "multiplies_bf16", lambda device: False)
    kept = []

    def keep(recipe):
        kept.append(make_trainer(recipe))
        return kept[-1]

    monkeypatch.setattr(study, "make_trainer", keep)
    for name in ("no mixer", "full objective"):
        study.train_variant(ABLATION[name], 0, built, 2)  # the first step's rate is 0
    without, full = (trainer.model.xpress_head for trainer in kept)
    assert not without.mix.L.any() and full.mix.L.any()
    assert [(each.args.bf16, each.target.dtype) for each in kept] == [(False, torch.float32)] * 2


def test_arithmetic_is_the_cpu_s(monkeypatch):
    """Of the drafter and of the study: the recipe's bf16 only where the CPU has it."""
    monkeypatch.setattr(bfloat16, "multiplies_bf16", lambda device: True)
    recipe = read_recipe("tiny")
    assert arithmetic() == {"bf16": recipe.setting("bf16"), "target_dtype": recipe.target_dtype}
    monkeypatch.setattr(bfloat16, "multiplies_bf16", lambda device: False)
    assert arithmetic() == {"bf16": False, "target_dtype": "float32"}


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


def test_variants_differ_from_the_recipe():
    shipped = read_recipe("tiny").values()
    for name, variant in (ABLATION | CHOICES).items():
        assert all(shipped.get(key) != value for key, value in variant.items()), name
        assert bool(variant) == (name not in ("full objective", "as shipped"))


def test_benchmark_runs_both_forms_on_the_same_blocks():
    ways = objective_ways(97, 16, 8, 16, 4, 5, torch.float32)
    assert list(ways) == ["bounded", "dense"]
    losses = []
    for way in ways.values():
        objective, refiner, h, inputs, _ = way.args
        losses.append(objective(refiner, h, inputs)[0].item())
        assert measure(way, repeats=1)[0] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_memory_is_measured():
    """The peak is no less than what the process holds, and rises by what a way takes on top, in MB."""
    held, before = psutil.Process().memory_info().rss / 2**20, peak_megabytes()
    assert held < before + 1
    megabytes = before - held + 64
    _, peak = measure(lambda: torch.ones(int(megabytes * 2**18)), repeats=1)  # of 4 bytes
    assert before + 32 < peak < before + 96


@pytest.mark.parametrize(("bf16", "said"), [(True, "bfloat16"), (False, "float32")])
def test_benches_compute_in_what_the_cpu_has_and_say_so(monkeypatch, bf16, said):
    monkeypatch.setattr(bfloat16, "multiplies_bf16", lambda device: bf16)
    sizes = ["--vocab-size", "256", "--hidden-size", "32", "--repeats", "1"]
    objective = [*sizes, "--anchors", "8"]
    refine = [*sizes, "--rank", "8", "--mlp-width", "16", "--block-size", "4", "--shortlist", "16"]
    used = []

    def seen(ways):
        def build(*args):
            used.append(args[-1])
            return ways(*args)

        return build

    monkeypatch.setattr(benchmark, "objective_ways", seen(objective_ways))
    monkeypatch.setattr(cli_lab, "refinement_ways", seen(cli_lab.refinement_ways))
    for name, options in (("bench-objective", objective), ("bench-refine", refine)):
        shown = CliRunner().invoke(app, [name, *options], catch_exceptions=False).output
        assert f", {said}, " in " ".join(shown.split())
    assert set(used) == {getattr(torch, said)}


def test_bench_objective_as_typed():
    sizes = ["--vocab-size", "256", "--hidden-size", "32", "--anchors", "8", "--repeats", "1"]
    shown = CliRunner().invoke(app, ["bench-objective", *sizes], catch_exceptions=False).output
    assert shown.count("bounded") == 4 and "times as fast" in shown
