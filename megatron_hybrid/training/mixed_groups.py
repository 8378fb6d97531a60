"""megatron-core's distributed optimizer for models with 16-bit and fp32 parameters."""

from __future__ import annotations

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_build_optimizer_group_ranges = DistributedOptimizer._build_optimizer_group_ranges


def allow_mixed_groups() -> None:
    """Let `DistributedOptimizer` save parameter groups of bf16 and fp32 parameters. Call it before
    the optimizer is built; once is enough.

    Core (0.16.1 to 0.19.2) numbers the parameters of a group buffer by buffer, but gives them to
    Adam with those of fp32 first. Where the bf16 buffer comes first, as an embedding makes it, a
    checkpoint has the states of other parameters, or fails for their shapes. Here buffers of fp32
    come first.
    """
    DistributedOptimizer._build_optimizer_group_ranges = classmethod(_fp32_first)


def _fp32_first(cls: type, param_groups: list[dict], gbuf_ranges: list[dict]) -> tuple:
    """See core. gbuf_ranges: of each buffer, {(dtype of parameters, of gradients): ranges}."""

    def is_16_bit(ranges: dict) -> bool:
        return all(dtype != torch.float32 for dtype, _ in ranges)

    return _build_optimizer_group_ranges(param_groups, sorted(gbuf_ranges, key=is_16_bit))
