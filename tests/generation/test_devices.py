"""Other dtypes, offloaded, quantised, adapted and compiled models. CASES E1, E2, E4, E7, E9."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rig import (
    BLOCK,
    VOCAB,
    assert_rounds,
    assert_same_but_for_a_near_tie,
    codebook,
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
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM


PATTERN = (0, 3, BLOCK - 1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("drafter_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_mixed_dtypes(target_dtype, drafter_dtype):
    model = make_target().to(target_dtype)
    text = plain(model, prompt(), 24)
    drafter = oracle(model, text, PATTERN).to(drafter_dtype)
    output, drafting = drafted(model, prompt(), drafter, 24)
    assert drafting.accepted > 8
    if not assert_same_but_for_a_near_tie(model, output, text, target_dtype):
        assert_rounds(drafting, PATTERN)
    assert target_dtype != torch.float32 or torch.equal(output, text)
    for kwargs in ({"shortlist_size": 8}, {"do_sample": True, "top_k": 1}):
        output, _ = drafted(model, prompt(), make_drafter(model).to(drafter_dtype), 12, **kwargs)
        assert_same_but_for_a_near_tie(model, output, text[:, :19], target_dtype)


@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16])
def test_autocast(drafter_dtype):
    model = make_target()
    with torch.autocast("cpu", torch.bfloat16):
        text = plain(model, prompt(), 24)
        drafter = oracle(model, text, PATTERN).to(drafter_dtype)
        output, drafting = drafted(model, prompt(), drafter, 24)
        assert drafting.accepted > 8
        assert_same_but_for_a_near_tie(model, output, text, torch.bfloat16)
        output, _ = drafted(model, prompt(), make_drafter(model).to(drafter_dtype), 12, do_sample=True, top_k=1)
        assert_same_but_for_a_near_tie(model, output, text[:, :19], torch.bfloat16)


@pytest.mark.parametrize("head", ["cpu", "disk"])
def test_target_offloaded_to_disk(tmp_path, head):
    """Layers, embedding or head on disk: every module is called, so that its hook brings the weights."""
    make_target().save_pretrained(tmp_path / "target")
    device_map = {"model.embed_tokens": head, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": head}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=tmp_path / "offload"
    ).eval()
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    drafter = oracle(target(), ref(), PATTERN)
    output, drafting = drafted(model, prompt(), drafter, 24)
    assert torch.equal(output, ref()[:, :31])
    assert_rounds(drafting, PATTERN)
    assert torch.equal(drafted(model, prompt(), make_drafter(target()), 12)[0], ref()[:, :19])


def test_drafter_loaded_by_device_map(tmp_path):
    drafter = make_drafter(target())
    expected, wanted = drafted(target(), prompt(), drafter, 24)
    drafter.save_pretrained(tmp_path)
    loaded = type(drafter).from_pretrained(tmp_path, device_map="cpu")
    output, drafting = drafted(target(), prompt(), loaded, 24)
    assert torch.equal(output, expected) and drafting.rounds == wanted.rounds


class Int8Linear(nn.Module):
    """Weight-only int8, as quantisers replace `nn.Linear`: no float `weight` to read."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.packed * self.scale)


def quantise(module: nn.Module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            quantise(child)


def test_quantised_target():
    model = make_target()
    codes = codebook(model)
    quantise(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    text = plain(model, prompt(), 24)
    assert not torch.equal(text, ref()[:, :31])
    drafter = oracle(target(), text, PATTERN)
    drafter.codes = codes
    output, drafting = drafted(model, prompt(), drafter, 24)
    assert torch.equal(output, text)
    assert_rounds(drafting, PATTERN)
    assert torch.equal(drafted(model, prompt(), make_drafter(model), 12)[0], text[:, :19])


def lora(model: nn.Module, *names: str):
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(names), init_lora_weights=False))


def test_adapted_target():
    """LoRA on the target: active, disabled and merged, the drafter reads the states of the model that decodes."""
    model = lora(make_target(), "q_proj", "v_proj", "up_proj").eval()
    text = plain(model, prompt(), 24)
    assert not torch.equal(text, ref()[:, :31])
    for _ in range(2):
        output, drafting = drafted(model, prompt(), oracle(target(), text, PATTERN), 24)
        assert torch.equal(output, text)
        assert_rounds(drafting, PATTERN)
        with model.disable_adapter():
            output, drafting = drafted(model, prompt(), oracle(target(), ref(), PATTERN), 24)
        assert torch.equal(output, ref()[:, :31])
        assert_rounds(drafting, PATTERN)
    merged = model.merge_and_unload()
    text = plain(merged, prompt(), 24)
    output, drafting = drafted(merged, prompt(), oracle(target(), text, PATTERN), 24)
    assert torch.equal(output, text)
    assert_rounds(drafting, PATTERN)


def test_adapted_drafter():
    """A drafter in LoRA drafts with its adapter: other blocks, same text."""
    bare = make_drafter(target())
    wrapped = lora(make_drafter(target()), "q_proj", "down_h", "fc").eval()
    blocks = []
    for drafter, norm in ((bare, bare.norm), (wrapped, wrapped.base_model.model.norm)):
        states = []
        hook = norm.register_forward_hook(lambda module, args, output, states=states: states.append(output))
        output, drafting = drafted(target(), prompt(), drafter, 12)
        hook.remove()
        assert torch.equal(output, ref()[:, :19]) and drafting.drafted > 10
        blocks.append(states[0])
    assert not torch.allclose(*blocks)


@pytest.mark.parametrize("name", ["w2", "in_proj"])
def test_an_adapter_that_decoding_would_pass_by_is_refused(name):
    drafter = lora(make_drafter(target()), name)
    with pytest.raises(ValueError, match=f"xpress_head.{name} is a Linear.*merge the adapter"):
        drafted(target(), prompt(), drafter, 8)
    output, _ = drafted(target(), prompt(), drafter.merge_and_unload(), 8)
    assert torch.equal(output, ref()[:, :15])


def test_compiled_drafter(monkeypatch):
    """`torch.compile(drafter)` is what runs, gives the same text, and settles after a few compilations."""
    torch._dynamo.reset()
    counter = CompileCounter()
    drafter = torch.compile(make_drafter(target(), num_hidden_layers=1), backend=counter)
    for seed, length in enumerate((7, 12)):
        ids = prompt(length, seed)
        expected = plain(target(), ids, 60)
        with monkeypatch.context() as patch:
            steer(patch, expected, (0, 3, BLOCK - 1, 1, 2, 4))
            output, drafting = drafted(target(), ids, drafter, 60)
        assert torch.equal(output, expected) and drafting.tau > 2.5
    torch._dynamo.reset()
    assert 0 < counter.frame_count <= 6


def test_ids_stay_in_the_vocabulary():
    output, _ = drafted(target(), prompt(), make_drafter(target()), 24, do_sample=True, temperature=5.0)
    assert 0 <= output.min() and output.max() < VOCAB
