"""The one entry: makes `target.generate(assistant_model=drafter)` run the drafter's own decoding.

Transformers knows no assistant that brings its own decoding, so two functions of `GenerationMixin` are wrapped, once,
when a drafter is built. An assistant with `assisted_decoding` gets the call; every other call, and an explicit
`speculation_type`, goes to Transformers as if nothing were there. The official door without wrapping is
`generate(custom_generate=xpress_generate, drafter=drafter)`.
"""

import inspect
from functools import wraps

import transformers
from transformers import GenerationMixin


# What is relied on: arguments of the two functions.
RELIED_ON = {
    "generate": {"generation_config", "assistant_model", "streamer", "kwargs"},
    "_assisted_decoding": {
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
        "streamer",
    },
}
MARK = "_hands_over_to_assistant"


def install_dispatch() -> None:
    """Wraps `GenerationMixin`; does nothing the second time, whichever copy of this file came first."""
    if hasattr(GenerationMixin._assisted_decoding, MARK):
        return
    for name, expected in RELIED_ON.items():
        missing = expected - set(inspect.signature(getattr(GenerationMixin, name)).parameters)
        if missing:
            raise ImportError(
                f"transformers {transformers.__version__} has no {sorted(missing)} in `GenerationMixin.{name}`, expected "
                "a version from 5.17 on whose `generate` takes them: update xpress-drafter, or install transformers 5.24."
            )
    GenerationMixin.generate = _wrap_generate(GenerationMixin.generate)
    GenerationMixin._assisted_decoding = _wrap_assisted_decoding(GenerationMixin._assisted_decoding)


def _wrap_generate(upstream):
    signature = inspect.signature(upstream)

    @wraps(upstream)
    def generate(self, *args, **kwargs):
        bound = signature.bind_partial(self, *args, **kwargs).arguments
        assistant, config = bound.get("assistant_model"), bound.get("generation_config")
        chosen = kwargs.get("speculation_type") or (config or self.generation_config).speculation_type
        if chosen is None and hasattr(assistant, "with_options"):
            # Our options are no arguments of `generate`: they travel with what takes the assistant's place.
            bound["assistant_model"], rest = assistant.with_options(assistant, self, **bound.pop("kwargs", {}))
            del bound["self"]
            return upstream(self, **bound, **rest)
        return upstream(self, *args, **kwargs)

    return generate


def _wrap_assisted_decoding(upstream):
    @wraps(upstream)
    def _assisted_decoding(self, *args, assistant_model=None, **kwargs):
        if hasattr(assistant_model, "assisted_decoding") and kwargs["generation_config"].speculation_type is None:
            return assistant_model.assisted_decoding(self, *args, **kwargs)
        return upstream(self, *args, assistant_model=assistant_model, **kwargs)

    setattr(_assisted_decoding, MARK, True)
    return _assisted_decoding
