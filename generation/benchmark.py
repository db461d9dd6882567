"""What one block's refinement costs at a given head's shape, beside the Markov head's left-to-right steps.

All ways run in turn, several times over, and are compared by medians of the same run.
"""

import time
from statistics import median
from types import SimpleNamespace

import torch

from ..modeling_xpress import MarkovHead, XPressHead
from .jacobi_xpress import resolve_block, resolve_left_to_right


def head_shape(vocab_size: int, hidden_size: int, rank: int, mlp_width: int, block_size: int) -> SimpleNamespace:
    """What `XPressHead` and `MarkovHead` read of a config."""
    return SimpleNamespace(
        vocab_size=vocab_size,
        draft_vocab_size=None,
        hidden_size=hidden_size,
        block_size=block_size,
        xpress_rank=rank,
        xpress_mlp_hidden=mlp_width,
        markov_rank=rank,
    )


def refinement_ways(
    vocab_size: int, hidden_size: int, rank: int, mlp_width: int, block_size: int, shortlist: int, dtype: torch.dtype
) -> dict:
    """Name to function: each resolves one block of random weights and base logits of that shape."""
    torch.manual_seed(0)
    config = head_shape(vocab_size, hidden_size, rank, mlp_width, block_size)
    xpress, markov = XPressHead(config).to(dtype).eval(), MarkovHead(config).to(dtype).eval()
    for parameter in xpress.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    h = torch.zeros(1, block_size, hidden_size, dtype=dtype)  # tokens alone decide, so every pass moves some
    base = torch.randn(1, block_size - 1, vocab_size, dtype=dtype)
    token = torch.tensor([1])

    def jacobi(passes: int, size: int):
        return lambda: resolve_block(xpress, h, base, token, token, passes, shortlist_size=size)

    ways = {f"Markov, {block_size - 1} steps": lambda: resolve_left_to_right(markov, base, token)}
    for passes in (1, 2, 4, 6):
        ways[f"xPress K = {passes}"] = jacobi(passes, 0)
    for passes in (4, 6):
        ways[f"xPress K = {passes}, best {shortlist}"] = jacobi(passes, shortlist)
    return ways


@torch.no_grad()
def time_ways(ways: dict, repeats: int) -> dict[str, float]:
    """Median milliseconds of each way, the ways interleaved."""
    seconds = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if repeat:  # the first is warm-up
                seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * median(values) for name, values in seconds.items()}
