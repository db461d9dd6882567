"""What a recipe will take, counted before anything is loaded: parameters, steps, tokens, bytes on each device.

Models are built on the meta device. A recipe with a `target_config` of its own asks no network, so that a plan of the
released 8B run needs neither weights nor one: its `drafter` is read where it lies already, and is of the recipe's
fields, with a warning, where it does not. Weights, gradients and optimizer are exact; activations are an estimate, of
the tensors that a step on the longest rows keeps.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..generation import XPressDrafterModel
from ..modeling_xpress import XPressDrafterConfig, XPressModel
from .adapters import adapt
from .answers import LONGEST
from .bounded import CHUNK
from .feature_cache import cache_bytes
from .optimizer import MuonAdamW
from .recipe_runs import continued_config, lora_config
from .recipes import Recipe
from .row_folder import MANIFEST, load_rows
from .weighting import freeze_backbone


logger = logging.get_logger(__name__)

COUNTED = ("adamw_torch", "adamw_torch_fused")  # `optim` that keep two numbers in float32


class Plan(NamedTuple):
    parameters: dict[str, int]  # of the target, the drafter's backbone and refiner, and of what is trained
    rows: int
    tokens: int  # of all rows
    rows_per_step: int
    steps: int
    memory: dict[str, int]  # bytes on one device, by what they are for
    disk: int  # bytes of the target's states, where the recipe keeps them

    @property
    def tokens_read(self) -> int:
        """Tokens that the target reads in the whole run."""
        return round(self.steps * self.rows_per_step * self.tokens / self.rows)


def make_plan(recipe: Recipe, devices: int = 1) -> Plan:
    """The plan of a recipe on that many devices, each with a target of its own."""
    if recipe.setting("optim") not in COUNTED:
        raise ValueError(
            f"`optim` is {recipe.setting('optim')!r}, whose memory is not counted here, expected one of "
            f"{', '.join(COUNTED)}: leave it out for a plan with AdamW in its place."
        )
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config(recipe))
        drafter = planned_drafter(recipe, target)
    rows, tokens, longest = row_counts(recipe)
    accumulated = recipe.setting("gradient_accumulation_steps")
    rows_per_step = recipe.setting("per_device_train_batch_size") * devices * accumulated
    steps = recipe.setting("max_steps")
    if steps <= 0:
        steps = math.ceil(recipe.setting("num_train_epochs") * math.ceil(rows / rows_per_step))
    disk = cache_bytes(kept_tokens(recipe, tokens), drafter.config, getattr(torch, recipe.target_dtype))
    whole = drafter.num_parameters()
    refiner = 0 if drafter.refiner is None else sum(p.numel() for p in drafter.refiner.parameters())
    activations = activation_bytes(recipe, target, drafter, longest)
    if recipe.lora_rank is not None:
        with torch.device("meta"):
            drafter = adapt(drafter, lora_config(recipe))
    if recipe.setting("freeze_backbone"):
        freeze_backbone(drafter)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    half = recipe.setting("bf16") or recipe.setting("fp16")
    memory = {
        f"target, {recipe.target_dtype}": target.num_parameters() * getattr(torch, recipe.target_dtype).itemsize,
        "drafter, float32": 4 * drafter.num_parameters(),
        "its copy for half-precision arithmetic": 2 * drafter.num_parameters() * half,
        "gradients": 4 * trained,
        f"optimizer, {recipe.optimizer}": optimizer_bytes(recipe, drafter),
        "activations, estimated": activations,
    }
    parameters = {
        "target": target.num_parameters(),
        "backbone": whole - refiner,
        "refiner": refiner,
        "trained": trained,
    }
    return Plan(parameters, rows, tokens, rows_per_step, steps, memory, disk)


def target_config(recipe: Recipe) -> PreTrainedConfig:
    """The target's shape: the recipe's, or that of its config file."""
    if recipe.target_config:
        return AutoConfig.for_model(**recipe.target_config)
    return AutoConfig.from_pretrained(recipe.target, revision=recipe.target_revision)


def planned_drafter(recipe: Recipe, target: PreTrainedModel) -> XPressDrafterModel:
    """The drafter that is trained: a fresh one, or of the config of the one to go on from."""
    if recipe.drafter is not None:
        try:
            config = XPressDrafterConfig.from_pretrained(recipe.drafter, local_files_only=bool(recipe.target_config))
            return XPressDrafterModel(continued_config(recipe, config))
        except OSError:
            logger.warning(
                f"The config of {recipe.drafter} could not be read: the drafter is counted by the recipe's fields "
                f"{recipe.drafter_fields}, and by the defaults of a fresh one."
            )
    try:
        return XPressDrafterModel.for_target(target, mask_token_id=0, **recipe.drafter_fields)
    except StrictDataclassError as error:
        raise ValueError(f"the drafter's fields are {recipe.drafter_fields}: {error}") from error


def row_counts(recipe: Recipe) -> tuple[int, int, int]:
    """Rows, their tokens and the longest row that there may be: of the data, or what the recipe expects of it."""
    if all((Path(folder) / MANIFEST).exists() for folder in recipe.folders):
        manifests = [load_rows(folder)[1] for folder in recipe.folders]
        rows, tokens = (sum(manifest["counts"][name] for manifest in manifests) for name in ("rows", "tokens"))
        return rows, tokens, max(manifest["settings"]["max_length"] for manifest in manifests)
    if recipe.expected_rows is None or recipe.expected_tokens is None:
        raise ValueError(
            f"`data` is {recipe.data}, which is not made yet, and the recipe has no `expected_rows` and `expected_tokens`: "
            "run `xpress data` first, or say what you expect."
        )
    return recipe.expected_rows, recipe.expected_tokens, LONGEST


def kept_tokens(recipe: Recipe, tokens: int) -> int:
    """Of training rows with that many tokens, and of `eval_data`, whose states the recipe keeps on the disk."""
    if recipe.feature_cache is None:
        return 0
    return tokens if recipe.eval_data is None else tokens + load_rows(recipe.eval_data)[1]["counts"]["tokens"]


def optimizer_bytes(recipe: Recipe, drafter: nn.Module) -> int:
    """AdamW keeps two numbers in float32 for every parameter, Muon one for every matrix entry."""
    if recipe.optimizer == "adamw":
        return 8 * sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    groups = MuonAdamW(drafter.named_parameters(), muon_lr=1.0, adamw_lr=1.0).param_groups
    numbers = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in groups]
    return 4 * numbers[0] + 8 * numbers[1]


def activation_bytes(recipe: Recipe, target: PreTrainedModel, drafter: XPressModel, S: int) -> int:
    """What one forward and backward on rows of S tokens keeps: layers, mask, target's states, chunk of the objective."""
    config, text = drafter.config, target.config.get_text_config(decoder=True)
    N, A, B = recipe.setting("per_device_train_batch_size"), recipe.setting("num_anchors"), config.block_size
    width = 2 if recipe.setting("bf16") or recipe.setting("fp16") else 4
    slots, keys, H = N * A * B, N * (S + A * B), config.hidden_size
    queries, values = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = slots * (8 * H + 2 * queries + 4 * config.intermediate_size) + keys * 3 * values
    if recipe.setting("gradient_checkpointing"):
        layers = layer + config.num_hidden_layers * slots * H
    else:
        layers = layer * config.num_hidden_layers
    context = N * S * H * (len(config.target_layer_ids) + 2)
    reading = N * S * (4 * text.hidden_size + 3 * text.intermediate_size)
    mask = slots * (S + A * B) * (1 + width)
    objective = max(CHUNK, (B - 1) * len(drafter.vocabulary)) * (3 * width + 8)
    return width * (layers + context + reading) + mask + objective
