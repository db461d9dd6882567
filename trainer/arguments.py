"""`XPressTrainingArguments`: Transformers' own, and the fields of the objective, checked when they are built."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class XPressTrainingArguments(TrainingArguments):
    """
    As `TrainingArguments`, except for the objective's own fields; the defaults are those of the released 8B run.

    Args:
        num_anchors (`int`): Blocks per sequence, at most.
        lambda_consistency (`float`): Weight of the self-conditioned rounds.
        lambda_anchor_start, lambda_anchor_end (`float`): Weight of the base term, moved linearly over training.
        num_rounds (`int`): Self-conditioned rounds.
        gamma (`float`): Decay of the position weights, in slots.
        ce_weight (`float`): Share of the cross-entropy; the rest is the L1 distance to the target's distribution.
    """

    num_train_epochs: float = field(default=10.0)
    learning_rate: float = field(default=6e-4)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=0.04)
    max_grad_norm: float = field(default=1.0)
    num_anchors: int = field(default=400)
    lambda_consistency: float = field(default=0.3)
    lambda_anchor_start: float = field(default=0.6)
    lambda_anchor_end: float = field(default=0.2)
    num_rounds: int = field(default=3)
    gamma: float = field(default=4.0)
    ce_weight: float = field(default=0.1)
    remove_unused_columns: bool = field(default=False)
    ddp_find_unused_parameters: bool | None = field(default=False)  # all weights are in every step's loss

    def __post_init__(self):
        super().__post_init__()
        if self.num_anchors < 1:
            raise ValueError(f"`num_anchors` is {self.num_anchors}, expected at least 1 block per sequence.")
