"""Caches: supplied, returned, static, offloaded, quantised; and what a call holds in memory. CASES A7, C1, C2, C4, C5, C7."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from packaging.version import Version
from rig import (
    BLOCK,
    CACHE,
    HIDDEN,
    LAYERS,
    TAPS,
    assert_rounds,
    drafted,
    make_drafter,
    make_target,
    oracle,
    plain,
    prompt,
    ref,
    target,
)
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import QuantizedLayer, StaticLayer
from xpress_drafter import track_drafting
from xpress_drafter.generation import candidate_generator_xpress


KINDS = ["qwen3", "qwen3-alternating"]
PATTERN = (0, 3, BLOCK - 1)
USER = prompt(3, seed=5)

static = pytest.mark.skipif(not StaticLayer.is_croppable, reason="static caches cannot be cropped before 5.24")
each_kind = pytest.mark.parametrize("kind", KINDS)


def states(cache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@each_kind
@pytest.mark.parametrize("pattern", [(BLOCK - 1,), PATTERN], ids=str)
def test_returned_cache_is_the_plain_one(kind, pattern):
    model, text = target(kind), ref(kind)
    for n in range(1, 2 * BLOCK + 4):
        output, _ = drafted(model, prompt(), oracle(model, text, pattern), n, return_dict_in_generate=True)
        expected = plain(model, prompt(), n, return_dict_in_generate=True)
        assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1
        for ours, theirs in zip(states(output[CACHE]), states(expected[CACHE])):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert not any(getattr(layer, "record_past", False) for layer in output[CACHE].layers)


@each_kind
@pytest.mark.parametrize("n", [2, 9])
def test_a_plain_run_continues_on_the_returned_cache(kind, n):
    model = target(kind)
    turn, _ = drafted(model, prompt(), oracle(model, ref(kind), PATTERN), n, return_dict_in_generate=True)
    ids = torch.cat([turn.sequences, USER], dim=1)
    assert torch.equal(plain(model, ids, 12, **{CACHE: turn[CACHE]}), plain(model, ids, 12))


def second_turn(model, pattern, n: int):
    """The prompt of a second turn, its plain output, and an oracle for it."""
    first = plain(model, prompt(), n)
    ids = torch.cat([first, USER], dim=1)
    text = plain(model, ids, 24)
    return ids, text, oracle(model, text, pattern)


@each_kind
@pytest.mark.parametrize("n", [1, 4, 11])
def test_second_turn_on_the_returned_cache(kind, n):
    """Same text as a cold run, and the drafter knows as much: equal contexts, equal rounds."""
    model = target(kind)
    ids, text, drafter = second_turn(model, PATTERN, n)
    turn, _ = drafted(model, prompt(), drafter, n, return_dict_in_generate=True)
    forwards = []
    hook = model.register_forward_hook(lambda *args: forwards.append(1))
    runs = []
    for cache in (turn[CACHE], None):
        seen, drafter.drafts = [], 0
        handle = drafter.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["context_hidden_states"]), with_kwargs=True
        )
        forwards.clear()
        output, drafting = drafted(model, ids, drafter, 24, **{CACHE: cache})
        handle.remove()
        assert torch.equal(output, text)
        assert_rounds(drafting, PATTERN)
        assert len(forwards) == 1 + len(drafting.rounds)  # nothing was computed twice
        runs.append((torch.cat(seen, dim=1), drafting.rounds))
    hook.remove()
    (warm, warm_rounds), (cold, cold_rounds) = runs
    assert warm_rounds == cold_rounds
    torch.testing.assert_close(warm, cold[:, -warm.shape[1] :], atol=1e-4, rtol=1e-4)


def assert_drafts_as_cold(model, drafter, ids, caches, n: int = 24):
    """On each of the caches the text is the plain one, and the drafter computes the very blocks of a cold run."""
    text, runs = plain(model, ids, n), []
    for cache in (*caches, None):
        states, drafter.drafts = [], 0
        hook = drafter.norm.register_forward_hook(lambda module, args, output, states=states: states.append(output))
        output, drafting = drafted(model, ids, drafter, n, **{CACHE: cache})
        hook.remove()
        assert torch.equal(output, text)
        runs.append((torch.cat(states), drafting.rounds))
    cold, rounds = runs.pop()
    for block, warm_rounds in runs:
        assert warm_rounds == rounds
        torch.testing.assert_close(block, cold, atol=1e-3, rtol=1e-3)


@each_kind
@pytest.mark.parametrize("random", [False, True])
def test_second_turn_drafts_exactly_as_a_cold_one(kind, random):
    """On the returned cache, and on one the drafter has never seen, where its context is computed once more (C5)."""
    model = target(kind)
    ids, text, drafter = second_turn(model, PATTERN, 9)
    if random:
        drafter = make_drafter(model)
    turn, _ = drafted(model, prompt(), drafter, 9, return_dict_in_generate=True)
    prefilled = DynamicCache(config=model.config)
    model(turn.sequences[:, :-1], **{CACHE: prefilled})
    assert_drafts_as_cold(model, drafter, ids, (turn[CACHE], prefilled))


def test_a_cache_cut_back_or_refilled():
    """A prompt that shares less than the whole text with the cache, and a cache refilled behind the drafter's back."""
    model = target()
    drafter = make_drafter(model)
    for refilled in (False, True):
        turn, _ = drafted(model, prompt(), drafter, 12, return_dict_in_generate=True)
        cache = turn[CACHE]
        cache.crop(11 - cache.get_seq_length())
        ids = torch.cat([turn.sequences[:, :11], USER], dim=1)
        if refilled:
            ids = torch.cat([turn.sequences[:, :9], prompt(5, seed=8)], dim=1)
            cache.crop(-2)
            model(ids[:, 9:12], **{CACHE: cache})
        assert_drafts_as_cold(model, drafter, ids, (cache,))


def test_another_drafter_on_the_cache():
    model = target()
    turn, _ = drafted(model, prompt(), make_drafter(model), 8, return_dict_in_generate=True)
    ids = torch.cat([turn.sequences, USER], dim=1)
    assert_drafts_as_cold(model, make_drafter(model, seed=5), ids, (copy.deepcopy(turn[CACHE]), turn[CACHE]))


@each_kind
@pytest.mark.parametrize("cached", [1, 4, 6, 7])
def test_supplied_cache_of_part_or_all_of_the_prompt(kind, cached):
    """`prompt[:-1]`, a shorter prefix, and exactly the prompt."""
    model, text = target(kind), ref(kind)
    cache = DynamicCache()  # without a config: full layers, whatever the model's windows
    model(text[:, :cached], **{CACHE: cache})
    drafter = oracle(model, text, PATTERN)
    output, drafting = drafted(model, prompt(), drafter, 24, return_dict_in_generate=True, **{CACHE: cache})
    assert torch.equal(output.sequences, text[:, :31])
    assert output[CACHE] is cache and cache.get_seq_length() == 30
    assert_rounds(drafting, PATTERN)


def test_cache_of_more_than_the_prompt_is_refused():
    cache = DynamicCache()
    target()(ref()[:, :11], **{CACHE: cache})
    with pytest.raises(ValueError, match="11 positions.*only 7 tokens.*Crop it"):
        drafted(target(), prompt(), make_drafter(target()), 8, **{CACHE: cache})
    assert cache.get_seq_length() == 11


def test_whole_prompt_past_a_sliding_window_is_refused():
    model = target("qwen3-alternating")
    cache = DynamicCache(config=model.config)
    model(prompt(9), **{CACHE: cache})
    with pytest.raises(ValueError, match="9 positions.*window of 6.*at least one position less"):
        drafted(model, prompt(9), make_drafter(model), 8, **{CACHE: cache})


@each_kind
def test_only_the_new_tokens_passed(kind):
    """`input_ids` may leave out what the cache holds; the mask covers all. The drafter starts blind and says so."""
    model, text = target(kind), ref(kind)
    cache = DynamicCache(config=model.config)
    model(text[:, :5], **{CACHE: cache})
    mask = torch.ones(1, 7, dtype=torch.long)
    output, drafting = drafted(
        model, text[:, 5:7], oracle(model, text, PATTERN), 24, attention_mask=mask, **{CACHE: cache}
    )
    assert torch.equal(output, text[:, 5:31])
    assert_rounds(drafting, PATTERN)


def test_second_turn_with_left_padding():
    model = target()
    pads, mask = torch.full((1, 5), 3), torch.ones(1, 12, dtype=torch.long)
    mask[:, :5] = 0
    ids, text, drafter = second_turn(model, PATTERN, 9)
    turn, _ = drafted(
        model, torch.cat([pads, prompt()], dim=1), drafter, 9, attention_mask=mask, return_dict_in_generate=True
    )
    padded = torch.cat([turn.sequences, USER], dim=1)
    mask = torch.cat([mask, mask.new_ones(1, padded.shape[1] - 12)], dim=1)
    drafter.drafts = 0
    forwards = []
    hook = model.register_forward_hook(lambda *args: forwards.append(1))
    output, drafting = drafted(model, padded, drafter, 24, attention_mask=mask, **{CACHE: turn[CACHE]})
    hook.remove()
    assert torch.equal(output[:, 5:], text)
    assert_rounds(drafting, PATTERN)
    assert len(forwards) == 1 + len(drafting.rounds)


def test_remembered_context_lives_as_long_as_its_cache():
    contexts = candidate_generator_xpress._CONTEXTS
    gc.collect()
    before = len(contexts)
    turn, _ = drafted(target(), prompt(), make_drafter(target()), 8, return_dict_in_generate=True)
    assert len(contexts) == before + 1
    kept = weakref.ref(contexts[turn[CACHE]][1])
    del turn
    gc.collect()
    assert len(contexts) == before and kept() is None


@static
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_static_cache(kind):
    model, text = target(kind), ref(kind)
    for pattern in ((BLOCK - 1,), PATTERN):
        kwargs = {"cache_implementation": "static", "return_dict_in_generate": True}
        output, drafting = drafted(model, prompt(), oracle(model, text, pattern), 24, **kwargs)
        assert isinstance(output[CACHE], StaticCache)
        assert torch.equal(output.sequences, text[:, :31])
        assert int(output[CACHE].get_seq_length()) == 30
        assert_rounds(drafting, pattern)


@static
def test_static_cache_supplied_and_continued():
    model = target()
    cache = StaticCache(config=model.config, max_cache_len=64)
    ids, text, drafter = second_turn(model, PATTERN, 9)
    turn, _ = drafted(model, prompt(), drafter, 9, **{CACHE: cache})
    drafter.drafts = 0
    output, drafting = drafted(model, ids, drafter, 24, **{CACHE: cache})
    assert torch.equal(output, text)
    assert_rounds(drafting, PATTERN)


@pytest.mark.parametrize("kind", ["qwen3-alternating"] if StaticLayer.is_croppable else KINDS)
def test_static_cache_that_cannot_be_cropped_is_refused_before_the_first_forward(kind):
    model, calls = make_target(kind), []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match="StaticCache cannot drop.*'dynamic'"):
        drafted(model, prompt(), make_drafter(model), 24, cache_implementation="static")
    assert not calls


def test_no_cache_is_refused():
    with pytest.raises(ValueError, match="use_cache=True"):
        drafted(target(), prompt(), make_drafter(target()), 8, use_cache=False)


def test_quantized_cache_is_refused_before_the_first_forward():
    class Quantized(QuantizedCache):
        def __init__(self, layers):
            super(QuantizedCache, self).__init__(layers=layers)

    class Layer(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor

        def _dequantize(self, tensor):
            return tensor

    with pytest.raises(ValueError, match="Quantized cannot drop"):
        drafted(target(), prompt(), make_drafter(target()), 8, **{CACHE: Quantized([Layer() for _ in range(LAYERS)])})


def test_dynamic_cache_made_by_the_caller():
    for cache in (DynamicCache(), DynamicCache(config=target().config)):
        output, drafting = drafted(target(), prompt(), oracle(target(), ref(), PATTERN), 24, **{CACHE: cache})
        assert torch.equal(output, ref()[:, :31])
        assert_rounds(drafting, PATTERN)


def test_cache_after_an_exception_holds_the_streamed_text():
    """A streamer that cancels inside a block leaves a cache the next call can use."""

    class Cancel(Exception):
        pass

    class Streamer:
        def __init__(self, stop):
            self.tokens, self.stop = [], stop

        def put(self, value):
            self.tokens += value.flatten().tolist()
            if len(self.tokens) == self.stop:
                raise Cancel

    for kind in KINDS:
        model, text = target(kind), ref(kind)
        for stop in range(8, 16):
            cache, streamer = DynamicCache(config=model.config), Streamer(stop)
            with pytest.raises(Cancel):
                drafted(model, prompt(), oracle(model, text), 24, streamer=streamer, **{CACHE: cache})
            assert streamer.tokens == text[0, :stop].tolist()
            assert cache.get_seq_length() == stop - 1
            assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
            assert torch.equal(plain(model, text[:, :stop], 8, **{CACHE: cache}), text[:, : stop + 8])


def test_memory_of_a_long_prompt():
    """The head runs on the last position only, and of the layers' states only the tapped ones are kept."""
    model, rows, kept = make_target(), [], []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel() // output.shape[-1]))
    model.register_forward_hook(
        lambda module, args, output: kept.append([i for i, s in enumerate(output.hidden_states) if s is not None])
    )
    ids = prompt(512)
    text = plain_text(ids)
    rows.clear(), kept.clear()
    _, drafting = drafted(model, ids, oracle(make_target(), text, PATTERN), 20)
    assert rows[0] == 1 and max(rows) <= BLOCK + 1
    selects = Version(transformers.__version__) >= Version("5.23")  # before, all layers' states are kept
    assert kept and all(layers == ([i + 1 for i in TAPS] if selects else [*range(LAYERS + 1)]) for layers in kept)
    assert_rounds(drafting, PATTERN)


def plain_text(ids):
    return plain(target(), ids, 20)


def test_drafter_context_is_not_kept_twice():
    """After a round the projected features are gone: the context is the drafter's keys and values, and one block's features."""
    model, text = target(), ref()
    with track_drafting():
        turn = model.generate(
            prompt(),
            assistant_model=oracle(model, text),
            max_new_tokens=24,
            do_sample=False,
            return_dict_in_generate=True,
        )
    _, context = candidate_generator_xpress._CONTEXTS[turn[CACHE]]
    [pending] = context.pending
    assert context.ids.shape[1] == context.cache.get_seq_length() + pending.shape[1] == 30
    assert pending.shape[1] <= BLOCK and pending.shape[2] == len(TAPS) * HIDDEN
