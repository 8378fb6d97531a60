"""The recipe of the demo model makes the shipped one, as docs/guides/demo_training.md says."""

import pytest
import torch

from megatron_hybrid import build_hybrid_model
from megatron_hybrid.checkpoints.checkpoint import read_config
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.training.optimizer import build_schedule
from megatron_hybrid.training.recipe import Recipe


@pytest.fixture(scope="module")
def recipe():
    return Recipe.load("demo")


def test_its_model_is_the_shipped_one(recipe):
    shipped = read_config(DEMO_FOLDER)
    config = recipe.model_config(shipped.vocab_size)
    assert config.differences(shipped) == []
    assert config.params_dtype == torch.bfloat16
    with torch.device("meta"):
        model = build_hybrid_model(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_836_728


def test_sequences_are_long_once_the_learning_rate_falls(recipe):
    steps = recipe.run.steps
    schedule = build_schedule(torch.optim.SGD([torch.zeros(1)]), recipe.optimizer, steps)
    rates = {}
    for step in range(steps):
        schedule.step(1)
        rates[step] = schedule.optimizer.param_groups[0]["lr"]
    assert rates[0] == pytest.approx(4e-3 / 60)
    assert all(rates[step] == 4e-3 for step in range(60, 1885))
    assert rates[1885] < 4e-3 and rates[steps - 1] == 0
    lengths = [recipe.data.longest_sequence(step) for step in range(steps)]
    assert lengths == [512] * 1885 + [2048] * 1015
