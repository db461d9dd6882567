"""What a drafter's `config.json` says, and every rule that it must keep.

The file keeps the keys of the released checkpoints: Qwen3's own fields, `block_size`, `dflash_config` with
`mask_token_id` and `target_layer_ids`, and `xpress_*`. In memory `mask_token_id` and `target_layer_ids` are flat, as
Transformers' own DFlash generator reads them. A rule that is broken raises a `ValueError` when the config is built.
"""

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config


# The class names under which vLLM serves these layouts.
RELEASED_ARCHITECTURES = {"xpress": "Qwen3XPressModel", "markov": "Qwen3DSparkModel", None: "DFlashDraftModel"}

# Where the remote code of a published folder finds its two classes (see `generation/drafter_xpress.py`).
AUTO_MAP = {
    "AutoConfig": "configuration_xpress.XPressDrafterConfig",
    "AutoModel": "drafter_xpress.XPressDrafterModel",
}


# Entries of other DFlash releases that change the arithmetic, with the values at which they change nothing.
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "is_causal": False}


def default_target_layer_ids(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """The target layers whose outputs a new drafter reads: `n` of `L`, evenly spread, none of the last three.

    Source: DFlash (z-lab), `round(1 + i (L - 4) / (n - 1))`; a single one is the middle layer.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    ids = [round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]
    if len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < num_target_layers:
        raise ValueError(
            f"{num_draft_layers} drafter layers over a target of {num_target_layers} layers would tap the layers {ids}; "
            "expected distinct layers of the target: use fewer drafter layers, or name `target_layer_ids` yourself."
        )
    return ids


@strict
class XPressDrafterConfig(Qwen3Config):
    r"""
    Configuration of an xPress drafter: as `Qwen3Config`, except that it describes a block drafter for one target.

    Args:
        block_size (`int`): Slots of a block, B: the anchor and B - 1 draft tokens; 16 where omitted.
        mask_token_id (`int`): The token whose target embedding fills the draft slots.
        target_layer_ids (`list[int]`): Target layers whose outputs are read, counted from 0; layer `i`'s output is
            `hidden_states[i + 1]`.
        num_target_layers (`int`): Layers of the target.
        target_fingerprint (`list[float]`): `embedding_fingerprint` of the target trained for: tells others of its size.
        trained_length (`int`): Tokens of the longest row trained on; drafting goes on behind it, with a warning. 0 before
            any training, `None` where it is not known.
        draft_vocab_size (`int`): Tokens that can be drafted, D; the weights' `d2t` says which. The target's whole vocabulary
            where omitted.
        sample_from_anchor (`bool`): Whether slot k predicts the token after position a + k ("shift"). Only `False`
            ("fill-in": slot k predicts position a + k) is read.
        xpress_rank, xpress_mlp_hidden, xpress_block_size (`int`): Rank R, MLP width m and block size of the causal
            refiner (arXiv 2608.02438). No rank: no refiner.
        xpress_num_passes (`int`): Jacobi passes K used unless a call says otherwise.
        xpress_topc (`int`): Refine only this many best base tokens per slot; 0 refines all that can be drafted.
        markov_rank (`int`): Rank of a Markov head (DSpark) in the refiner's place.
        confidence_threshold (`float`): A draft ends behind the slot up to which all is kept with less than this probability,
            by the drafter's own estimate, unless a call says otherwise; 0 verifies whole blocks. For targets whose forward
            takes longer with every token, as on CPUs.
    """

    model_type = "xpress_drafter"
    has_no_defaults_at_init = True

    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_fingerprint: list[float] | None = None
    trained_length: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    xpress_rank: int | None = None
    xpress_mlp_hidden: int | None = None
    xpress_block_size: int | None = None
    xpress_num_passes: int = 6
    xpress_topc: int = 0
    markov_rank: int | None = None
    confidence_threshold: float | int = 0.0

    def __post_init__(self, **kwargs):
        for key, value in (kwargs.pop("dflash_config", None) or {}).items():
            self._take_dflash_entry(key, value)
        self.block_size = 16 if self.block_size is None else self.block_size
        self._refuse_scales(kwargs)
        if self.xpress_rank is not None:
            self.xpress_mlp_hidden = 2 * self.xpress_rank if self.xpress_mlp_hidden is None else self.xpress_mlp_hidden
            self.xpress_block_size = self.block_size if self.xpress_block_size is None else self.xpress_block_size
        for key in ("num_draft_tokens", "target_layer_ids_start"):  # written by `to_dict`, derived here
            self._check_derived(key, kwargs.pop(key, None))
        super().__post_init__(**kwargs)
        self._check_layout()
        self._check_target()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict, dict]:
        # As `PreTrainedConfig`, except that a released drafter, which calls itself "qwen3", is read without a warning,
        # and that a file which leaves its layout open is refused.
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "speculators_model_type" in config_dict:
            raise ValueError(
                f"{pretrained_model_name_or_path} is a speculators checkpoint, whose layer ids count from 1, expected "
                "the released layout. Convert it with `xpress_drafter.hub_cards.converters.load_speculators`."
            )
        if config_dict.get("markov_rank") and "sample_from_anchor" not in config_dict:
            raise ValueError(
                f"{pretrained_model_name_or_path} has `markov_rank`={config_dict['markov_rank']} but no "
                "`sample_from_anchor`: DSpark checkpoints exist in both layouts, expected it stated. If slot k predicts "
                "position a + k, add `sample_from_anchor`: false to its config.json."
            )
        if "dflash_config" in config_dict:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    @property
    def refiner_type(self) -> str | None:
        """`"xpress"`, `"markov"`, or `None` for a plain DFlash drafter."""
        if self.xpress_rank is not None:
            return "xpress"
        return "markov" if self.markov_rank is not None else None

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of a block: all slots but the anchor's."""
        return self.block_size - 1

    @property
    def dflash_config(self) -> dict:
        """The two fields that the released layout keeps in an entry of their own."""
        return {"mask_token_id": self.mask_token_id, "target_layer_ids": self.target_layer_ids}

    def to_dict(self) -> dict:
        output = super().to_dict()
        output["dflash_config"] = {key: output.pop(key) for key in ("mask_token_id", "target_layer_ids")}
        output["num_draft_tokens"] = self.num_draft_tokens
        output["target_layer_ids_start"] = 0
        output["architectures"] = [RELEASED_ARCHITECTURES[self.refiner_type]]
        output["auto_map"] = dict(AUTO_MAP)
        return output

    def _take_dflash_entry(self, key: str, value):
        if NEUTRAL.get(key, value) != value or key not in {
            "mask_token_id",
            "target_layer_ids",
            "block_size",
            *NEUTRAL,
        }:
            raise ValueError(
                f"`dflash_config` holds {key!r}={value!r}, a layout that this version does not read: expected only "
                "'mask_token_id', 'target_layer_ids' and 'block_size'. Update xpress-drafter, or remove the entry if "
                "you know that it changes nothing."
            )
        if key in NEUTRAL:
            return
        flat = getattr(self, key)
        if flat is not None and flat != value:
            raise ValueError(
                f"`{key}` is {flat!r} but `dflash_config` says {value!r}: expected one value. Remove one."
            )
        setattr(self, key, value)

    def _refuse_scales(self, kwargs: dict):
        for key, neutral in NEUTRAL.items():
            if kwargs.get(key, neutral) != neutral:
                raise ValueError(
                    f"`{key}` is {kwargs[key]!r}, expected {neutral!r}: this version borrows the target's embedding and "
                    "head as they are. Use a checkpoint without it."
                )

    def _check_derived(self, key: str, value):
        expected = {"num_draft_tokens": self.num_draft_tokens, "target_layer_ids_start": 0}.get(key)
        if value is not None and expected is not None and value != expected:
            raise ValueError(
                f"the config says `{key}`={value!r}, but with `block_size`={self.block_size} this layout has {expected}: "
                "expected fill-in blocks (slot 0 is the anchor) and layer ids counted from 0. Convert the checkpoint."
            )

    def _check_layout(self):
        if self.sample_from_anchor:
            raise ValueError(
                "`sample_from_anchor`=True is the shift layout (slot k predicts position a + k + 1), expected False "
                "(fill-in: slot k predicts position a + k). Reading one as the other drafts the wrong positions."
            )
        if self.block_size < 2:
            raise ValueError(f"`block_size` is {self.block_size}, expected at least 2: an anchor and a draft token.")
        if self.xpress_rank is not None and self.markov_rank is not None:
            raise ValueError(
                f"`xpress_rank`={self.xpress_rank} and `markov_rank`={self.markov_rank}: expected at most one refiner."
            )
        if self.xpress_rank is not None and self.xpress_block_size != self.block_size:
            raise ValueError(
                f"`xpress_block_size`={self.xpress_block_size} but `block_size`={self.block_size}: expected the same, "
                "as the refiner mixes exactly the backbone's slots."
            )
        if self.xpress_num_passes < 0 or self.xpress_topc < 0:
            raise ValueError(
                f"`xpress_num_passes`={self.xpress_num_passes} and `xpress_topc`={self.xpress_topc}: expected 0 or more."
            )
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(
                f"`confidence_threshold` is {self.confidence_threshold}, expected a probability from 0 (whole blocks) to 1."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, expected 1 to `vocab_size`={self.vocab_size}, or None for the "
                "target's whole vocabulary."
            )
        if set(self.layer_types) != {"full_attention"}:
            raise ValueError(f"`layer_types` is {self.layer_types}, expected 'full_attention' in every drafter layer.")

    def _check_target(self):
        for key in ("mask_token_id", "target_layer_ids"):
            if getattr(self, key) is None:
                raise ValueError(
                    f"the config has no `{key}` (on disk: `dflash_config.{key}`); it is never guessed, as a wrong one "
                    "drafts badly without an error. Take it from the drafter's training run."
                )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the embedding of `vocab_size`={self.vocab_size} rows."
            )
        ids, layers = self.target_layer_ids, self.num_target_layers
        if len(set(ids)) < len(ids) or min(ids, default=-1) < 0 or (layers is not None and max(ids) >= layers):
            raise ValueError(
                f"`target_layer_ids` is {ids}, expected distinct layers from 0 to `num_target_layers` - 1 = "
                f"{layers - 1 if layers is not None else '?'}."
            )


__all__ = ["XPressDrafterConfig"]
