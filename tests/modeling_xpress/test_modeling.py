"""Backbone and refiner: shapes, who sees whom, padding, caches, checkpointing, initialisation, and what is borrowed."""

import pytest
import torch
from checkpoints import REFINERS, agreeing_pair, config, drafter
from rig import BLOCK, HIDDEN, SHAPE, TAPS, VOCAB, drafted, make_drafter, make_target, plain, prompt
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
)
from xpress_drafter import XPressDrafterConfig, XPressDrafterModel
from xpress_drafter.modeling_xpress import XPressModel, base_logits, context_features, previous_tokens


pytestmark = [  # flex attention without its compiler, which is another library's, and slow to start
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
ATTENTIONS = ["eager", "sdpa", "flex_attention"]
S = 5  # context positions


def inputs(rows: int = 1, context: int = S, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "noise_embeds": torch.randn(rows, BLOCK, HIDDEN, generator=generator),
        "context_hidden_states": torch.randn(rows, context, len(TAPS) * HIDDEN, generator=generator),
    }


@torch.no_grad()
def states(model: XPressModel, attention: str = "sdpa", **kwargs) -> torch.Tensor:
    """The block's normed states under an attention implementation (flex without its compiler)."""
    model.set_attn_implementation(attention)
    with torch.compiler.set_stance("force_eager"):
        return model(**kwargs).last_hidden_state


def changed(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """The slots in which two results `[N, B, ...]` differ."""
    return (a != b).flatten(2).any(dim=2).any(dim=0).nonzero().flatten().tolist()


# What the forward returns.


@pytest.mark.parametrize("refiner", REFINERS)
def test_forward_shapes(refiner):
    model = drafter(refiner)
    h = model(**inputs(rows=3)).last_hidden_state
    assert h.shape == (3, BLOCK, HIDDEN)
    prev = torch.zeros(3, BLOCK, dtype=torch.long)
    if refiner is None:
        assert model.refiner is None
    else:
        assert model.refiner(h, prev).shape == (3, BLOCK, VOCAB)


def test_positions_count_on_from_the_cache():
    """Left out, they are those of a first round, then of a second one on the cache; given, they are obeyed."""
    model, whole = drafter(), inputs(context=8)
    context, noise = whole["context_hidden_states"], whole["noise_embeds"]
    at_once = states(model, **whole)
    assert torch.equal(at_once, states(model, **whole, position_ids=torch.arange(8 + BLOCK)[None]))
    spread = torch.arange(8 + BLOCK)[None] * 3
    assert not torch.allclose(at_once, states(model, **whole, position_ids=spread), atol=1e-3)
    cache = DynamicCache()
    states(model, noise_embeds=noise, context_hidden_states=context[:, :5], cache=cache)
    cache.crop(-BLOCK)
    second = states(model, noise_embeds=noise, context_hidden_states=context[:, 5:], cache=cache)
    torch.testing.assert_close(second, at_once, rtol=0, atol=1e-5)


def test_only_relative_positions_matter():
    model, whole = drafter(), inputs()
    shifted = states(model, **whole, position_ids=torch.arange(S + BLOCK)[None] + 100)
    torch.testing.assert_close(shifted, states(model, **whole), rtol=0, atol=1e-4)


# Who sees whom.


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_blocks_are_bidirectional_and_read_all_context(attention):
    model, given = drafter(), inputs()
    before = states(model, attention, **given)
    for slot in (0, BLOCK - 1):
        noise = given["noise_embeds"].clone()
        noise[:, slot] += 1
        assert changed(before, states(model, attention, **given | {"noise_embeds": noise})) == list(range(BLOCK))
    for position in (0, S - 1):
        context = given["context_hidden_states"].clone()
        context[:, position] += 1
        assert changed(before, states(model, attention, **given | {"context_hidden_states": context})) == list(
            range(BLOCK)
        )


def visible_to_each_other() -> torch.Tensor:
    """A mask `[1, 1, B, S + B]` with holes of every kind: a slot alone, slots in pairs, context in part."""
    mask = torch.zeros(BLOCK, S + BLOCK, dtype=torch.bool)
    mask[:, S:] = torch.eye(BLOCK // 2).repeat_interleave(2, 0).repeat_interleave(2, 1).bool()
    mask[2:, :3] = True
    mask[0, S + 1] = False
    return mask[None, None]


def test_attention_implementations_agree():
    """With every kind of mask that the forward takes; a flex `BlockMask` says the same as a dense one."""
    model, given, mask = drafter(), inputs(rows=2), visible_to_each_other()
    reference = states(model, "eager", **given)
    padding = torch.ones(2, S + BLOCK, dtype=torch.long)
    padding[1, :2] = 0
    masked, padded = states(model, "eager", **given, attention_mask=mask), None
    assert not torch.allclose(masked, reference, atol=1e-3)
    padded = states(model, "eager", **given, attention_mask=padding)
    assert not torch.allclose(padded[1], reference[1], atol=1e-3)
    table = mask[0, 0]
    flex = create_block_mask(lambda b, h, q, k: table[q, k], None, None, BLOCK, S + BLOCK, device="cpu")
    for attention, expected, kwargs in (
        ("sdpa", reference, {}),
        ("flex_attention", reference, {}),
        ("sdpa", masked, {"attention_mask": mask}),
        ("flex_attention", masked, {"attention_mask": flex}),
        ("sdpa", padded, {"attention_mask": padding}),
    ):
        found = states(model, attention, **given, **kwargs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, a=attention: f"{a}: {m}")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_its_single_rows(attention, side):
    """The padding's features and positions are arbitrary: nothing of them may show."""
    model, lengths, width = drafter(), (3, 8), 8
    given = inputs(rows=2, context=width)
    positions, mask = torch.full((2, width + BLOCK), 77), torch.zeros(2, width + BLOCK, dtype=torch.long)
    real = [slice(width - n, width) if side == "left" else slice(0, n) for n in lengths]
    for row, n in enumerate(lengths):
        positions[row, real[row]], positions[row, width:] = torch.arange(n), torch.arange(n, n + BLOCK)
        mask[row, real[row]] = mask[row, width:] = 1
    batch = states(model, attention, **given, position_ids=positions, attention_mask=mask)
    for row in range(2):
        alone = {key: value[row : row + 1] for key, value in given.items()}
        alone["context_hidden_states"] = alone["context_hidden_states"][:, real[row]]
        torch.testing.assert_close(batch[row : row + 1], states(model, attention, **alone), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("refiner, reach", [("xpress", BLOCK), ("markov", 1)])
def test_refined_logits_are_strictly_causal_in_tokens(refiner, reach):
    """A draft token at slot j changes the bias of slots after j alone: of all of them, or (Markov) of the next one."""
    head, h = drafter(refiner).refiner, torch.randn(2, BLOCK, HIDDEN)
    tokens = torch.randint(0, 90, (2, BLOCK + 1))  # predecessor, anchor, drafts of slots 1..B-1
    before = head(h, previous_tokens(tokens[:, 0], tokens[:, 1], tokens[:, 2:]))
    for slot in range(-1, BLOCK):  # -1: the predecessor
        other = tokens.clone()
        other[:, slot + 1] += 1
        after = head(h, previous_tokens(other[:, 0], other[:, 1], other[:, 2:]))
        assert changed(before, after) == list(range(slot + 1, BLOCK))[:reach]


@torch.no_grad()
def test_refiner_reads_every_slot_through_the_summary_alone():
    """A change of the last slot's state reaches the first by the mean; the Markov head reads no state."""
    head, h, prev = drafter().refiner, torch.randn(1, BLOCK, HIDDEN), torch.zeros(1, BLOCK, dtype=torch.long)
    other = h.clone()
    other[:, BLOCK - 1] += 1
    assert changed(head(h, prev), head(other, prev)) == list(range(BLOCK))
    head = drafter("markov").refiner
    assert changed(head(h, prev), head(other, prev)) == []


def test_previous_tokens():
    predecessor, anchor, drafts = torch.tensor([1]), torch.tensor([2]), torch.tensor([[3, 4, 5]])
    assert previous_tokens(predecessor, anchor, drafts).tolist() == [[1, 2, 3, 4]]


# What is borrowed from the target.


def test_context_features_are_the_outputs_of_the_named_layers():
    """In the order of the ids; index 0 of `hidden_states` is the embedding's output."""
    target = make_target()
    outputs = target(prompt(), output_hidden_states=True)
    found = context_features(outputs.hidden_states, [2, 0]).chunk(2, dim=-1)
    assert torch.equal(found[0], outputs.hidden_states[3]) and torch.equal(found[1], outputs.hidden_states[1])


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"logit_scale": 0.25}, lambda logits: 0.25 * logits),  # Cohere
        ({"logits_scaling": 4.0}, lambda logits: logits / 4),  # Granite
        ({"final_logit_softcapping": 2.0}, lambda logits: 2 * torch.tanh(logits / 2)),  # Gemma
    ],
)
@torch.no_grad()
def test_base_logits_are_the_targets_own(change, expected):
    target, h = make_target(), torch.randn(2, BLOCK, HIDDEN)
    plain_logits = target.lm_head(h)
    assert torch.equal(base_logits(target, h), plain_logits)
    target.config.update(change)
    torch.testing.assert_close(base_logits(target, h), expected(plain_logits))
    assert base_logits(target, h[:, 1:]).shape == (2, BLOCK - 1, VOCAB)


def test_for_target_takes_the_targets_shapes():
    """Vocabulary, widths, heads and rotary base; of a target with several rotary bases, the full layers' one."""
    llama = LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=40, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=1, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 3e5},
    )  # fmt: skip
    made = XPressDrafterModel.for_target(
        LlamaForCausalLM(llama), mask_token_id=79, num_hidden_layers=2, block_size=4
    ).config
    assert (made.vocab_size, made.intermediate_size, made.num_key_value_heads, made.head_dim) == (80, 40, 1, 8)
    assert (made.rms_norm_eps, made.rope_parameters["rope_theta"]) == (1e-5, 3e5)
    assert (made.num_target_layers, made.target_layer_ids) == (9, [1, 6])
    gemma = Gemma3TextConfig(
        vocab_size=80, hidden_size=32, intermediate_size=40, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    target = Gemma3ForCausalLM(gemma)
    made = XPressDrafterModel.for_target(target, mask_token_id=0, num_hidden_layers=2, intermediate_size=16).config
    assert made.rope_parameters["rope_theta"] == gemma.rope_parameters["full_attention"]["rope_theta"]
    assert made.intermediate_size == 16  # what the caller names wins


SCALED = {"original_max_position_embeddings": 256}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **SCALED},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], **SCALED},
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_rotary_positions_are_the_targets_far_past_its_length_too(rope_type):
    """Kind, base and factors; the very tables at positions up to four times the longest, and finite states there."""
    rope = {"rope_type": rope_type, "rope_theta": 5e5, **ROPES[rope_type]}
    target = make_target("llama", rope_parameters=rope)
    model, longest = make_drafter(target), target.config.max_position_embeddings
    assert model.config.rope_parameters == target.config.rope_parameters
    assert XPressDrafterConfig.from_dict(model.config.to_dict()).rope_parameters == model.config.rope_parameters
    for start in (0, longest // 2, longest - BLOCK, 4 * longest - S - BLOCK, 0):  # some kinds remember where they were
        positions = torch.arange(start, start + S + BLOCK)[None]
        tables = (module.rotary_emb(torch.zeros(1), positions) for module in (model, target.model))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*tables))
        assert states(model, **inputs(), position_ids=positions).isfinite().all()


def test_rotary_factors_for_a_part_of_the_head_are_refused():
    """As Phi-4-mini has them; with a rotation of its own the drafter is made."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **SCALED}
    rope |= {"factor": 4.0, "short_factor": [1.0] * 2, "long_factor": [1.0] * 2}
    target = AutoModelForCausalLM.from_config(Phi3Config(**SHAPE | {"pad_token_id": 0}, rope_parameters=rope))
    with pytest.raises(
        ValueError, match=r"turns 0.5 of each head, by 2 factors.*expected `rope_parameters` of its own"
    ):
        make_drafter(target)
    own = {"rope_type": "default", "rope_theta": 1e4}
    assert make_drafter(target, rope_parameters=own).config.rope_parameters == own


def test_a_refiner_that_knows_the_target_is_believed():
    """The whole path: base, passes, acceptance. Pass j settles slot j, so K passes keep K draft tokens a round."""
    target, model = agreeing_pair()
    reference = plain(target, prompt(), 30)
    for passes in (1, 3, BLOCK - 1):
        output, drafting = drafted(target, prompt(), model, n=30, num_passes=passes)
        assert torch.equal(output, reference)
        assert min(round.accepted for round in drafting.rounds[:-1]) >= passes


# Training.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradient_checkpointing_changes_nothing(attention):
    """Loss and gradients; each layer's attention does run twice."""
    model, given, calls = drafter(), inputs(rows=2), []
    model.set_attn_implementation(attention)
    model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    prev = torch.randint(0, VOCAB, (2, BLOCK))

    def gradients():
        model.zero_grad()
        h = model.train()(**given).last_hidden_state
        (h.square().mean() + model.refiner(h, prev).square().mean()).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    without = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    found = gradients()
    assert len(calls) == 3
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(grad.abs().sum() > 0 for grad in found.values())
    assert all(torch.equal(found[name], grad) for name, grad in without.items())


@pytest.mark.parametrize("refiner", REFINERS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_initialisation(refiner, device):
    """N(0, 0.02) everywhere, norms one, mixer zero, also where the model was built on the meta device first."""
    big = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 64}
    fields = {"xpress": {"xpress_rank": 64}, "markov": {"markov_rank": 64}, None: {}}[refiner]
    with torch.device(device):
        model = XPressDrafterModel(config(None, **big, **fields))
    if device == "meta":
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(7)  # fresh memory holds anything
        model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        elif name.endswith("mix.L"):
            assert not parameter.any(), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
            assert abs(float(parameter.detach().mean())) < 0.002, name
