"""`XPressTrainer`: the Transformers `Trainer` with the co-training loss. The loop, checkpoints and logs are inherited.

The frozen target runs inside the trainer, without gradient and never in a checkpoint.
"""

from collections import defaultdict

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel, Trainer
from transformers.utils import logging

from ..generation.pairing_xpress import check_pair
from ..modeling_xpress import XPressModel, base_logits, context_features, states_to_keep
from .arguments import XPressTrainingArguments
from .blocks import Blocks, block_attention_mask, cut_blocks, document_positions, sample_anchors
from .bounded import ObjectiveInputs, bounded_objective
from .checkpoints import CloseLogAtSave, check_resumable, last_whole_checkpoint
from .data import XPressCollator, check_rows
from .objective import ObjectiveTerms, position_weights, simulated_tau


logger = logging.get_logger(__name__)


class XPressTrainer(Trainer):
    """
    Trains a drafter on rows of `input_ids` and `loss_mask`.

    Args:
        drafter (`XPressModel`): Trained in full; fp32 parameters.
        target (`PreTrainedModel`): Frozen. Only read.
        args (`XPressTrainingArguments`), train_dataset, eval_dataset, kwargs: As `Trainer`.
    """

    def __init__(self, drafter: XPressModel, target: PreTrainedModel, args: XPressTrainingArguments, **kwargs):
        _check_drafter(drafter)
        check_pair(drafter, target)
        for name in ("train_dataset", "eval_dataset"):
            datasets = kwargs.get(name)
            for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
                if dataset is not None:
                    check_rows(dataset)
        self.target = target.eval().requires_grad_(False)
        kwargs.setdefault("data_collator", XPressCollator())
        super().__init__(model=drafter, args=args, **kwargs)
        self.target.to(args.device)
        self.model_accepts_loss_kwargs = True  # `num_items_in_batch` is our denominator, over the global batch
        self.loss_is_scaled_for_ga = True
        self._sums = defaultdict(float)
        self.add_callback(CloseLogAtSave())

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """
        As `Trainer.train`, except that `resume_from_checkpoint=True` means the last checkpoint that was written to its
        end, or the start where there is none: a killed run goes on by the call that began it.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                logger.warning(f"{self.args.output_dir} holds no whole checkpoint: training begins at step 0.")
        if resume_from_checkpoint:
            check_resumable(resume_from_checkpoint)
        self._sums = defaultdict(float)
        return super().train(resume_from_checkpoint or None, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        # As `Trainer`, except that anchors are drawn here, seeded by step and process, so that a resumed run draws the
        # same, and that the items are the weights of all slots that count in the global batch: the loss's denominator.
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        args = self.args
        generator = torch.Generator().manual_seed(
            (args.seed << 32) + self.state.global_step * args.world_size + args.process_index
        )
        weight = torch.zeros((), device=device)
        for batch in batches:
            self.draw_anchors(batch, generator)
            weight += self.slot_weights(self.cut_blocks(batch).counted).sum()
        if args.world_size > 1:
            weight = self.accelerator.gather(weight).sum()
        return batches, weight

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
            self.accelerator.unwrap_model(self.model).config.block_size,
        )

    def slot_weights(self, counted: torch.Tensor) -> torch.Tensor:
        """The position weights of the draft slots that count `[..., P]`, from `counted` `[..., B]`."""
        return counted[..., 1:] * position_weights(counted.shape[-1], self.args.gamma, counted.device)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        with self.accelerator.autocast():
            loss, terms = self.objective(model, inputs)
        loss = loss / (terms.weight if num_items_in_batch is None else num_items_in_batch)
        if self.args.world_size > 1:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, {"loss": loss}) if return_outputs else loss

    def lambda_anchor(self) -> float:
        """The base term's weight now: linear from start to end over the whole training."""
        progress = self.state.global_step / max(self.state.max_steps, 1)
        start, end = self.args.lambda_anchor_start, self.args.lambda_anchor_end
        return start + (end - start) * min(progress, 1.0)

    def objective(self, model, inputs: dict) -> tuple[torch.Tensor, ObjectiveTerms]:
        """
        The objective of one batch, which has its anchors: the loss summed over slots, and its terms, which are also
        added to the sums that `log` averages.
        """
        drafter = self.accelerator.unwrap_model(model)
        blocks = self.cut_blocks(inputs)
        features, states_NSH = self.read_target(inputs)
        h_NABH = draft_blocks(model, self.target, features, blocks, inputs["attention_mask"])
        valid = blocks.valid
        tokens_MB, counted_MB = blocks.tokens[valid], blocks.counted[valid]
        objective_inputs = ObjectiveInputs(
            head=lambda h: base_logits(self.target, h.to(features.dtype)),
            tokens_MB=tokens_MB,
            predecessors_M=blocks.predecessors[valid],
            teacher_states_SH=states_NSH.flatten(0, 1),
            teacher_index_MP=teacher_positions(blocks, states_NSH.shape[1]),
            weights_MP=self.slot_weights(counted_MB),
            num_rounds=self.args.num_rounds,
            ce_weight=self.args.ce_weight,
            lambda_c=self.args.lambda_consistency,
            lambda_b=self.lambda_anchor(),
        )
        loss, terms = bounded_objective(drafter.refiner, h_NABH[valid], objective_inputs)
        for name in ("teacher_forced", "consistency", "anchor", "weight"):
            self._sums[name] += getattr(terms, name)
        for j, guess in enumerate(terms.guesses):
            self._sums[f"tau_pass_{j}"] += simulated_tau(guess, tokens_MB[:, 1:], counted_MB[:, 1:])
        self._sums["blocks"] += valid.sum()
        return loss, terms

    @torch.no_grad()
    def read_target(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's features `[N, S, H * taps]` and its last states `[N, S, H]`, which its head reads."""
        layer_ids = self.accelerator.unwrap_model(self.model).config.target_layer_ids
        outputs = self.target.get_decoder()(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            output_hidden_states=states_to_keep(layer_ids),
            use_cache=False,
        )
        return context_features(outputs.hidden_states, layer_ids), outputs.last_hidden_state

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # As `Trainer`, except that the objective is summed for `evaluation_loop`, on anchors that are always the same.
        inputs = self._prepare_inputs(inputs)
        self.draw_anchors(inputs, torch.Generator().manual_seed(self.args.seed))
        with torch.no_grad(), self.accelerator.autocast():
            self.objective(model, inputs)
        return None, None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        # As `Trainer`, except that the loss is one quotient over the whole data set, with the last weight of the base
        # term so that evaluations of one run compare; its terms and the simulated tau stand beside it.
        training, self._sums = self._sums, defaultdict(float)
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            means = self._means()
        finally:
            self._sums = training
        terms = ObjectiveTerms(means["loss_teacher_forced"], means["loss_consistency"], means["loss_anchor"], 1.0, [])
        means["loss"] = terms.loss(self.args.lambda_consistency, self.args.lambda_anchor_end)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in means.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `Trainer`, with every loss term and the simulated tau (accepted + 1) of base and rounds, averaged."""
        if "loss" in logs:
            logs |= self._means()
            self._sums = defaultdict(float)
        super().log(logs, start_time)

    def _means(self) -> dict[str, float]:
        """Terms per unit of weight and tau per block, over all processes, of what was summed."""
        names = list(self._sums)
        sums = torch.stack([torch.as_tensor(self._sums[name]).double() for name in names])
        sums = dict(zip(names, self.accelerator.reduce(sums).tolist()))
        means = {f"loss_{name}": sums[name] / sums["weight"] for name in ("teacher_forced", "consistency", "anchor")}
        return means | {name: value / sums["blocks"] for name, value in sums.items() if name.startswith("tau_")}


def draft_blocks(
    drafter: XPressModel,
    target: PreTrainedModel,
    features_NSF: torch.Tensor,
    blocks: Blocks,
    attention_mask_NS: torch.Tensor,
    document_ids_NS: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backbone's normed states of all blocks `[N, A, B, H]`, in one pass over context and blocks."""
    N, A, B = blocks.tokens.shape
    unwrapped = extract_model_from_parallel(drafter)
    noise_ids = torch.full_like(blocks.tokens, unwrapped.config.mask_token_id)
    noise_ids[..., 0] = blocks.tokens[..., 0]
    noise_embeds = target.get_input_embeddings()(noise_ids.flatten(1)).to(unwrapped.dtype)
    if document_ids_NS is None:
        document_ids_NS = torch.zeros_like(attention_mask_NS)
    mask = block_attention_mask(blocks.anchors, blocks.valid, B, attention_mask_NS, document_ids_NS)
    h = drafter(
        noise_embeds=noise_embeds,
        context_hidden_states=features_NSF.to(unwrapped.dtype),
        position_ids=torch.cat([document_positions(document_ids_NS), blocks.positions.flatten(1)], dim=1),
        attention_mask=mask,
    ).last_hidden_state
    return h.view(N, A, B, -1)


def teacher_positions(blocks: Blocks, length: int) -> torch.Tensor:
    """Where each draft slot is predicted from, position a + k - 1: flat indices of `[N * S]`, `[M, P]` for valid blocks."""
    rows, _ = blocks.valid.nonzero(as_tuple=True)
    slots = torch.arange(blocks.tokens.shape[2] - 1, device=rows.device)
    positions = (blocks.anchors[blocks.valid][:, None] + slots).clamp_max(length - 1)
    return rows[:, None] * length + positions


def _check_drafter(drafter: XPressModel):
    dtypes = {p.dtype for p in drafter.parameters()}
    if dtypes != {torch.float32}:
        raise ValueError(
            f"the drafter's parameters are {sorted(map(str, dtypes))}, expected torch.float32: at these learning rates "
            "bf16 weights stop moving. Load it with `dtype=torch.float32`, and set `bf16=True` for the arithmetic."
        )
