"""The objective, against slow references, closed forms and the left-to-right decode."""

from collections import Counter

import pytest
import torch
from rig import BLOCK, HIDDEN, VOCAB, make_drafter, target
from torch.utils._python_dispatch import TorchDispatchMode
from training import Peak, assert_close, batch_of, gradients, make_rows, make_trainer
from xpress_drafter.generation import resolve_block
from xpress_drafter.modeling_xpress import previous_tokens
from xpress_drafter.trainer import bounded, position_weights, slot_loss, xpress_objective
from xpress_drafter.trainer.benchmark import objective_ways
from xpress_drafter.trainer.bounded import ObjectiveInputs, bounded_objective, slot_loss_and_gradient_
from xpress_drafter.trainer.metrics import kept


M, P = 5, BLOCK - 1
TERMS = ("teacher_forced", "consistency", "anchor")


def random_slots(dtype=torch.float32):
    logits = (3 * torch.randn(M, P, VOCAB)).to(dtype).requires_grad_()
    teacher = (3 * torch.randn(M, P, VOCAB)).softmax(dim=-1)
    return logits, torch.randint(VOCAB, (M, P)), teacher


# The loss of a slot.


@pytest.mark.parametrize("ce_weight", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_form_equals_the_formula(ce_weight, dtype):
    """Value, and the gradient that takes the logits' place, with other weights per slot."""
    logits, labels, teacher = random_slots(dtype)
    scale = torch.rand(M, P)
    expected = slot_loss(logits, labels, teacher, ce_weight)
    (gradient,) = torch.autograd.grad((expected * scale).sum(), logits)
    rows = logits.detach().clone().flatten(0, 1)
    found = slot_loss_and_gradient_(
        rows, rows.argmax(dim=-1), labels.flatten(), teacher.flatten(0, 1), ce_weight, scale.flatten()
    )
    assert found.dtype == expected.dtype == torch.float32 and rows.dtype == dtype
    torch.testing.assert_close(found, expected.flatten(), rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(rows, gradient.flatten(0, 1), rtol=tolerance, atol=tolerance)
    assert gradient.abs().sum() > 1


@pytest.mark.parametrize("ce_weight", [0.0, 1.0])
def test_closed_form_where_q_underflows(ce_weight):
    """A label two hundred below the best logit: its probability is 0 in fp32, its loss and gradient are finite."""
    logits, labels = torch.tensor([[200.0, 0.0, -5.0]], requires_grad=True), torch.tensor([2])
    teacher = torch.tensor([[0.0, 0.25, 0.75]])
    expected = slot_loss(logits[None], labels[None], teacher[None], ce_weight)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    rows = logits.detach().clone()
    found = slot_loss_and_gradient_(rows, torch.tensor([0]), labels, teacher, ce_weight, torch.ones(1))
    assert found.item() == pytest.approx(expected.item()) and found.item() > 1
    torch.testing.assert_close(rows, gradient)


def test_numbers_worked_by_hand():
    """p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2): CE of token 2 is ln 2, L1 is 1, total variation 1/2."""
    logits = torch.tensor([0.25, 0.25, 0.5]).log().view(1, 1, 3)
    labels, teacher = torch.tensor([[2]]), torch.tensor([[[0.5, 0.5, 0.0]]])
    assert slot_loss(logits, labels, teacher, 1.0).item() == pytest.approx(0.693147, abs=1e-5)
    assert slot_loss(logits, labels, teacher, 0.0).item() == pytest.approx(1.0, abs=1e-5)
    assert slot_loss(logits, labels, teacher, 0.1).item() == pytest.approx(0.0693147 + 0.9, abs=1e-5)


def test_second_part_is_twice_the_total_variation():
    """TV = 1 - sum_v min(p, q): what speculative sampling rejects, from its own formula."""
    logits, labels, teacher = random_slots()
    rejected = 1 - torch.minimum(teacher, logits.softmax(dim=-1)).sum(dim=-1)
    torch.testing.assert_close(slot_loss(logits, labels, teacher, 0.0), 2 * rejected)


def test_position_weights():
    assert position_weights(4, 2.0).tolist() == pytest.approx([1.0, 0.6065307, 0.3678794])
    assert position_weights(16, 4.0)[4].item() == pytest.approx(0.3678794)  # slot 5 = 1 + gamma: 1 / e


# The objective of a block.


class Blocks:
    """Random blocks of a random drafter, whose base logits hang on h through a head of their own."""

    def __init__(self, **config):
        drafter = make_drafter(target(), **config)
        self.refiner, self.vocabulary = drafter.refiner, drafter.vocabulary
        self.h = torch.randn(M, BLOCK, HIDDEN, requires_grad=True)
        self.head = torch.nn.Linear(HIDDEN, len(self.vocabulary), bias=False).requires_grad_(False)
        self.head.weight *= 3
        self.tokens = torch.randint(VOCAB, (M, BLOCK))
        self.predecessors = torch.randint(VOCAB, (M,))
        self.teacher = (3 * torch.randn(M, P, len(self.vocabulary))).softmax(dim=-1)
        self.columns, draftable = self.vocabulary.columns(self.tokens[:, 1:])
        self.weights = position_weights(BLOCK, 4.0) * (torch.rand(M, P) < 0.8) * draftable

    def base(self) -> torch.Tensor:
        base = self.head(self.h[:, 1:])
        base.retain_grad()
        return base

    def objective(self, base, refiner, **kwargs):
        settings = {"num_rounds": 3, "ce_weight": 0.1, "vocabulary": self.vocabulary, **kwargs}
        return xpress_objective(
            refiner, self.h, base, self.tokens, self.predecessors, self.teacher, self.weights, **settings
        )

    def reference(self, base, num_rounds: int) -> dict[str, torch.Tensor]:
        """The three terms from the whole refiner at every round and the formula of a slot's loss."""

        def loss(logits):
            return (slot_loss(logits, self.columns, self.teacher, 0.1) * self.weights).sum()

        def refined(tokens_MP):
            prev = previous_tokens(self.predecessors, self.tokens[:, 0], tokens_MP)
            return base + self.refiner(self.h, prev)[:, 1:]

        rounds, guess = [], self.vocabulary.tokens(base.argmax(dim=-1))
        for _ in range(num_rounds):
            logits = refined(guess)
            rounds.append(loss(logits))
            guess = self.vocabulary.tokens(logits.argmax(dim=-1))
        return {
            "teacher_forced": loss(refined(self.tokens[:, 1:])),
            "consistency": torch.stack(rounds).mean(),
            "anchor": loss(base),
        }

    def gradients(self, loss, base) -> dict[str, torch.Tensor]:
        self.refiner.zero_grad()
        self.h.grad = base.grad = None
        loss.backward(retain_graph=True)
        parts = {name: p.grad for name, p in self.refiner.named_parameters() if p.grad is not None}
        return {"h": self.h.grad.clone(), "base": base.grad.clone(), **{k: v.clone() for k, v in parts.items()}}


MARKOV = {"xpress_rank": None, "markov_rank": 16}
EVEN = {"draft_token_ids": range(0, VOCAB, 2)}
KINDS = {"xpress": {}, "markov": MARKOV, "none": {"xpress_rank": None}, "draft vocabulary": EVEN}


@pytest.mark.parametrize("config", [{}, MARKOV, EVEN], ids=["xpress", "markov", "draft vocabulary"])
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_terms_and_their_gradients(config, num_rounds):
    """Each term's value, and its gradient in h, in the base logits and in every weight of the refiner."""
    blocks = Blocks(**config)
    base = blocks.base()
    terms, expected = blocks.objective(base, blocks.refiner, num_rounds=num_rounds), blocks.reference(base, num_rounds)
    assert len({value.item() for value in expected.values()}) == 3
    for name, value in expected.items():
        torch.testing.assert_close(getattr(terms, name), value, rtol=1e-5, atol=1e-5)
        ours, theirs = (blocks.gradients(loss, base) for loss in (getattr(terms, name), value))
        assert_close(ours, theirs)
    assert torch.equal(terms.weight, blocks.weights.sum())
    total = terms.loss(lambda_c=0.3, lambda_b=0.6)
    torch.testing.assert_close(
        total, expected["teacher_forced"] + 0.3 * expected["consistency"] + 0.6 * expected["anchor"]
    )


CHUNKS = {"one chunk": 2**23, "chunks of 2 blocks": 2 * P * VOCAB, "a block at a time": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_bounded_form_equals_the_formula(kind, chunk, num_rounds, monkeypatch):
    """Loss, terms, guesses, and gradients of states and weights, however the blocks are cut into chunks."""
    monkeypatch.setattr(bounded, "CHUNK", CHUNKS[chunk])
    monkeypatch.setattr(bounded, "SLICE", 3 * VOCAB)
    blocks = Blocks(**KINDS[kind])
    states, index = torch.randn(11, HIDDEN), torch.randint(11, (M, P))
    blocks.teacher = blocks.head(states)[index].softmax(dim=-1)
    parameters = [] if kind == "none" else list(blocks.refiner.parameters())
    expected = blocks.objective(blocks.base(), blocks.refiner, num_rounds=num_rounds)
    expected_loss = expected.loss(lambda_c=0.3, lambda_b=0.6)
    inputs = ObjectiveInputs(
        blocks.head,
        blocks.tokens,
        blocks.predecessors,
        states,
        index,
        blocks.weights,
        num_rounds,
        0.1,
        0.3,
        0.6,
        blocks.vocabulary,
    )
    loss, terms = bounded_objective(blocks.refiner, blocks.h, inputs)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    for name in (*TERMS, "weight"):
        assert getattr(terms, name).item() == pytest.approx(getattr(expected, name).item(), rel=1e-6)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(terms.guesses, expected.guesses, strict=True))
    ours = torch.autograd.grad(3 * loss, [blocks.h, *parameters])
    theirs = torch.autograd.grad(3 * expected_loss, [blocks.h, *parameters])
    assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))


class Softmaxes(TorchDispatchMode):
    """The shapes of all softmaxes that ran."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._softmax.default:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_the_teacher_is_taken_once_for_all_terms(monkeypatch):
    """One softmax of the teacher's positions, each of them once, beside one of every term's own logits."""
    monkeypatch.setattr(bounded, "SLICE", 2**23)
    blocks = Blocks()
    states, index = torch.randn(11, HIDDEN), torch.arange(P).expand(M, P)
    inputs = ObjectiveInputs(
        blocks.head,
        blocks.tokens,
        blocks.predecessors,
        states,
        index,
        blocks.weights,
        3,
        0.1,
        0.3,
        0.6,
        blocks.vocabulary,
    )
    with Softmaxes() as softmaxes:
        bounded_objective(blocks.refiner, blocks.h, inputs)
    assert softmaxes.shapes == {(P, VOCAB): 1, (M * P, VOCAB): 5}  # base, teacher-forced, three rounds


# 64 blocks of 16 slots, as the issue says; a vocabulary of 49,152 and what is carried at a time, both a 24th as large.
SHAPE = {"vocab_size": 2048, "hidden_size": 48, "rank": 16, "mlp_width": 32, "block_size": 16, "dtype": torch.float32}


def peak_of_the_objective(way: str, anchors: int) -> int:
    """The most bytes that one step's loss and gradients hold, beyond inputs, weights and the weights' gradients."""
    step = objective_ways(anchors=anchors, **SHAPE)[way]
    with Peak() as peak:
        step()
    return peak.bytes


def test_bounded_form_is_small(monkeypatch):
    """At most a third of what autograd keeps of the formula; twice the blocks add only their states' gradients."""
    monkeypatch.setattr(bounded, "CHUNK", 2**23 // 24)
    dense, few, many = (
        peak_of_the_objective(way, anchors) for way, anchors in (("dense", 64), ("bounded", 64), ("bounded", 128))
    )
    assert few < dense / 3
    assert 0 <= many - few < 3 * 64 * SHAPE["block_size"] * SHAPE["hidden_size"] * 4


def test_bounded_form_of_what_is_frozen_and_of_nothing():
    """No gradient where none is wanted, and no block at all: a loss of 0."""
    blocks = Blocks()
    states, index = torch.randn(11, HIDDEN), torch.randint(11, (M, P))
    inputs = ObjectiveInputs(
        blocks.head,
        blocks.tokens,
        blocks.predecessors,
        states,
        index,
        blocks.weights,
        3,
        0.1,
        0.3,
        0.6,
        blocks.vocabulary,
    )
    blocks.refiner.w1.requires_grad_(False)
    loss, _ = bounded_objective(blocks.refiner, blocks.h.detach(), inputs)
    loss.backward()
    assert blocks.refiner.w1.weight.grad is None and blocks.refiner.w2.weight.grad.norm() > 0
    with torch.no_grad():
        evaluated, _ = bounded_objective(blocks.refiner, blocks.h, inputs)
    assert evaluated == loss and not evaluated.requires_grad
    empty, terms = bounded_objective(blocks.refiner, blocks.h[:0], inputs.chunk(slice(0, 0)))
    empty.backward()
    assert empty == terms.weight == 0 and [len(guess) for guess in terms.guesses] == [0] * 4


def test_only_the_guesses_are_detached():
    """Co-training: h and base get gradient from every term; h through the refiner too, not through the base alone."""
    blocks = Blocks()
    base = blocks.base()
    terms = blocks.objective(base, blocks.refiner)
    reached = {name: blocks.gradients(getattr(terms, name), base) for name in TERMS}
    whole = {"h", "base", *dict(blocks.refiner.named_parameters())}
    assert reached["anchor"].keys() == {"h", "base"}
    for name in ("teacher_forced", "consistency"):
        assert reached[name].keys() == whole
        assert all(gradient.norm() > 1e-3 for gradient in reached[name].values()), name
        through_base = reached[name]["base"] @ blocks.head.weight
        through_refiner = reached[name]["h"][:, 1:] - through_base
        assert through_refiner.norm() > 0.01 * through_base.norm()
    assert reached["teacher_forced"]["h"][:, 0].norm() > 0  # slot 0 is read by the mixer and by the mean
    assert not any(guess.requires_grad for guess in terms.guesses)


def test_slots_that_do_not_count_change_nothing():
    """Neither their label nor their teacher, though a label is also the token before the next slot."""
    blocks = Blocks()
    blocks.weights[:, 2:] = 0
    base = blocks.base()
    before = blocks.objective(base, blocks.refiner)
    blocks.tokens[:, 3:] = (blocks.tokens[:, 3:] + 1) % VOCAB
    blocks.teacher[:, 2:] = blocks.teacher[:, 2:].roll(1, dims=-1)
    after = blocks.objective(base, blocks.refiner)
    for name in TERMS:
        assert torch.equal(getattr(before, name), getattr(after, name))
    blocks.tokens[:, 2] = (blocks.tokens[:, 2] + 1) % VOCAB  # a slot that counts
    assert blocks.objective(base, blocks.refiner).anchor != before.anchor


def test_without_readout_it_is_plain_dflash():
    """Exactly: every term is the base's, and h gets (1 + lambda_c + lambda_b) times the base's gradient."""
    blocks = Blocks()
    torch.nn.init.zeros_(blocks.refiner.w2.weight)
    base = blocks.base()
    plain, terms = blocks.objective(base, None), blocks.objective(base, blocks.refiner, num_rounds=1)
    assert plain.consistency == plain.anchor == 0
    for name in TERMS:
        assert torch.equal(getattr(terms, name), plain.teacher_forced)
    ours, theirs = (blocks.gradients(loss, base) for loss in (terms.loss(0.3, 0.6), plain.loss(0.3, 0.6)))
    assert_close({"h": ours["h"]}, {"h": 1.9 * theirs["h"]})
    assert all(torch.equal(guess, plain.guesses[0]) for guess in terms.guesses)


# Rounds are the Jacobi passes of generation.


@torch.no_grad()
def test_rounds_are_the_passes_and_settle_left_to_right():
    """After j rounds slots 1..j are those of the left-to-right decode; after B - 1 all are, and not before."""
    blocks = Blocks()
    blocks.h.requires_grad_(False)
    base = blocks.head(blocks.h[:, 1:])
    rounds = blocks.objective(base, blocks.refiner, num_rounds=P + 1).guesses
    tokens = torch.zeros(M, P, dtype=torch.long)
    for k in range(P):
        prev = previous_tokens(blocks.predecessors, blocks.tokens[:, 0], tokens)
        tokens[:, k] = (base + blocks.refiner(blocks.h, prev)[:, 1:])[:, k].argmax(dim=-1)
    for j, guess in enumerate(rounds):
        assert torch.equal(guess[:, :j], tokens[:, :j])
        passes = resolve_block(blocks.refiner, blocks.h, base, blocks.predecessors, blocks.tokens[:, 0], j)
        assert torch.equal(guess, passes.tokens)
    assert not torch.equal(rounds[P - 1], tokens) and torch.equal(rounds[P], tokens)


def test_kept_are_the_leading_hits():
    guesses = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]])
    labels = torch.tensor([[1, 2, 3]]).expand(5, -1)
    counted = torch.tensor([[1, 1, 1]] * 3 + [[1, 1, 0], [0, 0, 0]]).bool()
    assert kept(guesses, labels, counted).sum(dim=-1).tolist() == [3, 1, 0, 2, 0]


def test_gradients_reach_the_backbone_through_every_term():
    """Of a real drafter in one piece: every backbone weight moves under each term alone; the refiner under two."""
    trainer = make_trainer()
    batch = batch_of(trainer, make_rows(2))

    def gradient(consistency: float, anchor: float) -> dict[str, torch.Tensor]:
        trainer.args.lambda_consistency = consistency
        trainer.args.lambda_anchor_start = trainer.args.lambda_anchor_end = anchor
        trainer.model.zero_grad(set_to_none=True)
        trainer.objective(trainer.model, batch)[0].backward()
        return gradients(trainer.model)

    teacher_forced = gradient(0.0, 0.0)
    terms = {"teacher_forced": teacher_forced}
    for name, weights in (("consistency", (1.0, 0.0)), ("anchor", (0.0, 1.0))):
        terms[name] = {key: value - teacher_forced[key] for key, value in gradient(*weights).items()}
    heads = {name for name in teacher_forced if name.startswith("xpress_head")}
    for name, found in terms.items():
        unreached = {key for key, value in found.items() if value.norm() < 1e-6}
        assert unreached == (heads if name == "anchor" else set()), name
