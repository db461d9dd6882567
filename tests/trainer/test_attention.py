"""The drafter's attention in training: every implementation the same, and what its mask weighs."""

import pytest
import torch
from rig import BLOCK, HIDDEN, MASK_TOKEN, TAPS, make_drafter, target
from torch.utils._python_dispatch import TorchDispatchMode
from training import assert_close, gradients
from transformers.integrations import flex_attention
from xpress_drafter.trainer import block_attention_mask, cut_blocks
from xpress_drafter.trainer.blocks import flex_block_mask
from xpress_drafter.trainer.drafting import draft_blocks


# Two rows: an anchor at a document's start, anchors one apart, none at all; padding on the right and on both sides.
ANCHORS = torch.tensor([[0, 1, 2, 5, 6, 9], [1, 4, 5, 8, 0, 0]])
VALID = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
REAL = torch.tensor([[1] * 10 + [0] * 2, [0, 0] + [1] * 7 + [0] * 3])


def states(attention: str, device: str = "cpu", grad: bool = True):
    """States of these blocks, and the gradients of their valid ones' squares."""
    torch.manual_seed(0)
    drafter = make_drafter(target()).to(device)
    drafter.set_attn_implementation(attention)
    ids = torch.randint(MASK_TOKEN, REAL.shape)
    features = torch.randn(*REAL.shape, len(TAPS) * HIDDEN, device=device)
    anchors, valid, documents, real = (table.to(device) for table in (ANCHORS, VALID, DOCUMENTS, REAL))
    blocks = cut_blocks(ids.to(device), torch.ones_like(real).bool(), anchors, valid, BLOCK, documents)
    with torch.set_grad_enabled(grad):
        h = draft_blocks(drafter, target().to(device), features, blocks, real, documents)[valid]
    if not grad:
        return h, None
    h.pow(2).sum().backward()
    return h, gradients(torch.nn.ModuleDict({"fc": drafter.fc, "layers": drafter.layers, "norm": drafter.norm}))


def test_eager_and_sdpa():
    (eager, eager_gradients), (sdpa, sdpa_gradients) = states("eager"), states("sdpa")
    torch.testing.assert_close(eager, sdpa, rtol=1e-4, atol=1e-5)
    assert_close(sdpa_gradients, eager_gradients, 1e-5)


def test_flex(monkeypatch):
    """Forward alone: torch's flex attention has no backward on CPUs. Uncompiled: compiling takes half a minute there."""

    def uncompiled(query, key, value, training: bool, **kwargs):
        return flex_attention.flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)
    flex, sdpa = (states(attention, grad=False)[0] for attention in ("flex_attention", "sdpa"))
    torch.testing.assert_close(flex, sdpa, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's flex attention has no backward on CPUs")
def test_flex_gradients():
    (flex, flex_gradients), (sdpa, sdpa_gradients) = states("flex_attention", "cuda"), states("sdpa", "cuda")
    torch.testing.assert_close(flex, sdpa, rtol=1e-3, atol=1e-3)
    assert_close(flex_gradients, sdpa_gradients, 1e-3)


def test_flex_mask_entry_by_entry():
    """What it calls visible, and the tiles that it lists."""
    dense = block_attention_mask(ANCHORS, VALID, 3, REAL, DOCUMENTS)[:, 0]
    mask = flex_block_mask(ANCHORS, VALID, 3, REAL, DOCUMENTS)
    n, query, key = torch.meshgrid(*(torch.arange(size) for size in dense.shape), indexing="ij")
    assert torch.equal(mask.mask_mod(n, torch.zeros_like(n), query, key), dense)
    assert mask.shape == (2, 1, *dense.shape[1:])


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, (tuple, list)) else [result]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        self.numel = max([self.numel, *(tensor.untyped_storage().nbytes() // 4 for tensor in tensors)])
        return result


@pytest.mark.parametrize("A, S", [(16, 64), (32, 64), (16, 256)])
def test_what_the_mask_weighs(A, S):
    """A byte for each of A * B * (S + A * B) pairs; attention, forward and backward, makes nothing larger than that in
    fp32: no copy of it for every head."""
    drafter = make_drafter(target())
    ids = torch.randint(MASK_TOKEN, (1, S))
    anchors = torch.arange(A)[None] * (S // A)
    mask = block_attention_mask(anchors, torch.ones_like(anchors).bool(), BLOCK, torch.ones_like(ids))
    pairs = A * BLOCK * (S + A * BLOCK)
    assert mask.untyped_storage().nbytes() == pairs
    blocks = cut_blocks(ids, torch.ones_like(ids).bool(), anchors, torch.ones_like(anchors).bool(), BLOCK)
    features = torch.randn(1, S, len(TAPS) * HIDDEN)
    with Largest() as largest:
        draft_blocks(drafter, target(), features, blocks, torch.ones_like(ids)).sum().backward()
    assert pairs // 4 <= largest.numel <= pairs
