"""Recipes: all settings that the result of a training run depends on, in a YAML file."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml

from megatron_hybrid.models.config.hybrid_config import HybridConfig, decode_fields
from megatron_hybrid.models.layer_pattern import split_predictions
from megatron_hybrid.models.sharding.parallel_setup import PARALLEL_SIZES
from megatron_hybrid.training.checkpoints import CheckpointFields
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.dpo import DpoFields
from megatron_hybrid.training.fields import Fields, as_number, check_known
from megatron_hybrid.training.grpo import GrpoFields
from megatron_hybrid.training.lora import LoraFields
from megatron_hybrid.training.optimizer import OptimizerFields
from megatron_hybrid.training.reports import ReportFields
from megatron_hybrid.utils.validation import Range

RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes in the package, which are known by their names."""


@dataclass
class RunFields(Fields):
    """Fields of the run: its length, its batches and its evaluations."""

    steps: Annotated[int, Range(ge=1)] = 1000
    """Optimizer steps; the schedules of rates end with the last one."""

    stop_at_step: Annotated[int, Range(ge=1)] | None = None
    """Step at which the run is saved and ends, as if it were stopped. The default is the last."""

    micro_batch_size: Annotated[int, Range(ge=1)] = 1
    """Rows in a forward pass of a rank."""

    global_batch_size: Annotated[int, Range(ge=1)] = 1
    """Rows in an optimizer step, over all ranks. A rank computes its rows micro-batch by
    micro-batch, and adds up their gradients."""

    seed: int = 1234
    """Seed of the initial weights and of dropout; `data.seed` is that of the order of the data."""

    eval_every_steps: int = 0
    """Steps between two evaluations; 0 means no evaluations."""

    eval_batches: Annotated[int, Range(ge=1)] = 10
    """Global batches of validation data in an evaluation; every evaluation takes the same
    batches."""

    max_skipped_steps: int = 10
    """Most steps in a row that are skipped because their gradient is not finite; the next such step
    ends the run."""

    overlap_gradients: bool = False
    """Reduce gradients over data-parallel ranks during the backward pass."""


@dataclass
class Recipe:
    """A training run. Each section is a dataclass, which documents its fields."""

    model: dict[str, Any]
    """Fields of HybridConfig, with values as in config.json; `vocab_size` defaults to the
    tokenizer's. With `pretrained`, a folder for `load_pretrained`, the fields replace those of the
    model in the folder."""
    tokenizer: str
    """A folder with a tokenizer, or "demo"."""
    data: DataFields
    """The datasets, and the rows that are made from them."""
    run: RunFields = field(default_factory=RunFields)
    """The length of the run, its batches and its evaluations."""
    optimizer: OptimizerFields = field(default_factory=OptimizerFields)
    """The optimizer, its rates and their schedules."""
    lora: LoraFields | None = None
    """Adapters of `model.pretrained`, which alone are trained; `{}` takes all defaults. Without
    this section all parameters are trained."""
    dpo: DpoFields | None = None
    """The loss of preferences; `{}` takes all defaults. The default loss is cross entropy."""
    grpo: GrpoFields | None = None
    """Reinforcement learning on prompts."""
    checkpoints: CheckpointFields = field(default_factory=CheckpointFields)
    """When the run saves checkpoints, and how many it keeps."""
    reports: ReportFields = field(default_factory=ReportFields)
    """Content and intervals of the log."""

    @staticmethod
    def path_of(source: str | Path) -> Path:
        """Return the file of a recipe: of a path, or of the name of a recipe in the package."""
        shipped = RECIPES / f"{source}.yaml"
        return shipped if shipped.is_file() and not Path(source).is_file() else Path(source)

    @classmethod
    def load(cls, source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a recipe.

        Args:
            source: a YAML file, or the name of a recipe in the package.
            overrides: fields with values in YAML, such as `run.steps=100`.

        Raises:
            ValueError: there is no such recipe, it is not YAML, or a key or value is illegal.
        """
        path = cls.path_of(source)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
            raise ValueError(
                f"{source} cannot be read as a recipe ({error}). Name a YAML file, or a recipe of "
                f"the package: {names}."
            ) from error
        values = _parse(text, str(path))
        if not isinstance(values, dict):
            raise ValueError(f"{path} has no sections: a recipe is a mapping.")
        return cls.of(values, overrides)

    @classmethod
    def of(cls, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
        """Make a recipe from nested mappings, with the `overrides` of `load`.

        Raises:
            ValueError: a key or value is illegal.
        """
        values = copy.deepcopy(dict(values))
        for override in overrides:
            _override(values, override)
        check_known("the recipe", values, (one.name for one in dataclasses.fields(cls)))
        for name in ("model", "tokenizer", "data"):
            if name not in values:
                raise ValueError(f"the recipe has no section {name!r}, which every run needs.")
        model, tokenizer = values["model"], values["tokenizer"]
        if not isinstance(model, Mapping):
            raise ValueError(f"model is {model!r}; it must be a section with fields.")
        check_known("model", model, ["pretrained", *_MODEL_FIELDS])
        model = {name: as_number(value, _MODEL_FIELDS.get(name)) for name, value in model.items()}
        if not isinstance(model.get("pretrained", ""), str):
            raise ValueError(f"model.pretrained is {model['pretrained']!r}; it must be a folder.")
        if not isinstance(tokenizer, str):
            raise ValueError(f"tokenizer is {tokenizer!r}; it must be a folder, or 'demo'.")
        if values.get("lora") is not None and "pretrained" not in model:
            raise ValueError("lora trains adapters of a trained model: set model.pretrained.")
        optional = {"lora": LoraFields, "dpo": DpoFields, "grpo": GrpoFields}
        chosen = {name: kind for name, kind in optional.items() if values.get(name) is not None}
        recipe = cls(
            model,
            tokenizer,
            DataFields.of("data", values["data"]),
            RunFields.of("run", values.get("run")),
            OptimizerFields.of("optimizer", values.get("optimizer")),
            checkpoints=CheckpointFields.of("checkpoints", values.get("checkpoints")),
            reports=ReportFields.of("reports", values.get("reports")),
            **{name: kind.of(name, values[name]) for name, kind in chosen.items()},
        )
        for name, kind in (("dpo", "preferences"), ("grpo", "prompts")):
            if getattr(recipe, name) is not None and recipe.data.kind != kind:
                raise ValueError(
                    f"{name} trains on {kind}, and data.kind is {recipe.data.kind!r}: set it to "
                    f"{kind}, or leave {name} out."
                )
        if recipe.grpo is not None and recipe.run.eval_every_steps:
            raise ValueError(
                "run.eval_every_steps has no meaning with grpo, whose log has rewards."
            )
        recipe.optimizer.check_steps(recipe.run.steps)
        return recipe

    @property
    def splits_model(self) -> bool:
        """Whether the model is split over ranks."""
        return any(self.model.get(name) not in (None, 1, False) for name in _LAYOUT_FIELDS)

    def model_config(
        self, vocab_size: int, is_on_one_rank: bool = False, **fields: Any
    ) -> HybridConfig:
        """Return the config of a model that begins untrained.

        Args:
            vocab_size: that of the tokenizer, if the recipe has none.
            is_on_one_rank: leave out the layout.
            fields: those of HybridConfig, in addition to the recipe's.

        Raises:
            ValueError: no model can have these fields.
        """
        left_out = _LAYOUT_FIELDS if is_on_one_rank else ()
        model = {name: value for name, value in self.model.items() if name not in left_out}
        return HybridConfig(**decode_fields({"vocab_size": vocab_size, **model}), **fields)

    def whole_model_config(self, mtp: bool = True) -> HybridConfig:
        """Return the model's config on one device, for its sizes.

        mtp: include its MTP heads.

        Raises:
            ValueError: the model has no vocab_size, or is a pretrained one.
        """
        if "vocab_size" not in self.model or "pretrained" in self.model:
            raise ValueError(
                "the recipe leaves the model's size to its tokenizer or its pretrained model: set "
                "model.vocab_size, or take that model's folder."
            )
        fields = {name: value for name, value in self.model.items() if name not in _LAYOUT_FIELDS}
        if not mtp and "layer_pattern" in fields:
            fields["layer_pattern"] = split_predictions(fields["layer_pattern"])[0]
        return HybridConfig(**decode_fields(fields), perform_initialization=False)

    def to_dict(self) -> dict[str, Any]:
        """Return nested mappings for `of`, with all defaults."""
        return dataclasses.asdict(self)


_LAYOUT_FIELDS = (*PARALLEL_SIZES, "sequence_parallel")
_MODEL_FIELDS = get_type_hints(HybridConfig)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is no YAML: {error}") from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, name = key.split(".")
    if not equals or not name:
        raise ValueError(f"{override!r} is no override: write section.field=value.")
    for section in sections:
        if values.get(section) is None:  # an empty section of YAML, too
            values[section] = {}
        if not isinstance(values[section], dict):
            raise ValueError(f"{override!r}: {section} has no fields.")
        values = values[section]
    values[name] = _parse(text, override)
