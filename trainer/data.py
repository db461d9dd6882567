"""Rows and batches: `input_ids` and a `loss_mask` of the same length (1 on the tokens that the target produced)."""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset


def check_row(row: dict, name: str = "row") -> None:
    """Raises a `ValueError` for a row that cannot be trained on."""
    missing = {"input_ids", "loss_mask"} - set(row)
    if missing:
        raise ValueError(f"{name} has the keys {sorted(row)}, expected also {sorted(missing)}.")
    if len(row["input_ids"]) != len(row["loss_mask"]):
        raise ValueError(
            f"{name} has {len(row['input_ids'])} `input_ids` but {len(row['loss_mask'])} `loss_mask` values: expected "
            "one for each token."
        )
    supervised = torch.as_tensor(row["loss_mask"]).bool()
    if not (supervised[:-1] & supervised[1:]).any():
        raise ValueError(
            f"{name} has {int(supervised.sum())} supervised of {len(supervised)} tokens, expected at least two in a "
            "row: an anchor and the token after it. Leave the row out, or mend its `loss_mask`."
        )


def check_rows(rows) -> int | None:
    """
    `check_row` for a whole data set, before any work; returns the longest row's tokens. A stream's rows are checked when
    they come, and how long they will be is not known.
    """
    if isinstance(rows, IterableDataset):
        return None
    longest = 0
    for number, row in enumerate(rows):
        check_row(row, f"row {number}")
        longest = max(longest, len(row["input_ids"]))
    return longest


@dataclass
class XPressCollator:
    """
    Pads rows on the right: `input_ids`, `attention_mask` and `loss_mask` `[N, S]`; of cached rows `features` and `states`
    too. Other columns are left out.
    """

    pad_token_id: int = 0

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        for row in rows:
            check_row(row)
        ids = [torch.as_tensor(row["input_ids"]) for row in rows]
        masks = [torch.as_tensor(row["loss_mask"]).bool() for row in rows]
        cached = [name for name in ("features", "states") if name in rows[0]]
        return {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in cached} | {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "loss_mask": pad_sequence(masks, batch_first=True),
        }
