"""transformers on the same shapes as our engine: a prefill and decode steps of whole models."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.models import CONFIGS, SHAPES
from benchmarks.gpu.serving import named

TOY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Fields in the place of published ones, where a config has them."""
LAYERS = {
    "nemotron_h_8b": {"hybrid_override_pattern": "M-M*", "num_hidden_layers": 4},
    "qwen3_5_4b": {"num_hidden_layers": 4},
}
"""The models that are compared, and few layers of each."""


def run(bench: Bench, name: str) -> Iterator[Row]:
    """One of `LAYERS`."""
    for row in bench.guarded("does not run", _of_model(bench, name)):
        yield named(f"{SHAPES[name].name} by transformers", row)


def _of_model(bench: Bench, name: str) -> Iterator[Row]:
    model = _model(bench, name)
    for batch, length in bench.size(((1, 8192), (8, 1024), (1, 1024)), ((2, 20),)):
        what = f"batch {batch}, context {length:,}"
        yield from bench.guarded(what, _of_batch(bench, model, what, batch, length))
        bench.free()


def _model(bench: Bench, name: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    values = values.get("text_config", values)
    if bench.toy or bench.once:
        values |= LAYERS[name]
        if "layer_types" in values:
            values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    if bench.toy:
        values |= {key: value for key, value in TOY.items() if key in values}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(bench.device):
        options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        return AutoModelForCausalLM.from_config(config, **options).eval()


@torch.inference_mode()
def _of_batch(
    bench: Bench, model: torch.nn.Module, what: str, batch: int, length: int
) -> Iterator[Row]:
    tokens = torch.randint(128, (batch, length), device=bench.device)
    few = bench.toy or bench.once
    found = {}

    def prefill() -> None:
        found["output"] = model(tokens, use_cache=True, logits_to_keep=1)

    def step() -> None:
        cache = found["output"].past_key_values
        model(tokens[:, :1], past_key_values=cache, use_cache=True)

    seconds = statistics.median([bench.wall_seconds(prefill) for _ in range(1 if few else 3)][-2:])
    yield Row(f"prefill, {what}", seconds, note=f"{batch * length / seconds:,.0f} tokens/s")
    times = [bench.wall_seconds(step) for _ in range(2 if few else 10)]
    seconds = statistics.median(times[len(times) // 2 :])
    activity = bench.activity(step)
    yield Row(
        f"decode step, {what}",
        seconds,
        numbers={"busy ms": activity.busy_seconds * 1e3, "launches": activity.launches},
        note=f"{batch / seconds:,.0f} tokens/s",
    )
