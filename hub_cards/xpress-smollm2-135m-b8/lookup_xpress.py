"""Copying instead of drafting: prompt lookup (Saxena 2023), which proposes what followed the same tokens before.

Shapes: n tokens of the text so far, L proposed.
"""

import torch


LONGEST_MATCH = 32  # tokens compared at each place, unless more must match
TRUST = 2  # tokens proposed for each that matches, at most: longer copies of short matches cost more than they keep


def look_up(ids_n: torch.LongTensor, ngram_size: int, length: int) -> torch.LongTensor | None:
    """
    What followed the text's last tokens at an earlier place `[L]`, on the text's device; `None` where at least
    `ngram_size` of them never came before.

    Of several places it is the one with most tokens in common, and of those the latest. A short match is trusted for less:
    L is at most twice what matched. What is copied past the text's own end is what was copied first, so a text that repeats
    itself goes on repeating.

    Args:
        ids_n: The text so far.
        ngram_size (`int`): Tokens that must match, at least 1.
        length (`int`): Tokens to propose, at most.
    """
    ids = ids_n.cpu()
    n = len(ids)
    places = torch.arange(1, n)  # of the first token copied
    for size in range(1, max(LONGEST_MATCH, ngram_size) + 1):
        longer = places[places >= size]
        longer = longer[ids[longer - size] == ids[n - size]]
        if len(longer) == 0:
            if size <= ngram_size:
                return None
            break
        places = longer
        matched = size
    start, length = int(places[-1]), min(length, TRUST * matched)
    return ids_n[start + torch.arange(length, device=ids_n.device) % (n - start)]
