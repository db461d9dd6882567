"""Recipes: all that a training run is made of, in one YAML; `recipe_runs` does what they say.

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

from .xpress_trainer import XPressTrainingArguments


PACKAGE = Path(__file__).parents[1]
FOLDER = PACKAGE / "trainer" / "recipes"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))

DRAFTER_FIELDS = (
    "num_hidden_layers",
    "intermediate_size",
    "target_layer_ids",
    "block_size",
    "draft_vocab_size",
    "xpress_rank",
    "xpress_mlp_hidden",
    "xpress_num_passes",
    "xpress_topc",
    "markov_rank",
    "confidence_threshold",
    "rope_parameters",
)


OPTIM = ("optim", "optim_args", "optim_target_modules")  # what `Trainer` makes an optimizer of, besides its settings


@dataclass
class Recipe:
    """
    A training run.

    Args:
        target (`str`), target_revision (`str`), target_dtype (`str`): The frozen target; an adapter is merged first.
        target_config (`dict`): Its shape, for a dry run that reads nothing; a target of another shape is refused.
        data (`str` or `list[str]`), eval_data (`str`): Folders that `xpress data` made.
        expected_rows, expected_tokens (`int`): Of `data`, for a dry run before it is made.
        feature_cache (`str`): Folder, seen by all processes, where the target's states are kept, so that it reads every row
            once; for few rows and many epochs. Where omitted it reads them at every step. One process writes them, those of
            `eval_data` too, while the others wait for its lock on the folder, however long that takes.
        feature_cache_gib (`float`): What all states that lie there may take; training does not begin where they would take
            more.
        drafter (`str`): Hub id or folder of the drafter to go on from; a fresh one where omitted.
        mask_token (`str` or `int`): Token or id of a fresh drafter's empty slots; the tokenizer's where omitted.
        optimizer (`str`): `"adamw"`, by `optim`, or `"muon"` for the matrices with AdamW at `learning_rate` for the rest.
            `weight_decay` is then the matrices' (0.01 where omitted), and `adam_beta2` is 0.95 where omitted.
        muon_learning_rate (`float`): Of the matrices.
        lora_rank, lora_alpha (`int`): Trains an adapter of that rank on the backbone, and the refiner in full.
        drafter_fields, training (`dict`): Collected: fields of the drafter's config, and of `XPressTrainingArguments`.
    """

    target: str
    data: str | list[str]
    target_revision: str | None = None
    target_dtype: str = "bfloat16"
    target_config: dict = field(default_factory=dict)
    eval_data: str | None = None
    expected_rows: int | None = None
    expected_tokens: int | None = None
    feature_cache: str | None = None
    feature_cache_gib: float = 16.0
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
        if not self.folders or not all(isinstance(folder, str) for folder in self.folders):
            raise ValueError(f"`data` is {self.data!r}, expected a folder that `xpress data` made, or a list of such.")
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
        self._refuse_secrets()
        self._refuse_ignored()

    def _refuse_secrets(self) -> None:
        """Raises for what must not lie beside the drafter: `recipe.yaml` does, is uploaded with it and shown on its card."""
        for name, value in self.training.items():
            if name.endswith("_token") and value is not None:
                raise ValueError(
                    f"`{name}` is given, which the run's recipe.yaml would publish, expected no token in a recipe: leave it "
                    "out and log in with `hf auth login`."
                )

    def _refuse_ignored(self) -> None:
        """Raises for a value that nothing would read."""
        values = self.values()
        for name, ignored, beside in (
            ("feature_cache_gib", self.feature_cache is None, "no `feature_cache`"),
            ("xpress_mlp_hidden", self.drafter_fields.get("xpress_rank") is None, "no `xpress_rank`"),
            ("mask_token", self.drafter is not None, "a `drafter`, which has its own"),
            ("muon_learning_rate", self.optimizer != "muon", f"`optimizer` {self.optimizer!r}"),
            *((name, self.optimizer == "muon", "`optimizer` 'muon'") for name in OPTIM),
            ("lora_alpha", self.lora_rank is None, "no `lora_rank`"),
            ("freeze_backbone", self.lora_rank is not None and self.setting("freeze_backbone"), "`lora_rank`"),
        ):
            if ignored and values.get(name) is not None:
                raise ValueError(
                    f"`{name}` is {values[name]!r} beside {beside}: nothing would read it, expected it left out, or null."
                )

    @property
    def folders(self) -> list[str]:
        """Of the training rows."""
        return self.data if isinstance(self.data, list) else [self.data]

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
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
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
        overrides[key] = parse_yaml(value, pair)
    return overrides


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text; a `ValueError` that names its source where it is none."""
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
