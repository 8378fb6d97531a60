"""Recompute over two ranks gives the gradients that each rank has without it."""

import pytest
import torch
from core_training import ignore_warnings_of_core, set_up_groups
from matrix import matrix_rows
from megatron.core import parallel_state
from rank_processes import run_micro_batches, train_on_ranks
from small_models import random_tokens, small_config

from megatron_hybrid.models.hybrid_model import build_hybrid_model

pytestmark = ignore_warnings_of_core

RANKS, LENGTH, MICRO_BATCHES = 2, 24, 3
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": RANKS},
    "sequence": {"tensor_model_parallel_size": RANKS, "sequence_parallel": True},
    "stages": {"pipeline_model_parallel_size": RANKS},
    "experts": {"expert_model_parallel_size": RANKS},
}
KINDS = {
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3),
    "parts": dict(
        recompute_granularity="selective",
        recompute_modules=["core_attn", "shared_experts", "gated_delta_net", "layernorm"],
    ),
    "mixers": dict(
        recompute_granularity="selective", recompute_modules=["mamba", "attention", "mlp", "moe"]
    ),
}


def gradients(sizes: dict, recompute: dict) -> dict[str, torch.Tensor]:
    """Of this rank, after some micro batches under core's schedule, with dropout; and its router's
    counts."""
    set_up_groups(sizes)
    config = small_config(
        "M*EG|-+EKW",
        hidden_dropout=0.2,
        attention_dropout=0.2,
        num_moe_experts=4,
        moe_ffn_hidden_size=20,
        moe_shared_expert_intermediate_size=24,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        pipeline_dtype=torch.float32,
        **sizes,
        **recompute,
    )
    torch.manual_seed(3)
    model = build_hybrid_model(config).train()
    torch.manual_seed(5 + parallel_state.get_expert_model_parallel_rank())
    rows = [random_tokens(1, LENGTH + 1) for _ in range(MICRO_BATCHES)]
    run_micro_batches(forward_step, model, rows, LENGTH)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    counts = {name: b for name, b in model.named_buffers() if name.endswith("tokens_per_expert")}
    assert all(count.sum() == LENGTH * 2 * MICRO_BATCHES for count in counts.values())
    return {**found, **counts}


def forward_step(rows, model):
    row = next(rows)
    output = model(row[:, :-1], labels=row[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), {})


def compare(layouts: str) -> dict[str, list[str]]:
    """{layout and kind: names of the tensors that differ}."""
    differing = {}
    for layout, sizes in ((layout, LAYOUTS[layout]) for layout in layouts.split()):
        expected = gradients(sizes, {})
        for kind, fields in KINDS.items():
            found = gradients(sizes, fields)
            assert found.keys() == expected.keys() and len(found) > 20
            differing[f"{layout} {kind}"] = [
                name for name in found if not torch.equal(found[name], expected[name])
            ]
    return differing


@pytest.mark.parametrize(
    "layouts",
    matrix_rows(["sequence stages", "tensor experts"]),  # test_recompute.py: on one rank
)
def test_gradients_of_each_rank_are_those_without_recompute(tmp_path, layouts):
    for differing in train_on_ranks(compare, RANKS, tmp_path, layouts):
        assert len(differing) == len(layouts.split()) * len(KINDS)
        assert not any(differing.values()), differing
