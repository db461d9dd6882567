"""`xpress train`: recipes and what overrides them, plans that load nothing, runs that go on, and what is refused."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from training import losses
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from typer.testing import CliRunner
from xpress_drafter import XPressDrafterModel, track_drafting
from xpress_drafter.cli import PROBLEMS, TINY, app, encode, read_prompts
from xpress_drafter.trainer import XPressTrainingArguments, recipes, tiny_pair
from xpress_drafter.trainer.answers import AnswerSettings, write_rows
from xpress_drafter.trainer.plan import make_plan
from xpress_drafter.trainer.prompts import read_conversations
from xpress_drafter.trainer.recipe_runs import make_trainer, run, save_drafter
from xpress_drafter.trainer.recipes import SHIPPED, parse_overrides, read_recipe
from xpress_drafter.trainer.row_folder import load_rows


SHORT = AnswerSettings(str(TINY / "target"), max_new_tokens=16, batch_size=8)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """Eight short answers of the shipped target."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(read_conversations(str(PROBLEMS), limit=8), folder, SHORT)
    return str(folder)


@pytest.fixture
def tiny(rows, tmp_path):
    """The recipe `tiny` for a few small steps, with further overrides."""

    def recipe(**overrides):
        own = {"target": str(TINY / "target"), "data": rows, "output_dir": str(tmp_path / "run"), "disable_tqdm": True}
        return read_recipe("tiny", own | {"max_steps": 4, "num_anchors": 4, "logging_steps": 1} | overrides)

    return recipe


def invoke(*arguments: str):
    result = CliRunner().invoke(app, ["train", *arguments])
    return result, " ".join(result.output.replace("│", " ").split())


# Reading.


def test_the_shipped_ones():
    """Each says its data, steps, memory and time, and reads."""
    assert SHIPPED == ["qwen3-8b-adapt", "qwen3-8b-b16", "smollm2-135m", "tiny"]
    for name in SHIPPED:
        text = (recipes.FOLDER / f"{name}.yaml").read_text()
        for what in ("Data", "Steps", "Memory", "Time"):
            assert re.search(rf"^# {what} +\S", text, flags=re.MULTILINE), (name, what)
        read_recipe(name)
    released = read_recipe("qwen3-8b-b16")
    expected = {
        "learning_rate": 6e-4,
        "num_train_epochs": 10,
        "warmup_steps": 0.04,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "num_anchors": 400,
        "lambda_consistency": 0.3,
        "num_rounds": 3,
        "lambda_anchor_start": 0.6,
        "lambda_anchor_end": 0.2,
        "gamma": 4.0,
        "bf16": True,
    }
    assert {name: released.setting(name) for name in expected} == expected
    assert released.drafter == "z-lab/Qwen3-8B-DFlash-b16" and released.optimizer == "adamw"


def test_every_field_can_be_overridden():
    """Numbers as people write them, lists, nothing; whatever class the field belongs to."""
    pairs = [
        "learning_rate=1e-3",
        "block_size=4",
        "target_layer_ids=[1, 2]",
        "xpress_rank=null",
        "xpress_mlp_hidden=null",
        "rope_parameters={rope_type: default, rope_theta: 1e5}",
        "bf16=false",
        "data=d",
    ]
    recipe = read_recipe("tiny", parse_overrides([*pairs, "weight_decay=.1", "target=a=b"]))
    assert recipe.training["learning_rate"] == 1e-3 and recipe.training["bf16"] is False
    assert recipe.training["weight_decay"] == 0.1
    assert recipe.drafter_fields["block_size"] == 4 and recipe.drafter_fields["target_layer_ids"] == [1, 2]
    assert recipe.drafter_fields["xpress_rank"] is None and recipe.drafter_fields["xpress_mlp_hidden"] is None
    assert recipe.drafter_fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e5}
    assert recipe.data == "d" and recipe.target == "a=b"
    for name in ("max_steps", "dataloader_num_workers", "ce_weight"):  # read from the class, ours and Transformers'
        assert read_recipe("tiny", {name: 1}).setting(name) == 1
        assert XPressTrainingArguments.__dataclass_fields__[name]


def test_a_file_of_one_s_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("target: t\ndata: d\noutput_dir: o\nlearning_rate: 2e-4\n")
    recipe = read_recipe(str(path))
    assert recipe.setting("learning_rate") == 2e-4 and recipe.setting("num_anchors") == 400
    path.write_text(yaml.safe_dump(recipe.values()))
    assert read_recipe(str(path)) == recipe


REFUSED = [
    ({"blok_size": 4}, "'blok_size' is no field of a recipe; the nearest is 'block_size'"),
    ({"learning_rates": 1}, "the nearest is 'learning_rate'"),
    ({"xyz": 1}, "'xyz' is no field of a recipe; the nearest is"),
    ({"learning_rate": "fast"}, "`learning_rate` is 'fast', expected a value of type float"),
    ({"max_steps": 1.5}, "`max_steps` is 1.5, expected a value of type int"),
    ({"max_steps": True}, "`max_steps` is True, expected a value of type int"),
    ({"bf16": 1}, "`bf16` is 1, expected a value of type bool"),
    ({"data": None}, "has no `data`, which has no default"),
    ({"data": 3}, "`data` is 3, expected a folder that `xpress data` made, or a list of such"),
    ({"feature_cache_gib": 2.0}, "`feature_cache_gib` is 2.0 beside no `feature_cache`: nothing would read it"),
    ({"hub_token": "hf_secret"}, "`hub_token` is given, .* leave it out and log in with `hf auth login`"),
    ({"xpress_rank": None}, "`xpress_mlp_hidden` is 192 beside no `xpress_rank`: nothing would read it, .* or null"),
    ({"xpress_rank": None, "markov_rank": 8}, "`xpress_mlp_hidden` is 192 beside no `xpress_rank`"),
    ({"optimizer": "sgd"}, "`optimizer` is 'sgd', expected one of adamw, muon"),
    ({"target_dtype": "int8"}, "`target_dtype` is 'int8', expected one of float32"),
    ({"lora_rank": 8}, "`lora_rank` is 8 without a `drafter` to adapt"),
    ({"mask_token": "<|mask|>", "drafter": "d"}, "`mask_token` is '<|mask|>' beside a `drafter`, which has its own"),
    ({"optimizer": "adamw", "muon_learning_rate": 0.1}, "`muon_learning_rate` is 0.1 beside `optimizer` 'adamw'"),
    ({"optim": "adamw_torch"}, "`optim` is 'adamw_torch' beside `optimizer` 'muon': nothing would read it"),
    ({"optim_args": "a=1"}, "`optim_args` is 'a=1' beside `optimizer` 'muon': nothing would read it"),
    ({"lora_alpha": 8}, "`lora_alpha` is 8 beside no `lora_rank`"),
    (
        {"lora_rank": 8, "drafter": "d", "optimizer": "adamw", "freeze_backbone": True},
        "`freeze_backbone` is True beside `lora_rank`",
    ),
    ({"lora_rank": 8, "drafter": "d"}, "`lora_rank` is 8 and `optimizer` 'muon', expected 'adamw'"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_values_that_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        read_recipe("tiny", overrides)


def test_a_token_is_not_repeated_where_it_is_refused(tiny):
    """Nor is the mask token, which is no secret, refused."""
    with pytest.raises(ValueError) as error:
        tiny(hub_token="hf_secret")
    assert "hf_secret" not in str(error.value)
    assert tiny(hub_token=None, mask_token="<|pad|>").values()["mask_token"] == "<|pad|>"


def test_rows_that_no_evaluation_reads_are_refused(tiny, rows):
    with pytest.raises(ValueError, match="`eval_data` is .* but `eval_strategy` 'no': nothing would read it"):
        run(tiny(eval_data=rows))


def test_recipes_that_are_none(tmp_path):
    with pytest.raises(
        ValueError, match="'tinny' is no recipe, expected one of qwen3-8b-adapt, .*, tiny, or the path"
    ):
        read_recipe("tinny")
    path = tmp_path / "mine.yaml"
    for text, message in (
        ("a: [", "is no YAML"),
        ("- a", "holds a list"),
        ("target: t\ndata: d", "has no `output_dir`"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_recipe(str(path))
    with pytest.raises(ValueError, match="'steps' is no override, expected KEY=VALUE"):
        parse_overrides(["steps"])


# Plans.


def test_plans_of_the_shipped_ones_load_nothing(monkeypatch, tmp_path):
    """Without weights and without a network; the sizes are those of the released drafter, and for SmolLM2 what fits into 40 MB."""
    monkeypatch.chdir(tmp_path)
    for loader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", None)
    sizes = {"smollm2-135m": (134.5, 16.1), "qwen3-8b-b16": (8190.7, 1129.2), "qwen3-8b-adapt": (8190.7, 1129.2)}
    for name, (target, drafter) in sizes.items():
        plan = make_plan(read_recipe(name))
        assert plan.parameters["target"] / 1e6 == pytest.approx(target, abs=0.1)
        assert (plan.parameters["backbone"] + plan.parameters["refiner"]) / 1e6 == pytest.approx(drafter, abs=0.1)
    assert make_plan(read_recipe("qwen3-8b-b16"), devices=8).steps == 10 * 200_000 // 32
    result, output = invoke("qwen3-8b-b16", "--dry-run", "--devices", "8", "num_train_epochs=1")
    assert result.exit_code == 0, output
    assert invoke("qwen3-8b-b16", "--devices", "8")[1].count("expected `accelerate launch` to say it") == 1
    assert "steps 6,250" in output and "8,190.7 M" in output and "in all 36." in output


def test_plan_of_the_shipped_pair_from_any_folder(monkeypatch, tmp_path):
    """Its target lies in the package, wherever one stands; one that is named otherwise lies where one stands."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(read_recipe("tiny"))
    assert plan.parameters["target"] == AutoModelForCausalLM.from_pretrained(TINY / "target").num_parameters()
    assert plan.rows == read_recipe("tiny").expected_rows
    assert read_recipe("tiny", {"target": "hub_cards/tiny/target"}).target == "hub_cards/tiny/target"


def test_plan_counts_the_data_that_is_there(tiny):
    plan = make_plan(tiny(max_steps=-1, num_train_epochs=3, per_device_train_batch_size=3))
    assert (plan.rows, plan.rows_per_step, plan.steps) == (8, 3, 9)
    assert plan.tokens_read == round(27 * plan.tokens / 8)
    with pytest.raises(ValueError, match="`data` is elsewhere, which is not made yet"):
        make_plan(tiny(data="elsewhere", expected_rows=None))


@pytest.mark.parametrize("frozen", [False, True], ids=["whole", "frozen"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_plan_is_what_the_run_takes(tiny, optimizer, frozen):
    """Parameters, and the optimizer's state after a step, to the byte."""
    recipe = tiny(optimizer=optimizer, max_steps=1, freeze_backbone=frozen)
    plan, trainer = make_plan(recipe), run(recipe)
    drafter = trainer.model
    assert plan.parameters["target"] == trainer.target.num_parameters()
    assert plan.parameters["refiner"] == sum(p.numel() for p in drafter.refiner.parameters())
    assert plan.parameters["backbone"] + plan.parameters["refiner"] == drafter.num_parameters()
    assert plan.parameters["trained"] == drafter.num_parameters(only_trainable=True)
    assert plan.parameters["trained"] == plan.parameters["refiner"] + plan.parameters["backbone"] * (not frozen)
    assert plan.memory["gradients"] == 4 * plan.parameters["trained"]
    state = [value for entry in trainer.optimizer.optimizer.state.values() for value in entry.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor) and value.numel() > 1]
    assert plan.memory[f"optimizer, {optimizer}"] == 4 * sum(tensor.numel() for tensor in tensors)


def test_settings_of_muon(tiny):
    """Those that are named count, also where the value is `TrainingArguments`' default; the others are its own."""
    keys = ("weight_decay", "betas", "eps")
    for named, expected in (
        ({}, [0.01, None, None, 0.0, (0.9, 0.95), 1e-8]),
        ({"weight_decay": 0.0, "adam_beta2": 0.999}, [0.0, None, None, 0.0, (0.9, 0.999), 1e-8]),
        ({"weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}, [0.1, None, None, 0.0, (0.8, 0.95), 1e-6]),
    ):
        groups = make_trainer(tiny(**named)).optimizer.param_groups
        assert [group.get(key) for group in groups for key in keys] == expected


def test_plan_of_an_adapter(tiny):
    """Little is trained of the backbone, and the refiner in full, beside the one that it starts from."""
    recipe = {"optimizer": "adamw", "drafter": str(TINY / "drafter")}
    adapted, whole = make_plan(tiny(lora_rank=4, **recipe)), make_plan(tiny(**recipe))
    added = adapted.parameters["trained"] - adapted.parameters["refiner"]
    assert 0 < added < 0.1 * whole.parameters["backbone"]
    held = whole.parameters["trained"] + adapted.parameters["trained"]
    assert adapted.memory["drafter, float32"] == 4 * held
    assert adapted.memory["optimizer, adamw"] == 8 * adapted.parameters["trained"]


def test_plan_of_a_drafter_that_goes_on(rows, tmp_path, caplog, monkeypatch):
    """Is of its config, and of the recipe's fields where those differ; where it cannot be read, the plan says so."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    path = tmp_path / "mine.yaml"
    own = {"target": str(TINY / "target"), "data": rows, "output_dir": "o", "drafter": str(TINY / "drafter")}
    path.write_text(yaml.safe_dump(own))
    drafter = XPressDrafterModel.from_pretrained(TINY / "drafter")
    sizes = [make_plan(read_recipe(str(path), fields)).parameters for fields in ({}, {"xpress_rank": 8})]
    assert sizes[0]["refiner"] == sum(p.numel() for p in drafter.refiner.parameters()) > sizes[1]["refiner"] > 0
    assert sizes[0]["backbone"] == drafter.num_parameters() - sizes[0]["refiner"] == sizes[1]["backbone"]
    assert "could not be read" not in caplog.text
    shape = AutoConfig.from_pretrained(TINY / "target").to_dict()
    make_plan(read_recipe(str(path), {"drafter": "nobody/no-drafter", "target_config": shape, "xpress_rank": 8}))
    assert "nobody/no-drafter could not be read" in caplog.text and "fields {'xpress_rank': 8}" in caplog.text


def test_plan_of_an_optimizer_that_it_does_not_know(tiny):
    with pytest.raises(ValueError, match="`optim` is 'adafactor', whose memory is not counted here, expected one of"):
        make_plan(tiny(optimizer="adamw", optim="adafactor"))


# Running.


class Interrupt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_rows_of_several_folders_and_states_on_the_disk(tiny, rows, tmp_path, monkeypatch):
    """
    Training is that without a cache, loss for loss, for which the plan knew the size; a second run writes none. The processes
    that do not write wait for a lock, not in a collective, which `ddp_timeout` would end.
    """
    monkeypatch.setattr(XPressTrainingArguments, "main_process_first", None)
    held_out = tmp_path / "held-out"
    write_rows(read_conversations(str(PROBLEMS), limit=10)[8:], held_out, SHORT)
    cache, own = tmp_path / "states", {"data": [rows, rows], "target_dtype": "float32", "bf16": False}
    own |= {"max_steps": 3, "warmup_steps": 0, "eval_data": str(held_out), "eval_strategy": "steps", "eval_steps": 3}
    online = run(tiny(output_dir=str(tmp_path / "online"), **own))
    assert len(online.train_dataset) == 2 * len(load_rows(rows)[0])
    recipe = tiny(feature_cache=str(cache), **own)
    trainer = run(recipe)
    assert len(losses(online)) == 3
    assert losses(online)[2]["loss"] != pytest.approx(losses(online)[0]["loss"], rel=1e-2)  # it trained
    for ours, theirs in zip(losses(trainer), losses(online), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(online.evaluate()["eval_loss"], rel=1e-4)
    files = sorted(cache.glob("*.states"))
    size = sum(file.stat().st_size for file in files)
    assert len(files) == 2 and size == make_plan(recipe).disk > make_plan(tiny(**own)).disk == 0
    written = [file.stat().st_mtime_ns for file in files]
    make_trainer(recipe)
    assert [file.stat().st_mtime_ns for file in sorted(cache.glob("*.states"))] == written


def test_a_cache_that_would_be_too_large_is_not_begun(tiny, tmp_path):
    cache = tmp_path / "states"
    with pytest.raises(ValueError, match="allowed are 1,073 .*`feature_cache_gib`"):
        make_trainer(tiny(feature_cache=str(cache), feature_cache_gib=1e-6))
    assert not list(cache.glob("*.states")) + list(cache.glob("*.partial"))


def test_a_draft_vocabulary_of_the_rows(tiny, rows, tmp_path):
    """The tokens that the answers hold; counted by the plan, saved with the drafter, kept by a run that goes on from it."""
    recipe = tiny(draft_vocab_size=300, max_steps=1, warmup_steps=0)
    drafter = XPressDrafterModel.from_pretrained(save_drafter(run(recipe)), dtype=torch.float32)
    answered = {t for row in load_rows(rows)[0] for t, m in zip(row["input_ids"], row["loss_mask"]) if m}
    ids = drafter.vocabulary.ids_D.tolist()
    assert len(ids) == 300 and answered <= set(ids)
    refiner = sum(parameter.numel() for parameter in drafter.refiner.parameters())
    assert (
        make_plan(recipe).parameters["refiner"]
        == refiner
        == make_plan(tiny()).parameters["refiner"] - (2048 - 300) * 96
    )
    on = {
        "drafter": str(tmp_path / "run" / "drafter"),
        "mask_token": None,
        "max_steps": 1,
        "output_dir": str(tmp_path / "on"),
    }
    assert make_trainer(tiny(**on)).vocabulary.ids_D.tolist() == ids
    for make in (make_plan, make_trainer):
        with pytest.raises(ValueError, match="`?draft_vocab_size`? is|draft_vocab_size"):
            make(tiny(draft_vocab_size="many"))
    with pytest.raises(ValueError, match=r"do not fit the weights .*'d2t', 'xpress_head.w2.weight'"):
        make_trainer(tiny(draft_vocab_size=200, **on))


def test_a_run_that_was_stopped_goes_on(tiny, tmp_path):
    """Muon and all: the weights are those of a run that was not; a complete one takes no step more."""
    own = {"max_steps": 3, "save_steps": 2}  # inside an epoch
    straight = run(tiny(output_dir=str(tmp_path / "straight"), **own))
    stopped = make_trainer(tiny(**own))
    stopped.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = run(tiny(**own))
    again = run(tiny(**own))
    for trainer in (resumed, again):
        assert trainer.state.global_step == 3
        for name, weight in straight.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], weight), name
    assert len({entry["step"] for entry in again.state.log_history if "loss" in entry}) == 3


def test_a_run_that_ended_is_loaded_as_it_ended(tiny, tmp_path, rows):
    """Its best weights where those were asked for, also once the folder was moved; not the last."""
    evaluated = {"eval_data": rows, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the first
    own = {"max_steps": 3, "warmup_steps": 0, **evaluated, **best}
    ended = run(tiny(**own))
    assert ended.state.best_global_step == 1
    (tmp_path / "run").rename(tmp_path / "moved")
    again = run(tiny(**own, output_dir=str(tmp_path / "moved")))
    for name, weight in ended.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name


def test_a_run_that_goes_on_otherwise_says_so(tiny, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run(tiny(max_steps=1))
    assert caplog.text == ""
    run(tiny(max_steps=2, learning_rate=1e-3))
    assert "goes on with `learning_rate` = 0.001; it was begun with 0.003" in caplog.text
    assert "goes on with `max_steps` = 2; it was begun with 1" in caplog.text
    noted = read_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert noted == tiny(max_steps=2, learning_rate=1e-3)


def test_the_command_makes_a_drafter_that_drafts(rows, tmp_path):
    """Loaded as anybody loads it: bf16, and the same text as the plain run."""
    own = [f"target={TINY / 'target'}", f"data={rows}", f"output_dir={tmp_path}", "disable_tqdm=true"]
    few = ["max_steps=2", "num_anchors=4", "logging_steps=1"]
    result, output = invoke("tiny", *own, "--set", few[0], "--set", few[1], few[2])
    assert result.exit_code == 0, output
    assert "2 steps; the drafter lies in" in output and "at K = 3" in output
    drafter = AutoModel.from_pretrained(tmp_path / "drafter", trust_remote_code=True)
    assert drafter.dtype == torch.bfloat16 and drafter.config.target_layer_ids == [2, 5, 8]
    target = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    inputs = encode(AutoTokenizer.from_pretrained(TINY / "target"), read_prompts(PROBLEMS)[0])
    with track_drafting() as drafting:
        drafted = target.generate(inputs, assistant_model=drafter.float(), max_new_tokens=12, do_sample=False)
    assert torch.equal(drafted, target.generate(inputs, max_new_tokens=12, do_sample=False)) and drafting.drafted > 0
    result, output = invoke("tiny", "blok_size=3")
    assert result.exit_code == 2 and "the nearest is 'block_size'" in output


def test_the_tiny_pair_is_trained_by_its_recipe(rows, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "answers").symlink_to(rows)
    (tmp_path / "target").symlink_to(TINY / "target")
    short = {"max_steps": 2, "num_anchors": 4, "logging_steps": 1}
    monkeypatch.setattr(tiny_pair, "read_recipe", lambda name, own: read_recipe(name, own | short))
    tiny_pair.train_drafter(tmp_path, seed=0)
    assert (tmp_path / "drafter" / "model.safetensors").exists() and (
        tmp_path / "work" / "drafter-checkpoints"
    ).exists()
    log = json.loads((tmp_path / "work" / "drafter-log.json").read_text())
    assert [entry["step"] for entry in log] == [1, 2, 2]


# Where a drafter starts.


def test_a_public_backbone_goes_on_with_a_fresh_refiner(tiny, tmp_path):
    """As the released run: every weight of the backbone is taken over, the refiner's shape is the recipe's."""
    target = AutoModelForCausalLM.from_pretrained(TINY / "target")
    backbone = XPressDrafterModel.for_target(
        target, mask_token_id=4, num_hidden_layers=2, target_layer_ids=[2, 5, 8], block_size=8
    )
    backbone.bfloat16().save_pretrained(tmp_path / "dflash")
    drafter = make_trainer(tiny(drafter=str(tmp_path / "dflash"))).model
    assert drafter.config.xpress_rank == tiny().drafter_fields["xpress_rank"] and drafter.config.mask_token_id == 4
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    for name, weight in backbone.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], weight.float()), name
    assert drafter.xpress_head.w2.weight.std().item() == pytest.approx(0.02, rel=0.1)
    drafter.save_pretrained(tmp_path / "whole")
    whole = make_trainer(tiny(drafter=str(tmp_path / "whole"))).model
    assert all(torch.equal(whole.state_dict()[name], weight) for name, weight in drafter.state_dict().items())
    for misfit in ({"intermediate_size": 64}, {"xpress_rank": 32}):
        with pytest.raises(ValueError, match="do not fit the weights of .*whole"):
            make_trainer(tiny(drafter=str(tmp_path / "whole"), **misfit))


def test_a_released_drafter_is_adapted(tiny, tmp_path):
    """By its recipe's command: the adapter lies beside the drafter that it was merged into, which drafts alone."""
    adapting = {"drafter": str(TINY / "drafter"), "lora_rank": 4, "optimizer": "adamw", "max_steps": 2}
    trainer = run(tiny(**adapting))
    planned = make_plan(tiny(**adapting)).parameters["trained"]
    assert planned == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    folder = save_drafter(trainer)
    assert (folder.parent / "adapter" / "adapter_model.safetensors").exists()
    merged, before = (XPressDrafterModel.from_pretrained(path) for path in (folder, TINY / "drafter"))
    assert merged.state_dict().keys() == before.state_dict().keys()
    moved = {
        name for name, weight in merged.state_dict().items() if not torch.equal(weight, before.state_dict()[name])
    }
    assert {"fc.weight", "xpress_head.w2.weight", "layers.0.self_attn.q_proj.weight"} <= moved
    assert not {"norm.weight", "layers.0.input_layernorm.weight"} & moved


def test_fields_that_the_drafter_s_config_refuses(tiny):
    with pytest.raises(ValueError, match="`block_size` is 1, expected at least 2"):
        make_trainer(tiny(block_size=1))
    with pytest.raises(ValueError, match=r"the drafter's fields are (?s:.*)Field 'block_size' with value 'four'"):
        make_trainer(tiny(block_size="four"))


def test_rotary_positions_of_ones_own(tiny):
    """Also for a target for which the drafter needs them: it turns parts of its heads, by one factor for each."""
    rope = {"rope_type": "default", "rope_theta": 5e4}
    assert make_trainer(tiny(rope_parameters=rope)).model.config.rope_parameters == rope
    partial = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    partial |= {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 1024}
    shape = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 10}
    shape |= {"model_type": "phi3", "pad_token_id": 0, "rope_parameters": partial}
    with pytest.raises(ValueError, match="expected `rope_parameters` of its own"):
        make_plan(tiny(target_config=shape))
    assert make_plan(tiny(target_config=shape, rope_parameters=rope)).parameters["backbone"] > 0


def test_the_mask_token(tiny):
    assert make_trainer(tiny()).model.config.mask_token_id == 4
    assert make_trainer(tiny(mask_token="<|pad|>")).model.config.mask_token_id == 0
    assert make_trainer(tiny(mask_token=7)).model.config.mask_token_id == 7
    with pytest.raises(ValueError, match="`mask_token` is '<none>', which .*tokenizer does not have"):
        make_trainer(tiny(mask_token="<none>"))


# What does not belong together.


def test_rows_of_another_tokenizer_are_refused(tiny, rows, tmp_path):
    folder = other_rows(rows, tmp_path, tokenizer="0" * 64)
    with pytest.raises(ValueError, match="were made with the tokenizer of .*, expected that of"):
        make_trainer(tiny(data=folder))


def test_rows_of_a_tokenizer_that_was_saved_after_use(tiny, rows, tmp_path):
    """What padding and truncation it was last used with, tokenizer.json says too: rows of it are its own all the same."""
    shutil.copytree(TINY / "target", tmp_path / "target")
    used = AutoTokenizer.from_pretrained(tmp_path / "target")
    used(["One", "one and two"], padding=True, truncation=True, max_length=3)
    used.save_pretrained(tmp_path / "target")
    assert json.loads((tmp_path / "target" / "tokenizer.json").read_text())["truncation"] is not None
    target = str(tmp_path / "target")
    settings = AnswerSettings(target, max_new_tokens=16, batch_size=8)
    write_rows(read_conversations(str(PROBLEMS), limit=2), tmp_path / "rows", settings)
    make_trainer(tiny(target=target, data=str(tmp_path / "rows")))
    make_trainer(tiny(target=target, data=rows))


def test_rows_of_another_target_are_warned_of(tiny, rows, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    make_trainer(tiny())
    make_trainer(tiny(data=other_rows(rows, tmp_path / "given", weights=None)))
    assert "were answered by" not in caplog.text
    make_trainer(tiny(data=other_rows(rows, tmp_path / "other", weights="0" * 64)))
    assert "were answered by" in caplog.text and "which has other weights than" in caplog.text


def other_rows(rows: str, folder: Path, **settings) -> str:
    """The same rows, with a manifest that says something else."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text((Path(rows) / "rows.jsonl").read_text())
    manifest = json.loads((Path(rows) / "manifest.json").read_text())
    manifest["settings"] |= settings
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


def test_a_target_of_another_shape_is_refused(tiny):
    with pytest.raises(
        ValueError, match="is not of the recipe's `target_config`: `num_hidden_layers` is 10, there 36"
    ):
        make_trainer(tiny(target_config={"num_hidden_layers": 36, "hidden_size": 256}))
