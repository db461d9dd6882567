"""`XPressTrainer`: the Transformers `Trainer` with the co-training loss. The loop, checkpoints and logs are inherited.

The frozen target runs inside the trainer, without gradient and never in a checkpoint.
"""

import time
from functools import partial
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..generation.pairing_xpress import check_pair
from ..modeling_xpress import XPressModel, base_logits
from .adapters import adapt
from .arguments import XPressTrainingArguments
from .bfloat16 import warn_of_slow_bf16
from .blocks import Blocks, cut_blocks, sample_anchors, spread_anchors, teacher_positions
from .bounded import ObjectiveInputs, bounded_objective
from .checkpoints import CloseLogAtSave, check_resumable, ended_state, last_whole_checkpoint
from .data import XPressCollator, check_rows
from .drafting import draft_blocks, label_probabilities, own_draft
from .feature_cache import read_states
from .metrics import Sums
from .objective import ObjectiveTerms, position_weights
from .optimizer import MuonAdamW
from .weighting import dpace_weights, freeze_backbone, scale_backbone_rate, scheduled
from .wrapping import bare_drafter, freeze_target, inside_forward, to_target


logger = logging.get_logger(__name__)


class XPressTrainer(Trainer):
    """
    Trains a drafter on rows of `input_ids` and `loss_mask`.

    Args:
        drafter (`XPressModel`): Trained in full, or in an adapter; fp32 parameters.
        target (`PreTrainedModel` or `PeftModel`): Frozen. Only read.
        args (`XPressTrainingArguments`), train_dataset, eval_dataset, kwargs: As `Trainer`.
        peft_config (`PeftConfig`, *optional*): Trains an adapter on the backbone, and the refiner in full (`adapt`).
    """

    def __init__(
        self,
        drafter: XPressModel,
        target: PreTrainedModel,
        args: XPressTrainingArguments,
        *,
        peft_config: PeftConfig | None = None,
        **kwargs,
    ):
        _check_drafter(drafter)
        check_pair(drafter, target)
        lengths = {}
        for name in ("train_dataset", "eval_dataset"):
            datasets = kwargs.get(name)
            for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
                if dataset is not None:
                    lengths[name] = check_rows(dataset)
        self._longest_row = lengths.get("train_dataset")
        if peft_config is not None:
            drafter = adapt(drafter, peft_config)
        _check_options(drafter, args, kwargs)
        if args.bf16:
            warn_of_slow_bf16("`bf16` is set", "`bf16=False`", args.device)
        if args.freeze_backbone:
            freeze_backbone(drafter)
        self.target = freeze_target(target, args.device)
        kwargs.setdefault("data_collator", XPressCollator())
        super().__init__(model=drafter, args=args, **kwargs)
        self._read_vocabulary(self.model)
        self.model_accepts_loss_kwargs = True  # `num_items_in_batch` is our denominator, over the global batch
        self.loss_is_scaled_for_ga = True
        self._sums = Sums()
        self.add_callback(CloseLogAtSave())

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """
        As `Trainer.train`, except that `resume_from_checkpoint=True` means the last checkpoint that was written to its
        end, or the start where there is none: a killed run goes on by the call that began it. A run that came to its end
        is loaded as it ended, with its best weights where the arguments ask for those.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                logger.warning(f"{self.args.output_dir} holds no whole checkpoint: training begins at step 0.")
        self.note_length()
        if resume_from_checkpoint:
            check_resumable(resume_from_checkpoint)
            if (state := ended_state(resume_from_checkpoint, self.args)) is not None:
                return self.load_ended(resume_from_checkpoint, state)
        self._sums = Sums()
        return super().train(resume_from_checkpoint or None, **kwargs)

    def note_length(self) -> None:
        """Writes the longest row of this training and of those before into the drafter's config, where all are known."""
        config = bare_drafter(self.model).config
        lengths = config.trained_length, self._longest_row  # a stream does not tell, nor does a drafter from elsewhere
        config.trained_length = None if None in lengths else max(lengths)

    def load_ended(self, checkpoint: str, state: TrainerState) -> TrainOutput:
        """Takes up weights and history of a run that has no step left."""
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # Beside the last one: the folder may have been moved.
            checkpoint = str(Path(checkpoint).with_name(Path(state.best_model_checkpoint).name))
        self._load_from_checkpoint(checkpoint)
        self.state = state
        return TrainOutput(state.global_step, 0.0, {})

    def _load_from_checkpoint(self, *args, **kwargs):
        # As `Trainer`, except that the checkpoint may hold another draft vocabulary: that of the rows it was begun with.
        super()._load_from_checkpoint(*args, **kwargs)
        self._read_vocabulary(self.model)

    def _read_vocabulary(self, model: torch.nn.Module) -> None:
        self.vocabulary = bare_drafter(model).vocabulary.to(self.args.device)
        self._target_head = self.vocabulary.head(self.target)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        # As `Trainer`, except that the backbone may learn at a rate of its own.
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.args.backbone_lr_scale != 1.0:
            scale_backbone_rate(optimizer, self.model if model is None else model, self.args.backbone_lr_scale)
        return optimizer

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        # As `Trainer`, except that anchors are drawn here, seeded by step and process, so that a resumed run draws the
        # same, and that the items are the weights of all learned slots in the global batch: the loss's denominators.
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        args = self.args
        draw = self.state.global_step * args.world_size + args.process_index
        generator = torch.Generator().manual_seed((args.seed * 1_000_003 + draw) % 2**32)  # all that the CPU's reads
        totals = torch.zeros(2, device=device)
        for batch in batches:
            self.draw_anchors(batch, generator)
            totals += self.totals(self.cut_blocks(batch).learned).to(device)
        return batches, self.accelerator.reduce(totals)

    def draw_anchors(self, batch: dict, generator: torch.Generator):
        """Adds `anchors` and `anchor_valid` `[N, A]` to a batch."""
        drawn = sample_anchors(batch["loss_mask"], self.args.num_anchors, generator)
        batch["anchors"], batch["anchor_valid"] = drawn

    def cut_blocks(self, batch: dict) -> Blocks:
        return cut_blocks(
            batch["input_ids"],
            batch["loss_mask"],
            batch["anchors"],
            batch["anchor_valid"],
            bare_drafter(self.model).config.block_size,
            vocabulary=self.vocabulary,
        )

    def slot_weights(self, learned: torch.Tensor) -> torch.Tensor:
        """The position weights of the draft slots that are learned `[..., P]`, from `learned` `[..., B]`."""
        if self.args.dpace_alpha is not None:  # what the drafter's confidence is still to weigh
            return learned[..., 1:].float()
        return learned[..., 1:] * position_weights(learned.shape[-1], self.args.gamma, learned.device)

    def totals(self, learned: torch.Tensor) -> torch.Tensor:
        """What divides the refined terms and the base term `[2]`: the sums of their slots' weights."""
        weight = self.slot_weights(learned).sum()
        return torch.stack([weight, learned[..., 1:].sum().to(weight) if self.args.undecayed_anchor else weight])

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        totals = self.totals(self.cut_blocks(inputs).learned) if num_items_in_batch is None else num_items_in_batch
        totals = totals.where(totals > 0, 1.0)  # a batch may have no label that can be drafted; its loss is 0
        anchor_scale = totals[0] / totals[1] if self.args.undecayed_anchor else 1.0
        with self.accelerator.autocast():
            loss, _ = self.objective(model, inputs, anchor_scale)
        loss = loss / totals[0] * self.args.world_size  # gradients are averaged over processes
        return (loss, {"loss": loss}) if return_outputs else loss

    def lambda_anchor(self, progress: float) -> float:
        """The base term's weight at a point of the training, from 0 to 1."""
        args = self.args
        return scheduled(args.lambda_anchor_schedule, args.lambda_anchor_start, args.lambda_anchor_end, progress)

    def objective(
        self, model, inputs: dict, anchor_scale: float | torch.Tensor = 1.0, drafting: bool = False
    ) -> tuple[torch.Tensor, ObjectiveTerms]:
        """
        The objective of one batch, which has its anchors: the loss summed over slots, and its terms, which are also
        added to the sums that `log` averages. With `drafting`, so is what the drafter itself would draft.
        """
        blocks = self.cut_blocks(inputs)
        features, states_NSH = self.read_target(inputs)
        counted_MB = blocks.counted[blocks.valid]
        objective_inputs = self.objective_inputs(blocks, features.dtype, states_NSH, anchor_scale)

        def draft_and_compare(drafter: XPressModel):
            h_NABH = draft_blocks(drafter, self.target, features, blocks, inputs["attention_mask"])
            h_MBH = h_NABH[blocks.valid]
            loss, terms = self.weighted_objective(drafter, h_MBH, objective_inputs)
            return loss, terms, own_draft(drafter, h_MBH, objective_inputs) if drafting else terms.guesses[-1]

        loss, terms, draft_MP = inside_forward(model, draft_and_compare)
        truth = objective_inputs.tokens_MB[:, 1:], counted_MB[:, 1:]
        self._sums.add_terms(terms, self.totals(blocks.learned), *truth)
        self._sums.add_draft(draft_MP, *truth)
        return loss, terms

    def objective_inputs(
        self,
        blocks: Blocks,
        dtype: torch.dtype,
        states_NSH: torch.Tensor,
        anchor_scale: float | torch.Tensor = 1.0,
    ) -> ObjectiveInputs:
        """What the objective reads of the valid blocks, besides the drafter's states; the head computes in `dtype`."""
        progress = self.state.global_step / max(self.state.max_steps, 1)
        return ObjectiveInputs(
            head=partial(self.head, dtype=dtype),
            vocabulary=self.vocabulary,
            tokens_MB=blocks.tokens[blocks.valid],
            predecessors_M=blocks.predecessors[blocks.valid],
            teacher_states_SH=states_NSH.flatten(0, 1),
            teacher_index_MP=teacher_positions(blocks, states_NSH.shape[1]),
            weights_MP=self.slot_weights(blocks.learned[blocks.valid]),
            num_rounds=self.args.num_rounds,
            ce_weight=self.args.ce_weight,
            lambda_c=self.args.lambda_consistency,
            lambda_b=anchor_scale * self.lambda_anchor(progress),
        )

    def weighted_objective(self, drafter: XPressModel, h_MBH: torch.Tensor, inputs: ObjectiveInputs):
        """`bounded_objective` with the weights that the arguments ask for."""
        learned_MP = inputs.weights_MP > 0
        if self.args.dpace_alpha is not None:
            q_MP = label_probabilities(drafter, h_MBH, inputs)
            inputs = inputs._replace(weights_MP=dpace_weights(q_MP, learned_MP, self.args.dpace_alpha))
        if not self.args.undecayed_anchor:
            return bounded_objective(drafter.refiner, h_MBH, inputs)
        loss, terms = bounded_objective(drafter.refiner, h_MBH, inputs._replace(lambda_b=0.0))
        base_loss, base = bounded_objective(None, h_MBH, inputs._replace(weights_MP=learned_MP.float()))
        return loss + inputs.lambda_b * base_loss, terms._replace(anchor=base.teacher_forced)

    def head(self, h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The target's head on states `[..., H]`, wherever it stands, for the tokens that can be drafted."""
        return base_logits(self.target, to_target(self.target, h.to(dtype)), self._target_head).to(h.device)

    def read_target(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's features and last states, from the batch where they are cached."""
        if "features" in inputs:
            return inputs["features"], inputs["states"]
        features, states = read_states(self.target, bare_drafter(self.model).config.target_layer_ids, inputs)
        return features.to(self.args.device), states.to(self.args.device)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # As `Trainer`, except that the objective is summed for `evaluation_loop`, on anchors that are always the same,
        # and without the rows that only fill the last batch, so that every process has one.
        inputs = self._prepare_inputs(inputs)
        inputs["anchors"], inputs["anchor_valid"] = spread_anchors(inputs["loss_mask"], self.args.num_anchors)
        inputs["loss_mask"][self.rows_to_count(len(inputs["input_ids"])) :] = False
        with torch.no_grad(), self.accelerator.autocast():
            self.objective(model, inputs, drafting=True)
        return None, None, None

    def rows_to_count(self, rows: int) -> int:
        """How many of this process's rows are not repeated: what `gather_for_metrics` keeps of them."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return min(max(state.remainder - self.args.process_index * rows, 0), rows)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        # As `Trainer`, except that the loss is one quotient over the whole data set, with the last weight of the base
        # term so that evaluations of one run compare; `tau` is that of the drafter's own passes (accepted + 1).
        training, self._sums = self._sums, Sums()
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            means = self._sums.means(self.accelerator)
        finally:
            training.started += time.perf_counter() - self._sums.started
            self._sums = training
        terms = ObjectiveTerms(means["loss_teacher_forced"], means["loss_consistency"], means["loss_anchor"], 1.0, [])
        means["loss"] = terms.loss(self.args.lambda_consistency, self.lambda_anchor(progress=1.0))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in means.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer`, with the means of every loss term, and tau and the slots' acceptance of the rounds trained."""
        if "loss" in logs:
            logs |= self._sums.means(self.accelerator)
            del logs["tau"]  # that of the last round; `eval_tau` is of the drafter's own passes
            self._sums = Sums()
        super().log(logs, start_time)


def _check_drafter(drafter: XPressModel):
    dtypes = {p.dtype for p in drafter.parameters()}
    if dtypes != {torch.float32}:
        raise ValueError(
            f"the drafter's parameters are {sorted(map(str, dtypes))}, expected torch.float32: at these learning rates "
            "bf16 weights stop moving. Load it with `dtype=torch.float32`, and set `bf16=True` for the arithmetic."
        )


def _check_options(drafter: XPressModel, args: XPressTrainingArguments, kwargs: dict):
    """Raises for options that would be ignored, or cannot work together."""
    if args.undecayed_anchor and bare_drafter(drafter).refiner is None:
        raise ValueError("`undecayed_anchor` is set, but without a refiner the base's is the only term: leave it out.")
    if args.freeze_backbone and isinstance(drafter, PeftModel):
        raise ValueError(
            "`freeze_backbone` is set, but the drafter trains in an adapter, which is the backbone's: leave one out."
        )
    optimizer = kwargs.get("optimizers", (None, None))[0]
    if isinstance(optimizer, MuonAdamW) and args.deepspeed_plugin is not None:
        raise ValueError(
            "the optimizer is Muon, which needs whole matrices, but DeepSpeed flattens what it shards: use FSDP with "
            "`fsdp_version: 2`, or `optimizer: adamw`."
        )
    if args.backbone_lr_scale != 1.0 and optimizer is not None:
        raise ValueError(
            f"`backbone_lr_scale` is {args.backbone_lr_scale}, but `optimizers` brings its own rates: leave one out."
        )
