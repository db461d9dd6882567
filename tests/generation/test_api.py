"""What `generate` takes and refuses, and every refusal before the first forward. CASES D3, D4, D5, D10."""

import pytest
import torch
from rig import BLOCK, CACHE, assert_rounds, drafted, make_drafter, make_target, oracle, plain, prompt, ref, target
from transformers import GenerationConfig, WatermarkingConfig
from xpress_drafter import xpress_generate


PATTERN = (0, 3, BLOCK - 1)
TWO_PROMPTS = torch.cat([prompt(), prompt(seed=2)])


@pytest.fixture
def untouched():
    """A target that fails the test when it runs."""
    model = make_target()
    forwards = []
    hook = model.register_forward_pre_hook(lambda *args: forwards.append(1))
    yield model
    hook.remove()
    assert not forwards


OPTIONS = r"\['num_passes', 'shortlist_size', 'confidence_threshold'\]"
REFUSALS = {
    "two prompts": ({"inputs": TWO_PROMPTS}, "2 sequences.*expected 1.*call it once for each"),
    "num_return_sequences": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences has to be 1"),
    "inputs_embeds": (
        {"inputs": None, "inputs_embeds": torch.zeros(1, 3, 32)},
        "`inputs_embeds`.*expected `input_ids`",
    ),
    "no cache": ({"use_cache": False}, "expected `use_cache=True`"),
    "synced_gpus": ({"synced_gpus": True}, "`synced_gpus`"),
    "guidance_scale": ({"guidance_scale": 1.5}, "`guidance_scale`=1.5"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight`=0.5"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 0}, "`prompt_lookup_num_tokens` is 0, expected a whole number"),
    "n-gram": (
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1},
        "`max_matching_ngram_size` is -1, expected a whole number",
    ),
    "early exit": ({"assistant_early_exit": 1}, "`assistant_early_exit`=1"),
    "mtp": ({"use_mtp": True}, "`use_mtp`=True"),
    "prefill_chunk_size": ({"prefill_chunk_size": 4}, "`prefill_chunk_size`=4"),
    "num_passes -1": ({"num_passes": -1}, "`num_passes` is -1, expected a whole number"),
    "num_passes '3'": ({"num_passes": "3"}, "`num_passes` is '3', expected a whole number"),
    "shortlist_size": ({"shortlist_size": True}, "`shortlist_size` is True, expected a whole number"),
    "threshold 2": ({"confidence_threshold": 2}, "`confidence_threshold` is 2, expected a probability"),
    "threshold True": ({"confidence_threshold": True}, "`confidence_threshold` is True, expected a probability"),
    "threshold '0.3'": ({"confidence_threshold": "0.3"}, "`confidence_threshold` is '0.3', expected a probability"),
    "threshold nan": ({"confidence_threshold": float("nan")}, "`confidence_threshold` is nan, expected a probability"),
    "typo num_pases": ({"num_pases": 3}, f"got `num_pases`, expected.*{OPTIONS}"),
    "typo shortlist": ({"shortlist": 3}, f"got `shortlist`, expected.*{OPTIONS}"),
    "typo confidence": ({"confidence_treshold": 0.3}, f"got `confidence_treshold`, expected.*{OPTIONS}"),
    "unknown": ({"anything_else": 3}, "anything_else"),
}


@pytest.mark.parametrize("kwargs, message", REFUSALS.values(), ids=list(REFUSALS))
def test_refused_before_the_first_forward(untouched, kwargs, message):
    call = {"inputs": prompt(), "max_new_tokens": 8, "do_sample": False, **kwargs}
    with pytest.raises(ValueError, match=message):
        untouched.generate(assistant_model=make_drafter(untouched), **call)


def test_num_passes_without_jacobi_is_refused(untouched):
    for config in ({"xpress_rank": None}, {"xpress_rank": None, "markov_rank": 8}):
        with pytest.raises(ValueError, match="`num_passes`=2.*makes no Jacobi passes"):
            drafted(untouched, prompt(), make_drafter(untouched, **config), 8, num_passes=2)


PAIRS = {
    "hidden_size": ({"hidden_size": 64}, "hidden_size=64.*has 32"),
    "vocab_size": ({"vocab_size": 128}, "vocab_size=128.*has 96"),
    "layers": ({"num_hidden_layers": 8}, "num_target_layers=8.*has 4"),
}


@pytest.mark.parametrize("overrides, message", PAIRS.values(), ids=list(PAIRS))
def test_a_drafter_of_another_target_is_refused(untouched, overrides, message):
    with pytest.raises(ValueError, match=f"{message}.*trained for this target"):
        drafted(untouched, prompt(), make_drafter(make_target(**overrides)), 8)


def test_a_tap_the_target_lacks_is_refused(untouched):
    drafter = make_drafter(make_target(num_hidden_layers=8), target_layer_ids=[0, 6])
    drafter.config.num_target_layers = None  # as in checkpoints that do not say
    with pytest.raises(ValueError, match=r"layers \[0, 6\].*only 4"):
        drafted(untouched, prompt(), drafter, 8)


def test_beams_are_said_to_leave_the_drafter_out(caplog):
    from transformers.generation.configuration_utils import logger

    logger.addHandler(caplog.handler)
    output, drafting = drafted(target(), prompt(), make_drafter(target()), 8, num_beams=2)
    logger.removeHandler(caplog.handler)
    assert "only supported with Greedy Search and Sample" in caplog.text
    assert torch.equal(output, plain(target(), prompt(), 8, num_beams=2)) and not drafting.rounds


@pytest.mark.parametrize(
    "kwargs",
    [
        {"position_ids": torch.arange(7)[None] + 5},
        {"attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1, 1]])},
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
        {"cache_implementation": "dynamic"},
        {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.9},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_other_arguments(kwargs):
    ours = {key: value for key, value in kwargs.items() if "assistant" not in key}
    text = plain(target(), prompt(), 24, **ours)
    drafter = oracle(target(), text, PATTERN)
    if "position_ids" in kwargs:  # the oracle looks tokens up by position
        drafter.text = torch.cat([torch.zeros(5, dtype=torch.long), drafter.text])
    if "attention_mask" in kwargs:
        drafter.text = torch.cat([text[0, :2], drafter.text[4:]])
    output, drafting = drafted(target(), prompt(), drafter, 24, **kwargs)
    assert torch.equal(output, text)
    assert_rounds(drafting, PATTERN)


def test_ways_to_call():
    drafter = oracle(target(), ref(), PATTERN)
    config = GenerationConfig(max_new_tokens=24, do_sample=False)
    mask = torch.ones_like(prompt())
    outputs = [
        target().generate(input_ids=prompt(), attention_mask=mask, assistant_model=drafter, max_new_tokens=24),
        target().generate(prompt(), config, assistant_model=drafter),
        target().generate(prompt(), generation_config=config, assistant_model=drafter, num_passes=1, shortlist_size=4),
        target().generate(prompt(), config, None, None, None, None, drafter),
        target().generate(**{"inputs": prompt(), "assistant_model": drafter, "max_length": 31}),
    ]
    for output in outputs:
        assert torch.equal(output, ref()[:, :31])
    assert drafter.drafts >= 30


def test_inference_and_grad_mode_both_work():
    drafter = oracle(target(), ref(), PATTERN)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            output, _ = drafted(target(), prompt(), drafter, 12, return_dict_in_generate=True)
        assert torch.equal(output.sequences, ref()[:, :19])
        assert not output[CACHE].layers[0].keys.requires_grad


def test_custom_generate_door():
    """The door without wrapping, with our options and the records."""
    drafter = oracle(target(), ref(), PATTERN)
    call = {"custom_generate": xpress_generate, "drafter": drafter, "max_new_tokens": 24, "do_sample": False}
    assert torch.equal(target().generate(prompt(), **call), ref()[:, :31])
    output = target().generate(prompt(), **call, return_dict_in_generate=True, num_passes=1, shortlist_size=8)
    assert torch.equal(output.sequences, ref()[:, :31])
    assert output.drafting.accepted > 10 and output.drafting.passes <= len(output.drafting.rounds)
    with pytest.raises(ValueError, match="`num_passes` is -2"):
        target().generate(prompt(), **call, num_passes=-2)
    sampled = target().generate(prompt(), **{**call, "do_sample": True, "top_k": 1})
    assert torch.equal(sampled, ref()[:, :31])
    ended = target().generate(prompt(), **call, eos_token_id=int(ref()[0, 11]), pad_token_id=0)
    assert torch.equal(ended, plain(target(), prompt(), 24, eos_token_id=int(ref()[0, 11]), pad_token_id=0))
