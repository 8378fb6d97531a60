"""megatron-core trains a model with experts in float64 on two ranks as plain torch does on one.

In fp32 rounding alone would choose other experts, from which the losses part.
"""

import pytest
import torch
import torch.distributed as dist
from core_training import (
    adam_of,
    data_parallel,
    ignore_warnings_of_core,
    mean_loss_step,
    set_up_groups,
)
from matrix import asked, matrix_rows
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from rank_processes import run_micro_batches, train_on_ranks
from router_losses import forget_losses, take_losses
from small_models import small_fields
from split_models import load, micro_batches

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model

pytestmark = ignore_warnings_of_core

RANKS, STEPS, MICRO_BATCHES, LENGTH = 2, 4, 4, 24
ADAM = dict(lr=1e-2, weight_decay=0.1, eps=1e-5)
BIAS_RATE = 1e-2
TP, EP = {"tensor_model_parallel_size": RANKS}, {"expert_model_parallel_size": RANKS}
LAYOUTS = {
    "tp": TP,
    "tp_rows": {**TP, "sequence_parallel": True},
    "tp_ep": {**TP, **EP, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
    "ep": EP,
}
CONFIG = small_fields(
    "*EME",
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=20,
    moe_shared_expert_intermediate_size=20,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
RUN = dict(
    moe_router_dtype="fp64",
    moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
    moe_aux_loss_coeff=[0.02, 0.03],
    moe_z_loss_coeff=0.01,
    moe_router_bias_update_rate=BIAS_RATE,
    moe_expert_capacity_factor=1.2,
)


def batches_of(step):
    """Of one training step over all ranks."""
    return micro_batches(step, MICRO_BATCHES, LENGTH)


def train_with_core(folder, sizes):
    """(loss, norm of the gradient, losses of the routers by name and layer) of each step."""
    set_up_groups(sizes)
    forget_losses()
    own = load(folder, **RUN, **sizes).double()
    model = data_parallel(own)
    fields = dict(lr=ADAM["lr"], weight_decay=ADAM["weight_decay"], adam_eps=ADAM["eps"])
    # Without clipping, which core asserts to be of fp32 gradients.
    optimizer = adam_of(model, clip_grad=0.0, **fields)
    group, rows = own.pg_collection.dp, []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = batches_of(step)[group.rank() :: group.size()]
        outputs = run_micro_batches(mean_loss_step, model, batches, LENGTH)
        _, norm, _ = optimizer.step()
        loss = torch.stack([output["loss"] for output in outputs]).mean()
        dist.all_reduce(loss, group=group)
        losses = take_losses(of_all_ranks=True)
        losses = {name: values / len(batches) for name, values in losses.items()}
        rows.append((loss.item() / group.size(), float(norm), losses))
    return rows, {name: b for name, b in own.named_buffers() if name.endswith("expert_bias")}


def run_all(folder, names):
    return {name: train_with_core(folder, LAYOUTS[name]) for name in names}


def train_with_torch(folder):
    """As `train_with_core`, with nothing of core's training code."""
    forget_losses()
    model = load(folder, **RUN).double()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / MICRO_BATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    routers = [model.decoder.layers[i].mlp.router for i in (1, 3)]
    rows = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(inputs, labels=labels).mean() for inputs, labels in batches_of(step)]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        for router in routers:
            counts = router.local_tokens_per_expert
            router.expert_bias += BIAS_RATE * (counts.mean() - counts).sign()
            counts.zero_()
        found = {name: values / MICRO_BATCHES for name, values in take_losses().items()}
        rows.append((loss.item(), norm.item(), found))
    forget_losses()
    return rows, {name: b for name, b in model.named_buffers() if name.endswith("expert_bias")}


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """What `train_with_torch` returns, and what each rank does by layout."""
    folder = tmp_path_factory.mktemp("moe_training")
    torch.manual_seed(3)
    save_checkpoint(build_hybrid_model(HybridConfig(**CONFIG)), folder / "weights")
    expected = train_with_torch(folder / "weights")
    names = asked(request, "layout", LAYOUTS)
    results = train_on_ranks(run_all, RANKS, folder / "ranks", folder / "weights", names)
    return expected, results


@pytest.mark.parametrize("layout", matrix_rows(LAYOUTS, "tp_ep"))
def test_steps_are_those_of_plain_torch(outcome, layout):
    (expected, biases), ranks = outcome
    for rank in ranks:
        rows, found = rank[layout]
        assert len(rows) == STEPS
        worst = 0.0
        assert rows[0][2].keys() == {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"}
        for (loss, norm, losses), (right_loss, right_norm, right_losses) in zip(rows, expected):
            worst = max(worst, abs(loss - right_loss), abs(norm - right_norm))
            assert losses.keys() == right_losses.keys()
            for name, values in losses.items():
                worst = max(worst, (values - right_losses[name]).abs().max().item())
        assert worst < 1e-4
        for name, bias in biases.items():
            assert torch.equal(found[name], bias)
            assert bias.any()
