"""Saving and loading: what a folder holds, which folders load as they are, and which are refused and how."""

import copy
import json
import logging
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from checkpoints import REFINERS, config, drafter, edit_config, part, vector, write, write_zlab
from rig import BLOCK, HIDDEN, make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils.hub import PushToHubMixin
from xpress_drafter import XPressDrafterConfig, XPressDrafterModel
from xpress_drafter.modeling_xpress.configuration_xpress import AUTO_MAP


LOADERS = {"own class": XPressDrafterModel, "AutoModel": AutoModel}


@pytest.fixture
def warnings_seen():
    """What Transformers logs as warnings, of any of its loggers."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@torch.no_grad()
def output(model: XPressDrafterModel) -> torch.Tensor:
    """
    A forward of fixed inputs: states, and the refiner's bias behind them.

    By a copy of the model: on some processors the last bit of a product depends on how its weights lie in memory, and a
    file's lie as they come.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(1, BLOCK, HIDDEN, generator=generator).to(model.dtype)
    context = torch.randn(1, 4, 2 * HIDDEN, generator=generator).to(model.dtype)
    h = model(noise, context).last_hidden_state
    return h if model.refiner is None else torch.cat([h, model.refiner(h, torch.zeros(1, BLOCK, dtype=int))], dim=-1)


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


# A folder of our own.


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("refiner", REFINERS)
def test_saved_folder_loads_identically(tmp_path, refiner, loader, warnings_seen):
    model = drafter(refiner)
    model.save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    assert type(loaded) is XPressDrafterModel and not loaded.training
    assert same_weights(loaded, model) and torch.equal(output(loaded), output(model))
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert type(AutoConfig.from_pretrained(tmp_path)) is XPressDrafterConfig
    assert warnings_seen == []


def test_auto_class_for_language_models_refuses(tmp_path):
    """A drafter is none; the message names both classes."""
    drafter().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="XPressDrafterConfig.*AutoModelForCausalLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_saved_folder_holds_the_drafter_and_nothing_of_the_target(tmp_path):
    """Also where the drafter holds its target as an attribute; no generation config, no optimiser."""
    target = make_target()
    model = make_drafter(target)
    object.__setattr__(model, "target", target)
    model.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert {name for name in files if not name.endswith(".py")} == {"config.json", "model.safetensors"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == dict(model.named_parameters()).keys()
    kinds = {name.split(".")[0] for name in tensors}
    assert kinds == {"fc", "hidden_norm", "layers", "norm", "xpress_head"}
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
    borrowed = {p.data_ptr() for p in target.parameters()}
    assert not borrowed & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("refiner", REFINERS)
def test_tensor_names_are_the_released_ones(tmp_path, refiner):
    drafter(refiner, num_hidden_layers=1).save_pretrained(tmp_path)
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.0.{name}.weight" for name in layer)}
    if refiner == "xpress":
        names = ["w1", "down_h", "down_g", "in_proj", "w2", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        expected |= {"xpress_head.mix.L", *(f"xpress_head.{name}.weight" for name in names)}
    elif refiner == "markov":
        expected |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert load_file(tmp_path / "model.safetensors").keys() == expected


def test_folder_reads_for_others(tmp_path):
    """What vLLM and SGLang look for in `config.json`; Transformers' own generation config is left to the target."""
    drafter().save_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    assert (read["architectures"], read["block_size"]) == (["Qwen3XPressModel"], 6)
    assert read["dflash_config"] == {"mask_token_id": 95, "target_layer_ids": [0, 2]}


# The model is built on the meta device, then filled.


@pytest.mark.parametrize(
    "kwargs", [{}, {"low_cpu_mem_usage": True}, {"low_cpu_mem_usage": False}, {"device_map": "cpu"}], ids=str
)
def test_buffers_survive_the_meta_device(tmp_path, kwargs):
    """Twenty times: unfilled memory is zero by luck now and then."""
    model = drafter(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    model.save_pretrained(tmp_path)
    buffers, expected = dict(model.named_buffers()), output(model)
    assert "rotary_emb.inv_freq" in buffers
    for _ in range(20 if not kwargs else 3):
        loaded = XPressDrafterModel.from_pretrained(tmp_path, **kwargs)
        assert all(torch.equal(value, dict(loaded.named_buffers())[name]) for name, value in buffers.items())
        assert torch.equal(output(loaded), expected)
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}


def test_from_config():
    made = AutoModel.from_config(config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert type(made) is XPressDrafterModel and output(made).isfinite().all()
    assert torch.equal(made.rotary_emb.inv_freq, Qwen3RotaryEmbedding(made.config).inv_freq)
    with torch.device("meta"):
        assert {p.device.type for p in XPressDrafterModel(config()).parameters()} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loaded_in_half_precision(tmp_path, dtype):
    """Weights rounded, rotary tables not; saved again it says so, and loads in what it says."""
    model = drafter()
    model.save_pretrained(tmp_path)
    half = XPressDrafterModel.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in half.parameters()} == {dtype}
    assert half.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.fc.weight, model.fc.weight.to(dtype))
    assert (output(half).float() - output(model)).norm() < 0.05 * output(model).norm()
    half.save_pretrained(tmp_path / "half")
    again = XPressDrafterModel.from_pretrained(tmp_path / "half")
    assert again.dtype == dtype and same_weights(again, half)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


# Folders of others, without conversion.


def write_released(folder, **changes):
    """
    An xPress drafter as released: Qwen3's name and Transformers 4's keys, a wide MLP, no `auto_map`, no `xpress_topc`.
    """
    model = drafter(xpress_mlp_hidden=64).bfloat16()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "block_size", "num_target_layers", "xpress_rank", "rms_norm_eps")
    released = {key: getattr(model.config, key) for key in keys} | {
        "model_type": "qwen3",
        "architectures": ["Qwen3XPressModel"],
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
        "xpress_mlp_hidden": 64,
        "xpress_block_size": BLOCK,
        "xpress_num_passes": 6,
        "sample_from_anchor": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        **changes,
    }
    write(folder, released, {name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    return model


def test_released_xpress_folder_loads(tmp_path, warnings_seen):
    """As it is, and silently: above all without the remark that it was another type of model."""
    model = write_released(tmp_path)
    loaded = XPressDrafterModel.from_pretrained(tmp_path)
    assert same_weights(loaded, model) and loaded.dtype == torch.bfloat16
    assert loaded.config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert loaded.config.xpress_topc == 0  # the whole vocabulary, where vLLM would take 512
    assert loaded.xpress_head.mlp.gate_proj.out_features == 64  # not 2 R
    assert warnings_seen == []
    loaded.save_pretrained(tmp_path / "ours")
    assert same_weights(AutoModel.from_pretrained(tmp_path / "ours"), model)


def test_legacy_rotary_scaling_is_in_use(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    write_released(tmp_path, rope_scaling=scaling)
    loaded = XPressDrafterModel.from_pretrained(tmp_path)
    as_target = Qwen3Config(head_dim=8, rope_parameters={"rope_theta": 1e6, **scaling})
    assert torch.equal(loaded.rotary_emb.inv_freq, Qwen3RotaryEmbedding(as_target).inv_freq)


def test_zlab_folder_loads(tmp_path, warnings_seen):
    loaded = XPressDrafterModel.from_pretrained(write_zlab(tmp_path))
    weights = part(vector("dflash")[0], "weights.")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.refiner is None and loaded.config.target_layer_ids == [1, 5, 9]
    assert warnings_seen == []


def test_folder_of_others_is_saved_with_our_code_alone(tmp_path):
    """Their `auto_map`, which names files or a repository of theirs, is not carried on."""
    write_zlab(tmp_path, auto_map={"AutoModel": "z-lab/drafter--dflash.DFlashDraftModel"})
    XPressDrafterModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_sliding_zlab_folder_is_refused(tmp_path):
    write_zlab(tmp_path, **vector("dflash")[1]["sliding"])
    with pytest.raises(ValueError, match="`layer_types` is .*sliding_attention.*, expected 'full_attention'"):
        XPressDrafterModel.from_pretrained(tmp_path)


def test_a_target_is_no_drafter(tmp_path):
    make_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no `mask_token_id`"):
        XPressDrafterModel.from_pretrained(tmp_path)


# Folders that are refused.


@pytest.fixture
def folder(tmp_path):
    drafter().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_missing_and_unexpected_tensors(folder, loader):
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors.pop("xpress_head.w1.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        loader.from_pretrained(folder)
    assert "missing: ['xpress_head.w1.weight']" in str(error.value)
    assert "unexpected: ['embed_tokens.weight']" in str(error.value)


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_another_shape(folder, loader):
    edit_config(folder, xpress_mlp_hidden=24)
    with pytest.raises(ValueError, match=r"gate_proj.weight has the shape \[32, 16\], expected \[24, 16\]"):
        loader.from_pretrained(folder)


def test_refiner_that_the_config_does_not_name(folder):
    """The weights of a refiner are not dropped in silence."""
    edit_config(folder, xpress_rank=None, xpress_mlp_hidden=None, xpress_block_size=None)
    with pytest.raises(ValueError, match="unexpected: .*'xpress_head.w2.weight'"):
        XPressDrafterModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dflash_config": {"mask_token_id": 95}}, "no `target_layer_ids`"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "no `mask_token_id`"),
        ({"dflash_config": None}, "no `mask_token_id`"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}}, "96, outside the embedding"),
        ({"num_target_layers": 2}, r"\[0, 2\], expected distinct layers from 0 to `num_target_layers` - 1 = 1"),
        ({"sample_from_anchor": True}, "shift layout"),
    ],
)
def test_config_faults_are_raised_at_load(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        XPressDrafterModel.from_pretrained(edit_config(folder, **changes))


def test_file_cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read .* expected a whole safetensors file"):
        XPressDrafterModel.from_pretrained(folder)


@pytest.mark.parametrize("rest", [0.0, 0.5, 0.97], ids=["all", "half", "the last tensor's end"])
def test_file_ends_in_zeros(folder, rest):
    """As downloaders leave it that reserve the whole file before they fill it."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    keep = start + int(rest * (len(data) - start))
    file.write_bytes(data[:keep] + bytes(len(data) - keep))
    with pytest.raises(ValueError, match="zero at their ends.*'xpress_head.w2.weight'"):
        XPressDrafterModel.from_pretrained(folder)


@pytest.mark.parametrize("fault", ["zeros", "gone"])
def test_one_shard_of_several(tmp_path, fault):
    drafter().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    if fault == "gone":
        shards[1].unlink()
    else:
        save_file({k: 0 * t for k, t in load_file(shards[1]).items()}, shards[1], metadata={"format": "pt"})
    with pytest.raises((ValueError, OSError), match="zero at their ends" if fault == "zeros" else shards[1].name):
        XPressDrafterModel.from_pretrained(tmp_path)


def test_zeros_that_are_no_fault(tmp_path):
    """A fresh mixer is zero, and so is the row of a token that never came up."""
    model = drafter()
    torch.nn.init.zeros_(model.xpress_head.mix.L)
    with torch.no_grad():
        model.xpress_head.w1.weight[-1] = 0
    model.save_pretrained(tmp_path)
    assert same_weights(XPressDrafterModel.from_pretrained(tmp_path), model)


# Where it is loaded from.


def test_subfolder(tmp_path):
    model = drafter()
    model.save_pretrained(tmp_path / "inner")
    for loader in LOADERS.values():
        assert same_weights(loader.from_pretrained(tmp_path, subfolder="inner"), model)


def test_pinned_revision_of_a_cached_repository(tmp_path):
    """Two commits in a cache of the Hub's layout: config and weights both come from the one asked for."""
    commits, repository = ["1" * 40, "2" * 40], tmp_path / "models--org--drafter"
    models = [drafter(xpress_num_passes=passes) for passes in (1, 2)]
    for commit, model in zip(commits, models):
        torch.nn.init.normal_(model.fc.weight)
        model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[1])
    where = {"cache_dir": tmp_path, "local_files_only": True}
    for revision, model in ((commits[0], models[0]), (commits[1], models[1]), ("main", models[1])):
        loaded = XPressDrafterModel.from_pretrained("org/drafter", revision=revision, **where)
        assert same_weights(loaded, model)
        assert loaded.config.xpress_num_passes == model.config.xpress_num_passes
    assert not same_weights(*models)


def test_hub_arguments_are_forwarded(monkeypatch):
    """What Transformers' own loader is called with: everything we were given."""
    seen = {}

    def record(cls, name, *args, **kwargs):
        seen.update(kwargs, name=name)
        return drafter(), {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(record))
    given = {
        "revision": "abc",
        "token": "a token",
        "cache_dir": "here",
        "subfolder": "inner",
        "local_files_only": True,
    }
    given |= {"force_download": True, "dtype": torch.bfloat16, "device_map": "cpu"}
    model, info = XPressDrafterModel.from_pretrained("org/drafter", output_loading_info=True, **given)
    assert isinstance(model, XPressDrafterModel) and info["missing_keys"] == set()
    assert {key: seen[key] for key in given} == given and seen["name"] == "org/drafter"


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_uploads_hold_the_code(tmp_path, monkeypatch, how):
    """Both ways up: what is in the folder, and new, at the moment of the upload."""
    uploaded = []

    def upload(self, folder, repo_id, files_timestamps, **kwargs):
        uploaded.extend(path.name for path in Path(folder).iterdir() if path.name not in files_timestamps)

    hub = SimpleNamespace(create_repo=lambda repo_id, **kwargs: SimpleNamespace(repo_id=repo_id))
    for module in (transformers.modeling_utils, transformers.utils.hub):
        monkeypatch.setattr(module, "hf_api", lambda: hub)
        monkeypatch.setattr(
            module, "create_and_tag_model_card", lambda *args, **kwargs: SimpleNamespace(save=lambda path: None)
        )
    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    if how == "push_to_hub":
        drafter().push_to_hub("org/drafter")
    else:
        drafter().save_pretrained(tmp_path, push_to_hub=True, repo_id="org/drafter")
    assert {"config.json", "model.safetensors", "drafter_xpress.py", "configuration_xpress.py"} <= set(uploaded)
