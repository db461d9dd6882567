"""How a drafter is learned: data, blocks and masks, objective, Trainer."""

from .blocks import Blocks, block_attention_mask, cut_blocks, sample_anchors
from .bounded import ObjectiveInputs, bounded_objective
from .chat_rows import tokenize_chat
from .data import XPressCollator
from .objective import ObjectiveTerms, position_weights, slot_loss, xpress_objective
from .xpress_trainer import XPressTrainer, XPressTrainingArguments


__all__ = [
    "Blocks",
    "ObjectiveInputs",
    "ObjectiveTerms",
    "XPressCollator",
    "XPressTrainer",
    "XPressTrainingArguments",
    "block_attention_mask",
    "bounded_objective",
    "cut_blocks",
    "position_weights",
    "sample_anchors",
    "slot_loss",
    "tokenize_chat",
    "xpress_objective",
]
