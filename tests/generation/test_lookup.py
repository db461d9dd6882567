"""Prompt lookup beside a drafter: what is copied, that the text stays plain's, greedy and sampled, and who is told."""

import pytest
import torch
from rig import CACHE, CONFIGS, VOCAB, drafted, make_drafter, make_target, oracle, plain, prompt, target
from xpress_drafter.generation import DraftingStatistics
from xpress_drafter.generation.lookup_xpress import LONGEST_MATCH, look_up
from xpress_drafter.generation.statistics_xpress import Round


def test_what_followed_the_same_tokens():
    ids = torch.tensor([5, 6, 7, 8, 9, 1, 2, 5, 6, 7])
    assert look_up(ids, 3, 4).tolist() == [8, 9, 1, 2]
    assert look_up(ids, 1, 2).tolist() == [8, 9]
    assert look_up(ids, 4, 4) is None  # three tokens are alike, not four
    repeats = torch.cat([torch.arange(50), torch.arange(40)])
    assert look_up(repeats, 40, 3).tolist() == [40, 41, 42] and look_up(repeats, 41, 3) is None


def test_the_longest_match_before_the_latest():
    ids = torch.tensor([1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 3, 4, 70, 1, 2, 3, 4])
    assert look_up(ids, 2, 1).tolist() == [50]  # four alike
    assert look_up(ids[4:-3], 1, 1) is None  # its last token, 1, is new there
    assert look_up(torch.cat([ids[:-4], torch.tensor([0, 3, 4])]), 2, 1).tolist() == [70]  # two alike, thrice


def test_a_match_is_trusted_for_twice_its_length():
    text = torch.cat([torch.arange(30), torch.tensor([99, 7, 8, 9])])
    assert look_up(text, 1, 10).tolist() == [10, 11, 12, 13, 14, 15]
    assert look_up(text[:-1], 1, 10).tolist() == [9, 10, 11, 12]
    assert look_up(text[:-1], 1, 3).tolist() == [9, 10, 11]


def test_a_text_that_repeats_itself_goes_on():
    assert look_up(torch.tensor([9, 1, 2, 3, 1, 2, 3]), 3, 8).tolist() == [1, 2, 3, 1, 2, 3]
    assert look_up(torch.full((3 * LONGEST_MATCH,), 7), 2, 5).tolist() == [7] * 5


@pytest.mark.parametrize("ids", [[3], [3, 4], [3, 3]], ids=str)
def test_a_text_too_short_for_a_match(ids):
    assert look_up(torch.tensor(ids), 2, 4) is None


def test_one_token_is_enough_where_that_is_asked():
    assert look_up(torch.tensor([3, 3]), 1, 2).tolist() == [3, 3]


LONG = prompt(120)  # of 95 tokens, so that most have come before
ONCE = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}


@pytest.mark.parametrize("length", [1, 3, 10])
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_is_plains(kind, length):
    """An oracle that is right by turns, so that rounds of both kinds follow each other."""
    model, once = target(kind), ONCE | {"prompt_lookup_num_tokens": length}
    text = plain(model, LONG, 40)
    output, drafting = drafted(model, LONG, oracle(model, text, (0, 3, 5)), 40, **once)
    assert torch.equal(output, text)
    assert 0 < drafting.copied < len(drafting.rounds)
    assert drafting.accepted + len(drafting.rounds) + 1 == 40


def test_drafting_behind_copied_rounds_is_as_if_all_had_been_drafted():
    """The oracle looks tokens up by position, on a backbone whose cache must hold every verified one."""
    model = target()
    text = plain(model, LONG, 40)
    _, drafting = drafted(model, LONG, oracle(model, text, (4,)), 40, **ONCE)
    own = [r for r in drafting.rounds[:-1] if not r.copied]
    assert drafting.copied and own
    assert {r.accepted for r in own} == {4}


def looping_target():
    """A target that counts: its next token is the last one's successor."""
    model = make_target()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight)
        model.lm_head.weight.copy_(rows.roll(1, dims=0))
    return model


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1e-3, "top_k": 0}], ids=str)
def test_copied_tokens_are_kept_where_the_text_repeats(sampling):
    model, twice = looping_target(), torch.arange(2 * VOCAB)[None] % VOCAB
    kwargs = {"prompt_lookup_num_tokens": 7, **sampling}
    output, drafting = drafted(model, twice, make_drafter(model), 40, **kwargs)
    assert output[0].tolist() == [i % VOCAB for i in range(2 * VOCAB + 40)]
    assert drafting.copied == len(drafting.rounds) == 5  # of 8 tokens, behind the prompt's one
    assert all(r.passes == 0 for r in drafting.rounds)


def test_sampled_tokens_have_the_targets_distribution():
    """The second token, behind one that was seen before and therefore copied from, over many runs."""
    model = make_target(initializer_range=0.1)
    everything = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[None]
    successor = everything[0].argsort()  # each token's place, then the token behind it
    successor = everything[0, (successor + 1) % VOCAB]
    drafter, runs = make_drafter(model), 400
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, **ONCE}
    torch.manual_seed(0)
    seen, copied, kept = torch.zeros(VOCAB), 0, 0
    for _ in range(runs):
        output, drafting = drafted(model, everything, drafter, **kwargs)
        copied += drafting.rounds[0].copied
        first, second = output[0, -3:-1].tolist()
        seen[second] += 1
        kept += second == successor[first]
    with torch.no_grad():
        first_V = model(everything).logits[0, -1].softmax(-1)
        followed = torch.cat([everything.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
        second_VV = model(followed).logits[:, -1].softmax(-1)
    expected = runs * first_V @ second_VV
    expected_kept = runs * float(first_V @ second_VV[torch.arange(VOCAB), successor])
    assert copied > 0.95 * runs  # but for the prompt's last token, which has nothing behind it yet
    assert ((seen - expected) ** 2 / expected).sum() < VOCAB - 1 + 4 * (2 * (VOCAB - 1)) ** 0.5
    assert abs(kept - expected_kept) < 5 * expected_kept**0.5


def test_padding_is_neither_matched_nor_copied():
    """As if it had never been: the same rounds, though the pads are the text's own tokens."""
    model, start = target(), torch.tensor([[3, 9, 4, 9, 8, 4]])
    pads, mask = torch.tensor([[9, 8, 4, 9, 8]]), torch.ones(1, 11, dtype=torch.long)
    mask[:, :5] = 0
    text = plain(model, start, 24)
    output, drafting = drafted(model, start, oracle(model, text, (3, 0)), 24, **ONCE)
    padded = torch.cat([pads, start], dim=1)
    padded_output, padded_drafting = drafted(
        model, padded, oracle(model, text, (3, 0)), 24, attention_mask=mask, **ONCE
    )
    assert torch.equal(output, text) and torch.equal(padded_output[:, 5:], text)
    assert drafting.copied and padded_drafting.rounds == drafting.rounds


@pytest.mark.parametrize(
    "kwargs",
    [{"repetition_penalty": 1.3}, {"cache_implementation": "static"}, {"eos_token_id": 17}],
    ids=str,
)
def test_what_else_a_call_asks_for(kwargs):
    model = target()
    text = plain(model, LONG, 40, **kwargs)
    output, drafting = drafted(model, LONG, make_drafter(model), 40, **ONCE, **kwargs)
    assert torch.equal(output, text) and drafting.copied


def test_records_and_a_second_turn_on_the_cache():
    model, drafter = target(), make_drafter(target())
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    expected = plain(model, LONG, 20, **wanted)
    turn, drafting = drafted(model, LONG, drafter, 20, **wanted, **ONCE)
    assert drafting.copied and torch.equal(turn.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(turn.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    again = torch.cat([turn.sequences, prompt(3)], dim=1)
    output, drafting = drafted(model, again, drafter, 20, **{CACHE: turn[CACHE]}, **ONCE)
    assert drafting.copied and torch.equal(output, plain(model, again, 20))


def test_acceptance_by_slot_is_of_drafted_rounds():
    drafting = DraftingStatistics([Round(5, 2, 1), Round(10, 10, 0, True), Round(5, 0, 1)])
    assert drafting.acceptance == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert (drafting.copied, drafting.tau) == (1, 5.0)
