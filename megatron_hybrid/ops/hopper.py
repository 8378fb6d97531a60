"""What Triton compiles wrongly for Hopper (compute capability 9), and how kernels keep clear of it.

A product of matrices by wgmma runs on while the program goes on. Before it has waited, a program
may write neither the registers that the product reads, nor shared memory that products of other
warps read. Triton breaks both rules in loops with stages, as a product runs on into the next
iteration:

- If its first factor is in registers, that iteration makes the factor anew, and may do so before
  the wait: whole rows become NaN. megatron-core's `chunk_scan` is so, with Triton 3.6 and 3.7.
- If there are eight warps, each four wait for their own products alone, up to Triton 3.7.

So our kernels multiply by wgmma with four warps, or without stages, and make factors after the
wait; the tests look at what was compiled (`tests/helpers/wgmma.py`). Configs of megatron-core that
can race are left out, though an H200 showed none of them wrong.
"""

from __future__ import annotations

import functools
import re

import torch
import triton
from triton.runtime.autotuner import Autotuner

TILES = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}
"""Tiles of a config for two warps that each kernel of megatron-core's Mamba-2 has."""

left_out: dict[Autotuner, list[triton.Config]] = {}
"""Configs left out, by kernel, so that a run on a GPU can try them."""


@functools.cache
def is_hopper() -> bool:
    """Return whether the current device is of compute capability 9; False where there is none."""
    try:
        return torch.cuda.get_device_capability()[0] == 9
    except (AssertionError, RuntimeError):  # torch's, without CUDA and without a driver
        return False


def compiles_wrongly() -> bool:
    """Return whether gradients of libraries' kernels are not to be trusted: on Hopper with Triton
    3.4 to 3.7.0."""
    major, minor, patch = map(int, re.findall(r"\d+", triton.__version__)[:3])
    return is_hopper() and (3, 4, 0) <= (major, minor, patch) < (3, 7, 1)


def can_race(config: triton.Config, in_registers: bool) -> bool:
    """Return whether a kernel with this config multiplies by wgmma in a loop with stages, which
    takes four warps and 64 rows, and may be wrong.

    in_registers: whether its first factor is there.
    """
    has_stages, has_group = config.num_stages > 1, config.num_warps % 4 == 0
    is_async = has_stages and has_group and config.kwargs["BLOCK_SIZE_M"] % 64 == 0
    return is_async and (in_registers or config.num_warps > 4)


def without_races(configs: list[triton.Config], in_registers: bool) -> list[triton.Config]:
    """Leave out the configs that can race. Where all can, as in a deterministic mode that has a
    single one, return one that megatron-core has otherwise."""
    right = [config for config in configs if not can_race(config, in_registers)]
    return right or [triton.Config(TILES, num_stages=4, num_warps=2)]


def leave_racing_configs_out(kernel: Autotuner, in_registers: bool) -> list[str]:
    """Leave the configs that can race out of a kernel of megatron-core's Mamba-2, on Hopper.

    Args:
        in_registers: whether the first factor of its products is in registers.

    Returns:
        A remark for `megatron-hybrid info`; none where nothing is left out.
    """
    racing = [config for config in kernel.configs if can_race(config, in_registers)]
    if not racing or not is_hopper():
        return []
    left_out[kernel] = racing
    kernel.configs = without_races(kernel.configs, in_registers)
    name, count = kernel.base_fn.__name__, len(racing)
    configs = "1 config" if count == 1 else f"{count} configs"
    return [f"{configs} of {name} left out: Triton may compile them wrongly for Hopper"]
