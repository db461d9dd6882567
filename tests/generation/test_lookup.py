"""Prompt lookup beside a drafter: what is copied, that the text stays plain's, greedy and sampled, and who is told."""

import pytest
import torch
from rig import CONFIGS, VOCAB, drafted, make_drafter, make_target, oracle, plain, prompt, target
from xpress_drafter.generation.lookup_xpress import LONGEST_MATCH, look_up


def test_what_followed_the_same_tokens():
    ids = torch.tensor([5, 6, 7, 8, 9, 1, 2, 5, 6, 7])
    assert look_up(ids, 3, 4).tolist() == [8, 9, 1, 2]
    assert look_up(ids, 1, 2).tolist() == [8, 9]
    assert look_up(ids, 4, 4) is None  # three tokens are alike, not four


def test_the_longest_match_before_the_latest():
    ids = torch.tensor([1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 3, 4, 70, 1, 2, 3, 4])
    assert look_up(ids, 2, 1).tolist() == [50]  # four alike
    assert look_up(ids[4:-3], 1, 1) is None  # its last token, 1, is new there
    assert look_up(torch.cat([ids[:-4], torch.tensor([0, 3, 4])]), 2, 1).tolist() == [70]  # two alike, thrice


def test_a_text_that_repeats_itself_goes_on():
    assert look_up(torch.tensor([9, 1, 2, 3, 1, 2, 3]), 3, 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert look_up(torch.full((3 * LONGEST_MATCH,), 7), 2, 5).tolist() == [7] * 5


@pytest.mark.parametrize("ids", [[3], [3, 4], [3, 3]], ids=str)
def test_a_text_too_short_for_a_match(ids):
    assert look_up(torch.tensor(ids), 2, 4) is None


def test_one_token_is_enough_where_that_is_asked():
    assert look_up(torch.tensor([3, 3]), 1, 2).tolist() == [3, 3]


LONG = prompt(120)  # of 95 tokens, so that most have come before


@pytest.mark.parametrize("length", [1, 3, 10])
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_is_plains(kind, length):
    """An oracle that is right by turns, so that rounds of both kinds follow each other."""
    model, once = target(kind), {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 1}
    text = plain(model, LONG, 40)
    output, drafting = drafted(model, LONG, oracle(model, text, (0, 3, 5)), 40, **once)
    assert torch.equal(output, text)
    assert 0 < drafting.copied < len(drafting.rounds)
    assert drafting.accepted + len(drafting.rounds) + 1 == 40


def test_drafting_behind_copied_rounds_is_as_if_all_had_been_drafted():
    """The oracle looks tokens up by position, on a backbone whose cache must hold every verified one."""
    model, once = target(), {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    text = plain(model, LONG, 40)
    _, drafting = drafted(model, LONG, oracle(model, text, (4,)), 40, **once)
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
    """The first token behind a copied draft, over many runs, against the target's own probabilities."""
    model = make_target(initializer_range=0.1)
    ids = torch.cat([prompt(6), prompt(6)], dim=1)
    drafter, runs = make_drafter(model), 600
    kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "prompt_lookup_num_tokens": 2}
    kwargs |= {"max_matching_ngram_size": 1}
    torch.manual_seed(0)
    seen, copied = torch.zeros(VOCAB), 0
    for _ in range(runs):
        output, drafting = drafted(model, ids, drafter, **kwargs)
        copied += drafting.copied
        seen[output[0, 13]] += 1
    with torch.no_grad():  # the second token's distribution, over all first ones
        first_V = model(ids).logits[0, -1].softmax(-1)
        followed = torch.cat([ids.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
        expected = runs * first_V @ model(followed).logits[:, -1].softmax(-1)
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert copied > runs / 20
    assert statistic < VOCAB - 1 + 4 * (2 * (VOCAB - 1)) ** 0.5
