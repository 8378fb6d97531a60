"""docs/training.md has every field of a recipe, with its default, and its recipes are sound."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml

from megatron_hybrid import build_hybrid_model
from megatron_hybrid.training.checkpoints import CheckpointFields
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.lora import LoraFields
from megatron_hybrid.training.optimizer import OptimizerFields
from megatron_hybrid.training.recipe import Recipe, RunFields
from megatron_hybrid.training.reports import ReportFields

DOCS = (Path(__file__).parents[3] / "docs/training.md").read_text(encoding="utf-8")
SECTIONS = {
    "data": DataFields,
    "run": RunFields,
    "optimizer": OptimizerFields,
    "lora": LoraFields,
    "checkpoints": CheckpointFields,
    "reports": ReportFields,
}


def documented(section: str) -> dict[str, object]:
    """Field -> default as YAML reads it, of the table under the section's heading."""
    text = re.search(rf"^### {section}$(.*?)^##", DOCS, re.DOTALL | re.MULTILINE)[1]
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]*)`? \|", text, re.MULTILINE)
    return {name: yaml.safe_load(default) for name, default in rows}


@pytest.mark.parametrize(("section", "fields"), SECTIONS.items(), ids=SECTIONS)
def test_tables_have_the_fields_and_their_defaults(section, fields):
    expected = {}
    for field in dataclasses.fields(fields):
        if field.default_factory is not dataclasses.MISSING:
            expected[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            expected[field.name] = field.default
        else:
            expected[field.name] = "needed"
    assert documented(section) == expected


def test_every_section_has_a_heading():
    assert {"model", "tokenizer", *SECTIONS} == {one.name for one in dataclasses.fields(Recipe)}
    for field in dataclasses.fields(Recipe):
        assert f"\n### {field.name}\n" in DOCS


def test_recipes_in_it_are_legal():
    recipes = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)]
    whole = [Recipe.of(recipe) for recipe in recipes if "model" in recipe]
    parts = [DataFields.of("data", recipe["data"]) for recipe in recipes if "model" not in recipe]
    assert (len(whole), len(parts)) == (2, 1)
    with torch.device("meta"):
        build_hybrid_model(whole[0].model_config(3072))


def test_the_recipe_of_its_script_is_legal():
    name, overrides = re.search(r"Recipe\.load\((.+?), (\[.+?\])\)", DOCS).groups()
    assert Recipe.load(ast.literal_eval(name), ast.literal_eval(overrides)).run.steps == 50
