"""Recipes: all that a training run is made of, in one YAML, and the run itself.

A recipe is flat: the fields of `Recipe`, those of the drafter's config, and every field of `XPressTrainingArguments`
stand side by side, and each can be overridden (`xpress train RECIPE key=value`). An unknown key raises a `ValueError`
with the nearest valid one. What a recipe leaves out has the default of its class.
"""

import re
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..generation import XPressDrafterModel
from ..modeling_xpress import XPressDrafterConfig, embedding_fingerprint
from .answers import load_tokenizer
from .checkpoints import last_whole_checkpoint
from .optimizer import MuonAdamW
from .row_folder import load_rows, sha256, weights_fingerprint
from .xpress_trainer import XPressTrainer, XPressTrainingArguments


logger = logging.get_logger(__name__)

PACKAGE = Path(__file__).parents[1]
FOLDER = PACKAGE / "trainer" / "recipes"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))
NOTE = "recipe.yaml"  # what a run was made of, in its output folder

DRAFTER_FIELDS = (
    "num_hidden_layers",
    "intermediate_size",
    "target_layer_ids",
    "block_size",
    "xpress_rank",
    "xpress_mlp_hidden",
    "xpress_num_passes",
    "xpress_topc",
    "markov_rank",
)


@dataclass
class Recipe:
    """
    A training run.

    Args:
        target (`str`), target_revision (`str`), target_dtype (`str`): The frozen target; an adapter is merged first.
        target_config (`dict`): Its shape, for a dry run that reads nothing; a target of another shape is refused.
        data, eval_data (`str`): Folders that `xpress data` made.
        expected_rows, expected_tokens (`int`): Of `data`, for a dry run before it is made.
        drafter (`str`): Hub id or folder of the drafter to go on from; a fresh one where omitted.
        mask_token (`str` or `int`): Token or id of a fresh drafter's empty slots; the tokenizer's where omitted.
        optimizer (`str`): `"adamw"`, by `optim`, or `"muon"` for the matrices with AdamW at `learning_rate` for the rest.
        muon_learning_rate (`float`): Of the matrices.
        lora_rank, lora_alpha (`int`): Trains an adapter of that rank on the backbone, and the refiner in full.
        drafter_fields, training (`dict`): Collected: fields of the drafter's config, and of `XPressTrainingArguments`.
    """

    target: str
    data: str
    target_revision: str | None = None
    target_dtype: str = "bfloat16"
    target_config: dict = field(default_factory=dict)
    eval_data: str | None = None
    expected_rows: int | None = None
    expected_tokens: int | None = None
    drafter: str | None = None
    mask_token: str | int | None = None
    optimizer: str = "adamw"
    muon_learning_rate: float = 0.02
    lora_rank: int | None = None
    lora_alpha: int = 64
    drafter_fields: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, value, expected in (
            ("optimizer", self.optimizer, ("adamw", "muon")),
            ("target_dtype", self.target_dtype, ("float32", "bfloat16", "float16")),
        ):
            if value not in expected:
                raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(expected)}.")
        if self.lora_rank is not None and self.drafter is None:
            raise ValueError(
                f"`lora_rank` is {self.lora_rank} without a `drafter` to adapt: name one, or leave it out."
            )
        if self.lora_rank is not None and self.optimizer == "muon":
            raise ValueError(
                f"`lora_rank` is {self.lora_rank} and `optimizer` 'muon', expected 'adamw' with an adapter."
            )
        if "output_dir" not in self.training:
            raise ValueError("the recipe has no `output_dir`, expected the folder for checkpoints and drafter.")
        self._refuse_ignored()

    def _refuse_ignored(self) -> None:
        """Raises for a value that nothing would read."""
        values = self.values()
        for name, ignored, beside in (
            ("mask_token", self.drafter is not None, "a `drafter`, which has its own"),
            ("muon_learning_rate", self.optimizer != "muon", f"`optimizer` {self.optimizer!r}"),
            ("optim", self.optimizer == "muon", "`optimizer` 'muon'"),
            ("lora_alpha", self.lora_rank is None, "no `lora_rank`"),
            ("freeze_backbone", self.lora_rank is not None and self.setting("freeze_backbone"), "`lora_rank`"),
        ):
            if ignored and values.get(name) is not None:
                raise ValueError(
                    f"`{name}` is {values[name]!r} beside {beside}: nothing would read it, expected it left out."
                )

    def values(self) -> dict[str, Any]:
        """The recipe as a YAML would say it."""
        own = {name: getattr(self, name) for name, each in OWN_FIELDS.items() if getattr(self, name) != each.default}
        return {name: value for name, value in own.items() if value != {}} | self.drafter_fields | self.training

    def setting(self, name: str) -> Any:
        """A field of `XPressTrainingArguments`: the recipe's value, or the class's default."""
        return self.training.get(name, TRAINING_FIELDS[name].default)


TRAINING_FIELDS = {each.name: each for each in fields(XPressTrainingArguments) if each.init}
OWN_FIELDS = {each.name: each for each in fields(Recipe) if each.name not in ("drafter_fields", "training")}
KEYS = (*OWN_FIELDS, *DRAFTER_FIELDS, *TRAINING_FIELDS)


class _Loader(yaml.SafeLoader):
    """As YAML 1.2, `6e-4` is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_recipe(name: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """
    A shipped recipe's name or the path of a YAML file, with other values for some of its keys. A target that ships with
    the package is found from any working directory.
    """
    shipped = name in SHIPPED
    path = FOLDER / f"{name}.yaml" if shipped else Path(name)
    if not path.is_file():
        raise ValueError(f"{name!r} is no recipe, expected one of {', '.join(SHIPPED)}, or the path of a YAML file.")
    values = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected `key: value` lines.")
    if shipped and (PACKAGE / values["target"]).is_dir():
        values["target"] = str(PACKAGE / values["target"])
    values |= overrides or {}
    for key, value in values.items():
        _check_value(key, value)
    missing = [key for key, each in OWN_FIELDS.items() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [key for key in missing if values.get(key) is None]:
        raise ValueError(f"{path} has no {', '.join(f'`{key}`' for key in missing)}, which has no default: name it.")
    return Recipe(
        **{key: values[key] for key in values if key in OWN_FIELDS},
        drafter_fields={key: values[key] for key in values if key in DRAFTER_FIELDS},
        training={key: values[key] for key in values if key in TRAINING_FIELDS},
    )


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`key=value` of a command line; values are read as in the YAML."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is no override, expected KEY=VALUE, as in learning_rate=1e-3.")
        overrides[key] = _parse(value, pair)
    return overrides


def _parse(text: str, name: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML, expected `key: value` lines: {error}") from error


def _check_value(key: str, value: Any) -> None:
    """Raises for a key that nothing reads, and for a plain value of another kind than the field's."""
    if key not in KEYS:
        nearest = get_close_matches(str(key), KEYS, n=1, cutoff=0.0)[0]
        raise ValueError(f"{key!r} is no field of a recipe; the nearest is {nearest!r}. Correct or remove it.")
    if key in DRAFTER_FIELDS:  # its config checks them
        return
    each = {**TRAINING_FIELDS, **OWN_FIELDS}[key]
    if value is None and each.default in (None, MISSING):
        return
    kind = each.type
    fits = {bool: bool, int: int, float: (int, float), str: str}.get(kind)
    if fits is not None and (not isinstance(value, fits) or (kind is not bool and isinstance(value, bool))):
        raise ValueError(f"`{key}` is {value!r}, expected a value of type {kind.__name__}.")


def make_trainer(recipe: Recipe) -> XPressTrainer:
    """Everything loaded and checked, nothing trained yet."""
    args = XPressTrainingArguments(**recipe.training)
    rows, manifest = load_rows(recipe.data)
    held_out = None if recipe.eval_data is None else load_rows(recipe.eval_data)[0]
    set_seed(args.seed)
    tokenizer = load_tokenizer(recipe.target, recipe.target_revision)
    target = AutoModelForCausalLM.from_pretrained(
        recipe.target, revision=recipe.target_revision, dtype=recipe.target_dtype
    )
    check_shape(target, recipe.target_config)
    check_rows_are_of(manifest, recipe, tokenizer, target)
    drafter = make_drafter(recipe, target, tokenizer)
    parts = {"peft_config": lora_config(recipe)}
    if recipe.optimizer == "muon":
        trained = [(name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad]
        optimizer = MuonAdamW(trained, muon_lr=recipe.muon_learning_rate, adamw_lr=args.learning_rate)
        parts["optimizers"] = (optimizer, None)
    return XPressTrainer(drafter, target, args, train_dataset=rows, eval_dataset=held_out, **parts)


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
    args, out = trainer.args, Path(trainer.args.output_dir)
    checkpoint = last_whole_checkpoint(str(out))
    if trainer.is_world_process_zero():
        _note(recipe, out, resumed=checkpoint is not None)
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        ended = state.global_step >= args.max_steps if args.max_steps > 0 else state.epoch >= args.num_train_epochs
        if ended:  # `Trainer` would take one step more
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                checkpoint = str(out / Path(state.best_model_checkpoint).name)  # `out` may have been moved
            trainer._load_from_checkpoint(checkpoint)
            trainer.state = state
            return trainer
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
    weights = trainer.accelerator.get_state_dict(
        trainer.model_wrapped
    )  # of all processes, where they hold a part each
    if trainer.is_world_process_zero():
        whole = XPressDrafterModel(drafter.config)
        whole.load_state_dict(weights)
        whole.bfloat16().save_pretrained(folder)
    return folder


def make_drafter(recipe: Recipe, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> XPressDrafterModel:
    """A fresh drafter, or the one to go on from; a refiner that the recipe names and that one lacks is fresh."""
    try:
        if recipe.drafter is None:
            return XPressDrafterModel.for_target(
                target, mask_token_id=mask_token_id(recipe, tokenizer), **recipe.drafter_fields
            )
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
    different = [
        f"`{key}` is {config.get(key)!r}, there {value!r}" for key, value in shape.items() if config.get(key) != value
    ]
    if different:
        raise ValueError(
            f"the target is not of the recipe's `target_config`: {'; '.join(different)}. For another target set "
            "`target_config={}` and the drafter's fields."
        )


def check_rows_are_of(
    manifest: dict, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel
) -> None:
    """Raises for rows of another tokenizer, warns of rows that another target answered."""
    made = manifest["settings"]
    if made["tokenizer"] != sha256(tokenizer.backend_tokenizer.to_str()):
        raise ValueError(
            f"the rows of {recipe.data} were made with the tokenizer of {manifest['target']}, expected that of "
            f"{recipe.target}: make them with `--target {recipe.target}`."
        )
    answered = made["weights"] is not None and made["dtype"] == recipe.target_dtype
    if answered and made["weights"] != weights_fingerprint(target):
        logger.warning(
            f"The rows of {recipe.data} were answered by {manifest['target']}, which has other weights than {recipe.target}: "
            "the drafter learns to speak for another target than the one that it reads."
        )


def _note(recipe: Recipe, out: Path, resumed: bool) -> None:
    """Writes down what the run is made of, as a recipe; a resumed one says what it was not begun with."""
    path, values = out / NOTE, recipe.values()
    if resumed and path.exists():
        before = _parse(path.read_text(encoding="utf-8"), str(path))
        for key in sorted(key for key in {*before, *values} if before.get(key) != values.get(key)):
            logger.warning(
                f"This run goes on with `{key}` = {values.get(key)!r}; it was begun with {before.get(key)!r}."
            )
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
