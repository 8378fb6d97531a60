"""Recipes: read from YAML, overridden, checked, written again; those of the guides are legal, and
every value is, or is refused by name."""

import ast
import dataclasses
import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import yaml
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_hybrid import build_hybrid_model
from megatron_hybrid.models.config.hybrid_config import SAVED_FIELDS, HybridConfig, decode_fields
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.recipe import RECIPES, Recipe
from megatron_hybrid.utils.core_errors import core_refusals

TEXT = """
model: {layer_pattern: M*, hidden_size: 32}
tokenizer: demo
data: {sequence_length: 16, train: [text]}
run: {steps: 7}
optimizer: {learning_rate: 1e-3}
reports:
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


def test_sections_are_read_and_left_out_ones_have_defaults(path):
    recipe = Recipe.load(path)
    assert recipe.model == {"layer_pattern": "M*", "hidden_size": 32}
    assert recipe.run.steps == 7 and recipe.run.seed == 1234
    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.lora is None and recipe.checkpoints.keep == 2


def test_overrides_set_nested_values(path):
    recipe = Recipe.load(
        path,
        [
            "run.steps=9",
            "run.steps=11",  # the last one counts
            "model.num_attention_heads=4",
            "model.layer_pattern=M=*",
            "data.train=[[1, a], [2, b]]",
            "data.cache_path=",
            "reports.every_steps=2",  # of a section that is there and empty
            "checkpoints.asynchronous=false",  # of one that is not there
            "tokenizer=other",
        ],
    )
    assert recipe.run.steps == 11
    assert recipe.model["num_attention_heads"] == 4 and recipe.model["layer_pattern"] == "M=*"
    assert recipe.data.train == [[1, "a"], [2, "b"]] and recipe.data.cache_path is None
    assert recipe.reports.every_steps == 2 and not recipe.checkpoints.asynchronous
    assert recipe.tokenizer == "other"


def test_the_sizes_of_a_model_have_its_part_for_multi_token_prediction_on_request(path):
    heads = ["model.num_attention_heads=4", "model.mamba_num_heads=4", "model.mamba_head_dim=16"]
    recipe = Recipe.load(path, ["model.layer_pattern=M*/*", "model.vocab_size=96", *heads])
    patterns = [recipe.whole_model_config(mtp).layer_pattern for mtp in (True, False)]
    assert patterns == ["M*/*", "M*"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps", "'run.steps' is no override: write section.field=value"),
        ("run.=3", "'run.=3' is no override"),
        ("run.steps=[1", "is no YAML"),
        ("run.stesp=3", "run has no field 'stesp': did you mean steps?"),
        ("runs.steps=3", "the recipe has no field 'runs': did you mean run?"),
        ("run.steps.more=3", "steps has no fields"),
        ("model=", "model is None; it must be a section"),
        ("model.hiden_size=3", "model has no field 'hiden_size': did you mean hidden_size?"),
        ("tokenizer=3", "tokenizer is 3; it must be a folder"),
        ("run=[1]", "run is [1]; it must be a section with fields"),
        ("run={7: 1}", "run has no field 7: its fields are steps"),
        ("run.overlap_gradients=3", "overlap_gradients is 3; it must be"),
        ("optimizer.learning_rate=fast", "learning_rate is 'fast'; it must be a number"),
        ("lora.rank=4", "set model.pretrained"),
        ("optimizer.warmup_steps=7", "run.steps=7 is too few for optimizer.warmup_steps=7. Lower"),
    ],
)
def test_a_wrong_override_is_refused(path, override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.load(path, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "has no sections"),
        ("model: {", "is no YAML"),
        ("data: {}", "the recipe has no section 'model'"),
        ("model: {}\ntokenizer: demo\ndata:", "data needs the field 'sequence_length'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(path, text, message):
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.load(path)


def test_a_missing_file_is_told_with_the_names_of_the_package(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read as a recipe .*jamba_mini, "):
        Recipe.load(tmp_path / "missing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read as a recipe"):
        Recipe.load(tmp_path / "bytes")


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_the_recipes_of_the_package_go_by_their_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()  # such as a run's folder
    recipe = Recipe.load(name, ["run.seed=5"])
    assert recipe.run.seed == 5
    assert recipe.model_config(65536).layer_pattern == recipe.model["layer_pattern"]


def test_a_written_recipe_is_read_as_the_same(path, tmp_path):
    overrides = ["model.pretrained=w", "lora.rank=4", "data.sequence_length_warmup=[[3, 8]]"]
    recipe = Recipe.load(path, overrides)
    written = tmp_path / "written.yaml"
    written.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False))
    assert Recipe.load(written) == recipe
    assert Recipe.of(recipe.to_dict()) == recipe


GUIDES = Path(__file__).parents[3] / "docs/guides"
TRAINING = (GUIDES / "training.md").read_text(encoding="utf-8")
DATA = (GUIDES / "training_data.md").read_text(encoding="utf-8")


def test_the_recipes_of_guides_are_legal():
    recipes = re.findall(r"```yaml\n(.*?)```", TRAINING + DATA, re.DOTALL)
    recipes = [yaml.safe_load(text) for text in recipes]
    whole = [Recipe.of(recipe) for recipe in recipes if "model" in recipe]
    parts = [DataFields.of("data", recipe["data"]) for recipe in recipes if "model" not in recipe]
    assert (len(whole), len(parts)) == (2, 1)
    with torch.device("meta"):
        build_hybrid_model(whole[0].model_config(3072))


def test_the_recipe_of_the_script_in_a_guide_is_legal():
    name, overrides = re.search(r"Recipe\.load\((.+?), (\[.+?\])\)", TRAINING).groups()
    assert Recipe.load(ast.literal_eval(name), ast.literal_eval(overrides)).run.steps == 50


VALUES = [math.nan, math.inf, -1, 1e20, 10**20, "1e20", "abc", [], {}, None]
MODEL = {
    "layer_pattern": "MG*+W-E",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "sliding_window": 8,
    "num_moe_experts": 4,
    "vocab_size": 64,
}
HINTS = get_type_hints(Recipe)
del HINTS["model"], HINTS["tokenizer"]
NEEDED = {
    "model": MODEL,
    "data": {"sequence_length": 16, "train": ["text"]},
    "grpo": {"reward": "module:function"},
}
OTHERS = {"tokenizer": "demo", "data": NEEDED["data"]}
SECTIONS = {
    "model": HybridConfig,
    **{name: get_args(hint)[0] if get_args(hint) else hint for name, hint in HINTS.items()},
}
NEGATIVE = {
    *("glu_linear_offset", "moe_router_force_biased", "residual_multiplier", "stream_multiplier"),
    *(
        "kda_decay_bound",
        "value_multiplier",
        "embedding_multiplier",
        "logits_multiplier",
        "mlp_gate_multiplier",
        "mlp_output_multiplier",
    ),
    *(f"{part}_{way}_multiplier" for part in ("attention", "mamba") for way in ("input", "output")),
    *(field.name for field in dataclasses.fields(HybridConfig) if field.name not in SAVED_FIELDS),
}
"""Fields of numbers that may be below 0. Of those of core alone, `ranges` have some."""


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_every_value_of_every_field_is_legal_or_refused_by_name(section):
    kind = SECTIONS[section]
    needed = NEEDED.get(section, {})
    wrong = []
    for name in (field.name for field in dataclasses.fields(kind)):
        for value in VALUES:
            values = {**needed, name: value}
            try:
                kind(**decode_fields(values)) if kind is HybridConfig else kind.of(section, values)
            except ValueError as error:
                if name not in str(error) and not str(error).startswith("megatron-core refuses"):
                    wrong.append(f"{name}={value!r}: {error}")
            else:
                if isinstance(value, int | float) and not (value == -1 and name in NEGATIVE):
                    wrong.append(f"{name}={value!r} is taken")
    assert wrong == []


def test_numbers_of_a_model_may_be_written_as_yaml_reads_text():
    recipe = Recipe.of({"model": {**MODEL, "rotary_base": "1e5"}, **OTHERS})
    assert recipe.model_config(64).rotary_base == 1e5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"pretrained": 3}, "model.pretrained is 3; it must be a folder"),
        ({"layer_overrides": {"W": 3}}, "layer_overrides['W'] is 3; it must be a mapping"),
        ({"moe_aux_loss_coeff": [0.1, "x"]}, "moe_aux_loss_coeff[1] is 'x'; it must be a number"),
        ({"hidden_size": 0.5}, "hidden_size is 0.5; it must be a whole number"),
        ({"init_method_std": math.inf}, "init_method_std is inf; it must be a finite number, of"),
    ],
)
def test_a_refused_value_comes_with_what_is_legal(model, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.of({"model": {**MODEL, **model}, **OTHERS}).model_config(64)


def test_an_assertion_of_core_is_told_as_what_it_means():
    with pytest.raises(
        ValueError,
        match=r"^megatron-core refuses inference_fuse_tp_communication"
        r"=True: .* only supported for .* \(transformer_config.py:\d+\)$",
    ):
        HybridConfig(**MODEL, inference_fuse_tp_communication=True)
    schedule = (None, 0.0, 1.0, 2.0, 1, 9, "linear", 0.0, 0.0, 9, "constant")
    needed = r"refuses this run: it needs `max_lr >= min_lr` \("
    with pytest.raises(ValueError, match=needed), core_refusals("this run"):
        OptimizerParamScheduler(*schedule)
    with pytest.raises(AssertionError, match="ours"), core_refusals("this run"):
        raise AssertionError("ours")
