"""The target's states, read as training goes or kept on the disk: one flat file, whose size is known before it is begun.

Keeping them is worth it for small data sets and many epochs alone: a token of an 8B target takes 48 KiB.

Shapes: N sequences, S positions, H hidden, F = H * taps, T positions of all rows.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import torch
from huggingface_hub.utils import WeakFileLock
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..modeling_xpress import XPressDrafterConfig, context_features, states_to_keep
from .data import XPressCollator, check_rows
from .row_folder import sha256, weights_fingerprint
from .wrapping import freeze_target, to_target


@torch.no_grad()
def read_states(target: PreTrainedModel, layer_ids: list[int], batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's features `[N, S, F]` and its last states `[N, S, H]`, which its head reads."""
    outputs = target.get_decoder()(
        input_ids=to_target(target, batch["input_ids"]),
        attention_mask=to_target(target, batch["attention_mask"]),
        output_hidden_states=states_to_keep(layer_ids),
        use_cache=False,
    )
    return context_features(outputs.hidden_states, layer_ids), outputs.last_hidden_state


def cache_bytes(positions: int, config: XPressDrafterConfig, dtype: torch.dtype) -> int:
    """How large the cache of rows with that many tokens will be: every position's tapped states and its last one."""
    return positions * (len(config.target_layer_ids) + 1) * config.hidden_size * dtype.itemsize


class CachedRows(Dataset):
    """Rows with their `features` and `states`, which `XPressTrainer` then takes instead of running the target's layers."""

    def __init__(self, rows, table_TW: torch.Tensor, hidden_size: int):
        self.rows, self.table_TW, self.hidden_size = rows, table_TW, hidden_size
        lengths = torch.tensor([0] + [len(row["input_ids"]) for row in rows])
        self.starts = lengths.cumsum(0).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row, part = self.rows[index], self.table_TW[self.starts[index] : self.starts[index + 1]]
        features, states = part.split([part.shape[1] - self.hidden_size, self.hidden_size], dim=1)
        return {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "features": features, "states": states}


def cache_features(
    target: PreTrainedModel,
    config: XPressDrafterConfig,
    tables: Sequence[tuple[Sequence[dict], dict | None]],
    folder: str | Path,
    *,
    max_bytes: int,
    batch_size: int = 8,
) -> list[CachedRows]:
    """
    The rows of every table with the target's states on the disk, written there unless a run before has. Of several
    processes and runs with one folder, the first to lock it writes; the others wait as long as that takes.

    Args:
        config: The drafter's: which layers are read.
        tables: `(rows, manifest)` each: rows of `input_ids` and `loss_mask`, whose order is kept, and what they were made
            from (`load_rows`), which is part of the cache's name.
        folder: Where caches lie, each under a name of what it was made from; a cut-off one is written again.
        max_bytes (`int`): Raises a `ValueError` before a byte is written if all that lies there would be more.
    """
    folder = Path(folder)
    for rows, _ in tables:
        check_rows(rows)
    named = [(folder / f"{_key(target, config, rows, manifest)}.states", rows) for rows, manifest in tables]
    if not all(path.exists() for path, _ in named):
        folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder / "lock"):  # that of a process that dies is free
            lacking = {path: rows for path, rows in named if not path.exists()}
            _write(target, config, lacking, folder, max_bytes, batch_size)
    return [_open(path, rows, target, config) for path, rows in named]


def _write(
    target: PreTrainedModel,
    config: XPressDrafterConfig,
    lacking: dict[Path, Sequence[dict]],
    folder: Path,
    max_bytes: int,
    batch_size: int,
) -> None:
    """Fills the files that lack, each whole before it has its name; by the one process that holds the folder's lock."""
    for left in folder.glob("*.partial"):
        left.unlink()
    _check_space(sum(_size(rows, target, config) for rows in lacking.values()), max_bytes, folder)
    for path, rows in lacking.items():
        partial = path.with_suffix(f".{uuid4().hex}.partial")  # no other's, where a file system cannot lock
        out = _open(partial, rows, target, config, shared=True)
        _fill(freeze_target(target, target.device), config.target_layer_ids, out, batch_size)
        partial.replace(path)


def _open(
    path: Path, rows: Sequence[dict], target: PreTrainedModel, config: XPressDrafterConfig, shared: bool = False
) -> CachedRows:
    """The rows with the states of a file; a `shared` one is made, and written to."""
    elements = _size(rows, target, config) // target.dtype.itemsize
    table = torch.from_file(str(path), shared=shared, size=elements, dtype=target.dtype)
    return CachedRows(
        rows, table.view(-1, (len(config.target_layer_ids) + 1) * config.hidden_size), config.hidden_size
    )


def _size(rows: Sequence[dict], target: PreTrainedModel, config: XPressDrafterConfig) -> int:
    return cache_bytes(sum(len(row["input_ids"]) for row in rows), config, target.dtype)


def _fill(target: PreTrainedModel, layer_ids: list[int], out: CachedRows, batch_size: int) -> None:
    for start in range(0, len(out), batch_size):
        chosen = range(start, min(start + batch_size, len(out)))
        batch = XPressCollator()([out.rows[index] for index in chosen])
        states_NSW = torch.cat(read_states(target, layer_ids, batch), dim=-1).cpu()
        for index, states_SW in zip(chosen, states_NSW):
            first, last = out.starts[index], out.starts[index + 1]
            out.table_TW[first:last] = states_SW[: last - first]


def _key(target: PreTrainedModel, config: XPressDrafterConfig, rows, manifest: dict | None) -> str:
    """Of all that decides over the states: the target, the layers, every token, and what the rows were made from."""
    tokens = hashlib.sha256()
    for row in rows:
        tokens.update(json.dumps(list(map(int, row["input_ids"]))).encode())
    parts = {
        "target": weights_fingerprint(target),
        "dtype": str(target.dtype),
        "layers": config.target_layer_ids,
        "tokens": tokens.hexdigest(),
        "manifest": manifest,
    }
    return sha256(json.dumps(parts, sort_keys=True))[:32]


def _check_space(size: int, max_bytes: int, folder: Path) -> None:
    """Raises if `size` bytes more would be too much in `folder`."""
    held, free = sum(path.stat().st_size for path in folder.glob("*.states")), shutil.disk_usage(folder).free
    if held + size > max_bytes or size > free:
        raise ValueError(
            f"the target's states would take {size:,} bytes beside {held:,} that lie in {folder}; allowed are {max_bytes:,} in all "
            f"(`max_bytes`; of a recipe, `feature_cache_gib`), free are {free:,}. Train without a cache, which is the default, "
            "on fewer rows, delete states that no run needs, or allow more."
        )
