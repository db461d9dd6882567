"""`XPressDrafterModel`: the drafter as a user holds it, loaded, passed to `generate`, and saved with its own code.

A saved folder holds, next to the weights, every file that loading and generating need with nothing but torch and
transformers installed (Hugging Face remote code: flat files that import each other by `from .name import`).
"""

import re
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import logging

from .modeling_xpress import XPressModel
from .decoding_xpress import assisted_decoding
from .dispatch_xpress import install_dispatch
from .pairing_xpress import check_pair


logger = logging.get_logger(__name__)

_IMPORT = re.compile(r"^from (\.+)((?:\w+\.)*)(\w+) import", flags=re.MULTILINE)


class XPressDrafterModel(XPressModel):
    """As `XPressModel`, except that it decodes: pass it as `assistant_model` to the `generate` of its target."""

    def __init__(self, config):
        super().__init__(config)
        install_dispatch()

    def assisted_decoding(self, target, *args, **kwargs):
        """For a `target.generate` that was looked up before this drafter was built, so before it was wrapped."""
        return BoundDrafter(self, {}).assisted_decoding(target, *args, **kwargs)

    @staticmethod
    def with_options(
        drafter,
        target,
        *,
        num_passes: int | None = None,
        shortlist_size: int | None = None,
        confidence_threshold: float | None = None,
        **generate_kwargs,
    ) -> "tuple[BoundDrafter, dict]":
        """
        A drafter with the options of one `target.generate` call, and the arguments that are not ours.

        Static, because `drafter` is what the caller holds: this model, or what `torch.compile` or PEFT made of it.
        """
        check_pair(drafter, target)  # first of all: Transformers would speak of tokenizers
        options = {
            "num_passes": num_passes,
            "shortlist_size": shortlist_size,
            "confidence_threshold": confidence_threshold,
        }
        if "assistant_confidence_threshold" in generate_kwargs:
            logger.warning_once(
                "`assistant_confidence_threshold` is not read by an xPress drafter, which drafts blocks: give "
                "`confidence_threshold`, the probability with which a draft is kept up to its end."
            )
        for name in generate_kwargs:
            if not hasattr(target.generation_config, name) and get_close_matches(name, options, cutoff=0.7):
                raise ValueError(f"`generate` got `{name}`, expected one of the drafter's options {list(options)}.")
        return BoundDrafter(drafter, options), generate_kwargs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As `PreTrainedModel.from_pretrained`, except that weights which do not fit exactly raise a `ValueError`."""
        wants_info = kwargs.pop("output_loading_info", False)
        name = pretrained_model_name_or_path or "the given `state_dict`"
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"a weight file of {name} cannot be read ({error}), expected a whole safetensors file: its download was "
                "probably cut off. Download the folder again."
            ) from error
        _check_loaded(model, info, name)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory, **kwargs):
        """As `PreTrainedModel.save_pretrained`, and the code that the folder needs to be loaded anywhere."""
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_code(Path(save_directory))

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        # As `PushToHubMixin`, except that `save_pretrained(push_to_hub=True)`, which uploads from within, has its code.
        write_code(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class BoundDrafter:
    """A drafter and the options of one call, in the place of `assistant_model`."""

    def __init__(self, drafter: XPressDrafterModel, options: dict):
        self.drafter, self.options, self.config = drafter, options, drafter.config

    @staticmethod
    def with_options(drafter: "BoundDrafter", target, **generate_kwargs) -> "tuple[BoundDrafter, dict]":
        return drafter, generate_kwargs

    def assisted_decoding(
        self,
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_tokenizer=None,
        tokenizer=None,
        **model_kwargs,
    ):
        """The loop, on what `generate` prepared; the arguments that only other assistants read are dropped."""
        return assisted_decoding(
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            self.drafter,
            synced_gpus,
            streamer,
            **self.options,
            **model_kwargs,
        )


def xpress_generate(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter,
    num_passes=None,
    shortlist_size=None,
    confidence_threshold=None,
    **model_kwargs,
):
    """
    The door that needs no wrapping: `target.generate(..., custom_generate=xpress_generate, drafter=drafter)`.

    Transformers hands neither a streamer nor a tokenizer to a custom method, so `streamer` stays silent there and
    `stop_strings` raise; use `assistant_model=drafter` for those.
    """
    model_kwargs.setdefault("synced_gpus", False)
    return assisted_decoding(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        drafter,
        num_passes=num_passes,
        shortlist_size=shortlist_size,
        confidence_threshold=confidence_threshold,
        **model_kwargs,
    )


def _check_loaded(model: XPressModel, info: dict, name) -> None:
    """Raises unless exactly the model's tensors were in the checkpoint, with its shapes, and hold values."""
    faults = []
    if info["missing_keys"]:
        faults.append(f"missing: {sorted(info['missing_keys'])}")
    if info["unexpected_keys"]:
        faults.append(f"unexpected: {sorted(info['unexpected_keys'])}")
    for key, found, expected in info["mismatched_keys"]:
        faults.append(f"{key} has the shape {list(found)}, expected {list(expected)} by the config")
    if zeros := _zero_filled(model):
        faults.append(f"zero at their ends, as in a file that was cut off: {zeros}")
    try:
        model.check_vocabulary()
    except ValueError as error:
        faults.append(str(error).rstrip("."))
    if faults:
        raise ValueError(
            f"the weights of {name} are not those that its config describes; " + "; ".join(faults) + ". Download the "
            "folder again, or convert a checkpoint of another layout first."
        )


def _zero_filled(model: XPressModel) -> list[str]:
    """Parameters with nothing in their last row, where a cut leaves zeros; of a token table, nothing in any row."""
    names = []
    for name, weight in model.named_parameters():
        elsewhere = weight.device.type == "meta" or weight.numel() == 0
        if elsewhere or name.endswith("mix.L"):  # the mixer starts at zero
            continue
        part = weight if weight.dim() == 1 or name.endswith("w1.weight") else weight[-1]
        if not part.any():
            names.append(name)
    return names


def code_files() -> dict[str, str]:
    """The flat source files of a published folder, by name: this file and all that it imports from its package."""
    found, waiting = {}, [Path(__file__)]
    while waiting:
        path = waiting.pop()
        source = path.read_text(encoding="utf-8")
        for dots, rooms, name in _IMPORT.findall(source):
            folder = path.parent.joinpath(*[".."] * (len(dots) - 1), *rooms.rstrip(".").split(".")).resolve()
            if f"{name}.py" not in found and folder / f"{name}.py" not in waiting:
                waiting.append(folder / f"{name}.py")
        found[path.name] = _IMPORT.sub(r"from .\3 import", source)
    return found


def write_code(folder: Path) -> None:
    """Writes the published folder's code."""
    for name, source in code_files().items():
        (folder / name).write_text(source, encoding="utf-8")


__all__ = ["XPressDrafterModel"]
