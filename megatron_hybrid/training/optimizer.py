"""Optimizers of megatron-core over a model, and the schedules of their rates."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor, nn

from megatron_hybrid.compat import quiet_core
from megatron_hybrid.training.core_groups_patch import patch_mixed_groups
from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.validation import Range


@dataclass
class OptimizerFields(Fields):
    """The optimizer, its rates and their schedules. All counts are optimizer steps."""

    name: Literal["adam", "muon", "sgd"] = "adam"
    """AdamW (from Transformer Engine or apex, if one is installed), SGD, or Muon (Jordan et al.
    2024) for the weight matrices of the layers with AdamW for all other parameters. The matrix of
    each expert is separate, and so are queries, keys and values. Muon's updates are scaled to the
    size of Adam's, so both take one learning rate. Muon needs whole matrices: neither tensor
    parallelism nor `distributed`. Adapters (`lora`) are trained by AdamW."""

    learning_rate: Annotated[float, Range(gt=0)] = 3e-4
    """Highest learning rate, which is reached after the warm-up."""

    min_learning_rate: Annotated[float, Range(ge=0)] = 0.0
    """Learning rate of the last step."""

    warmup_steps: int = 0
    """Steps over which the rate rises from 0, linearly."""

    decay: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Schedule of the rate between warm-up and end. `WSD` (warm-up, stable, decay) is constant up
    to the last `decay_steps`, over which the rate falls linearly."""

    decay_steps: int | None = None
    """Steps over which the rate of `WSD` falls. `WSD` needs this field, and the other schedules
    refuse it."""

    weight_decay: Annotated[float, Range(ge=0)] = 0.1
    """Weight decay, decoupled but for SGD. Embeddings, the matrices of the layers and those of
    adapters decay; vectors, norms, convolutions and the constants of recurrent layers do not."""

    end_weight_decay: float | None = None
    """Weight decay of the last step, to which it rises linearly. By default it is constant."""

    beta1: Annotated[float, Range(ge=0, lt=1)] = 0.9
    """Decay of Adam's mean of gradients."""

    beta2: Annotated[float, Range(ge=0, lt=1)] = 0.95
    """Decay of Adam's mean of squared gradients."""

    epsilon: Annotated[float, Range(gt=0)] = 1e-8
    """Epsilon of Adam, which is added to the root of that mean."""

    momentum: Annotated[float, Range(ge=0, lt=1)] = 0.95
    """Momentum of Muon and of SGD."""

    clip_gradient: Annotated[float, Range(ge=0)] = 1.0
    """Largest norm of the gradient over all parameters and ranks; 0 does not clip it."""

    distributed: bool = False
    """Split Adam's states over the data-parallel ranks."""

    def check(self) -> None:
        super().check()
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate is {self.min_learning_rate}, above the learning_rate of "
                f"{self.learning_rate}."
            )
        if (self.decay == "WSD") != (self.decay_steps is not None):
            raise ValueError(
                f"decay is {self.decay!r} and decay_steps is {self.decay_steps}: WSD alone has, "
                "and needs, steps of its own to decay in."
            )
        if self.end_weight_decay is not None and self.end_weight_decay < self.weight_decay:
            raise ValueError(
                f"end_weight_decay is {self.end_weight_decay}, but weight decay starts at "
                f"{self.weight_decay} and can only rise."
            )
        if self.name != "adam" and self.distributed:
            raise ValueError(
                f"optimizer {self.name} with distributed=true: megatron-core's distributed "
                "optimizer cuts states anywhere, where Muon needs whole matrices, and saves "
                "those of Adam alone. Use distributed=false, or adam."
            )

    def check_steps(self, steps: int) -> None:
        """Raise ValueError unless warm-up and decay fit into a run of `steps`."""
        decay = self.decay_steps or 0
        if self.warmup_steps >= steps or self.warmup_steps + decay > steps:
            after = f" and optimizer.decay_steps={decay}" if decay else ""
            raise ValueError(
                f"run.steps={steps} is too few for optimizer.warmup_steps={self.warmup_steps}"
                f"{after}. Lower these, for example to a tenth of the run, as in "
                f"optimizer.warmup_steps={steps // 10}, or raise run.steps."
            )


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], fields: OptimizerFields
) -> ChainedOptimizer:
    """Build megatron-core's optimizers over a model's trainable parameters; every rank calls it.

    Args:
        chunks: the model, wrapped for data parallelism.
        fields: checked ones.

    Raises:
        ValueError: Muon for matrices that are cut over tensor-parallel ranks, or a model in fp16.
    """
    model_config = chunks[0].config
    if model_config.params_dtype == torch.float16:
        raise ValueError(
            "params_dtype is float16, whose gradients need a scaled loss to train. Use bfloat16, "
            "which has the range of float32, or float32."
        )
    for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
        if fields.name == "muon" and getattr(model_config, name) > 1:
            raise ValueError(
                f"optimizer muon with {name}={getattr(model_config, name)}: Muon orthogonalises "
                "whole matrices, and these are cut. Use data, expert or pipeline parallelism, or "
                "adam."
            )
    config = OptimizerConfig(
        optimizer="sgd" if fields.name == "sgd" else "adam",
        lr=fields.learning_rate,
        min_lr=fields.min_learning_rate,
        weight_decay=fields.weight_decay,
        adam_beta1=fields.beta1,
        adam_beta2=fields.beta2,
        adam_eps=fields.epsilon,
        sgd_momentum=fields.momentum,
        clip_grad=fields.clip_gradient,
        bf16=model_config.params_dtype == torch.bfloat16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=fields.distributed,
    )
    matrices = [
        parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if fields.name == "muon" and parameter.requires_grad and is_layer_matrix(name, parameter)
    ]
    try:
        for parameter in matrices:  # core leaves frozen ones out
            parameter.requires_grad = False
        with quiet_core():
            built = get_megatron_optimizer(config, list(chunks), _NO_DECAY)
    finally:
        for parameter in matrices:
            parameter.requires_grad = True
    optimizers = list(built.chained_optimizers)
    if fields.name == "sgd":
        for each in optimizers:
            each.init_state_fn = _init_momentum
    if fields.name == "muon":
        experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        for is_expert, group in enumerate((chunks[0].module.pg_collection.mp, experts)):
            own = [p for p in matrices if getattr(p, "allreduce", True) != bool(is_expert)]
            number = torch.tensor(len(own), device=next(chunks[0].parameters()).device)
            dist.all_reduce(number, group=group)
            if number:  # core cannot save one without parameters on any rank
                optimizers.append(_muon(own, config, fields, group, bool(is_expert)))
    optimizer = ChainedOptimizer(optimizers)
    patch_mixed_groups(optimizer)
    return optimizer


def _init_momentum(optimizer: torch.optim.SGD, _: OptimizerConfig | None = None) -> None:
    """Make the states that a checkpoint is loaded into, as core does for Adam alone."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon updates a parameter: a weight matrix of a layer, or a stack of those of
    its experts, but not of the embedding, the output layer or adapters, and no constant of a
    recurrent layer such as `A_log`."""
    is_outside = any(part in name for part in ("embedding", "output_layer", ".lora."))
    return _decays(parameter, name) and not is_outside


def describe_optimizers(model: nn.Module, fields: OptimizerFields) -> str:
    """Say which optimizer trains which of this rank's parameters, with `*` for layer numbers."""
    found: dict[str, dict[str, None]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_muon = fields.name == "muon" and is_layer_matrix(name, parameter)
            kind = "Muon" if is_muon else "SGD" if fields.name == "sgd" else "AdamW"
            found.setdefault(kind, {})[re.sub(r"\.\d+\.", ".*.", name)] = None
    return "\n".join(f"{kind} trains {', '.join(names)}" for kind, names in found.items())


def _decays(parameter: nn.Parameter, name: str) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, also stacks of those of
    experts, but not to convolutions and constants of recurrent layers."""
    is_stacked = parameter.dim() == 3 and ".experts." in name
    is_weight = name.rpartition(".")[2].startswith("weight") or ".lora." in name
    return is_weight and (parameter.dim() == 2 or is_stacked)


_NO_DECAY = {
    ParamKey(
        with_name_predicate=ParamWithNamePredicate(
            name="no_decay", fn=lambda parameter, name: not _decays(parameter, name)
        )
    ): ParamGroupOverride(wd_mult=0.0)
}


class _Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum and decoupled weight decay. Its updates are scaled to the size
    of Adam's, so that both share a learning rate (Liu et al. 2025).

    Args:
        group: core's group of parameters, which are matrices, or stacks of them.
        rows: for each parameter the rows of the matrices in it, in turn; empty if it is one matrix.
    """

    def __init__(self, group: dict[str, Any], rows: list[Sequence[int]], **defaults: Any):
        super().__init__([group], defaults)
        self.rows = rows

    def init_states(self, _: OptimizerConfig | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not (state := self.state[parameter]):
                    state["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.init_states()
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            # For a model in bf16, core puts fp32 copies in the parameters' places, in their order.
            for parameter, rows in zip(group["params"], self.rows):
                mean = self.state[parameter]["momentum_buffer"]
                mean.lerp_(parameter.grad, 1 - momentum)
                direction = parameter.grad.lerp(mean, momentum)
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(_orthogonal_blocks(direction, rows), alpha=-rate)


def _orthogonal_blocks(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    if not rows:
        return _orthogonal(matrix)
    groups = matrix.unflatten(0, (-1, sum(rows)))
    parts = [
        _orthogonal(part.flatten(0, 1)).view_as(part) for part in groups.split(list(rows), dim=1)
    ]
    return torch.cat(parts, 1).view_as(matrix)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix, or those of a stack, by Newton and Schulz's
    iteration in bf16, times the size of Adam's updates."""
    x = matrix.bfloat16().view(-1, *matrix.shape[-2:])
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    x = x.mT if is_tall else x
    return x.reshape(matrix.shape).to(matrix.dtype) * (0.2 * math.sqrt(max(matrix.shape[-2:])))


def _muon(
    matrices: list[nn.Parameter],
    config: OptimizerConfig,
    fields: OptimizerFields,
    group: dist.ProcessGroup,
    is_expert: bool,
) -> MegatronOptimizer:
    """Wrap Muon as core does. `group` has the ranks with other parameters of the same copy."""
    optimizer = None
    if matrices:
        own = {
            "params": matrices,
            "is_expert_parallel": is_expert,
            "default_config": True,
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": config.lr,
            "min_lr": config.min_lr,
        }
        optimizer = _Muon(
            own,
            [getattr(matrix, "group_rows", ()) for matrix in matrices],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=fields.momentum,
        )

    if config.bf16:
        wrapped = Float16OptimizerWithFloat16Params(optimizer, config, None, _Muon.init_states)
    else:
        wrapped = FP32Optimizer(optimizer, config, _Muon.init_states)
    wrapped.grad_stats_parallel_group = group
    wrapped.tp_group = parallel_state.get_tensor_model_parallel_group()
    return wrapped


def build_schedule(
    optimizer: MegatronOptimizer, fields: OptimizerFields, steps: int
) -> OptimizerParamScheduler:
    """Build the schedule of the learning rate and weight decay over `steps` steps, into which
    warm-up and decay fit (`check_steps`). Call its `step(1)` before each step."""
    final = fields.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=fields.learning_rate,
        min_lr=fields.min_learning_rate,
        lr_warmup_steps=fields.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=fields.decay,
        start_wd=fields.weight_decay,
        end_wd=fields.weight_decay if final is None else final,
        wd_incr_steps=steps,
        wd_incr_style="constant" if final is None else "linear",
        wsd_decay_steps=fields.decay_steps,
        lr_wsd_decay_style="linear",
    )


@torch.no_grad()
def update(optimizer: ChainedOptimizer) -> tuple[bool, float]:
    """Clip the gradients and update the model, unless a gradient is not finite.

    Returns:
        Whether the model was updated, and the norm of the gradient before it was clipped; both are
        the same on all ranks.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    limit = optimizer.config.clip_grad
    for part in optimizer.chained_optimizers:
        if limit > 0 and not part.is_stub_optimizer and (parameters := part.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
    optimizer.step_with_ready_grads()
    return True, norm


_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Keys that distinguish core's groups of parameters, and those that a recipe sets."""


def correct_loaded(state: dict[Any, Any], updates: int, own: Sequence[Mapping[str, Any]]) -> None:
    """Give the loaded states of every Adam the number of updates, and the loaded groups of
    parameters the rates of the recipe, which may differ. Core saves that number only for the
    optimizers of the first pipeline stage, one of which, such as that of the experts, may be empty;
    and it finds groups by their rates, too.

    Args:
        state: the argument of `ChainedOptimizer.load_state_dict`.
        updates: number of steps that changed the model.
        own: groups of the optimizers with the recipe's rates.
    """
    for name, part in state.items():
        if name == "param_groups":
            for group in part:
                same = (one for one in own if all(one.get(n) == group.get(n) for n in _GROUP))
                given = next(same, {})
                group.update((rate, given[rate]) for rate in _RATES if rate in given)
        elif isinstance(part, dict):
            correct_loaded(part, updates, own)
            of_adam = (isinstance(one, dict) and "exp_avg" in one for one in part.values())
            if name == "state" and any(of_adam):
                part.setdefault("common_step", torch.tensor(float(updates)))
