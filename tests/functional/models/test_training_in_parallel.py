"""Multi-token prediction over two tensor-parallel ranks trains and drafts as on one; recompute over
two ranks gives the gradients that each has without it."""

import pytest
import torch
from core_training import data_parallel, ignore_warnings_of_core, mean_loss_step, set_up_groups
from drafted import noted
from megatron.core import parallel_state
from rank_processes import run_micro_batches, train_on_ranks
from reference import greedy, tiny_engine
from small_models import small_config
from split_models import assert_all_close, assert_close, load, micro_batches

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models import hybrid_model
from megatron_hybrid.models.hybrid_model import build_hybrid_model

pytestmark = [pytest.mark.matrix, ignore_warnings_of_core]

RANKS, LENGTH, MICRO_BATCHES, STEPS = 2, 23, 3, 3
LAYOUTS = {
    "one": {},
    "tensor": {"tensor_model_parallel_size": RANKS},
    "sequence": {"tensor_model_parallel_size": RANKS, "sequence_parallel": True},
    "stages": {"pipeline_model_parallel_size": RANKS},
    "experts": {"expert_model_parallel_size": RANKS},
}


def train(folder, layout):
    """Losses of the model and of the parts in each micro batch, and the weights at the end."""
    sizes = LAYOUTS[layout]
    set_up_groups(sizes)
    own = load(folder / "weights", mtp_loss_scaling_factor=0.5, **sizes)
    hybrid_model.LOSS_BYTES = 4 * 61 * (5 if sizes else LENGTH)  # ranks: by some rows at a time
    model = data_parallel(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []

    def forward_step(rows, model):
        row = next(rows)
        output = model(row[:, :-1], labels=row[:, 1:].contiguous())
        losses.append(own.mtp.losses)

        def mean_of(output):
            losses.append(output.mean().detach()[None])
            return output.mean(), {}

        return output, mean_of

    for _ in range(STEPS):
        model.zero_grad_buffer()
        generator = torch.Generator().manual_seed(7)
        rows = torch.randint(0, 61, (MICRO_BATCHES, 1, LENGTH + 1), generator=generator)
        run_micro_batches(forward_step, model, list(rows), LENGTH)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
    return torch.cat(losses), full_state_dict(own)


def draft(folder, layout):
    """Answers with drafts, and the drafts with the tokens before them."""
    sizes = LAYOUTS[layout]
    set_up_groups(sizes)
    model = load(folder / "weights", **sizes)
    engine = tiny_engine(model.eval(), speculation="mtp", verify_ranks=True)
    told = noted(engine)
    prompts = [list(range(20)), [*range(12), 3, 1]]
    results = [r for _ in range(2) for r in engine.generate(prompts, greedy(12))]
    return [(r.token_ids, r.prefix.skipped_tokens) for r in results], told


def run(folder, function, layouts):
    return {layout: function(folder, layout) for layout in layouts}


def by_layout(function, pattern, tmp_path):
    """What ranks compute from the same weights, by layout."""
    torch.manual_seed(4)
    save_checkpoint(build_hybrid_model(small_config(pattern)), tmp_path / "weights")
    results = {}
    for num_ranks, layouts in ((1, ["one"]), (RANKS, ["tensor", "sequence"])):
        folder = tmp_path / str(num_ranks)
        results |= train_on_ranks(run, num_ranks, folder, tmp_path, function, layouts)[0]
    return results


def test_two_ranks_draft_as_one(tmp_path):
    results = by_layout(draft, "M*-G/*-", tmp_path)
    assert results["tensor"] == results["sequence"] == results["one"]
    assert sum(len(drafts) for _, drafts in results["one"][1]) > 40


def test_two_ranks_train_as_one(tmp_path):
    results = by_layout(train, "M*-G/*M/*M", tmp_path)
    expected_losses, expected = results["one"]
    per_step = expected_losses.view(STEPS, -1).mean(1)
    assert per_step[-1] < per_step[0] - 0.05
    assert any(name.startswith("mtp.layers.1.mtp_model_layer.layers.1.") for name in expected)
    for layout in ("tensor", "sequence"):
        losses, state = results[layout]
        assert_close(losses, expected_losses, layout)
        assert_all_close(state, expected)


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
    seed = 5 + parallel_state.get_expert_model_parallel_rank()
    torch.manual_seed(seed)
    run_micro_batches(mean_loss_step, model, micro_batches(seed, MICRO_BATCHES, LENGTH), LENGTH)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    counts = {name: b for name, b in model.named_buffers() if name.endswith("tokens_per_expert")}
    assert all(count.sum() == LENGTH * 2 * MICRO_BATCHES for count in counts.values())
    return {**found, **counts}


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


@pytest.mark.parametrize("layouts", ["sequence stages", "tensor experts"])
def test_gradients_of_each_rank_are_those_without_recompute(tmp_path, layouts):
    for differing in train_on_ranks(compare, RANKS, tmp_path, layouts):
        assert len(differing) == len(layouts.split()) * len(KINDS)
        assert not any(differing.values()), differing
