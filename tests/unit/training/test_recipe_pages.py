"""The recipes that the guides of training show are legal."""

import ast
import re
from pathlib import Path

import torch
import yaml

from megatron_hybrid import build_hybrid_model
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.recipe import Recipe

GUIDES = Path(__file__).parents[3] / "docs/guides"
TRAINING = (GUIDES / "training.md").read_text(encoding="utf-8")
DATA = (GUIDES / "training_data.md").read_text(encoding="utf-8")


def test_their_recipes_are_legal():
    recipes = re.findall(r"```yaml\n(.*?)```", TRAINING + DATA, re.DOTALL)
    recipes = [yaml.safe_load(text) for text in recipes]
    whole = [Recipe.of(recipe) for recipe in recipes if "model" in recipe]
    parts = [DataFields.of("data", recipe["data"]) for recipe in recipes if "model" not in recipe]
    assert (len(whole), len(parts)) == (2, 1)
    with torch.device("meta"):
        build_hybrid_model(whole[0].model_config(3072))


def test_the_recipe_of_their_script_is_legal():
    name, overrides = re.search(r"Recipe\.load\((.+?), (\[.+?\])\)", TRAINING).groups()
    assert Recipe.load(ast.literal_eval(name), ast.literal_eval(overrides)).run.steps == 50
