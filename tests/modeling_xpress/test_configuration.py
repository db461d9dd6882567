"""The config: what it writes, what it reads, and every rule that it keeps."""

import json

import pytest
from checkpoints import FIELDS, REFINERS, config
from xpress_drafter import XPressDrafterConfig


RELEASED = {"xpress": "Qwen3XPressModel", "markov": "Qwen3DSparkModel", None: "DFlashDraftModel"}


def on_disk(config: XPressDrafterConfig) -> dict:
    return json.loads(config.to_json_string())


@pytest.mark.parametrize("refiner", REFINERS)
def test_round_trip_through_json(refiner, tmp_path):
    """Flat in memory, as Transformers' own DFlash generator reads it; the released layout on disk."""
    before = config(refiner, xpress_topc=7, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    written = on_disk(before)
    assert written["dflash_config"] == {"mask_token_id": 95, "target_layer_ids": [0, 2]}
    assert not {"mask_token_id", "target_layer_ids"} & written.keys()
    assert written["architectures"] == [RELEASED[refiner]]
    after = XPressDrafterConfig.from_dict(written)
    assert (after.mask_token_id, after.target_layer_ids) == (95, [0, 2])
    assert after.refiner_type == refiner
    assert on_disk(after) == written
    before.save_pretrained(tmp_path)
    assert on_disk(XPressDrafterConfig.from_pretrained(tmp_path)) == written


def test_file_says_which_layout_and_counting_it_uses():
    written = on_disk(config())
    expected = {
        "model_type": "xpress_drafter",
        "block_size": 6,
        "num_draft_tokens": 5,
        "sample_from_anchor": False,
        "target_layer_ids_start": 0,
        "num_target_layers": 4,
        "xpress_rank": 16,
        "xpress_block_size": 6,
        "xpress_num_passes": 6,
        "xpress_topc": 0,
    }
    assert {key: written[key] for key in expected} == expected


@pytest.mark.parametrize(
    "key, flipped, expected",
    [
        ("sample_from_anchor", True, "expected False"),
        ("num_draft_tokens", 6, "this layout has 5"),
        ("block_size", 7, "this layout has 6"),
        ("xpress_block_size", 5, "but `block_size`=6"),
        ("target_layer_ids_start", 1, "this layout has 0"),
    ],
)
def test_a_flipped_flag_is_refused_with_both_values(key, flipped, expected):
    with pytest.raises(ValueError, match=expected) as error:
        XPressDrafterConfig.from_dict(on_disk(config()) | {key: flipped})
    assert str(flipped) in str(error.value)


@pytest.mark.parametrize("refiner", ["xpress", None])
def test_released_files_may_leave_things_out(refiner):
    """The released keys alone, with Transformers 4's rotary keys; and the widths that are read, not assumed."""
    released = {k: v for k, v in FIELDS.items() if k not in ("mask_token_id", "target_layer_ids")}
    released |= {"dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]}, "rope_theta": 1e6}
    released |= {"model_type": "qwen3", "rope_scaling": None, "torch_dtype": "bfloat16", **REFINERS[refiner]}
    read = XPressDrafterConfig.from_dict(released | ({"xpress_mlp_hidden": 64} if refiner else {}))
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (read.xpress_topc, read.xpress_num_passes, read.sample_from_anchor) == (0, 6, False)
    assert read.xpress_mlp_hidden == (64 if refiner else None)  # 4 R, as the released 4B


def test_rotary_scaling_of_the_legacy_keys_is_kept():
    legacy = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    read = XPressDrafterConfig(**FIELDS, rope_theta=1e6, rope_scaling=legacy)
    assert read.rope_parameters["rope_type"] == "yarn" and read.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_nothing_is_guessed(name):
    fields = {key: value for key, value in FIELDS.items() if key != name}
    with pytest.raises(ValueError, match=rf"no `{name}` \(on disk: `dflash_config.{name}`\)"):
        XPressDrafterConfig(**fields)
    with pytest.raises(ValueError, match=f"no `{name}`"):
        XPressDrafterConfig(**fields, dflash_config={})


REFUSED = {
    "a layer too deep": ({"target_layer_ids": [0, 4]}, r"\[0, 4\], expected .* from 0 to `num_target_layers` - 1 = 3"),
    "a layer twice": ({"target_layer_ids": [2, 2]}, r"\[2, 2\], expected distinct"),
    "a layer before the first": ({"target_layer_ids": [-1, 2]}, r"\[-1, 2\], expected .* from 0"),
    "no layer": ({"target_layer_ids": []}, r"\[\], expected distinct"),
    "a mask outside": ({"mask_token_id": 96}, "96, outside the embedding of `vocab_size`=96"),
    "a negative mask": ({"mask_token_id": -1}, "-1, outside the embedding"),
    "a block without drafts": ({"block_size": 1}, "`block_size` is 1, expected at least 2"),
    "two refiners": ({"markov_rank": 4}, "`xpress_rank`=16 and `markov_rank`=4: expected at most one"),
    "another mixer": ({"xpress_block_size": 8}, "`xpress_block_size`=8 but `block_size`=6"),
    "negative passes": ({"xpress_num_passes": -1}, "`xpress_num_passes`=-1 .* expected 0 or more"),
    "a threshold above 1": ({"confidence_threshold": 1.5}, "`confidence_threshold` is 1.5, expected a probability"),
    "a negative shortlist": ({"xpress_topc": -1}, "`xpress_topc`=-1: expected 0 or more"),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        r"\['full_attention', 'sliding_attention'\], expected 'full_attention'",
    ),
    "two masks": ({"dflash_config": {"mask_token_id": 7}}, "`mask_token_id` is 95 but `dflash_config` says 7"),
    "two taps": ({"dflash_config": {"target_layer_ids": [1, 2]}}, r"is \[0, 2\] but `dflash_config` says \[1, 2\]"),
    "two block sizes": ({"dflash_config": {"block_size": 8}}, "`block_size` is 6 but `dflash_config` says 8"),
    "an unknown entry": (
        {"dflash_config": {"layout": "shift"}},
        "'layout'='shift', a layout that this version does not",
    ),
    "causal blocks": ({"dflash_config": {"is_causal": True}}, "'is_causal'=True, a layout that"),
    "scaled input": ({"input_embedding_scale": 2.0}, "`input_embedding_scale` is 2.0, expected 1.0"),
    "scaled output": ({"output_multiplier": 0.5}, "`output_multiplier` is 0.5, expected 1.0"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_neutral_entries_of_other_releases_are_read():
    neutral = {"input_embedding_scale": 1.0, "is_causal": False, "block_size": 6}
    read = config(dflash_config=neutral)
    assert read.block_size == 6 and "is_causal" not in on_disk(read)["dflash_config"]


def test_unknown_depth_of_the_target_leaves_only_the_upper_bound_open():
    assert config(num_target_layers=None, target_layer_ids=[0, 40]).target_layer_ids == [0, 40]
    with pytest.raises(ValueError, match="expected distinct layers from 0 to"):
        config(num_target_layers=None, target_layer_ids=[40, 40])


def test_markov_file_that_does_not_state_its_layout_is_refused(tmp_path):
    """DSpark checkpoints exist in both, and DeepSpec's own do not say which."""
    written = on_disk(config("markov"))
    del written["sample_from_anchor"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="`markov_rank`=16 but no `sample_from_anchor`"):
        XPressDrafterConfig.from_pretrained(tmp_path)
