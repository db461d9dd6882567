"""Which tokens a drafter learns to draft, where its vocabulary is smaller than the target's."""

from collections.abc import Iterable

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


def most_used_tokens(rows: Iterable[dict], size: int, vocab_size: int) -> list[int]:
    """The `size` token ids of a vocabulary that the rows' supervised spans hold most often, those of equal count by id; ascending."""
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        supervised = torch.tensor(row["input_ids"])[torch.tensor(row["loss_mask"]).bool()]
        counts_V += torch.bincount(supervised, minlength=vocab_size)
    chosen = counts_V.argsort(descending=True, stable=True)[:size]
    share = counts_V[chosen].sum().item() / max(counts_V.sum().item(), 1)
    logger.info(f"The {size} tokens of the draft vocabulary are {share:.2%} of what the rows' answers hold.")
    return chosen.sort().values.tolist()
