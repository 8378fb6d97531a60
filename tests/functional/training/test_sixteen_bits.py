"""A bf16 model in core's Float16Module trains, balances experts, and goes on from a checkpoint."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from rank_processes import train_on_ranks
from small_models import small_config

from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.training.core_groups_patch import support_mixed_groups

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:torch.distributed.*", "ignore:The .grad attribute"
)

RANKS, STEPS, LENGTH = 2, 3, 40
RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


class Trainer:
    """A bf16 model and core's optimizer, whose main parameters are fp32."""

    def __init__(self, distributed_optimizer):
        torch.manual_seed(4)
        config = small_config(
            "MGE*",
            params_dtype=torch.bfloat16,
            num_moe_experts=4,
            moe_ffn_hidden_size=20,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        )
        self.own = build_hybrid_model(config).train()
        wrapped = Float16Module(config, self.own)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
        self.model = DistributedDataParallel(config, ddp_config, wrapped)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            use_distributed_optimizer=distributed_optimizer,
            clip_grad=1.0,
        )
        self.optimizer = get_megatron_optimizer(
            settings, [self.model], get_standard_config_overrides(settings)
        )
        support_mixed_groups(self.optimizer)
        self.distributed_optimizer = distributed_optimizer
        config.finalize_model_grads_func = finalize_model_grads

    def train(self, steps):
        return [self._step(step) for step in steps]

    def _step(self, step):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * RANKS + dist.get_rank())
        row = torch.randint(0, 61, (1, LENGTH + 1), generator=generator)
        (report,) = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter([row]),
            model=[self.model],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        assert self.optimizer.step()[0]
        return report["loss"].item()

    def state(self, is_loading):
        model = self.own.sharded_state_dict(metadata=RESHARDABLE)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=RESHARDABLE)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder):
        for optimizer in self.optimizer.chained_optimizers * self.distributed_optimizer:
            optimizer._init_optimizer_states_with_dummy_values()
        with torch.no_grad():
            state = dist_checkpointing.load(self.state(is_loading=True), folder)
            self.own.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def tensors(self):
        return {name: t.clone() for name, t in self.own.state_dict().items() if torch.is_tensor(t)}


def _forward_step(rows, model):
    row = next(rows)

    def loss(losses):
        mean = losses.mean()
        return mean, {"loss": mean.detach().clone()}

    return model(row[:, :-1], labels=row[:, 1:].contiguous()), loss


def train_both(folder):
    parallel_state.initialize_model_parallel()
    return {kind: train_and_go_on(folder / str(kind), kind) for kind in (True, False)}


def train_and_go_on(folder, distributed_optimizer):
    """What a rank has at the start, and the losses and tensors of a run and of its continuation."""
    first = Trainer(distributed_optimizer)
    start = first.tensors()
    first.train(range(STEPS))
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(first.state(is_loading=False), folder)
    losses = first.train(range(STEPS, 2 * STEPS))
    second = Trainer(distributed_optimizer)
    second.load(folder)
    return (
        start,
        (losses, first.tensors()),
        (second.train(range(STEPS, 2 * STEPS)), second.tensors()),
    )


@pytest.mark.matrix  # test_trainer.py has a short run over ranks
def test_a_bf16_model_trains_and_goes_on(tmp_path):
    results = train_on_ranks(train_both, RANKS, tmp_path, tmp_path)
    for start, whole, resumed in [run for result in results for run in result.values()]:
        (losses, tensors), (resumed_losses, resumed_tensors) = whole, resumed
        assert losses == resumed_losses
        assert all(torch.equal(tensors[name], resumed_tensors[name]) for name in tensors)
        for name in ("mixer.A_log", "mixer.dt_bias", "self_attention.A_log", "router.weight"):
            (full,) = (key for key in tensors if key.endswith(f".{name}"))
            assert tensors[full].dtype == torch.float32
            # It moved, and by less than a step of bf16 too.
            moved = tensors[full] - start[full]
            assert moved.any() and not torch.equal(tensors[full].bfloat16().float(), tensors[full])
        (bias,) = (t for name, t in tensors.items() if name.endswith("expert_bias"))
        # Six updates of 0.001 up or down, exact up to fp32's rounding.
        assert bias.any() and torch.allclose(bias * 1000, (bias * 1000).round(), atol=1e-3)
    losses = [run[1][0] for run in results[0].values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
