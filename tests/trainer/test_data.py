"""Rows, batches and what is refused before any work."""

import pytest
import torch
from datasets import Dataset
from datasets import IterableDataset as HubStream
from torch.utils.data import IterableDataset
from training import make_rows, make_trainer
from xpress_drafter.trainer import XPressCollator
from xpress_drafter.trainer.data import check_rows


GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
FAULTS = [
    ({"input_ids": [1, 2, 3]}, r"has the keys \['input_ids'\], expected also \['loss_mask'\]"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "has 3 `input_ids` but 2 `loss_mask` values"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, "has 0 supervised of 3 tokens, expected at least two in a row"),
    ({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}, "has 2 supervised of 3 tokens, expected at least two in a row"),
    ({"input_ids": [1], "loss_mask": [1]}, "has 1 supervised of 1 tokens"),
    ({"input_ids": [], "loss_mask": []}, "has 0 supervised of 0 tokens"),
]


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_rows_that_cannot_be_trained_on(row, message):
    with pytest.raises(ValueError, match=f"row 1 {message}"):
        check_rows([GOOD, row])
    with pytest.raises(ValueError, match=f"row 1 {message}"):
        make_trainer(rows=[GOOD, row])
    with pytest.raises(ValueError, match=f"row 0 {message}"):
        make_trainer(eval_dataset={"held out": [row]})
    with pytest.raises(ValueError, match=message):
        XPressCollator()([GOOD, row])
    check_rows([GOOD, GOOD])


def test_batches():
    """Padded on the right; columns that are not ours are left out, tensors and lists mix."""
    rows = [GOOD | {"question": "?"}, {"input_ids": torch.tensor([4, 5]), "loss_mask": torch.tensor([1, 1])}]
    batch = XPressCollator(pad_token_id=9)(rows)
    assert batch.keys() == {"input_ids", "attention_mask", "loss_mask"}
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, True, False]]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows, self.taken = rows, 0

    def __iter__(self):
        for row in self.rows:
            self.taken += 1
            yield row


def test_streams_are_not_consumed_by_checks():
    stream = Stream(make_rows(8))
    trainer = make_trainer(rows=stream, max_steps=2)
    assert stream.taken == 0
    trainer.train()
    assert trainer.state.global_step == 2 and stream.taken == 8
    with pytest.raises(ValueError, match="expected at least two in a row"):
        make_trainer(rows=Stream(make_rows(3) + [FAULTS[2][0]]), max_steps=1).train()


@pytest.mark.parametrize("stream", [False, True])
def test_datasets_of_the_hub_library(stream):
    """With a column of its own, which Transformers' default would take for the model's."""
    rows = [row | {"question": "?"} for row in make_rows(8)]
    losses = []
    dataset = HubStream.from_generator(lambda: iter(rows)) if stream else Dataset.from_list(rows)
    for data in (dataset, rows):
        trainer = make_trainer(rows=data, max_steps=1, per_device_train_batch_size=8, num_anchors=64)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
