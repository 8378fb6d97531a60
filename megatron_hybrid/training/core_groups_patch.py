"""A patch of megatron-core's optimizers, to save states of 16-bit and fp32 parameters correctly."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer


def patch_mixed_groups(optimizer: MegatronOptimizer) -> None:
    """Let an optimizer of core (0.16.1 to 0.19.2) save and load the states of all its parameters
    even if a group has parameters of bf16 or fp16 and of fp32. Call it once, after
    `get_megatron_optimizer`.

    Core numbers such parameters wrongly. Its distributed optimizer numbers them buffer by buffer,
    though Adam has a group's fp32 parameters first: a checkpoint has the states of other parameters
    or fails for their shapes. Its plain optimizer counts only the 16-bit parameters, and fails.
    """
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(one, DistributedOptimizer):
            groups = zip(one.model_fp32_groups, one.model_float16_groups)
            for group, (of_fp32, of_16_bits) in enumerate(groups):
                for order, parameter in enumerate([*of_fp32, *of_16_bits]):
                    one.model_param_group_index_map[parameter] = group, order
        elif isinstance(one, Float16OptimizerWithFloat16Params) and not one.is_stub_optimizer:
            for name in ("sharded_state_dict", "load_state_dict"):
                setattr(one, name, partial(_with_all_parameters, one, getattr(one, name)))


def _with_all_parameters(
    optimizer: Float16OptimizerWithFloat16Params, method: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Call a method while fp32 parameters are listed among the 16-bit ones, as their own main
    parameters, in the order in which Adam numbers them."""
    kept = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    models = {
        id(main): model
        for model_group, main_group in zip(*kept)
        for model, main in zip(model_group, main_group)
    }
    mains = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    optimizer.fp32_from_float16_groups = mains
    optimizer.float16_groups = [[models.get(id(one), one) for one in group] for group in mains]
    try:
        return method(*args, **kwargs)
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = kept
