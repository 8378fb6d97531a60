"""Recipes make the shipped and published models, to the parameter; cut down, with their kinds of
layers and options, they train."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from index_folders import write_documents
from matrix import matrix_rows
from megatron.core import parallel_state
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_hybrid import build_hybrid_model
from megatron_hybrid.checkpoints.checkpoint import read_config
from megatron_hybrid.checkpoints.folder import config_of
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.optimizer import build_schedule
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reports import LOG, read_log
from megatron_hybrid.training.trainer import Trainer, training_device

WIDTHS = {
    "hidden_size": 64,
    "vocab_size": 128,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba1_inner_size": 128,
    "mamba1_dt_rank": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""Fields of HybridConfig, and what they are cut to."""

SHARES = {
    "num_query_groups": "num_attention_heads",
    "mamba_num_groups": "mamba_num_heads",
    "linear_num_key_heads": "linear_num_value_heads",
}
"""Fields that stay the same part of another one, if not less than 1."""


def cut_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a small model with the options of a large one. Its layers are the first ones that
    are of all kinds; what is already small stays."""
    pattern, cut = fields["layer_pattern"], dict(fields)
    cut["layer_pattern"] = next(
        pattern[:end] for end in range(1, len(pattern) + 1) if set(pattern[:end]) == set(pattern)
    )
    for name, width in WIDTHS.items():
        if name in fields:
            cut[name] = min(fields[name], width)
    for name, whole in SHARES.items():
        if name in fields:
            cut[name] = max(1, fields[name] * cut[whole] // fields[whole])
    return cut


PUBLISHED = Path(__file__).parents[2] / "functional/huggingface/hub_configs"
SHAPES = {
    "nemotron_h_8b": ("nemotron_h_8b", 8_100_852_736),
    "qwen3_next_80b_a3b": ("qwen3_next_80b_a3b", 79_674_391_296),
    "jamba_mini": ("jamba_1_5_mini", 51_570_323_328),
}
"""Recipe -> config.json as its makers published it, and the number of its parameters."""
ONE_RANK = {
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.expert_model_parallel_size": 1,
    "model.sequence_parallel": False,
}


def read(name: str, **more: object) -> Recipe:
    """A recipe for one rank."""
    values = {**ONE_RANK, **more}
    return Recipe.load(name, [f"{key}={json.dumps(value)}" for key, value in values.items()])


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("recipe", "published"), SHAPES.items(), ids=SHAPES.keys())
def test_fields_and_the_parameter_count_are_those_of_the_published_config(recipe, published):
    name, parameters = published
    config = read(recipe).model_config(1)
    values = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    assert config.differences(config_of(values, name)) == []
    assert config.params_dtype == torch.bfloat16
    with torch.device("meta"):
        model = build_hybrid_model(config)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert count(model) == count(theirs) == parameters


@pytest.mark.parametrize("recipe", matrix_rows(SHAPES, "qwen3_next_80b_a3b"))
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")
def test_cut_down_it_trains_by_its_own_sections(recipe, tmp_path):
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    text = write_documents(tmp_path / "text", [[*range(300, 340), tokenizer.eod]] * 40, tokenizer)
    decay = {"optimizer.decay_steps": 1} if read(recipe).optimizer.decay_steps else {}
    chosen = read(
        recipe,
        **decay,
        **{
            "tokenizer": "demo",
            "data.blend": [text],
            "data.split": "3,1",
            "data.sequence_length": 64,
            "run.steps": 3,
            "run.global_batch_size": 2,
            "run.eval_every_steps": 3,
            "run.eval_batches": 1,
            "optimizer.learning_rate": 2e-3,
            "optimizer.warmup_steps": 1,
            "reports.every_steps": 1,
        },
    )
    pattern = chosen.model["layer_pattern"]
    chosen.model = {**cut_fields(chosen.model), "vocab_size": tokenizer.vocab_size}
    parallel_state.destroy_model_parallel()
    with training_device() as device:
        trainer = Trainer(chosen, tmp_path / "run", device)
        assert set(trainer.model.config.layer_pattern) == set(pattern)
        assert count(trainer.model) < 10**6
        trainer.train()
    records = read_log(tmp_path / "run" / LOG)
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[0] > losses[1] > max(losses[2], records[-1]["eval_loss"])
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_0000003"]


@pytest.fixture(scope="module")
def demo():
    return Recipe.load("demo")


def test_the_demo_recipe_makes_the_shipped_model(demo):
    shipped = read_config(DEMO_FOLDER)
    config = demo.model_config(shipped.vocab_size)
    assert config.differences(shipped) == []
    assert config.params_dtype == torch.bfloat16
    with torch.device("meta"):
        model = build_hybrid_model(config)
    assert count(model) == 4_836_728


def test_its_sequences_are_long_once_the_learning_rate_falls(demo):
    steps = demo.run.steps
    schedule = build_schedule(torch.optim.SGD([torch.zeros(1)]), demo.optimizer, steps)
    rates = {}
    for step in range(steps):
        schedule.step(1)
        rates[step] = schedule.optimizer.param_groups[0]["lr"]
    assert rates[0] == pytest.approx(4e-3 / 60)
    assert all(rates[step] == 4e-3 for step in range(60, 1885))
    assert rates[1885] < 4e-3 and rates[steps - 1] == 0
    lengths = [demo.data.longest_sequence(step) for step in range(steps)]
    assert lengths == [512] * 1885 + [2048] * 1015
