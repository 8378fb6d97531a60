"""The recipes in published shapes: as published, to the parameter; cut down, they train."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from cut_models import cut_fields
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_hybrid import HybridConfig, build_hybrid_model, training
from megatron_hybrid.checkpoints.checkpoint import config_of

RECIPES = Path(training.__file__).parent / "recipes"
PUBLISHED = Path(__file__).parents[2] / "functional/huggingface/hub_configs"
SHAPES = {
    "nemotron_h_8b": ("nemotron_h_8b", 8_100_852_736),
    "qwen3_next_80b_a3b": ("qwen3_next_80b_a3b", 79_674_391_296),
    "jamba_mini": ("jamba_1_5_mini", 51_570_323_328),
}
"""Recipe -> config.json as its makers published it, and the number of its parameters."""

each_shape = pytest.mark.parametrize(("recipe", "published"), SHAPES.items(), ids=SHAPES.keys())


def read(recipe: str) -> dict:
    return yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))["model"]


def published_values(name: str) -> dict:
    return json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@each_shape
def test_fields_are_those_of_the_published_config(recipe, published):
    config = HybridConfig.from_dict(read(recipe))
    assert config.differences(config_of(published_values(published[0]), published[0])) == []
    assert config.params_dtype == torch.bfloat16


@each_shape
def test_builds_on_the_meta_device_with_the_published_parameter_count(recipe, published):
    name, parameters = published
    with torch.device("meta"):
        model = build_hybrid_model(HybridConfig.from_dict(read(recipe)))
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**published_values(name)))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert count(model) == count(theirs) == parameters


@each_shape
def test_cut_down_it_trains(recipe, published):
    fields = read(recipe)
    config = HybridConfig.from_dict(cut_fields(fields))
    assert set(config.layer_pattern) == set(fields["layer_pattern"])
    model = build_hybrid_model(config).train()
    assert count(model) < 10**6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randint(0, config.vocab_size, (2, 65))
    losses = []
    for _ in range(3):
        loss = model(rows[:, :-1], labels=rows[:, 1:].contiguous()).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
