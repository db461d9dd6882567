"""How a drafter is learned: data, blocks and masks, objective, Trainer."""

from .blocks import Blocks, block_attention_mask, cut_blocks, sample_anchors
from .data import XPressCollator, tokenize_chat
from .objective import ObjectiveTerms, position_weights, simulated_tau, slot_loss, xpress_objective
from .xpress_trainer import XPressTrainer, XPressTrainingArguments


__all__ = [
    "Blocks",
    "ObjectiveTerms",
    "XPressCollator",
    "XPressTrainer",
    "XPressTrainingArguments",
    "block_attention_mask",
    "cut_blocks",
    "position_weights",
    "sample_anchors",
    "simulated_tau",
    "slot_loss",
    "tokenize_chat",
    "xpress_objective",
]
