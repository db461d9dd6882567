"""The parts that the tiny pair's build is made of: varied questions and the optimizer over two."""

import re
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from xpress_drafter.trainer import bfloat16
from xpress_drafter.trainer.bfloat16 import multiplies_bf16, warn_of_slow_bf16
from xpress_drafter.trainer.optimizer import MuonAdamW, orthogonalized
from xpress_drafter.trainer.tiny_pair import vary_questions


QUESTIONS = [
    "On Monday, Maria and Ben had 12 pens. Maria sold 12 and Ben sold 1. How many are left?",
    "The shop sold 305 pens to Maria, Ben and Maria. On a Monday, Maria and Ben came back 0 times. Was it Ben or Maria?",
    "Each of 2.5 pies went to Maria, and so did 40% of the rest, said Maria to Ben, Ben and Ben.",
]


def test_numbers_and_names_change_and_the_rest_stays():
    varied = vary_questions(QUESTIONS, 3, seed=0)
    assert len(varied) == 9 and varied == vary_questions(QUESTIONS, 3, seed=0) != vary_questions(QUESTIONS, 3, seed=1)
    for number, text in enumerate(varied):
        before = QUESTIONS[number % 3]
        for pattern in (r"\d+", r"Maria|Ben"):
            old, new = re.findall(pattern, before), re.findall(pattern, text)
            assert [len(word) for word in old if word.isdigit()] == [len(word) for word in new if word.isdigit()]
            assert all(a == b for a, b in zip(old, new) if a in ("0", "1"))
        assert re.sub(r"\d+|Maria|Ben", "#", before) == re.sub(r"\d+|Maria|Ben", "#", text)  # Monday is no name
    assert len(set(varied)) == 9 and not set(varied) & set(QUESTIONS)
    first = varied[0]
    pens, sold = re.search(r"had (\d+) pens", first)[1], re.search(r"sold (\d+) and", first)[1]
    assert pens == sold and "sold 1." in first  # the same number is replaced alike


def small_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "w1": nn.Embedding(5, 4), "layer": nn.Linear(4, 4)})


def step(model, optimizer):
    optimizer.zero_grad()
    model["layer"](model["embed"].weight + model["w1"].weight).pow(2).sum().backward()
    optimizer.step()


def test_matrices_go_to_muon_and_the_rest_to_adamw(monkeypatch):
    """In bf16 as torch's own Muon, to the last bit."""
    monkeypatch.setattr(bfloat16, "multiplies_bf16", lambda device: True)
    model = small_model()
    optimizer = MuonAdamW(model.named_parameters(), muon_lr=0.02, adamw_lr=1e-3)
    muon, adamw = (group["params"] for group in optimizer.param_groups)
    assert [p is model["layer"].weight for p in muon] == [True] and len(adamw) == 3
    other = small_model()
    alone = [
        torch.optim.Muon([other["layer"].weight], lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(
            [p for p in other.parameters() if p is not other["layer"].weight],
            lr=1e-3,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    for _ in range(3):
        step(model, optimizer)
        other["layer"](other["embed"].weight + other["w1"].weight).pow(2).sum().backward()
        for part in alone:
            part.step()
            part.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_a_step_in_float32_is_that_in_bf16_without_its_rounding(monkeypatch, shape):
    matrix = nn.init.orthogonal_(torch.empty(shape)) * torch.linspace(0.5, 2.0, shape[1])
    steps = {}
    for bf16 in (True, False):
        monkeypatch.setattr(bfloat16, "multiplies_bf16", lambda device, bf16=bf16: bf16)
        steps[bf16] = orthogonalized(matrix)
    assert [steps[bf16].dtype for bf16 in (True, False)] == [torch.bfloat16, torch.float32]
    assert torch.allclose(steps[True].float(), steps[False], atol=0.05)
    values = torch.linalg.svdvals(steps[False])
    assert 0.5 < values.min() and values.max() < 1.5


def test_slow_bf16_is_said_where_it_is_slow_alone(monkeypatch, caplog):
    """A V100 and a CPU with AVX2 emulate it; what PyTorch calls supported counts emulation."""
    bfloat16.logger.warning_once.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    for native in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True, own=native: including_emulation or own
        )
        assert multiplies_bf16("cuda") == native and not multiplies_bf16() and multiplies_bf16("mps")
        warn_of_slow_bf16("a test asks", "`bf16=False`", "cuda")
        assert ("a device without bf16 instructions (cuda, Tesla V100)" in caplog.text) != native
    warn_of_slow_bf16("a test asks", "`bf16=False`")
    assert "a test asks on a device without bf16 instructions (cpu, " in caplog.text
    assert caplog.text.count("Set `bf16=False`.") == 2


def test_it_goes_on_from_its_state_and_follows_a_schedule():
    straight, resumed = small_model(), small_model()
    optimizer = MuonAdamW(straight.named_parameters(), 0.02, 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    for _ in range(2):
        step(straight, optimizer)
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.00025])
    resumed.load_state_dict(straight.state_dict())
    again = MuonAdamW(resumed.named_parameters(), 0.02, 1e-3)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for model, each in ((straight, optimizer), (resumed, again)):
        step(model, each)
    for ours, theirs in zip(resumed.parameters(), straight.parameters()):
        assert torch.equal(ours, theirs)


def test_its_state_is_what_sharded_checkpoints_read():
    """By name, of all parameters, from PyTorch's own functions; and taken up again by them."""
    model, other = small_model(), small_model()
    optimizer, again = (MuonAdamW(each.named_parameters(), 0.02, 1e-3) for each in (model, other))
    step(model, optimizer)
    saved = deepcopy(get_optimizer_state_dict(model, optimizer))
    names = {name: set(state) for name, state in saved["state"].items()}
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert names.pop("layer.weight") == {"momentum_buffer"}
    assert names == {name: adam for name, _ in model.named_parameters() if name != "layer.weight"}
    before = deepcopy(model.state_dict())
    set_optimizer_state_dict(other, again, saved)
    other.load_state_dict(before)
    for each in ((model, optimizer), (other, again)):
        step(*each)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(other.parameters(), model.parameters()))


def test_a_closure_is_called_with_gradients():
    straight, model = small_model(), small_model()
    optimizers = [MuonAdamW(each.named_parameters(), 0.02, 1e-3) for each in (straight, model)]
    step(straight, optimizers[0])

    def closure():
        loss = model["layer"](model["embed"].weight + model["w1"].weight).pow(2).sum()
        loss.backward()
        return loss

    assert optimizers[1].step(closure) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), straight.parameters()))


def test_what_it_cannot_take():
    """States of the version with an optimizer inside for each part, and flat pieces of matrices."""
    model = small_model()
    optimizer = MuonAdamW(model.named_parameters(), 0.02, 1e-3)
    with pytest.raises(ValueError, match="has `parts`.*expected `state` and `param_groups`: begin the run anew"):
        optimizer.load_state_dict({"parts": [optimizer.state_dict()]})
    flat = nn.Parameter(torch.ones(16))
    flat.grad = torch.ones(16)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(ValueError, match=r"piece of shape \[16\], expected a whole matrix.*`fsdp_version: 2`"):
        optimizer.step()
