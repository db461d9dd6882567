"""A folder of training rows that a killed command goes on filling.

`rows.jsonl` holds `{"id", "input_ids", "loss_mask"}`; `manifest.json` what they were made from, with their counts once
they are complete; `turns.txt` and `turns.npz` what was asked, in hashes (`asked.py`); `progress.jsonl` one line for every
finished batch, with the size that `rows.jsonl` had then. What lies behind the last such size, be it half a line or half
a batch, is dropped and made again.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..generation.evaluation_runs import differences, write_json
from .asked import Asked


logger = logging.get_logger(__name__)

ROWS, MANIFEST, PROGRESS = "rows.jsonl", "manifest.json", "progress.jsonl"
DROPPED = "dropped_"
FEATURES = Features({"id": Value("string"), "input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))})


class RowFolder:
    """
    The folder, opened for writing.

    Args:
        path (`Path`): Made if need be.
        settings (`dict`): All that decides over the rows; a folder made with others raises a `ValueError`.
        names (`dict`): What the manifest also says: names, versions and what was left out.
    """

    def __init__(self, path: Path, settings: dict, names: dict):
        self.path, self.batches, self.counts = path, 0, Counter()
        path.mkdir(parents=True, exist_ok=True)
        self.manifest = {**names, "settings": settings, "complete": False, "counts": {}}
        if (path / MANIFEST).exists():
            self._check_settings(read_manifest(path)["settings"], settings)
        elif (path / ROWS).exists():
            raise ValueError(f"{path} holds {ROWS} but no {MANIFEST}, expected both or neither: choose a new folder.")
        self._take_up()
        self._write_manifest()

    def note_turns(self, conversations: Iterable[list[dict]]) -> None:
        """Writes down what was asked, so that nobody is measured on it."""
        Asked.of(conversations).save(self.path)

    def add(self, rows: list[dict], counts: Counter) -> None:
        """One batch's rows, and what is to be counted of it besides them; `dropped_<reason>` for what was kept out."""
        counts = counts + Counter(
            rows=len(rows),
            tokens=sum(len(row["input_ids"]) for row in rows),
            supervised_tokens=sum(sum(row["loss_mask"]) for row in rows),
        )
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            size = os.fstat(file.fileno()).st_size
        with (self.path / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"size": size, "counts": counts}) + "\n")
        self.batches += 1
        self.counts += counts

    def finish(self) -> dict:
        """Marks the folder as complete; returns its manifest."""
        counts, dropped = {}, {}
        for name, value in sorted(self.counts.items()):
            (dropped if name.startswith(DROPPED) else counts)[name.removeprefix(DROPPED)] = value
        self.manifest |= {"complete": True, "counts": counts | {"dropped": dropped}}
        self._write_manifest()
        return self.manifest

    def _check_settings(self, found: dict, wanted: dict) -> None:
        if different := differences(found, wanted):
            raise ValueError(
                f"{self.path} was begun with other settings: {'; '.join(different)}. Expected the same: give those, or "
                "choose a new folder."
            )

    def _take_up(self) -> None:
        """Reads the finished batches, and cuts both files behind the last of them."""
        rows, progress = self.path / ROWS, self.path / PROGRESS
        rows.touch(), progress.touch()
        written, kept, size = rows.stat().st_size, 0, 0
        for line in progress.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or (batch := json.loads(line))["size"] > written:
                break
            self.batches += 1
            self.counts += Counter(batch["counts"])
            kept, size = kept + len(line), batch["size"]
        os.truncate(progress, kept)
        os.truncate(rows, size)

    def _write_manifest(self) -> None:
        write_json(self.path / MANIFEST, self.manifest)


def load_rows(folder: str | Path) -> tuple[Dataset, dict]:
    """The rows of a complete folder, as `XPressTrainer` takes them, and their manifest; a `ValueError` if they do not fit."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest["complete"]:
        raise ValueError(f"{folder} is not complete: its `xpress data` was stopped. Run the same command again.")
    rows = Dataset.from_json(str(folder / ROWS), features=FEATURES)
    if len(rows) != manifest["counts"]["rows"]:
        raise ValueError(
            f"{folder / ROWS} has {len(rows)} rows, its manifest says {manifest['counts']['rows']}: the file was changed. "
            "Run the same `xpress data` again."
        )
    return rows, manifest


def read_manifest(folder: Path) -> dict:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no {MANIFEST}, expected a folder that `xpress data` made.") from error


def weights_fingerprint(model: PreTrainedModel, samples: int = 64) -> str:
    """
    A hash of every tensor's name, shape and some evenly spread values: another for any other or further trained model.
    The tensors are those of `state_dict`, read module by module, so that offloaded ones are there while they are read.
    """
    parts = hashlib.sha256()
    for path, module in model.named_modules(remove_duplicate=False):
        with align_module_device(module):
            own = {}
            module._save_to_state_dict(own, f"{path}." if path else "", keep_vars=False)
            for name, tensor in own.items():
                spread = torch.linspace(0, tensor.numel() - 1, samples, dtype=torch.float64).long().to(tensor.device)
                values = tensor.flatten()[spread].double().cpu()
                parts.update(f"{name} {list(tensor.shape)}".encode() + values.numpy().tobytes())
    return parts.hexdigest()


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_rows_are_of(
    folder: str, manifest: dict, name: str, dtype: str, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel
) -> None:
    """Raises for rows of another tokenizer than the target's, warns of rows that another target answered."""
    made = manifest["settings"]
    if made["tokenizer"] != sha256(tokenizer.backend_tokenizer.to_str()):
        raise ValueError(
            f"the rows of {folder} were made with the tokenizer of {manifest['target']}, expected that of {name}: make them "
            f"with `--target {name}`."
        )
    if made["weights"] is not None and made["dtype"] == dtype and made["weights"] != weights_fingerprint(target):
        logger.warning(
            f"The rows of {folder} were answered by {manifest['target']}, which has other weights than {name}: what a drafter "
            "learns there, and what is measured of it, is another target's text."
        )
