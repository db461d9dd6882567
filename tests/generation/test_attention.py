"""Who sees whom in a block, and that every attention implementation agrees. CASE E8."""

import warnings

import pytest
import torch
from rig import BLOCK, HIDDEN, TAPS, VOCAB, assert_rounds, drafted, make_drafter, oracle, prompt, ref, target
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache


S = 9  # context positions


@pytest.fixture(autouse=True)
def uncompiled():
    """Flex attention as it is written: compiling its kernels takes minutes here."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def inputs(rows: int = 1) -> dict:
    return {
        "noise_embeds": torch.randn(rows, BLOCK, HIDDEN),
        "context_hidden_states": torch.randn(rows, S, len(TAPS) * HIDDEN),
    }


def states(drafter, **kwargs) -> torch.Tensor:
    return drafter(**kwargs).last_hidden_state


def test_a_block_sees_itself_in_both_directions():
    drafter, given = make_drafter(target()), inputs()
    before = states(drafter, **given)
    for slot in range(BLOCK):
        noise = given["noise_embeds"].clone()
        noise[:, slot] += 1.0
        after = states(drafter, **{**given, "noise_embeds": noise})
        assert ((after - before).abs().amax(dim=-1) > 1e-3).all(), slot


def test_every_slot_sees_every_context_position():
    drafter, given = make_drafter(target()), inputs()
    before = states(drafter, **given)
    for position in range(S):
        context = given["context_hidden_states"].clone()
        context[:, position] += 1.0
        after = states(drafter, **{**given, "context_hidden_states": context})
        assert ((after - before).abs().amax(dim=-1) > 1e-4).all(), position


def test_positions_matter_and_are_relative():
    drafter, given = make_drafter(target()), inputs()
    positions = torch.arange(S + BLOCK)[None]
    before = states(drafter, **given, position_ids=positions)
    torch.testing.assert_close(states(drafter, **given), before)
    torch.testing.assert_close(states(drafter, **given, position_ids=positions + 50), before, atol=1e-3, rtol=1e-3)
    shifted = positions.clone()
    shifted[:, S:] += 1
    assert (states(drafter, **given, position_ids=shifted) - before).abs().max() > 1e-2


def test_refined_logits_follow_earlier_tokens_only():
    """With the states held fixed: the token of slot j reaches slots after j, all of them, and no others."""
    refiner, h = make_drafter(target()).xpress_head, torch.randn(1, BLOCK, HIDDEN)
    prev = torch.randint(VOCAB, (1, BLOCK))  # prev[k] is the token of slot k - 1
    before, block = refiner(h, prev), refiner.begin_block(h)
    for k in range(BLOCK):
        changed = prev.clone()
        changed[:, k] = (changed[:, k] + 1) % VOCAB
        after = refiner(h, changed)
        assert torch.equal(after[:, :k], before[:, :k])
        assert ((after - before)[:, k:].abs().amax(dim=-1) > 1e-3).all()
    assert torch.equal(refiner.begin_block(h), block)


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_implementations_agree_with_sdpa(implementation):
    reference, other = make_drafter(target()), make_drafter(target())
    other.set_attn_implementation(implementation)
    given = inputs(2)
    torch.testing.assert_close(states(other, **given), states(reference, **given), atol=1e-4, rtol=1e-4)
    caches = DynamicCache(), DynamicCache()
    for _ in range(2):  # a second block on the same cache
        given = inputs(2)
        ours, theirs = (states(d, **given, cache=c) for d, c in zip((other, reference), caches))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_masks_agree():
    """Padding as `[N, T]`, as `[N, 1, B, T]`, and as a flex `BlockMask`; in every implementation that takes it."""
    given, T = inputs(2), S + BLOCK
    padding = torch.ones(2, T, dtype=torch.bool)
    padding[0, :3] = False
    full = padding[:, None, None, :].expand(-1, 1, BLOCK, -1)
    block = create_block_mask(lambda n, h, q, k: padding[n, k], 2, None, BLOCK, T, device="cpu")
    results = []
    for implementation, masks in {
        "sdpa": (padding, full),
        "eager": (padding, full),
        "flex_attention": (block,),
    }.items():
        drafter = make_drafter(target())
        drafter.set_attn_implementation(implementation)
        results += [states(drafter, **given, attention_mask=mask) for mask in masks]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-4, rtol=1e-4)
    drafter = make_drafter(target())
    assert (states(drafter, **given)[0] - results[0][0]).abs().max() > 1e-2
    row = {name: tensor[:1, 3:] if name.startswith("context") else tensor[:1] for name, tensor in given.items()}
    positions = torch.arange(3, T)[None]
    torch.testing.assert_close(states(drafter, **row, position_ids=positions), results[0][:1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states(drafter, **given)[1], results[0][1], atol=1e-4, rtol=1e-4)


def test_cached_context_equals_context_at_once():
    drafter, given, cache = make_drafter(target()), inputs(), DynamicCache()
    context = given["context_hidden_states"]
    for start, end in ((0, 4), (4, 5), (5, S)):
        piece = {**given, "context_hidden_states": context[:, start:end]}
        positions = torch.arange(start, end + BLOCK)[None]
        last = states(drafter, **piece, position_ids=positions, cache=cache)
        cache.crop(-BLOCK)
    torch.testing.assert_close(last, states(drafter, **given), atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == S


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_generation_in_other_implementations(implementation):
    drafter = oracle(target(), ref(), (0, 3, BLOCK - 1))
    drafter.set_attn_implementation(implementation)
    output, drafting = drafted(target(), prompt(), drafter, 12)
    assert torch.equal(output, ref()[:, :19])
    assert_rounds(drafting, drafter.pattern)
