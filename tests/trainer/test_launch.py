"""The command that a reader launches on several devices, and the files that it is given."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from training import losses
from transformers import AutoModel
from xpress_drafter import trainer as trainer_room
from xpress_drafter.cli import PROBLEMS, TINY
from xpress_drafter.trainer.answers import AnswerSettings, write_rows
from xpress_drafter.trainer.prompts import read_conversations
from xpress_drafter.trainer.recipe_runs import run
from xpress_drafter.trainer.recipes import parse_overrides, read_recipe


LAUNCH = Path(trainer_room.__file__).parent / "launch"
# All anchors of the short answers are drawn, and rows come in one order, however the batch is cut.
EVERYTHING = ["num_anchors=64", "train_sampling_strategy=random", "per_device_train_batch_size=1"]
RUN = ["max_steps=3", "warmup_steps=0", "logging_steps=1", "bf16=false", "target_dtype=float32", "disable_tqdm=true"]


def test_two_processes_train_as_one(tmp_path):
    """`accelerate launch` of the shipped file: losses of one process that accumulates two batches, and a drafter that loads."""
    settings = AnswerSettings(str(TINY / "target"), max_new_tokens=16, batch_size=6, dtype="float32")
    write_rows(read_conversations(str(PROBLEMS), limit=6), tmp_path / "rows", settings)
    own = [f"target={TINY / 'target'}", f"data={tmp_path / 'rows'}", *EVERYTHING, *RUN]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "cpu.yaml")]
    train = ["-m", "xpress_drafter.cli", "train", "tiny", *own, f"output_dir={tmp_path / 'two'}"]
    launched = subprocess.Popen([*launch, *train], env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    try:
        alone = ["gradient_accumulation_steps=2", f"output_dir={tmp_path / 'one'}"]
        expected = losses(run(read_recipe("tiny", parse_overrides([*own, *alone]))))
        assert launched.wait(timeout=300) == 0
    finally:
        launched.kill()
    checkpoint = tmp_path / "two" / "checkpoint-3"
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    assert len(expected) == 3 and expected[2]["loss"] != pytest.approx(expected[0]["loss"], rel=1e-2)
    for ours, theirs in zip(history, expected, strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-5)
    drafter = AutoModel.from_pretrained(tmp_path / "two" / "drafter", trust_remote_code=True)
    assert drafter.config.target_layer_ids == [2, 5, 8]


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipe_decides_over_the_arithmetic(path):
    """What a launch file says in its place would win over `bf16: false`."""
    assert load_config_from_file(str(path)).mixed_precision == "no"
