"""Drafters trained in an adapter, and drafters for adapted targets."""

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from rig import drafted, make_drafter, make_target, plain, prompt, target
from safetensors.torch import load_file
from training import EVERY, Stop, batch_of, hashes, losses, make_rows, make_trainer, moved
from transformers import AutoModel
from xpress_drafter import XPressDrafterModel


HEADS = [{}, {"xpress_rank": None, "markov_rank": 16}, {"xpress_rank": None}]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def base(tmp_path) -> str:
    """The folder of a drafter, as released."""
    make_drafter(target()).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def lora_trainer(drafter, folder=None, **kwargs):
    config = kwargs.pop("config", LoraConfig(r=4, init_lora_weights=False))
    return make_trainer(drafter, folder=folder, peft_config=config, num_anchors=EVERY, **kwargs)


@pytest.mark.parametrize("head", HEADS)
def test_what_learns(head):
    """Every adapter matrix of the backbone, every weight of the refiner's copy, and nothing else."""
    drafter = make_drafter(target(), **head)
    whole = {name.split(".")[0] for name, _ in drafter.named_parameters() if "_head." in name}
    matrices = {
        name for name, p in drafter.named_parameters() if p.dim() == 2 and name.split(".")[0] in ("fc", "layers")
    }
    trainer = lora_trainer(drafter)
    before = hashes(trainer.model)
    trainer.train()
    changed = moved(trainer.model, before)
    assert changed == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    loras = {name for name in changed if "lora_" in name}
    assert len(loras) == 2 * len(matrices) and not any("_head." in name for name in loras)
    others = {name.split(".")[2] for name in changed - loras}
    assert others == whole and all(".modules_to_save.default." in name for name in changed - loras)


def test_a_config_of_ones_own_is_kept():
    """Its targets and its modules to save; the caller's object is not written to."""
    config = LoraConfig(r=4, target_modules=["gate_proj"], modules_to_save=["fc"])
    trainer = lora_trainer(make_drafter(target()), config=config)
    trained = {name.split("base_model.model.")[1] for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora" not in name} == {"fc.modules_to_save.default.weight"}
    assert any("layers.1.mlp.gate_proj.lora_A" in name for name in trained)
    untouched = LoraConfig(r=4)
    lora_trainer(make_drafter(target()), config=untouched)
    assert untouched.target_modules is None and untouched.modules_to_save is None


def test_saved_as_an_adapter_and_merged(base, tmp_path):
    """However it is loaded again, it evaluates and drafts as the trained one did; the adapter is small."""
    rows = make_rows(3, seed=1)
    trainer = lora_trainer(
        XPressDrafterModel.from_pretrained(base),
        tmp_path / "run",
        eval_dataset=rows,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    before = trainer.evaluate()
    trainer.train()
    after, adapter = trainer.evaluate(), tmp_path / "run" / "checkpoint-2"
    assert before["eval_loss"] != pytest.approx(after["eval_loss"], rel=1e-3)
    names = load_file(adapter / "adapter_model.safetensors")
    assert not any("original_module" in name or "base_layer" in name for name in names)
    trainer.model.eval()
    rounds = drafted(target(), prompt(), trainer.model, 20)[1].rounds
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    loaded = [
        PeftModel.from_pretrained(XPressDrafterModel.from_pretrained(base), adapter),
        AutoModel.from_pretrained(tmp_path / "merged", trust_remote_code=True),
    ]
    if Version(transformers.__version__) >= Version("5.24"):  # 5.17 names the refiner's weights before it loads them
        loaded.append(AutoModel.from_pretrained(adapter, trust_remote_code=True))
    for drafter in loaded:
        again = make_trainer(drafter, eval_dataset=rows, num_anchors=EVERY).evaluate()
        for name in ("eval_loss", "eval_loss_anchor", "eval_tau"):
            assert again[name] == pytest.approx(after[name], rel=1e-5)
        output, drafting = drafted(target(), prompt(), drafter.eval(), 20)
        assert torch.equal(output, plain(target(), prompt(), 20)) and drafting.rounds == rounds


def test_resumed(base, tmp_path):
    """Four steps, against two and two in another trainer: adapter, refiner and logs are identical."""

    def run(folder, seed: int = 0, **kwargs):
        torch.manual_seed(seed)  # of the adapter's first weights
        drafter = XPressDrafterModel.from_pretrained(base)
        return lora_trainer(drafter, folder, save_strategy="steps", save_steps=2, **kwargs)

    straight = run(tmp_path / "straight", max_steps=4)
    straight.train()
    run(tmp_path / "run", max_steps=4, callbacks=[Stop(2)]).train()
    resumed = run(tmp_path / "run", seed=1, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and losses(resumed) == losses(straight)
    assert moved(resumed.model, hashes(straight.model)) == set()


def test_drafter_for_an_adapted_target():
    """The adapter's states and distributions are read, as of the merged model; the adapter stays as it is."""
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted, drafter, rows = get_peft_model(make_target(), config), make_drafter(target()), make_rows(4)
    before = hashes(adapted)
    trainer = make_trainer(drafter, adapted, rows, eval_dataset=rows, num_anchors=EVERY)
    metrics = trainer.evaluate()
    assert not any(p.requires_grad for p in adapted.parameters())
    reads = [make_trainer(drafter, model, rows).read_target(batch_of(trainer, rows)) for model in (adapted, target())]
    assert not torch.allclose(reads[0][0], reads[1][0]) and not torch.allclose(reads[0][1], reads[1][1])
    trainer.train()
    assert moved(adapted, before) == set()
    trained = trainer.evaluate()
    merged = adapted.merge_and_unload()
    again = make_trainer(make_drafter(target()), merged, rows, eval_dataset=rows, num_anchors=EVERY)
    assert again.evaluate()["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)
    assert trained["eval_loss"] < metrics["eval_loss"]
    assert torch.equal(drafted(merged, prompt(), drafter.eval(), 12)[0], plain(merged, prompt(), 12))


def test_what_is_refused():
    with pytest.raises(ValueError, match="`freeze_backbone` is set, but the drafter trains in an adapter"):
        lora_trainer(make_drafter(target()), freeze_backbone=True)
    prompted = get_peft_model(make_target(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(
        ValueError, match="the target has a PROMPT_TUNING adapter.*expected one that changes the weights"
    ):
        make_trainer(make_drafter(target()), prompted)
