"""What is checked before the first forward: that drafter and target fit, and that the call can be honoured.

Each check raises a `ValueError` that says what was got, what is expected and what to do.
"""

import torch
from torch import nn
from transformers import PreTrainedModel, QuantizedCache
from transformers.utils import logging

from .modeling_xpress import XPressModel, embedding_fingerprint


logger = logging.get_logger(__name__)

# Settings of `generate` that ask for another way of decoding, or of the prompt's forward.
REFUSED = (
    "guidance_scale",
    "assistant_ensemble_weight",
    "assistant_early_exit",
    "use_mtp",
    "prefill_chunk_size",
)

# Modules of a refiner whose weights decoding slices, so that what an adapter or a quantiser adds would be lost.
READ_AS_MATRICES = ("xpress_head.in_proj", "xpress_head.w2", "markov_head.markov_w2")


def check_pair(drafter: XPressModel, target: PreTrainedModel) -> None:
    """Raises unless the drafter can read this target's states and speak its vocabulary."""
    ours, text = drafter.config, target.config.get_text_config(decoder=True)
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder model, expected a decoder-only target.")
    for name, value, expected in (
        ("hidden_size", ours.hidden_size, text.hidden_size),
        ("vocab_size", ours.vocab_size, text.vocab_size),
        ("num_target_layers", ours.num_target_layers or text.num_hidden_layers, text.num_hidden_layers),
    ):
        if value != expected:
            raise ValueError(
                f"the drafter was made for a target with {name}={value}, but {type(target).__name__} has {expected}: "
                "load the drafter that was trained for this target."
            )
    if max(ours.target_layer_ids) >= text.num_hidden_layers:
        raise ValueError(
            f"the drafter reads the target's layers {ours.target_layer_ids}, but {type(target).__name__} has only "
            f"{text.num_hidden_layers}: load the drafter that was trained for this target."
        )
    for name, module in drafter.named_modules():
        if name.endswith(READ_AS_MATRICES) and type(module) is not nn.Linear:
            raise ValueError(
                f"the drafter's {name} is a {type(module).__name__}, expected a plain Linear, as decoding reads its matrix: "
                "merge the adapter (`merge_and_unload`), or leave this module out of it."
            )


def warn_of_another_target(drafter: XPressModel, target: PreTrainedModel) -> None:
    """Warns where sizes fit but the embedding is another model's: nothing breaks, but no draft would be kept."""
    ours, theirs = drafter.config.target_fingerprint, embedding_fingerprint(target)
    if ours is None or theirs is None:
        return
    furthest = max(abs(a - b) / max(abs(a), abs(b), 1e-9) for a, b in zip(ours, theirs))
    if furthest > 0.05:
        logger.warning_once(
            f"The drafter was trained for another target: norms of its embedding's rows are {theirs}, expected {ours} "
            "within 5 %. The output stays right, but few drafts will be kept: load the drafter of this target."
        )


def warn_of_length(drafter: XPressModel, length: int) -> None:
    """Warns of a sequence longer than any that the drafter was trained on, if it was and if that is known."""
    trained = drafter.config.trained_length
    if trained and length > trained:
        logger.warning_once(
            f"The sequence went past {trained} tokens, the longest that the drafter was trained on. The output stays right, "
            "but fewer drafts may be kept there: train on longer rows for longer texts."
        )


def check_options(drafter: XPressModel, num_passes, shortlist_size=None, confidence_threshold=None) -> None:
    """Raises for values of our own `generate` options that cannot be run."""
    for name, value in (("num_passes", num_passes), ("shortlist_size", shortlist_size)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(
                f"`{name}` is {value!r}, expected a whole number of at least 0, or None for the drafter's."
            )
    number = isinstance(confidence_threshold, (int, float)) and not isinstance(confidence_threshold, bool)
    if confidence_threshold is not None and not (number and 0 <= confidence_threshold <= 1):
        raise ValueError(
            f"`confidence_threshold` is {confidence_threshold!r}, expected a probability from 0 (whole blocks) to 1, or None "
            "for the drafter's."
        )
    if num_passes is not None and drafter.config.refiner_type != "xpress":
        raise ValueError(
            f"`num_passes`={num_passes} was given, but this drafter's refiner is {drafter.config.refiner_type!r}, which "
            "makes no Jacobi passes: leave it out."
        )


def check_call(target, input_ids, generation_config, synced_gpus: bool, cache, model_kwargs: dict) -> None:
    """Raises for calls whose output could not be the plain one's."""
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"`generate` got {input_ids.shape[0]} sequences, expected 1 with an xPress drafter: call it once for each, "
            "or leave `assistant_model` out."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("`inputs_embeds` was given, expected `input_ids`: the drafter reads the prompt's tokens.")
    if synced_gpus:
        raise ValueError("`synced_gpus` is set, expected False: rounds differ in length between processes.")
    for name in REFUSED:
        value = getattr(generation_config, name)
        if value not in (None, False) and (name, value) != ("guidance_scale", 1):
            raise ValueError(f"`{name}`={value} is not supported with an xPress drafter: leave one of the two out.")
    check_lookup(generation_config)
    check_cache(target, cache)


def check_lookup(generation_config) -> None:
    """Raises for settings of prompt lookup that cannot be run beside a drafter."""
    if generation_config.prompt_lookup_num_tokens is None:
        return
    for name, otherwise in (("prompt_lookup_num_tokens", "to copy nothing"), ("max_matching_ngram_size", "for 2")):
        value = getattr(generation_config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"`{name}` is {value!r}, expected a whole number of at least 1, or None {otherwise}.")


def check_cache(target, cache) -> None:
    """Raises unless rejected tokens can be taken out of the target's cache again."""
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []
    recurrent = sorted({kind for kind in layer_types if "attention" not in kind or "linear" in kind})
    if recurrent or target._is_stateful or (cache is not None and any(cache.is_linear)):
        raise ValueError(
            f"{type(target).__name__} keeps a recurrent state (layer types {recurrent or 'without attention'}), which "
            "cannot drop rejected draft tokens: expected attention layers only. Generate without `assistant_model`."
        )
    if cache is None:
        raise ValueError("drafting needs the target's cache: expected `use_cache=True`, got no cache.")
    if not cache.is_croppable or isinstance(cache, QuantizedCache):  # before 5.24 that one calls itself croppable
        raise ValueError(
            f"{type(cache).__name__} cannot drop rejected draft tokens: expected a cache that can be cropped. Leave "
            "`cache_implementation` out, or set it to 'dynamic'."
        )


def check_prefix(cache, cached: int, length: int) -> None:
    """Raises unless a cache of `cached` positions is the prompt's own `length` and can give its last one back."""
    if cached > length:
        raise ValueError(
            f"the cache holds {cached} positions, but the prompt has only {length} tokens: expected a cache of a part of "
            "the prompt. Crop it, or pass the whole sequence as `input_ids`, or its full `attention_mask`."
        )
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        if window is not None and layer.keys.shape[-2] < min(length, window):
            raise ValueError(
                f"the cache holds the whole prompt ({cached} positions), past a sliding window of {window}, so its "
                "last position cannot be recomputed: pass a cache with at least one position less than the prompt."
            )


def real_tokens(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.LongTensor:
    """`input_ids` `[1, n]` without padding."""
    if attention_mask is None:
        return input_ids
    return input_ids[:, attention_mask[0, : input_ids.shape[1]].bool().to(input_ids.device)]
