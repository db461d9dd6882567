"""Which terms and sizes matter: the tiny pair's drafter trained many ways for equally many steps, measured alike.

    xpress study OUT

`OUT` is a folder of `xpress build-tiny`: its target, the answers that its drafter was trained on, and the answers to held-out
questions, on which the simulated tau (accepted + 1) is measured, of the base logits and of what the drafter itself would draft. Every
run is one line of `OUT/work/study/runs.jsonl`; a killed study goes on with the next run.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from datasets import Dataset
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup, set_seed

from ..generation import XPressDrafterModel
from .optimizer import MuonAdamW
from .xpress_trainer import XPressTrainer, XPressTrainingArguments


DRAFTER = {
    "num_hidden_layers": 2,
    "target_layer_ids": [2, 5, 8],
    "block_size": 8,
    "xpress_rank": 64,
    "xpress_mlp_hidden": 128,
}
ARGS = {"per_device_train_batch_size": 2, "num_anchors": 40, "train_sampling_strategy": "group_by_length"}


class Variant(NamedTuple):
    """What differs from the full objective on the tiny pair's drafter; weights named in `frozen` stay as they start."""

    drafter: dict = {}
    args: dict = {}
    frozen: str = ""


ABLATION = {
    "full objective": Variant(),
    "without consistency": Variant(args={"lambda_consistency": 0.0}),
    "without anchor": Variant(args={"lambda_anchor_start": 0.0, "lambda_anchor_end": 0.0}),
    "CE only": Variant(args={"ce_weight": 1.0}),
    "no mixer": Variant(frozen="mix.L"),  # it starts at zero: slots read the token before them alone
    "Markov head": Variant(drafter={"xpress_rank": None, "markov_rank": 64}),
    "backbone only": Variant(drafter={"xpress_rank": None}),
}
CHOICES = {
    "as shipped": Variant(),
    "1 layer": Variant(drafter={"num_hidden_layers": 1}),
    "3 layers": Variant(drafter={"num_hidden_layers": 3}),
    "block 4": Variant(drafter={"block_size": 4}),
    "block 16": Variant(drafter={"block_size": 16}),
    "rank 16": Variant(drafter={"xpress_rank": 16, "xpress_mlp_hidden": 32}),
    "rank 128": Variant(drafter={"xpress_rank": 128, "xpress_mlp_hidden": 256}),
    "1 round": Variant(args={"num_rounds": 1}),
    "6 rounds": Variant(args={"num_rounds": 6}),
    "20 anchors": Variant(args={"num_anchors": 20}),
    "80 anchors": Variant(args={"num_anchors": 80}),
}


def run_study(
    variants: dict[str, Variant],
    seeds: Iterable[int],
    target: PreTrainedModel,
    mask_token_id: int,
    rows: Dataset,
    held_out: Dataset,
    steps: int,
    out: Path,
    on_run=print,
) -> list[dict]:
    """Trains what `out/runs.jsonl` does not hold yet, seed by seed; returns all its lines."""
    path = out / "runs.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(run["variant"], run["seed"], run["steps"]) for run in done}
    for seed in seeds:
        for name, variant in variants.items():
            if (name, seed, steps) in known:
                continue
            run = {"variant": name, "seed": seed, "steps": steps}
            run |= train_variant(variant, seed, target, mask_token_id, rows, held_out, steps, out)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            done.append(run)
            on_run(run)
    return [run for run in done if run["steps"] == steps and run["variant"] in variants]


def train_variant(variant: Variant, seed: int, target, mask_token_id: int, rows, held_out, steps: int, out: Path):
    """One run: its metrics on the held-out answers, parameters, and seconds of training."""
    set_seed(seed)
    drafter = XPressDrafterModel.for_target(target, mask_token_id=mask_token_id, **(DRAFTER | variant.drafter))
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not (variant.frozen and name.endswith(variant.frozen)))
    args = XPressTrainingArguments(
        output_dir=str(out / "unused"),
        max_steps=steps,
        per_device_eval_batch_size=8,
        bf16=True,
        save_strategy="no",
        report_to=[],
        seed=seed,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=steps,
        **(ARGS | variant.args),
    )
    trained = [(name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    optimizer = MuonAdamW(trained, muon_lr=0.02, adamw_lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=40, num_training_steps=steps)
    trainer = XPressTrainer(
        drafter, target, args, train_dataset=rows, eval_dataset=held_out, optimizers=(optimizer, schedule)
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    metrics = trainer.evaluate()
    return {
        "tau_base": metrics["eval_tau_pass_0"],
        "tau": metrics["eval_tau"],
        "parameters": drafter.num_parameters(),
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
