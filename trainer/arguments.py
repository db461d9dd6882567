"""`XPressTrainingArguments`: Transformers' own, and the fields of the objective, checked when they are built."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .weighting import SCHEDULES


@dataclass
class XPressTrainingArguments(TrainingArguments):
    """
    As `TrainingArguments`, except for the objective's own fields; the defaults are those of the released 8B run.

    Args:
        num_anchors (`int`): Blocks per sequence, at most.
        lambda_consistency (`float`): Weight of the self-conditioned rounds.
        lambda_anchor_start, lambda_anchor_end (`float`): Weight of the base term, at first and at last.
        lambda_anchor_schedule (`str`): How it moves over training: "linear", "cosine", or "constant" (at the start's).
        num_rounds (`int`): Self-conditioned rounds.
        gamma (`float`): Decay of the position weights, in slots.
        ce_weight (`float`): Share of the cross-entropy; the rest is the L1 distance to the target's distribution.

    Beyond the paper, and off:

        dpace_alpha (`float`, *optional*): D-PACE's position weights in the place of gamma's, with this alpha (its paper:
            0.5); the loss is then divided by the number of slots.
        undecayed_anchor (`bool`): Weighs all slots of the base term alike, and divides it by their number.
        backbone_lr_scale (`float`): The backbone's learning rate, as a multiple of the refiner's.
        freeze_backbone (`bool`): Trains the refiner alone.
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
    lambda_anchor_schedule: str = field(default="linear")
    num_rounds: int = field(default=3)
    gamma: float = field(default=4.0)
    ce_weight: float = field(default=0.1)
    dpace_alpha: float | None = field(default=None)
    undecayed_anchor: bool = field(default=False)
    backbone_lr_scale: float = field(default=1.0)
    freeze_backbone: bool = field(default=False)
    remove_unused_columns: bool = field(default=False)
    ddp_find_unused_parameters: bool | None = field(default=False)  # all weights are in every step's loss

    def __post_init__(self):
        super().__post_init__()
        if self.num_anchors < 1:
            raise ValueError(f"`num_anchors` is {self.num_anchors}, expected at least 1 block per sequence.")
        if self.gamma <= 0.0:
            raise ValueError(
                f"`gamma` is {self.gamma}, expected more than 0 slots: weights decay as exp(-(k - 1) / gamma)."
            )
        if not 0.0 <= self.ce_weight <= 1.0:
            raise ValueError(f"`ce_weight` is {self.ce_weight}, expected 0 to 1: the rest is the L1 distance's share.")
        if self.lambda_anchor_schedule not in SCHEDULES:
            raise ValueError(
                f"`lambda_anchor_schedule` is {self.lambda_anchor_schedule!r}, expected one of {sorted(SCHEDULES)}."
            )
        if self.dpace_alpha is not None and not 0.0 <= self.dpace_alpha <= 1.0:
            raise ValueError(f"`dpace_alpha` is {self.dpace_alpha}, expected 0 to 1, or None for gamma's weights.")
        if self.backbone_lr_scale <= 0.0:
            raise ValueError(
                f"`backbone_lr_scale` is {self.backbone_lr_scale}, expected more than 0; set `freeze_backbone=True` to "
                "train the refiner alone."
            )
        if self.freeze_backbone and self.backbone_lr_scale != 1.0:
            raise ValueError(
                f"`backbone_lr_scale` is {self.backbone_lr_scale}, but `freeze_backbone` is set: leave one of them out."
            )
