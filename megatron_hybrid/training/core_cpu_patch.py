"""A patch of megatron-core, whose training code then runs on a CPU: data parallelism, optimizers,
schedules, pipelines, checkpoints.

Core asks for a CUDA device in many places, though its computations there run anywhere. Under
`core_cpu_patch()` all calls from its modules are answered with the CPU. Code outside of core gets
torch's own answers.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megatron_hybrid.compat import MEGATRON_CORE_VERSION

_ANSWERS = {
    "current_device": torch.device("cpu"),
    "synchronize": None,
    "current_stream": None,
}
"""Functions of `torch.cuda` -> the values that they return to core."""
_SET_STATES = "_set_main_param_and_optimizer_states"


def _is_core(caller: FrameType) -> bool:
    return caller.f_globals.get("__name__", "").startswith("megatron.core.")


class _CpuForCore(TorchFunctionMode):
    """Answers core with the CPU where it names a CUDA device, or moves a tensor to one."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        names_cuda = device is not None and torch.device(device).type == "cuda"
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        moves = func is torch.Tensor.cuda
        if not (names_cuda or asks_type or moves) or not _is_core(sys._getframe(1)):
            return func(*args, **kwargs)
        if names_cuda:
            return func(*args, **{**kwargs, "device": "cpu"})
        if asks_type:  # core compares it with names of CUDA types
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0]


def _answer(value: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a function of `torch.cuda`."""
    return value if _is_core(sys._getframe(1)) else original(*args, **kwargs)


def _set_states(self: Any, model_param: Any, tensors: dict, core: Callable) -> None:
    """Stand in for `DistributedOptimizer._set_main_param_and_optimizer_states` (0.16.1, 0.19.2).

    Core copies all states of a parameter, and without Transformer Engine and apex those of torch's
    Adam include `step`. Checkpoints in the formats 'fully_reshardable' and
    'dp_zero_gather_scatter' lack it (KeyError: 'step'); with 'dp_reshardable' core silently takes
    the step from before the load. Moreover its `load_state_dict` gives one tensor to all
    parameters, so that each of them counts the steps of all. Here each gets a copy of its own, with
    the value that was loaded.
    """
    group, index = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
    state["step"] = state["step"].clone()
    core(self, model_param, {**tensors, "step": state["step"]})


@contextlib.contextmanager
def core_cpu_patch() -> Iterator[None]:
    """Let megatron-core's training code run on the CPU in this context.

    Raises:
        RuntimeError: core copies the states of its optimizers in another way than before.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    core = getattr(DistributedOptimizer, _SET_STATES, None)
    if core is None or "in dst_tensors:" not in inspect.getsource(core):
        raise RuntimeError(
            f"DistributedOptimizer.{_SET_STATES} of megatron-core "
            f"{'.'.join(map(str, MEGATRON_CORE_VERSION))} is not what was patched: core has "
            "changed. Look how it copies the states now, and correct "
            "megatron_hybrid/training/core_cpu_patch.py."
        )
    with contextlib.ExitStack() as stack:
        for name, value in _ANSWERS.items():
            stand_in = partial(_answer, value, getattr(torch.cuda, name))
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        fixed = partialmethod(_set_states, core=core)
        stack.enter_context(mock.patch.object(DistributedOptimizer, _SET_STATES, fixed))
        stack.enter_context(_CpuForCore())
        yield
