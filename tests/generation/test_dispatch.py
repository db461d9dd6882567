"""One entry, and everything else as if it were not there. CASES D5, D6, D9, and Transformers' own loop and DFlash."""

import threading

import pytest
import torch
from rig import (
    BLOCK,
    TAPS,
    NaNDrafter,
    assert_rounds,
    drafted,
    make_drafter,
    make_target,
    oracle,
    plain,
    prompt,
    ref,
    target,
)
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin
from xpress_drafter import track_drafting
from xpress_drafter.generation import XPressCandidateGenerator, dispatch_xpress


PATTERN = (0, 3, BLOCK - 1)


def test_wrapped_once():
    make_drafter(target())
    wrapped = GenerationMixin.generate, GenerationMixin._assisted_decoding
    make_drafter(target())
    assert wrapped == (GenerationMixin.generate, GenerationMixin._assisted_decoding)
    for function in wrapped:
        assert not hasattr(function.__wrapped__, dispatch_xpress.MARK)


def test_another_signature_is_met_with_a_version_message(monkeypatch):
    def other(self, input_ids, logits_processor, stopping_criteria, generation_config, helper):
        raise AssertionError

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", other)
    with pytest.raises(ImportError, match="transformers .* has no .*'assistant_model'.*expected a version from 5.17"):
        make_drafter(target())


def test_a_generate_looked_up_before_the_wrapping():
    """`target.generate(..., assistant_model=AutoModel.from_pretrained(...))`: `generate` is looked up first."""
    drafter = oracle(target(), ref(), PATTERN)
    unwrapped = GenerationMixin.generate.__wrapped__
    with track_drafting() as drafting:
        output = unwrapped(target(), prompt(), assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(output, ref()[:, :31])
    assert_rounds(drafting, PATTERN)


def test_ordinary_assistants_still_work(tmp_path):
    """An autoregressive assistant after a drafter was used, on a target saved and loaded again."""
    model = make_target()
    drafted(model, prompt(), make_drafter(model), 8)
    assert model.generation_config.to_diff_dict() == make_target().generation_config.to_diff_dict()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for each in (model, reloaded):
        calls = []
        assistant = make_target(seed=3)
        assistant.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        output = each.generate(prompt(), assistant_model=assistant, max_new_tokens=24, do_sample=False)
        assert torch.equal(output, ref()[:, :31]) and calls
    assert torch.equal(plain(model, prompt(), 24, prompt_lookup_num_tokens=3), ref()[:, :31])


def test_an_explicit_speculation_type_stays_upstreams():
    """`speculation_type="dflash"` runs our backbone in Transformers' own DFlash: the plain-DFlash baseline."""
    for kind in ("qwen3", "llama"):
        model = target(kind)
        for drafter in (make_drafter(model, xpress_rank=None), make_drafter(model), oracle(model, ref(kind), PATTERN)):
            blocks = []
            hook = drafter.register_forward_hook(lambda *args, blocks=blocks: blocks.append(1))
            output, drafting = drafted(model, prompt(), drafter, 24, speculation_type="dflash")
            hook.remove()
            assert torch.equal(output, ref(kind)[:, :31])
            assert blocks and not drafting.rounds
        config = GenerationConfig(speculation_type="dflash", max_new_tokens=24, do_sample=False)
        assert torch.equal(model.generate(prompt(), config, assistant_model=drafter), ref(kind)[:, :31])


def test_upstreams_dflash_accepts_as_ours_without_passes(monkeypatch):
    """The baseline is a fair one: native DFlash and our loop at K = 0 keep the same draft tokens, round for round."""
    from transformers.generation import candidate_generator

    matches = []
    upstream = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self, *args, **kwargs):
        matches.append(int(kwargs["n_last_matches"]))
        return upstream(self, *args, **kwargs)

    monkeypatch.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    model, drafter = target(), oracle(target(), ref(), PATTERN)
    model.generate(prompt(), assistant_model=drafter, max_new_tokens=24, do_sample=False, speculation_type="dflash")
    drafter.drafts = 0
    _, drafting = drafted(model, prompt(), drafter, 24, num_passes=0)
    ours = [r.accepted for r in drafting.rounds]
    assert matches[2:] == ours[: len(matches) - 2] and len(matches) >= len(ours)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-alternating"])
@pytest.mark.parametrize("make", [lambda m, text: oracle(m, text, PATTERN), lambda m, text: make_drafter(m)])
@pytest.mark.parametrize("lookup", [None, 3])
def test_our_candidates_in_transformers_own_loop(kind, make, lookup, monkeypatch):
    """The candidate generator keeps upstream's contract: same tokens, same acceptance as our loop, copied ones too."""
    model, drafter, matches = target(kind), make(target(kind), ref(kind)), []
    copying = {"prompt_lookup_num_tokens": lookup, "max_matching_ngram_size": 1}

    class Generator(XPressCandidateGenerator):
        def update_candidate_strategy(self, input_ids, scores, num_matches):
            matches.append(int(num_matches))

    def get_candidate_generator(self, generation_config, logits_processor, **kwargs):
        generation_config.update(**copying)
        return Generator(drafter, self, generation_config, logits_processor)

    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "_get_candidate_generator", get_candidate_generator)
        # Here prompt lookup only opens the door to the assisted loop.
        output = plain(model, prompt(), 24, prompt_lookup_num_tokens=2)
    assert torch.equal(output, ref(kind)[:, :31])
    drafter.drafts = 0
    _, drafting = drafted(model, prompt(), drafter, 24, **copying)
    assert (drafting.copied > 0) == (lookup is not None)
    assert matches[1:] == [r.accepted for r in drafting.rounds]  # the first is the prompt's forward


def test_sampling_in_transformers_own_loop(monkeypatch):
    """Its verification takes our scores as q: with top_k=1 the text is the greedy one."""
    drafter = oracle(target(), ref(), PATTERN)

    def get_candidate_generator(self, generation_config, logits_processor, **kwargs):
        generation_config.prompt_lookup_num_tokens = None  # it only opened the door
        return XPressCandidateGenerator(drafter, self, generation_config, logits_processor)

    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", get_candidate_generator)
    output = plain(target(), prompt(), 24, prompt_lookup_num_tokens=2, do_sample=True, top_k=1)
    assert torch.equal(output, ref()[:, :31]) and drafter.drafts > 5


def test_threads_share_a_pair():
    """Calls at the same time on one target and one drafter: own texts, own statistics."""
    model, drafter = target(), make_drafter(target())
    lengths = [3, 7, 11, 16]
    expected = {n: (plain(model, prompt(n), 20), drafted(model, prompt(n), drafter, 20)[1].rounds) for n in lengths}
    found, faults = {}, []

    def call(n):
        try:
            with torch.no_grad():
                output, drafting = drafted(model, prompt(n), drafter, 20)
            found[n] = output, drafting.rounds
        except Exception as fault:  # would be lost in the thread
            faults.append(fault)

    threads = [threading.Thread(target=call, args=(n,)) for n in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for n in lengths:
        assert torch.equal(found[n][0], expected[n][0]) and found[n][1] == expected[n][1]


def test_two_targets_share_no_state():
    """A drafter may serve two targets of one shape in turn, and a target two drafters."""
    first, second = target(), make_target(seed=4)
    text = plain(second, prompt(), 24)
    drafter = oracle(first, ref(), PATTERN)
    assert torch.equal(drafted(second, prompt(), drafter, 24)[0], text)
    drafter.drafts = 0
    output, drafting = drafted(first, prompt(), drafter, 24)
    assert torch.equal(output, ref()[:, :31])
    assert_rounds(drafting, PATTERN)
    assert torch.equal(drafted(first, prompt(), make_drafter(first, NaNDrafter), 24)[0], ref()[:, :31])
    assert TAPS == drafter.config.target_layer_ids
