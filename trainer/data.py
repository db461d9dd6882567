"""Rows and batches: `input_ids` and a `loss_mask` of the same length (1 on the tokens that the target produced).

Anchors are drawn here, with the batch, so that the loss's denominator is known before any forward.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .blocks import cut_blocks, sample_anchors
from .objective import position_weights


def tokenize_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> dict:
    """
    One conversation as a row: its ids, and a mask of the assistant's tokens.

    Needs a chat template with `{% generation %}` markers; raises a `ValueError` if nothing would be supervised.
    """
    row = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    if not any(row["assistant_masks"]):
        raise ValueError(
            "no token of this conversation would be supervised: expected a chat template that marks the assistant's "
            "part with {% generation %}, or rows with your own `loss_mask`. First message: "
            f"{str(messages[0])[:80]!r}"
        )
    return {"input_ids": row["input_ids"], "loss_mask": row["assistant_masks"]}


def check_rows(rows) -> None:
    """Raises a `ValueError` for a row that cannot be trained on, before any work."""
    for number, row in enumerate(rows):
        missing = {"input_ids", "loss_mask"} - set(row)
        if missing:
            raise ValueError(f"row {number} has the keys {sorted(row)}, expected also {sorted(missing)}.")
        if len(row["input_ids"]) != len(row["loss_mask"]):
            raise ValueError(
                f"row {number} has {len(row['input_ids'])} `input_ids` but {len(row['loss_mask'])} `loss_mask` values: "
                "expected one for each token."
            )


@dataclass
class XPressCollator:
    """
    Pads rows on the right, draws anchors, and sums the weights of the slots that will count.

    Returns `input_ids`, `attention_mask`, `loss_mask` `[N, S]`, `anchors`, `anchor_valid` `[N, A]` and `weight` `[N]`.
    """

    block_size: int
    num_anchors: int
    gamma: float
    pad_token_id: int = 0
    generator: torch.Generator | None = None

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=self.pad_token_id
        )
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        loss_mask = torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(row["loss_mask"]).bool() for row in rows], batch_first=True
        )
        anchors, valid = sample_anchors(loss_mask, self.num_anchors, self.generator)
        counted = cut_blocks(ids, loss_mask, anchors, valid, self.block_size).counted[..., 1:]
        weight = (counted * position_weights(self.block_size, self.gamma)).sum(dim=(1, 2))
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
            "loss_mask": loss_mask,
            "anchors": anchors,
            "anchor_valid": valid,
            "weight": weight,
        }
