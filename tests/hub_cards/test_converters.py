"""Converters: what they read becomes ours, what they write loads again, and what would be read wrongly is refused.

That the numbers of a converted checkpoint are the maker's own is `modeling_xpress/test_agreement.py`.
"""

import json

import pytest
import rig
import torch
from checkpoints import drafter, edit_config, part, vector, write_speculators
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Config
from xpress_drafter import XPressDrafterModel
from xpress_drafter.hub_cards.converters import export_released, load_speculators


def test_xpress_checkpoint(tmp_path):
    model = load_speculators(write_speculators(tmp_path), num_target_layers=8)
    config, theirs = model.config, part(vector("speculators_xpress")[0], "weights.")
    assert config.target_layer_ids == [1, 3, 5]  # theirs, 2, 4 and 6, count the embedding's output
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (6, 100, 8)
    assert (config.xpress_rank, config.xpress_mlp_hidden, config.xpress_num_passes) == (8, 16, 3)
    assert torch.equal(model.xpress_head.mix.L, theirs["refiner_head.mix_l"])
    assert torch.equal(model.xpress_head.w2.weight, theirs["refiner_head.readout.weight"])
    assert load_speculators(tmp_path).config.num_target_layers is None


def test_mlp_width_is_rank_times_ratio(tmp_path):
    with pytest.raises(ValueError, match=r"gate_proj.weight has the shape \[16, 8\], expected \[32, 8\]"):
        load_speculators(write_speculators(tmp_path, xpress_mlp_ratio=4))


def test_markov_checkpoint_drops_its_confidence_head_with_a_warning(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        model = load_speculators(write_speculators(tmp_path, "fill"))
    assert model.config.refiner_type == "markov" and model.config.markov_rank == 8
    assert "confidence_head.proj.weight" in caplog.text


def test_plain_checkpoint(tmp_path):
    """A `dflash` one, and a `dspark` one whose head is off (rank 0)."""
    write_speculators(tmp_path, "fill", markov_rank=0)
    tensors = part(vector("speculators_xpress")[0], "weights.")
    backbone = {name: tensor for name, tensor in tensors.items() if not name.startswith("refiner_head.")}
    save_file(backbone, tmp_path / "model.safetensors")
    assert load_speculators(tmp_path).refiner is None
    edit_config(tmp_path, speculators_model_type="dflash")
    assert load_speculators(tmp_path).refiner is None


def test_precision_is_kept(tmp_path):
    write_speculators(tmp_path)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert {p.dtype for p in load_speculators(tmp_path).parameters()} == {torch.bfloat16}


def test_sharded_checkpoint(tmp_path):
    write_speculators(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    for number, shard in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in shard}, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(load_speculators(tmp_path).fc.weight, tensors["fc.weight"])


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 7}
REFUSED = {
    "another kind": ({"speculators_model_type": "eagle3"}, "'eagle3', expected one of .*'xpress'"),
    "no kind": ({"speculators_model_type": None}, "None, expected one of .*DeepSpec"),
    "reduced vocabulary without its maps": ({"draft_vocab_size": 64}, r"maps`=\[\], expected \['d2t', 't2d'\]"),
    "no layer ids": ({"aux_hidden_state_layer_ids": None}, r"no \['aux_hidden_state_layer_ids'\], expected all of"),
    "no mask": ({"mask_token_id": None}, r"no \['mask_token_id'\]"),
    "no layout": ({"sample_from_anchor": None}, r"no \['sample_from_anchor'\]"),
    "no ratio": ({"xpress_mlp_ratio": None}, r"no \['xpress_mlp_ratio'\]"),
    "embedding tapped": ({"aux_hidden_state_layer_ids": [0, 4, 6]}, r"\[0, 4, 6\], expected ids from 1 on"),
    "shift": ({"sample_from_anchor": True}, "`sample_from_anchor`=True, expected False"),
    "narrower": ({"target_hidden_size": 64}, "`target_hidden_size`=64, expected 48"),
    "another target's layer": ({"aux_hidden_state_layer_ids": [2, 4, 9]}, r"\[1, 3, 8\], expected distinct layers"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_speculators(edit_config(write_speculators(tmp_path), **changes), num_target_layers=8)


@pytest.mark.parametrize(
    "changes, message",
    [
        (SLIDING, "`layer_types` is .*'sliding_attention'.*, expected 'full_attention'"),
        ({"model_type": "llama"}, "`transformer_layer_config.model_type`='llama', expected 'qwen3'"),
    ],
)
def test_other_layers_are_refused(tmp_path, changes, message):
    layers = vector("speculators_xpress")[1]["config"]["transformer_layer_config"] | changes
    with pytest.raises(ValueError, match=message):
        load_speculators(write_speculators(tmp_path, transformer_layer_config=layers))


def test_other_markov_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`sample_from_anchor`=True, expected False"):
        load_speculators(write_speculators(tmp_path, "shift"))
    for kind in ("gated", "rnn"):
        with pytest.raises(ValueError, match=f"`markov_head_type`='{kind}', expected 'vanilla'"):
            load_speculators(write_speculators(tmp_path, "fill", markov_head_type=kind))


def test_vocabulary_maps_and_strangers_are_refused(tmp_path):
    write_speculators(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"d2t": torch.zeros(101, dtype=torch.long)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"\['d2t'\], expected \[\]"):
        load_speculators(tmp_path)
    save_file(tensors | {"embed_tokens.weight": torch.ones(101, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: \['embed_tokens.weight'\]"):
        load_speculators(tmp_path)


def test_reduced_vocabulary(tmp_path):
    """As speculators saves one: `d2t` are the ids less their places, `t2d` a mask. CASES G15."""
    write_speculators(tmp_path, draft_vocab_size=40)
    whole, ids = load_file(tmp_path / "model.safetensors"), torch.arange(3, 83, 2)
    mask = torch.zeros(101, dtype=torch.bool)
    mask[ids] = True
    maps = {"d2t": ids - torch.arange(40), "t2d": mask}
    readout = {"refiner_head.readout.weight": whole["refiner_head.readout.weight"][ids]}
    save_file(whole | readout | maps, tmp_path / "model.safetensors")
    model = load_speculators(tmp_path)
    assert model.vocabulary.ids_D.tolist() == ids.tolist() and model.config.draft_vocab_size == 40
    assert torch.equal(model.xpress_head.w2.weight, readout["refiner_head.readout.weight"])
    model.save_pretrained(tmp_path / "ours")
    assert XPressDrafterModel.from_pretrained(tmp_path / "ours").vocabulary.ids_D.tolist() == ids.tolist()
    save_file(whole | readout | maps | {"t2d": mask.roll(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="`t2d` and `d2t` name other tokens"):
        load_speculators(tmp_path)


def test_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds \['config.json'\], expected a config.json and safetensors"):
        load_speculators(tmp_path)


def test_unconverted_checkpoint_says_how_to_convert_it(tmp_path):
    with pytest.raises(ValueError, match="load_speculators"):
        XPressDrafterModel.from_pretrained(write_speculators(tmp_path))


@pytest.mark.parametrize("refiner", ["xpress", "markov", None])
def test_released_form_loads_again_identically(tmp_path, refiner):
    model = drafter(refiner, xpress_topc=64, trained_length=512).bfloat16()
    export_released(model, tmp_path / "new" / "folder")
    again = XPressDrafterModel.from_pretrained(tmp_path / "new" / "folder")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    ours, read = model.config.to_diff_dict(), again.config.to_diff_dict()
    if refiner != "xpress":  # nobody reads it
        ours["xpress_topc"] = read["xpress_topc"]
    assert read == ours | {"dtype": "bfloat16"}


def test_released_form_is_what_vllm_reads(tmp_path):
    """`model_type` and architecture that it knows, its keys, no code; `AutoConfig` sees a Qwen3 model of these shapes."""
    export_released(
        drafter(xpress_mlp_hidden=48, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), tmp_path
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "model_type": "qwen3",
        "architectures": ["Qwen3XPressModel"],
        "dtype": "bfloat16",
        "rope_theta": 5e5,
        "block_size": 6,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "sample_from_anchor": False,
        "xpress_rank": 16,
        "xpress_mlp_hidden": 48,
        "xpress_block_size": 6,
        "xpress_num_passes": 6,
        "xpress_topc": 0,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert not {"auto_map", "num_draft_tokens", "target_layer_ids_start", "markov_rank"} & config.keys()
    assert None not in config.values()
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is Qwen3Config and read.rope_parameters["rope_theta"] == 5e5
    assert (read.hidden_size, read.num_hidden_layers, read.head_dim, read.sliding_window) == (32, 2, 8, None)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["xpress_head.mix.L"].shape == (16, 6, 6)


@pytest.mark.parametrize("refiner, name", [("markov", "Qwen3DSparkModel"), (None, "DFlashDraftModel")])
def test_released_architectures(tmp_path, refiner, name):
    export_released(drafter(refiner), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [name]
    assert not [key for key in config if key.startswith("xpress_")]


def test_a_draft_vocabulary_is_not_exported(tmp_path):
    """No reader of the released form knows one; nothing is written."""
    with pytest.raises(ValueError, match="drafts 3 of its target's 96 tokens .* expected all of them"):
        export_released(rig.make_drafter(rig.target(), draft_token_ids=[1, 2, 3]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
