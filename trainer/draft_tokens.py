"""Which tokens a drafter learns to draft, where its vocabulary is smaller than the target's."""

from collections.abc import Iterable

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)

ENOUGH = 0.97  # of an answer's tokens


def most_used_tokens(rows: Iterable[dict], size: int, vocab_size: int) -> list[int]:
    """
    The `size` token ids of a vocabulary that the rows' supervised spans hold most often, those of equal count by id; ascending.
    As speculators chooses them.
    """
    if type(size) is not int or not 0 < size <= vocab_size:
        raise ValueError(
            f"`draft_vocab_size` is {size!r}, expected a whole number from 1 to the target's {vocab_size} tokens."
        )
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        supervised = torch.tensor(row["input_ids"])[torch.tensor(row["loss_mask"]).bool()]
        counts_V += torch.bincount(supervised, minlength=vocab_size)
    chosen = counts_V.argsort(descending=True, stable=True)[:size]
    share = counts_V[chosen].sum().item() / max(counts_V.sum().item(), 1)
    message = f"The {size} tokens of the draft vocabulary are {share:.1%} of what the rows' answers hold."
    if share < ENOUGH:
        logger.warning(f"{message} No draft is kept past another one: a larger `draft_vocab_size` may pay.")
    else:
        logger.info(message)
    return chosen.sort().values.tolist()
