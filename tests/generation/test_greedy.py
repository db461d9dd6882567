"""Greedy text is the plain run's, token for token, whatever the drafter does: CASES A6, A8, A9, A10, A11, A13, A15, A18."""

import pytest
import torch
from rig import (
    BLOCK,
    CONFIGS,
    MASK_TOKEN,
    PATTERNS,
    TAPS,
    VOCAB,
    WINDOW,
    NaNDrafter,
    assert_rounds,
    assert_same_but_for_a_near_tie,
    drafted,
    make_drafter,
    make_target,
    oracle,
    plain,
    prompt,
    ref,
    steer,
    target,
)
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3NextConfig, Qwen3NextForCausalLM
from xpress_drafter import xpress_generate


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_with_an_oracle(kind, pattern):
    drafter = oracle(target(kind), ref(kind), pattern)
    output, drafting = drafted(target(kind), prompt(), drafter, 40)
    assert torch.equal(output, ref(kind))
    assert_rounds(drafting, pattern)


@pytest.mark.parametrize("refiner", [{}, {"xpress_rank": None}, {"xpress_rank": None, "markov_rank": 16}], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_with_a_random_drafter(kind, refiner):
    output, drafting = drafted(target(kind), prompt(), make_drafter(target(kind), **refiner), 24)
    assert torch.equal(output, ref(kind)[:, : output.shape[1]])
    assert drafting.drafted > 50


def test_text_with_a_drafter_that_is_not_a_number():
    output, drafting = drafted(target(), prompt(), make_drafter(target(), NaNDrafter), 24)
    assert torch.equal(output, ref()[:, : output.shape[1]])
    assert drafting.drafted > 50


@pytest.mark.parametrize("length", [1, 2, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-alternating"])
def test_prompt_lengths(kind, length):
    text = ref(kind, 24, length)
    drafter = oracle(target(kind), text, (0, 3, BLOCK - 1))
    output, drafting = drafted(target(kind), prompt(length), drafter, 24)
    assert torch.equal(output, text)
    assert_rounds(drafting, drafter.pattern)


@pytest.mark.parametrize("size", [2, 3, WINDOW + 4])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen3-alternating", "mistral-sliding", "gemma3"])
def test_block_sizes_past_the_window(kind, implementation, size):
    model = make_target(kind)
    model.set_attn_implementation(implementation)
    text = plain(model, prompt(), 40)
    pattern = (size - 1, 0, max(size - 3, 0))
    output, drafting = drafted(model, prompt(), oracle(model, text, pattern, block_size=size), 40)
    assert torch.equal(output, text)
    assert_rounds(drafting, pattern, size)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-alternating"])
def test_left_padding(kind):
    pads = torch.full((1, 5), 3)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :5] = 0
    for make in (lambda: oracle(target(kind), ref(kind), (0, 3, BLOCK - 1)), lambda: make_drafter(target(kind))):
        contexts = []
        for ids, kwargs in ((prompt(), {}), (torch.cat([pads, prompt()], dim=1), {"attention_mask": mask})):
            seen, drafter = [], make()
            drafter.register_forward_pre_hook(_record_inputs(seen), with_kwargs=True)
            output, drafting = drafted(target(kind), ids, drafter, 24, **kwargs)
            assert torch.equal(output[:, -31:], ref(kind)[:, :31])
            contexts.append((seen, drafting.rounds))
        (seen, rounds), (seen_padded, rounds_padded) = contexts
        assert rounds_padded == rounds
        for unpadded, padded in zip(seen, seen_padded):
            assert torch.equal(unpadded["position_ids"], padded["position_ids"])
            context, expected = padded["context_hidden_states"], unpadded["context_hidden_states"]
            torch.testing.assert_close(context, expected, atol=1e-4, rtol=1e-4)


def _record_inputs(seen: list):
    def hook(module, args, kwargs):
        seen.append({key: kwargs[key] for key in ("context_hidden_states", "position_ids")})

    return hook


def test_context_is_the_tapped_layers_of_every_verified_position():
    drafter, seen = oracle(target(), ref(), (0, 3, BLOCK - 1)), []
    drafter.register_forward_pre_hook(_record_inputs(seen), with_kwargs=True)
    drafted(target(), prompt(), drafter, 30)
    states = target()(ref(), output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in TAPS], dim=-1)
    position = 0
    for inputs in seen:
        context, positions = inputs["context_hidden_states"], inputs["position_ids"][0]
        new = context.shape[1]
        assert positions.tolist() == list(range(position, position + new + BLOCK))
        torch.testing.assert_close(context, expected[:, position : position + new], atol=1e-4, rtol=1e-4)
        position += new
    assert position > 30


@pytest.mark.parametrize(
    "refiner", [{}, {"xpress_rank": None}, {"xpress_rank": None, "markov_rank": 16}], ids=["xpress", "none", "markov"]
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gemma3"])
def test_drafts_equal_a_slow_reference(kind, refiner, monkeypatch):
    """Every draft of the loop, made from cached and incremental parts, against one made from scratch."""
    model, drafter = target(kind), make_drafter(target(kind), **refiner)
    drafts = steer(monkeypatch, ref(kind), (0, 3, BLOCK - 1, 1))
    output, _ = drafted(model, prompt(), drafter, 24)
    assert torch.equal(output, ref(kind)[:, :31]) and len(drafts) > 6
    for ids, draft in drafts:
        assert torch.equal(draft.tokens, slow_draft(model, drafter, ids))


def slow_draft(model, drafter, ids: torch.LongTensor) -> torch.LongTensor:
    """The draft tokens behind `ids`, by the definition: no cache, all passes through the whole refiner."""
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states
    block = torch.cat([ids[0, -1:], torch.full((BLOCK - 1,), MASK_TOKEN)])[None]
    h = drafter(
        model.get_input_embeddings()(block), torch.cat([states[i + 1] for i in TAPS], dim=-1)
    ).last_hidden_state
    base = model.lm_head(h)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        base = cap * torch.tanh(base / cap)
    tokens = base.argmax(dim=-1)
    passes = {"xpress": drafter.config.xpress_num_passes, "markov": BLOCK - 1, None: 0}[drafter.config.refiner_type]
    for _ in range(passes):
        prev = torch.cat([ids[:, -2:], tokens[:, 1:-1]], dim=1)
        tokens = (base + drafter.refiner(h, prev)).argmax(dim=-1)
    return tokens[:, 1:]


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_reaches_the_context_only_where_it_is_tapped(layer):
    model, constant = make_target(), 7.0
    model.model.layers[layer].register_forward_hook(lambda module, args, output: torch.full_like(output, constant))
    drafter, seen = make_drafter(model), []
    drafter.register_forward_pre_hook(_record_inputs(seen), with_kwargs=True)
    drafted(model, prompt(), drafter, 3)
    taps = seen[0]["context_hidden_states"].chunk(len(TAPS), dim=-1)
    assert [bool((tap == constant).all()) for tap in taps] == [i == layer for i in TAPS]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [ref()[0, 12:14].tolist(), ref()[0, 20:21].tolist()]},
        {"sequence_bias": {(3,): 2.0, (8, 4): 4.0}},
        {"suppress_tokens": [1, 2, 3, 50, 51]},
        {"begin_suppress_tokens": list(range(40))},
        {"repetition_penalty": 1.2, "suppress_tokens": [4], "renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(ids.shape[-1] % 3, VOCAB, 3))},
    ],
    ids=lambda kwargs: "+".join(kwargs),
)
def test_processors(kwargs):
    text = plain(target(), prompt(), 30, **kwargs)
    assert not torch.equal(text, ref()[:, :37])
    for pattern in ((BLOCK - 1,), (0, 3, BLOCK - 1)):
        output, drafting = drafted(target(), prompt(), oracle(target(), text, pattern), 30, **kwargs)
        assert torch.equal(output, text)
        assert_rounds(drafting, pattern)
    output, _ = drafted(target(), prompt(), make_drafter(target()), 30, **kwargs)
    assert torch.equal(output, text)


def test_a_callers_processor_is_called_once_for_every_token():
    class Recorder(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append((input_ids[0].tolist(), tuple(scores.shape)))
            return scores.roll(len(self.seen), dims=-1)

    wanted, seen = Recorder(), Recorder()
    text = plain(target(), prompt(), 20, logits_processor=LogitsProcessorList([wanted]))
    drafter = oracle(target(), text, (0, 3, BLOCK - 1))
    output, drafting = drafted(target(), prompt(), drafter, 20, logits_processor=LogitsProcessorList([seen]))
    assert torch.equal(output, text)
    assert seen.seen == wanted.seen
    assert_rounds(drafting, drafter.pattern)


def test_recurrent_targets_are_refused_before_the_first_forward():
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=1,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3NextForCausalLM(config).eval()
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    for message, door in (
        ("stateful models", {"assistant_model": make_drafter(model)}),  # Transformers' own check comes first
        (
            "recurrent state.*linear_attention.*without",
            {"custom_generate": xpress_generate, "drafter": make_drafter(model)},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(prompt(), max_new_tokens=8, do_sample=False, **door)
    assert not calls


class Boom(Exception):
    pass


class FailingStreamer:
    """Raises at its n-th token."""

    def __init__(self, n: int):
        self.left = n + 1  # the prompt is put first

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise Boom

    def end(self):
        pass


def test_nothing_is_left_over_from_an_earlier_call():
    model, text = make_target(), ref()
    drafter, random = oracle(model, text, (0, 3, BLOCK - 1)), make_drafter(model)
    configs = [m.config.to_json_string() for m in (model, drafter)] + [model.generation_config.to_json_string()]

    def fresh():
        drafter.drafts = 0
        output, drafting = drafted(model, prompt(), drafter, 30)
        assert torch.equal(output, text[:, :37])
        return drafting.rounds

    rounds = fresh()
    assert fresh() == rounds  # the same call twice
    drafted(model, prompt(50, seed=1), drafter, 10)
    assert fresh() == rounds  # a shorter prompt after a longer one
    drafted(model, prompt(), drafter, 20, do_sample=True, temperature=1.5, num_passes=1, shortlist_size=8)
    assert fresh() == rounds  # greedy after sampling with options
    drafted(model, prompt(), random, 10)
    assert fresh() == rounds  # another drafter between
    for n in (0, 1, 4, 7):
        with pytest.raises(Boom):
            drafted(model, prompt(), drafter, 20, streamer=FailingStreamer(n))
        assert fresh() == rounds  # a call that raised inside a block
    assert configs == [m.config.to_json_string() for m in (model, drafter)] + [
        model.generation_config.to_json_string()
    ]
    assert not model.training and not drafter.training
    for module in (*drafter.modules(), *(m for name, m in model.named_modules())):
        assert not module._forward_pre_hooks


def test_greedy_draws_no_random_number():
    drafter, state = make_drafter(target()), torch.get_rng_state()
    drafted(target(), prompt(), drafter, 10)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_at_near_ties(dtype):
    parted = 0
    for seed in range(4):
        model = make_target(seed=seed).to(dtype)
        text = plain(model, prompt(seed=seed), 40)
        output, drafting = drafted(model, prompt(seed=seed), oracle(model, text, (0, 3, BLOCK - 1)), 40)
        parted += assert_same_but_for_a_near_tie(model, output, text, dtype)
        assert drafting.accepted > 0
    assert parted <= 2


def test_a_block_is_the_anchor_and_mask_tokens():
    model, seen = make_target(), []
    drafter = make_drafter(model)
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].tolist()))
    drafted(model, prompt(), drafter, 4)
    masks = [MASK_TOKEN] * (BLOCK - 1)
    blocks = [ids[0] for ids in seen if isinstance(ids[0], list) and ids[0][1:] == masks]
    assert [block[0] for block in blocks] == ref()[0, 7 : 7 + len(blocks)].tolist() and len(blocks) == 2
