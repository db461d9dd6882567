"""The target's states, read as training goes or kept on the disk: one flat file, whose size is known before it is begun.

Keeping them is worth it for small data sets and many epochs alone: a token of an 8B target takes 48 KiB.

Shapes: N sequences, S positions, H hidden, F = H * taps, T positions of all rows.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
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
    rows,
    folder: str | Path,
    *,
    max_bytes: int,
    manifest: dict | None = None,
    batch_size: int = 8,
) -> CachedRows:
    """
    The rows with the target's states on the disk, written there unless a run before has.

    Args:
        config: The drafter's: which layers are read.
        rows: Rows of `input_ids` and `loss_mask`; their order is kept.
        folder: Where caches lie, each under a name of what it was made from; a cut-off one is written again.
        max_bytes (`int`): Raises a `ValueError` before a byte is written if the cache would be larger.
        manifest (`dict`, *optional*): What the rows were made from (`load_rows`); part of the name.
    """
    check_rows(rows)
    folder, size = Path(folder), cache_bytes(sum(len(row["input_ids"]) for row in rows), config, target.dtype)
    width = (len(config.target_layer_ids) + 1) * config.hidden_size
    path = folder / f"{_key(target, config, rows, manifest)}.states"
    elements = size // target.dtype.itemsize
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(size, max_bytes, shutil.disk_usage(folder).free, folder)
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        table = torch.from_file(str(partial), shared=True, size=elements, dtype=target.dtype).view(-1, width)
        _fill(freeze_target(target, target.device), config.target_layer_ids, CachedRows(rows, table, 0), batch_size)
        partial.rename(path)
    table = torch.from_file(str(path), shared=False, size=elements, dtype=target.dtype).view(-1, width)
    return CachedRows(rows, table, config.hidden_size)


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


def _check_space(size: int, max_bytes: int, free: int, folder: Path) -> None:
    if size > min(max_bytes, free):
        raise ValueError(
            f"the cache of the target's states would take {size:,} bytes; allowed are {max_bytes:,} (`max_bytes`; of a recipe, "
            f"`feature_cache_gib`), free in {folder} are {free:,}. Train without a cache, which is the default, on fewer rows, or allow more."
        )
