"""Blocks: where they start, what each slot sees and what it must predict."""

from itertools import combinations

import pytest
import torch
from rig import BLOCK, HIDDEN, MASK_TOKEN, TAPS, VOCAB, make_drafter, target
from training import EVERY, batch_of, make_trainer
from xpress_drafter.trainer import block_attention_mask, cut_blocks, sample_anchors
from xpress_drafter.trainer.blocks import document_positions, teacher_positions
from xpress_drafter.trainer.drafting import draft_blocks


LENGTH = 12

# Two turns: user 0-2, assistant 3-5, user 6-7, assistant 8-11. The token at position p is p.
TWO_TURNS = {"input_ids": list(range(LENGTH)), "loss_mask": [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]}

# Worked by hand for blocks of four: anchor -> {slot: (label, position whose target distribution is its teacher)}.
TWO_TURNS_TABLE = {
    3: {1: (4, 3), 2: (5, 4)},
    4: {1: (5, 4)},
    8: {1: (9, 8), 2: (10, 9), 3: (11, 10)},
    9: {1: (10, 9), 2: (11, 10)},
    10: {1: (11, 10)},
}


def pieces(row: dict, anchors, block_size: int = 4, documents=None):
    """`cut_blocks` of one row."""
    ids, mask = torch.tensor([row["input_ids"]]), torch.tensor([row["loss_mask"]]).bool()
    documents = None if documents is None else torch.tensor([documents])
    anchors = torch.tensor([anchors])
    return cut_blocks(ids, mask, anchors, torch.ones_like(anchors, dtype=torch.bool), block_size, documents)


def counted(blocks) -> list[list[int]]:
    """The slots of each block of the first row that count."""
    return [row.nonzero().flatten().tolist() for row in blocks.counted[0]]


# What a slot must predict.


def test_labels_and_teachers_of_a_two_turn_conversation():
    mask = torch.tensor([TWO_TURNS["loss_mask"]]).bool()
    anchors, valid = sample_anchors(mask, EVERY)
    assert anchors.tolist() == [list(TWO_TURNS_TABLE)] and valid.all()
    blocks = pieces(TWO_TURNS, anchors[0].tolist())
    teachers = teacher_positions(blocks, LENGTH)
    found = {
        anchor: {k: (int(blocks.tokens[0, n, k]), int(teachers[n, k - 1])) for k in slots}
        for n, (anchor, slots) in enumerate(zip(anchors[0].tolist(), counted(blocks)))
    }
    assert found == TWO_TURNS_TABLE
    assert blocks.predecessors.tolist() == [[2, 3, 7, 8, 9]]
    assert blocks.tokens[0, :, 0].tolist() == anchors[0].tolist()  # slot 0 is the anchor itself
    assert torch.equal(blocks.positions[0], anchors[0][:, None] + torch.arange(4))


def test_a_slot_counts_only_while_every_slot_before_it_is_supervised():
    row = {"input_ids": list(range(9)), "loss_mask": [1, 1, 0, 1, 1, 1, 1, 0, 1]}
    assert counted(pieces(row, [0, 3, 4, 5])) == [[1], [1, 2, 3], [1, 2], [1]]
    assert counted(pieces(row, [2])) == [[]]  # an anchor that is not supervised supervises nothing


def test_a_block_ends_with_its_sequence():
    row = {"input_ids": list(range(6)), "loss_mask": [1] * 6}
    blocks = pieces(row, [2, 3, 4])
    assert counted(blocks) == [[1, 2, 3], [1, 2], [1]]
    assert blocks.tokens[0, 0].tolist() == [2, 3, 4, 5]


def test_a_block_ends_with_its_document():
    row = {"input_ids": list(range(8)), "loss_mask": [1] * 8}
    blocks = pieces(row, [0, 1, 3, 4, 6], documents=[0, 0, 0, 0, 1, 1, 1, 1])
    assert counted(blocks) == [[1, 2, 3], [1, 2], [], [1, 2, 3], [1]]
    assert blocks.predecessors.tolist() == [[0, 0, 2, 4, 5]]  # a document's first token is its own predecessor
    assert blocks.positions[0, :, 0].tolist() == [0, 1, 3, 0, 2]


def test_positions_count_from_zero_in_every_document():
    documents = torch.tensor([[0, 0, 0, 1, 1, 5], [2, 2, 2, 2, 2, 2]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


# Where blocks start.


def test_anchors_are_uniform_without_replacement():
    """Three of the five candidates: every triple equally often, within four standard deviations."""
    rows = 6000
    mask = torch.tensor([TWO_TURNS["loss_mask"]]).bool().expand(rows, -1)
    anchors, valid = sample_anchors(mask, 3, torch.Generator().manual_seed(0))
    assert valid.all() and anchors.shape == (rows, 3)
    drawn = [tuple(row) for row in anchors.tolist()]
    for triple in combinations(TWO_TURNS_TABLE, 3):  # ascending, and no position twice
        assert abs(drawn.count(triple) - rows / 10) < 4 * (rows * 0.1 * 0.9) ** 0.5
    assert sum(map(drawn.count, combinations(TWO_TURNS_TABLE, 3))) == rows


def test_rows_with_fewer_candidates_than_others():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [1, 0, 1, 0, 1]]).bool()
    anchors, valid = sample_anchors(mask, EVERY)
    assert valid.tolist() == [[True] * 4, [True, False, False, False], [False] * 4]
    assert anchors[0].tolist() == [0, 1, 2, 3] and anchors[1, 0] == 3
    assert sample_anchors(mask, 2)[0].shape == (3, 2)


def test_a_seed_means_the_same_anchors():
    mask = torch.ones(2, 40, dtype=torch.bool)
    draws = [sample_anchors(mask, 5, torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# What a slot sees.

ANCHORS = [[0, 1, 2, 5, 6, 7, 9], [1, 4, 5, 8, 0, 0, 0]]
VALID = [[True] * 7, [True] * 4 + [False] * 3]
DOCUMENTS = [[0] * 5 + [1] * 7, [0] * 12]  # an anchor at a document's start, and blocks one apart on either side
REAL = [[1] * 10 + [0] * 2, [0, 0] + [1] * 7 + [0] * 3]  # padding on the right, and on both sides


def visible(n: int, a: int, j: int) -> bool:
    anchor = ANCHORS[n][a]
    return bool(VALID[n][a] and j < anchor and REAL[n][j] and DOCUMENTS[n][j] == DOCUMENTS[n][anchor])


def layout():
    return tuple(torch.tensor(x) for x in (ANCHORS, VALID, REAL, DOCUMENTS))


def test_mask_by_its_definition():
    anchors, valid, real, documents = layout()
    mask = block_attention_mask(anchors, valid, 3, real, documents)
    assert mask.shape == (2, 1, 7 * 3, LENGTH + 7 * 3)
    for n in range(2):
        for query in range(7 * 3):
            context = [visible(n, query // 3, j) for j in range(LENGTH)]
            own = [query // 3 == key // 3 for key in range(7 * 3)]
            assert mask[n, 0, query].tolist() == context + own


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradient_of_a_block_reaches_what_it_sees_and_nothing_else(attention):
    """From every block's states back to features and block inputs, both ways: zero outside, not zero inside."""
    drafter = make_drafter(target())
    drafter.set_attn_implementation(attention)
    anchors, valid, real, documents = layout()
    ids = torch.randint(MASK_TOKEN, (2, LENGTH))
    blocks = cut_blocks(ids, torch.ones_like(ids).bool(), anchors, valid, BLOCK, documents)
    features = torch.randn(2, LENGTH, len(TAPS) * HIDDEN, requires_grad=True)
    noise = {}

    def keep_noise(module, args):
        noise["embeds"] = args[0].detach().requires_grad_()
        return noise["embeds"], *args[1:]

    drafter.layers[0].register_forward_pre_hook(keep_noise)  # its input: the block's
    h = draft_blocks(drafter, target(), features, blocks, real, documents)
    for n in range(2):
        for a in range(7):
            seen = torch.autograd.grad(
                (h[n, a] * torch.randn(BLOCK, HIDDEN)).sum(), [features, noise["embeds"]], retain_graph=True
            )
            context, own = (gradient.abs().sum(dim=-1) > 0 for gradient in seen)
            assert not context[1 - n].any() and not own[1 - n].any()
            assert context[n].tolist() == [visible(n, a, j) for j in range(LENGTH)]
            assert own[n].view(7, BLOCK).tolist() == [[b == a] * BLOCK for b in range(7)]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_token_reaches_blocks_behind_it_and_the_one_it_anchors(kind):
    """Through the target as the trainer reads it: anchors one apart, every position changed in turn."""
    trainer = make_trainer(model=target(kind), num_anchors=EVERY)
    row = {"input_ids": torch.randint(MASK_TOKEN, (LENGTH,)), "loss_mask": [1] * LENGTH}

    def states(row: dict) -> torch.Tensor:
        batch = batch_of(trainer, [row])
        assert batch["anchors"].tolist() == [list(range(LENGTH - 1))]
        features, _ = trainer.read_target(batch)
        return draft_blocks(
            trainer.model, trainer.target, features, trainer.cut_blocks(batch), batch["attention_mask"]
        )[0]

    before = states(row)
    for p in range(LENGTH):
        ids = row["input_ids"].clone()
        ids[p] = (ids[p] + 1) % VOCAB
        moved = (states(row | {"input_ids": ids}) - before).abs().amax(dim=-1)  # [A, B]
        for a in range(LENGTH - 1):
            assert (moved[a] > 1e-3).all() if p <= a else (moved[a] < 1e-5).all(), (p, a)
