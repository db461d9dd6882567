"""What a killed run leaves behind: which checkpoints are whole, and that their logs join without a seam."""

import json
import re
from pathlib import Path

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging


logger = logging.get_logger(__name__)

STATE = "trainer_state.json"  # `Trainer` writes it last


def last_whole_checkpoint(output_dir: str) -> str | None:
    """The newest `checkpoint-N` that was written to its end; `Trainer`'s own choice is the newest folder."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        if _is_whole(folder):
            return str(folder)
        logger.warning(f"{folder} was not written to its end, as when a run is killed: it is passed over.")
    return None


def _is_whole(folder: Path) -> bool:
    try:
        json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def ended_state(folder: str, args: TrainingArguments) -> TrainerState | None:
    """The state of a checkpoint behind which no step is left, of which `Trainer` would take one more; else nothing."""
    state = TrainerState.load_from_json(str(Path(folder) / STATE))
    ended = state.global_step >= args.max_steps if args.max_steps > 0 else state.epoch >= args.num_train_epochs
    return state if ended else None


def check_resumable(folder: str) -> None:
    """Raises for a checkpoint whose steps would be counted on while its optimizer starts anew."""
    if not (Path(folder) / STATE).exists():
        raise ValueError(f"{folder} has no {STATE}, expected a checkpoint that `XPressTrainer` wrote to its end.")
    if not any(Path(folder).glob("optimizer*")) and not any(Path(folder).glob("global_step*")):
        raise ValueError(
            f"{folder} holds no optimizer, as `save_only_model=True` writes it, expected a whole checkpoint to resume "
            "from. To go on from its weights alone, load the folder as the drafter and start a new run."
        )


class CloseLogAtSave(TrainerCallback):
    """Logs wherever a checkpoint is written, so that no logged average spans a kill: its sums would be lost."""

    def on_step_end(self, args, state, control, **kwargs):
        may_save = control.should_save or (control.should_evaluate and args.save_strategy == "best")
        control.should_log = control.should_log or may_save

    on_epoch_end = on_step_end
