"""Our model against others' code: tensors that speculators 0.9 and dflash 0.1 computed for tiny random drafters.

How the two sides' names and definitions map is said where it matters; `vectors/make_*.py` say what the tensors are.
"""

from functools import partial

import pytest
import torch
from checkpoints import borrowed, part, vector, write_zlab
from torch.nn import functional as F
from transformers import GenerationConfig
from xpress_drafter import XPressDrafterModel
from xpress_drafter.generation import jacobi_xpress, resolve_block
from xpress_drafter.generation.candidate_generator_xpress import DraftContext, XPressCandidateGenerator
from xpress_drafter.hub_cards.converters import convert_speculators
from xpress_drafter.modeling_xpress import DraftVocabulary, base_logits, default_target_layer_ids, previous_tokens
from xpress_drafter.trainer.blocks import cut_blocks
from xpress_drafter.trainer.bounded import ObjectiveInputs, bounded_objective
from xpress_drafter.trainer.objective import position_weights, slot_loss
from xpress_drafter.trainer.xpress_trainer import draft_blocks, teacher_positions


TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
CASES = ["plain", "packed"]


def load(config: dict, weights: dict) -> XPressDrafterModel:
    config, tensors = convert_speculators(config, weights, num_target_layers=8)
    return XPressDrafterModel.from_pretrained(None, config=config, state_dict=tensors)


@pytest.fixture(scope="module")
def drafter() -> XPressDrafterModel:
    tensors, about = vector("speculators_xpress")
    return load(about["config"], part(tensors, "weights."))


@pytest.fixture(scope="module")
def target():
    return borrowed(vector("speculators_xpress")[0])


class Case:
    """One of the vector's two batches, and what our training path makes of its inputs."""

    def __init__(self, name: str, drafter: XPressDrafterModel, target):
        tensors = vector("speculators_xpress")[0]
        self.seen = part(tensors, f"{name}.")
        self.input = part(self.seen, "input.")
        ids, documents = self.input["input_ids"], self.input["document_ids"]
        anchors, self.valid = self.seen["anchors"], self.seen["anchor_valid"]
        self.blocks = cut_blocks(ids, self.input["loss_mask"], anchors[None], self.valid[None], 6, documents)
        attention_mask = (documents >= 0).long()
        h = draft_blocks(drafter, target, self.input["hidden_states"], self.blocks, attention_mask, documents)
        self.h_MBH = h[0, self.valid]
        self.base_MBV = base_logits(target, self.h_MBH)
        self.anchors_M = ids[0, anchors[self.valid]]
        self.predecessors_M = self.blocks.predecessors[self.blocks.valid]

    def expected(self, name: str) -> torch.Tensor:
        """A tensor of theirs, of the valid blocks; rounds first where there are several."""
        tensor = self.seen[name]
        return tensor[self.valid] if tensor.shape[0] == self.valid.shape[0] else tensor[:, self.valid]

    def teacher_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's normed last states `[S, H]`, and which of them predicts each draft slot."""
        last = self.input["verifier_last_hidden_states"]
        norm = vector("speculators_xpress")[0]["target.norm.weight"]
        states = F.rms_norm(last, norm.shape, norm, 1e-6)
        return states.flatten(0, 1), teacher_positions(self.blocks, states.shape[1])


@pytest.fixture(params=CASES)
def case(request, drafter, target) -> Case:
    with torch.no_grad():
        return Case(request.param, drafter, target)


def close(ours: torch.Tensor, theirs: torch.Tensor):
    assert theirs.abs().amax() > 0.01  # a comparison with nothing proves nothing
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_packed_case_holds_what_it_should():
    """Two documents, padding, anchors at both documents' starts, and an anchor that is none."""
    seen = part(vector("speculators_xpress")[0], "packed.")
    assert seen["input.document_ids"].unique().tolist() == [-1, 0, 1]
    starts = [int((seen["input.document_ids"][0] == d).nonzero()[0]) for d in (0, 1)]
    assert set(starts) <= set(seen["anchors"].tolist()) and not seen["anchor_valid"].all()


def test_backbone_and_base_logits(case):
    close(case.h_MBH, case.expected("hidden"))
    close(case.base_MBV, case.expected("base_logits"))


@torch.no_grad()
def test_refined_logits_given_the_true_tokens(case, drafter):
    """At a document's start the token before the anchor is the anchor itself, for them and for us."""
    tokens = case.blocks.tokens[case.blocks.valid]
    prev = previous_tokens(case.predecessors_M, case.anchors_M, tokens[:, 1:])
    assert torch.equal(prev, case.expected("refined_prev"))
    close(case.base_MBV + drafter.refiner(case.h_MBH, prev), case.expected("refined_logits"))


@torch.no_grad()
def test_every_jacobi_round_of_the_head(case, drafter):
    """Their rounds 1..B-1 are our passes; each reads the arg-max of the one before, the first the base's."""
    logits = case.base_MBV
    for prev, theirs in zip(case.expected("round_prev"), case.expected("round_logits")):
        own = previous_tokens(case.predecessors_M, case.anchors_M, logits[:, 1:].argmax(dim=-1))
        assert torch.equal(own, prev)
        logits = case.base_MBV + drafter.refiner(case.h_MBH, own)
        close(logits, theirs)


@torch.no_grad()
@pytest.mark.parametrize("num_passes", range(1, 6))
def test_every_jacobi_pass_of_generation(case, drafter, num_passes, monkeypatch):
    """Tokens when greedy; the scores behind them when sampling, here with a noise that is none."""
    theirs = case.expected("round_logits")[num_passes - 1][:, 1:]
    args = (drafter.refiner, case.h_MBH, case.base_MBV[:, 1:], case.predecessors_M, case.anchors_M, num_passes)
    assert torch.equal(resolve_block(*args).tokens, theirs.argmax(dim=-1))
    monkeypatch.setattr(jacobi_xpress, "gumbel_noise", lambda shape, device: torch.zeros(shape))
    close(resolve_block(*args, sample=True).scores, theirs)


def test_rounds_change_tokens():
    """Else the rounds' agreement would hold for a refiner that is never read."""
    seen = part(vector("speculators_xpress")[0], "plain.")
    tokens = [seen["base_logits"], *seen["round_logits"]]
    changed = [int((a.argmax(dim=-1) != b.argmax(dim=-1)).sum()) for a, b in zip(tokens, tokens[1:])]
    assert min(changed[:3]) > 0


def test_teacher_is_the_distribution_one_position_earlier(case, target):
    theirs = case.expected("teacher_logits")[:, 1:].softmax(dim=-1)
    states, index = case.teacher_states()
    close(base_logits(target, states[index]).softmax(dim=-1), theirs)


def test_losses_of_every_slot(case):
    """Their `ce_data` is our CE; their `tv` is half of our L1. Order: refined, rounds 1-5, base."""
    labels = case.blocks.tokens[case.blocks.valid]
    teacher = case.expected("teacher_logits").softmax(dim=-1)
    logits = [case.expected("refined_logits"), *case.expected("round_logits"), case.expected("base_logits")]
    for theirs_ce, theirs_tv, term in zip(case.expected("ce_data"), case.expected("tv"), logits):
        torch.testing.assert_close(slot_loss(term, labels, teacher, 1.0), theirs_ce, rtol=1e-5, atol=1e-5)
        close(slot_loss(term, labels, teacher, 0.0), 2 * theirs_tv)


def test_counted_slots(case):
    """
    They count every supervised slot of a block, behind a gap and in the next document too. Ours are those of them that
    have no gap before them, in the anchor's document, where the anchor is supervised (all are).
    """
    theirs = case.expected("block_mask")
    documents = case.input["document_ids"][0]
    indices = case.seen["block_indices"][case.valid].clamp_max(documents.shape[0] - 1)
    same = documents[indices] == documents[indices[:, :1]]
    ours = case.blocks.counted[case.blocks.valid]
    assert torch.equal(ours[:, 1:], (theirs & same)[:, 1:].cumprod(dim=1).bool())
    assert not ours[:, 0].any() and not theirs[:, 0].any()


def objective(case: Case, drafter, target):
    """Our objective over the slots that *they* count, divided as they divide: by the number of those slots."""
    counted = case.expected("block_mask")[:, 1:]
    weights = counted * position_weights(6, gamma=4.0)
    states, index = case.teacher_states()
    inputs = ObjectiveInputs(
        head=partial(base_logits, target),
        vocabulary=DraftVocabulary(target.config.vocab_size),
        tokens_MB=case.blocks.tokens[case.blocks.valid],
        predecessors_M=case.predecessors_M,
        teacher_states_SH=states,
        teacher_index_MP=index,
        weights_MP=weights,
        num_rounds=3,
        ce_weight=0.1,
        lambda_c=0.3,
        lambda_b=0.6,
    )
    return *bounded_objective(drafter.refiner, case.h_MBH, inputs), counted.sum()


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_training_loss_and_its_terms(name, drafter, target):
    """
    Their variant `data_ce_l1` is ours: CE on the data's tokens times 0.1, TV times 1.8 (L1 times 0.9), three rounds,
    0.3 of their mean, 0.6 of the base. Ours divides by the sum of the weights instead, once per global batch.
    """
    losses = vector("speculators_xpress")[1]["losses"][name]["data_ce_l1"]
    loss, terms, count = objective(Case(name, drafter, target), drafter, target)
    ours = {
        "tf_loss_sum": terms.teacher_forced,
        "consistency_loss_sum": terms.consistency,
        "base_anchor_loss_sum": terms.anchor,
        "loss_sum": loss,
    }
    for key, value in ours.items():
        assert float(value / count) == pytest.approx(losses[key], rel=1e-5), key


def test_gradients_of_every_parameter(drafter, target):
    """Through backbone, refiner and all rounds: the tensors of `grad.*`, and every parameter's norm."""
    tensors, about = vector("speculators_xpress")
    drafter.zero_grad()
    loss, _, count = objective(Case("plain", drafter, target), drafter, target)
    (loss / count).backward()
    grads = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    shown = convert_speculators(about["config"], part(tensors, "grad."))[1]
    assert len(shown) == 13
    for name, theirs in shown.items():
        torch.testing.assert_close(grads[name], theirs, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    norms = convert_speculators(about["config"], about["gradient_norms"])[1]
    assert norms.keys() == grads.keys()
    for name, norm in norms.items():
        assert float(grads[name].norm()) == pytest.approx(norm, rel=1e-3), name


@torch.no_grad()
def test_markov_logits(target):
    """A DSpark checkpoint in the fill-in layout, on the same backbone and inputs; slot 0 is discarded by both."""
    tensors, about = vector("speculators_xpress")
    weights = {name: t for name, t in part(tensors, "weights.").items() if not name.startswith("refiner_head.")}
    drafter = load(about["dspark_config"]["fill"], weights | part(tensors, "dspark.weights."))
    case = Case("plain", drafter, target)
    logits = case.base_MBV + drafter.refiner(case.h_MBH, case.expected("refined_prev"))
    close(logits[:, 1:], tensors["dspark.fill.logits"][:, 1:])
    states, index = case.teacher_states()
    close(
        base_logits(target, states[index]).softmax(dim=-1),
        tensors["dspark.fill.teacher_logits"][:, 1:].softmax(dim=-1),
    )


@torch.no_grad()
def test_dflash_rounds_through_our_generator(tmp_path):
    """z-lab's own model: the first round on an empty cache, the second behind our generator's crop."""
    tensors, about = vector("dflash")
    drafter, target = XPressDrafterModel.from_pretrained(write_zlab(tmp_path)), borrowed(tensors)
    generator = XPressCandidateGenerator(drafter, target, GenerationConfig(max_length=99))
    generator.context = DraftContext(torch.empty((1, 0), dtype=torch.long))
    for name in ("first", "second"):
        seen = part(tensors, f"{name}.")
        B = drafter.config.block_size
        anchor = seen["tokens"][:, :1]
        assert torch.equal(generator._noise_embeds(anchor), seen["noise"])
        generator.context.append(seen["context"], torch.zeros(1, seen["context"].shape[1], dtype=torch.long))
        h = generator.draft(anchor, seen["positions"][0, -B])
        close(h, seen["hidden"])
        close(base_logits(target, h), seen["logits"])
        assert generator.context.cache.get_seq_length() == int(seen["positions"][0, -B])


def test_default_target_layer_ids():
    """DFlash's own spread, and the case that it does not cover."""
    for name, ids in vector("dflash")[1]["default_layer_ids"].items():
        n, layers = (int(number) for number in name.split(" of "))
        assert default_target_layer_ids(n, layers) == ids
    assert default_target_layer_ids(5, 36) == [1, 9, 17, 25, 33]  # Qwen3-8B
    with pytest.raises(ValueError, match=r"5 drafter layers over a target of 6 layers would tap the layers \[1, 2, 2"):
        default_target_layer_ids(5, 6)
