"""A recipe's run: the trainer that it describes, trained or gone on with, and the drafter that comes out."""

from pathlib import Path

import yaml
from datasets import Dataset, concatenate_datasets
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..generation import XPressDrafterModel
from ..generation.evaluation_runs import differences
from ..modeling_xpress import XPressDrafterConfig, embedding_fingerprint
from .answers import load_tokenizer
from .bfloat16 import warn_of_slow_bf16
from .checkpoints import last_whole_checkpoint
from .draft_tokens import most_used_tokens
from .feature_cache import CachedRows, cache_features
from .optimizer import SETTINGS, MuonAdamW
from .recipes import Recipe, parse_yaml
from .row_folder import check_rows_are_of, load_rows
from .wrapping import freeze_target
from .xpress_trainer import XPressTrainer, XPressTrainingArguments


logger = logging.get_logger(__name__)

NOTE = "recipe.yaml"  # what a run was made of, in its output folder


def make_trainer(recipe: Recipe) -> XPressTrainer:
    """Everything loaded and checked, nothing trained yet."""
    args = XPressTrainingArguments(**recipe.training)
    tables = [[load_rows(folder) for folder in recipe.folders]]
    if recipe.eval_data is not None:
        tables.append([load_rows(recipe.eval_data)])
    set_seed(args.seed)
    tokenizer = load_tokenizer(recipe.target, recipe.target_revision)
    if recipe.target_dtype == "bfloat16":
        warn_of_slow_bf16("`target_dtype` is bfloat16", "`target_dtype=float32`", args.device)
    target = AutoModelForCausalLM.from_pretrained(
        recipe.target, revision=recipe.target_revision, dtype=recipe.target_dtype
    )
    check_shape(target, recipe.target_config)
    for folder, (_, manifest) in zip(recipe.folders, tables[0]):
        check_rows_are_of(folder, manifest, recipe.target, recipe.target_dtype, tokenizer, target)
    drafter = make_drafter(recipe, target, tokenizer, concatenate_datasets([rows for rows, _ in tables[0]]))
    rows, *held_out = joined(tables, recipe, freeze_target(target, args.device), drafter.config)
    kwargs = {"peft_config": lora_config(recipe), "eval_dataset": held_out[0] if held_out else None}
    if recipe.optimizer == "muon":
        trained = [(name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad]
        named = {name: recipe.training[name] for name in SETTINGS if name in recipe.training}
        optimizer = MuonAdamW(trained, recipe.muon_learning_rate, args.learning_rate, **named)
        kwargs["optimizers"] = (optimizer, None)
    return XPressTrainer(drafter, target, args, train_dataset=rows, **kwargs)


def joined(
    tables: list[list[tuple[Dataset, dict]]], recipe: Recipe, target: PreTrainedModel, config: XPressDrafterConfig
) -> list[Dataset | CachedRows]:
    """The rows of each table's parts, `(rows, manifest)` each, with the target's states where the recipe keeps them."""
    whole = [concatenate_datasets([rows for rows, _ in parts]) for parts in tables]
    if recipe.feature_cache is None:
        return whole
    made_from = [{"parts": [manifest["settings"] for _, manifest in parts]} for parts in tables]
    max_bytes = int(recipe.feature_cache_gib * 2**30)
    return cache_features(target, config, list(zip(whole, made_from)), recipe.feature_cache, max_bytes=max_bytes)


def lora_config(recipe: Recipe) -> LoraConfig | None:
    """The adapter that the recipe trains; `XPressTrainer` puts it on the backbone."""
    return None if recipe.lora_rank is None else LoraConfig(r=recipe.lora_rank, lora_alpha=recipe.lora_alpha)


def run(recipe: Recipe) -> XPressTrainer:
    """Trains, or goes on from the last whole checkpoint in `output_dir`; a run that came to its end is only loaded."""
    if recipe.eval_data is not None and recipe.setting("eval_strategy") == "no":
        raise ValueError(
            f"`eval_data` is {recipe.eval_data!r} but `eval_strategy` 'no': nothing would read it. Set "
            "`eval_strategy=steps` or `epoch`, or leave it out."
        )
    trainer = make_trainer(recipe)
    out = Path(trainer.args.output_dir)
    checkpoint = last_whole_checkpoint(str(out))
    if trainer.is_world_process_zero():
        _note(recipe, out, resumed=checkpoint is not None)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def save_drafter(trainer: XPressTrainer, folder: Path | None = None) -> Path:
    """Saves the trained drafter in bf16, ready for `generate` and the Hub, an adapter also merged; returns its folder."""
    folder = Path(trainer.args.output_dir) / "drafter" if folder is None else folder
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(drafter, PeftModel):
        if trainer.is_world_process_zero():
            drafter.save_pretrained(folder.parent / "adapter")
            drafter.merge_and_unload().bfloat16().save_pretrained(folder)
        return folder
    # Of all processes, where they hold a part each.
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        whole = XPressDrafterModel(drafter.config)
        whole.load_state_dict(weights)
        whole.bfloat16().save_pretrained(folder)
    return folder


def make_drafter(
    recipe: Recipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset
) -> XPressDrafterModel:
    """
    A fresh drafter, or the one to go on from; a refiner that the recipe names and that one lacks is fresh. A fresh one's
    draft vocabulary are the tokens that the rows use most.
    """
    try:
        if recipe.drafter is None:
            fields = recipe.drafter_fields | {"mask_token_id": mask_token_id(recipe, tokenizer)}
            if (size := fields.pop("draft_vocab_size", None)) is not None:
                vocab_size = target.config.get_text_config(decoder=True).vocab_size
                fields["draft_token_ids"] = most_used_tokens(rows, size, vocab_size)
            return XPressDrafterModel.for_target(target, **fields)
        source = XPressDrafterModel.from_pretrained(recipe.drafter, dtype="float32")
        config = continued_config(recipe, source.config)
    except StrictDataclassError as error:
        raise ValueError(f"the drafter's fields are {recipe.drafter_fields}: {error}") from error
    config.target_fingerprint = embedding_fingerprint(target)
    drafter, weights = XPressDrafterModel(config), source.state_dict()
    lacking = {name for name in drafter.state_dict() if name not in weights}
    refiner = {name for name in lacking if name.startswith(("xpress_head.", "markov_head."))}
    others = {
        name for name, tensor in weights.items() if drafter.state_dict().get(name, tensor[:0]).shape != tensor.shape
    }
    if lacking - refiner or others:
        raise ValueError(
            f"the recipe's fields {recipe.drafter_fields} do not fit the weights of {recipe.drafter}: "
            f"{sorted(lacking - refiner | others)}. Expected the fields of that drafter; leave them out."
        )
    drafter.load_state_dict(weights, strict=False)
    return drafter


def continued_config(recipe: Recipe, config: XPressDrafterConfig) -> XPressDrafterConfig:
    """The config of a drafter that goes on from one of this config."""
    return XPressDrafterConfig.from_dict(config.to_dict() | recipe.drafter_fields)


def mask_token_id(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the recipe's mask token, or the tokenizer's own."""
    token = tokenizer.mask_token if recipe.mask_token is None else recipe.mask_token
    if isinstance(token, int):
        return token
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"`mask_token` is {token!r}, which {recipe.target}'s tokenizer does not have: name a token of its vocabulary "
            "that text never holds, or an id between the vocabulary and the end of the embedding."
        )
    return tokenizer.convert_tokens_to_ids(token)


def check_shape(target: PreTrainedModel, shape: dict) -> None:
    """Raises if the target is not of the shape that the recipe counts with."""
    config = target.config.get_text_config(decoder=True).to_dict()
    different = differences(shape, {key: config.get(key) for key in shape})
    if different:
        raise ValueError(
            f"the target is not of the recipe's `target_config`: {'; '.join(different)}. For another target set "
            "`target_config={}` and the drafter's fields."
        )


def _note(recipe: Recipe, out: Path, resumed: bool) -> None:
    """Writes down what the run is made of, as a recipe; a resumed one says what it was not begun with."""
    path, values = out / NOTE, recipe.values()
    if resumed and path.exists():
        before = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        for key in sorted(key for key in {*before, *values} if before.get(key) != values.get(key)):
            logger.warning(
                f"This run goes on with `{key}` = {values.get(key)!r}; it was begun with {before.get(key)!r}."
            )
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
