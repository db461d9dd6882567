"""A drafter that drafts some of the target's tokens: the text is plain's, drafts are those of a whole vocabulary whose other
tokens are ruled out, and the head is the target's own."""

import pytest
import torch
from rig import (
    BLOCK,
    HIDDEN,
    MASK_TOKEN,
    TAPS,
    VOCAB,
    drafted,
    make_drafter,
    make_target,
    prompt,
    ref,
    target,
)
from torch import nn
from transformers import (
    AutoModel,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from xpress_drafter import XPressDrafterConfig, XPressDrafterModel
from xpress_drafter.generation import XPressCandidateGenerator, resolve_block, resolve_left_to_right
from xpress_drafter.modeling_xpress import DraftVocabulary, base_logits


P = BLOCK - 1
KEPT = [0, 2, 3, 5, 8, 13, 21, 34, 40, 55, 70, 89, 94]
REFINERS = {"xpress": {}, "none": {"xpress_rank": None}, "markov": {"xpress_rank": None, "markov_rank": 16}}
NARROW = DraftVocabulary(VOCAB, torch.tensor(KEPT))


def narrow_refiner(refiner):
    """The refiner whose readout has the kept rows alone."""
    ours = make_drafter(
        target(), draft_token_ids=KEPT, **REFINERS["markov" if hasattr(refiner, "markov_w1") else "xpress"]
    )
    weights = {name: w[KEPT] if name.endswith("w2.weight") else w for name, w in refiner.state_dict().items()}
    ours.refiner.load_state_dict(weights)
    return ours.refiner


def test_columns_and_tokens():
    tokens = torch.tensor([[0, 1, 94], [95, 40, 13]])
    columns, there = NARROW.columns(tokens)
    assert there.tolist() == [[True, False, True], [False, True, True]]
    assert torch.equal(NARROW.tokens(columns)[there], tokens[there])
    whole = DraftVocabulary(VOCAB)
    assert torch.equal(whole.columns(tokens)[0], tokens) and whole.columns(tokens)[1].all()
    assert (len(NARROW), len(whole)) == (len(KEPT), VOCAB)


HOT = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(5)])
WAYS = {
    "greedy": {},
    "a shortlist": {"shortlist_size": 5},
    "suppressed tokens": {"warp": lambda scores: SuppressTokensLogitsProcessor([8, 21, 89])(None, scores)},
    "sampled": {"sample": True},
    "sampled, top 5": {"sample": True, "warp": lambda scores: HOT(None, scores)},
    "sampled, a shortlist": {"sample": True, "shortlist_size": 5},
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_passes", [0, 1, P])
@pytest.mark.parametrize("refiner", ["xpress", "markov"])
def test_drafts_are_those_of_a_whole_vocabulary_without_the_others(way, num_passes, refiner):
    """Tokens and, sampled, the scores over the target's vocabulary, from the same noise."""
    whole = make_drafter(target(), **REFINERS[refiner]).refiner
    torch.manual_seed(3)
    h, base = torch.randn(20, BLOCK, HIDDEN), 3 * torch.randn(20, P, VOCAB)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[KEPT] = False
    tokens = torch.randint(VOCAB, (20,)), torch.randint(VOCAB, (20,))
    drafts = []
    for logits, part, vocabulary in (
        (base.masked_fill(outside, -torch.inf), whole, None),
        (base[..., KEPT], narrow_refiner(whole), NARROW),
    ):
        torch.manual_seed(5)
        drafts.append(resolve_block(part, h, logits, *tokens, num_passes, vocabulary=vocabulary, **WAYS[way]))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens) and len(drafts[1].tokens.unique()) > 4
    assert set(drafts[1].tokens.flatten().tolist()) <= set(KEPT)
    if drafts[1].scores is not None:
        q, expected = drafts[1].scores.softmax(dim=-1), drafts[0].scores.softmax(dim=-1)
        torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-6)
        assert q.shape[-1] == VOCAB and not q[..., outside].any()


@torch.no_grad()
@pytest.mark.parametrize("sample", [False, True])
def test_left_to_right(sample):
    whole = make_drafter(target(), **REFINERS["markov"]).refiner
    torch.manual_seed(3)
    base, anchor, drafts = 3 * torch.randn(20, P, VOCAB), torch.randint(VOCAB, (20,)), []
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[KEPT] = False
    for logits, part, vocabulary in (
        (base.masked_fill(outside, -torch.inf), whole, None),
        (base[..., KEPT], narrow_refiner(whole), NARROW),
    ):
        torch.manual_seed(5)
        drafts.append(resolve_left_to_right(part, logits, anchor, sample=sample, vocabulary=vocabulary))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens) and len(drafts[1].tokens.unique()) > 4
    if sample:
        torch.testing.assert_close(*(draft.scores.softmax(dim=-1) for draft in drafts), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("refiner", REFINERS)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_text_is_plains_and_drafts_are_kept_tokens(kind, refiner, monkeypatch):
    """Of a drafter whose vocabulary is what the text holds, and of one that lacks most of it."""
    text, drafts = ref(kind), []
    get_candidates = XPressCandidateGenerator.get_candidates

    def record(self, input_ids, *args, **kwargs):
        candidates, scores = get_candidates(self, input_ids, *args, **kwargs)
        drafts.extend(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, scores

    monkeypatch.setattr(XPressCandidateGenerator, "get_candidates", record)
    for ids in (sorted(set(text[0].tolist())), KEPT):
        drafter = make_drafter(target(kind), draft_token_ids=ids, **REFINERS[refiner])
        output, drafting = drafted(target(kind), prompt(), drafter, 24)
        assert torch.equal(output, text[:, : output.shape[1]]) and drafting.drafted > 50
        assert len(drafts) > 50 and set(drafts) <= set(ids)
        drafts.clear()
    output, _ = drafted(target(kind), prompt(), drafter, 24, do_sample=True, top_k=1)
    assert torch.equal(output, text[:, : output.shape[1]])


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def heads() -> dict:
    torch.manual_seed(0)
    hooked = nn.Linear(HIDDEN, VOCAB, bias=False)
    hooked.register_forward_hook(lambda module, inputs, output: -output)
    replaced = nn.Linear(HIDDEN, VOCAB, bias=False)
    replaced.forward = lambda x: -nn.functional.linear(x, replaced.weight)
    return {
        "plain": nn.Linear(HIDDEN, VOCAB, bias=False),
        "with a bias": nn.Linear(HIDDEN, VOCAB),
        "another module": Doubled(HIDDEN, VOCAB),
        "with a hook": hooked,
        "with a forward of its own": replaced,
    }


@torch.no_grad()
@pytest.mark.parametrize("name", heads())
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_head_is_the_targets_on_the_kept_tokens(kind, name):
    """Its scale and soft-cap too; only a plain matrix's rows are copied."""
    model = make_target(kind)
    model.set_output_embeddings(heads()[name])
    h = torch.randn(2, P, HIDDEN)
    rows, products = NARROW.head(model), []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: products.append(output))
    torch.testing.assert_close(base_logits(model, h, rows), base_logits(model, h)[..., KEPT])
    assert len(products) == (
        1 if name in ("plain", "with a bias") else 2
    )  # the reference's own, and the whole product


def test_saved_folder_keeps_it(tmp_path):
    """As `d2t`, the ids less their columns, whole also in bf16; the refiner's readout has as many rows."""
    drafter = make_drafter(target(), draft_token_ids=reversed(KEPT))
    drafter.bfloat16().save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config.draft_vocab_size == len(KEPT) and loaded.vocabulary.ids_D.tolist() == KEPT
    assert loaded.d2t.dtype == torch.long and loaded.d2t.tolist() == [
        token - column for column, token in enumerate(KEPT)
    ]
    assert loaded.xpress_head.w2.weight.shape[0] == len(KEPT) and loaded.xpress_head.w1.weight.shape[0] == VOCAB


@pytest.mark.parametrize("ids", [[3, 3, 5], [5, 4, 9], [-1, 2, 3], [0, 1, VOCAB]], ids=str)
def test_weights_with_other_ids_are_refused(ids, tmp_path):
    drafter = make_drafter(target(), draft_token_ids=[1, 2, 3])
    drafter.d2t.copy_(torch.tensor(ids) - torch.arange(3))
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`d2t` is .*, expected ascending token ids from 0 to `vocab_size` - 1 = 95"):
        XPressDrafterModel.from_pretrained(tmp_path)


def test_weights_without_it_are_refused(tmp_path):
    make_drafter(target(), xpress_rank=None).save_pretrained(tmp_path)
    config = XPressDrafterConfig.from_pretrained(tmp_path, draft_vocab_size=7)
    with pytest.raises(ValueError, match=r"missing: \['d2t'\]"):
        XPressDrafterModel.from_pretrained(tmp_path, config=config)


@pytest.mark.parametrize("size", [0, VOCAB + 1])
def test_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match=f"`draft_vocab_size` is {size}, expected 1 to `vocab_size`=96"):
        make_drafter(target(), draft_vocab_size=size)
    with pytest.raises(ValueError, match="`draft_vocab_size` is 5 without `draft_token_ids`, expected those ids"):
        make_drafter(target(), draft_vocab_size=5)
    with pytest.raises(ValueError, match=r"expected ascending token ids"):
        XPressDrafterModel.for_target(
            target(), mask_token_id=MASK_TOKEN, num_hidden_layers=2, target_layer_ids=TAPS, draft_token_ids=[4, 4]
        )
