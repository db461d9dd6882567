"""Which terms and sizes matter: the tiny pair's drafter trained many ways for equally many steps, measured alike.

    xpress study OUT ablation

`OUT` is a folder of `xpress build-tiny`: its target, the answers that its drafter was trained on, and the answers to
held-out questions, on which the simulated tau (accepted + 1) is measured at evenly spread positions, of the base logits and of
what the drafter itself would draft. Every run is the recipe `tiny` with some fields changed, and one line of `OUT/work/study/runs.jsonl`;
a killed study goes on with the next run.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

from .recipe_runs import make_trainer
from .recipes import read_recipe
from .tiny_pair import arithmetic


FROZEN = "frozen"  # of a variant: the weights that stay as they start, by the end of their names

EVALUATED = 40  # anchors of every held-out answer, evenly spread
NO_REFINER = {"xpress_rank": None, "xpress_mlp_hidden": None}
ABLATION = {
    "full objective": {},
    "without consistency": {"lambda_consistency": 0.0},
    "without anchor": {"lambda_anchor_start": 0.0, "lambda_anchor_end": 0.0},
    "CE only": {"ce_weight": 1.0},
    "no mixer": {FROZEN: "mix.L"},  # it starts at zero: a slot reads the one token before it alone
    "Markov head": NO_REFINER | {"markov_rank": 96},
    "backbone only": NO_REFINER,
}
CHOICES = {
    "as shipped": {},
    "1 layer": {"num_hidden_layers": 1},
    "3 layers": {"num_hidden_layers": 3},
    "block 4": {"block_size": 4},
    "block 16": {"block_size": 16},
    "rank 32": {"xpress_rank": 32, "xpress_mlp_hidden": 64},
    "rank 192": {"xpress_rank": 192, "xpress_mlp_hidden": 384},
    "1 round": {"num_rounds": 1},
    "6 rounds": {"num_rounds": 6},
    "20 anchors": {"num_anchors": 20},
    "80 anchors": {"num_anchors": 80},
}


def run_study(
    variants: dict[str, dict], seeds: Iterable[int], folder: Path, steps: int, on_run=lambda run: None
) -> list[dict]:
    """Trains what `folder/work/study/runs.jsonl` does not hold yet, seed by seed; returns the runs of these variants."""
    path = folder / "work" / "study" / "runs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(run["variant"], run["seed"], run["steps"]) for run in runs}
    for seed in seeds:
        for name in variants:
            if (name, seed, steps) in known:
                continue
            run = {"variant": name, "seed": seed, "steps": steps, **train_variant(variants[name], seed, folder, steps)}
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            runs.append(run)
            on_run(run)
    return [run for run in runs if run["steps"] == steps and run["variant"] in variants]


def train_variant(variant: dict, seed: int, folder: Path, steps: int) -> dict:
    """One run: its tau on the held-out answers, the drafter's parameters, and the seconds of its training."""
    settings = {
        "target": str(folder / "target"),
        "data": str(folder / "work" / "answers"),
        "eval_data": str(folder / "work" / "held-out"),
        "output_dir": str(folder / "work" / "study"),
        "max_steps": steps,
        "seed": seed,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": steps,
        **arithmetic(),
    }
    changes = {key: value for key, value in variant.items() if key != FROZEN}
    trainer = make_trainer(read_recipe("tiny", settings | changes))
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(FROZEN not in variant or not name.endswith(variant[FROZEN]))
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    trainer.args.num_anchors = EVALUATED  # the same for all, also where training takes others
    metrics = trainer.evaluate()
    return {
        "tau_base": metrics["eval_tau_pass_0"],
        "tau": metrics["eval_tau"],
        "parameters": trainer.model.num_parameters(),
        "seconds": seconds,
    }


def study_table(runs: list[dict]) -> str:
    """Markdown: mean and spread (standard deviation over seeds) of every variant, in the order of its first run."""
    lines = ["| | tau of the base | tau | parameters | train seconds |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(run["variant"] for run in runs):
        same = [run for run in runs if run["variant"] == name]
        columns = [_mean_and_spread([run[key] for run in same]) for key in ("tau_base", "tau")]
        seconds = mean(run["seconds"] for run in same)
        lines.append(f"| {name} | {' | '.join(columns)} | {same[0]['parameters'] / 1e6:.2f} M | {seconds:.0f} |")
    return "\n".join(lines)


def _mean_and_spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
