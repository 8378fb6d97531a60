"""megatron-core's training code on a CPU: data parallelism, optimizers, schedules, checkpoints.

Core asks for a CUDA device in many places, though what it computes there runs anywhere. Under
`cpu_seam()` those of them that training on gloo comes by are answered with the CPU. `PLACES` lists
them, each with the text in core that asks. A place whose text is gone from the installed core is an
error at the start, a place of core that is not listed an error when it asks. Code outside of core
gets torch's own answers.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, partialmethod
from operator import attrgetter
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megatron_hybrid.compat import MEGATRON_CORE_VERSION

BOTH, NEW = ("0.16.1", "0.19.2"), ("0.19.2",)
"""The megatron-core releases at which a place was found; those between are treated as 0.19.2."""


@dataclass(frozen=True)
class Place:
    """A function or method of megatron-core that asks for CUDA, and how it does."""

    module: str
    function: str
    text: str
    versions: tuple[str, ...] = BOTH

    def check(self) -> None:
        """Raises RuntimeError where the installed core does not ask here, or not in this way."""
        try:
            function = attrgetter(self.function)(importlib.import_module(self.module))
            found = self.text in inspect.getsource(function).replace("'", '"')
        except (ImportError, AttributeError):
            found = False
        if not found:
            raise RuntimeError(
                f"{self.module}.{self.function} of megatron-core "
                f"{'.'.join(map(str, MEGATRON_CORE_VERSION))} has no `{self.text}`: core has "
                "changed. Look where it asks now and correct PLACES in "
                "megatron_hybrid/training/cpu_seam.py."
            )


def _places(module: str, *rows: tuple) -> list[Place]:
    return [Place(f"megatron.core.{module}", *row) for row in rows]


DEVICE, CURRENT = 'device="cuda"', "torch.cuda.current_device()"
SYNCHRONIZE, STREAM = "torch.cuda.synchronize()", "torch.cuda.current_stream()"
CUDA, TYPE = ".cuda()", ".type()"
PLACES = [
    *_places(  # gradients lie in buffers of its own, on the current device
        "distributed.param_and_grad_buffer",
        ("_ParamAndGradBuffer.__init__", CURRENT),
        ("_ParamAndGradBucketGroup.start_grad_sync", STREAM, NEW),  # it waits for the backward pass
    ),
    *_places(  # counts of tokens
        "pipeline_parallel.schedules",
        ("forward_backward_no_pipelining", DEVICE),
        ("forward_backward_pipelining_without_interleaving", DEVICE),
    ),
    *_places(  # buffers of what is received, and a wait for what was
        "pipeline_parallel.p2p_communication",
        ("P2PCommunicator._communicate", CURRENT),
        ("P2PCommunicator._communicate", SYNCHRONIZE),
    ),
    *_places(  # loss scales, and which parameters are fp32 of CUDA
        "optimizer.optimizer",
        ("FP32Optimizer.__init__", DEVICE),
        ("MixedPrecisionOptimizer.__init__", DEVICE),
        ("Float16OptimizerWithFloat16Params.__init__", TYPE),
        ("MegatronOptimizer.has_grad_norm_group", DEVICE, NEW),
    ),
    *_places(  # sums, and that gradients are fp32 of CUDA
        "optimizer.clip_grads",
        ("get_grad_norm_fp32", DEVICE),
        ("clip_grad_by_total_norm_fp32", DEVICE),
        ("clip_grad_by_total_norm_fp32", TYPE),
    ),
    *_places("utils", ("local_multi_tensor_l2_norm", DEVICE)),
    *_places(  # which parameters are fp32 and which are bf16 of CUDA
        "optimizer.distrib_optimizer",
        ("DistributedOptimizer.__init__", TYPE),
        ("DistributedOptimizer._build_model_and_main_param_groups", TYPE),
        ("DistributedOptimizer.get_parameter_state_dp_zero", CURRENT),  # what a save gathers
        ("DistributedOptimizer.get_parameter_state_dp_zero", CUDA),
    ),
    *_places(
        "dist_checkpointing.strategies.state_dict_saver",
        ("save_state_dict_async_finalize", CURRENT),  # a flag that all ranks sum
    ),
    *_places(
        "dist_checkpointing.strategies.filesystem_async",
        ("FileSystemWriterAsync.preload_tensors", SYNCHRONIZE),  # after copies to the host
    ),
    *_places(  # saves that go on beside the training: whether all ranks have written
        "dist_checkpointing.strategies.async_utils",
        ("AsyncCaller.sync_all_async_calls", CURRENT),
        ("TemporalAsyncCaller.schedule_async_call", SYNCHRONIZE),
        ("AsyncCallsQueue.maybe_finalize_async_calls", CURRENT),
    ),
]


class CpuSeam(TorchFunctionMode):
    """Answers core with the CPU, and keeps which places asked in `asked`.

    Raises:
        RuntimeError: core has changed, or asks in a place that `PLACES` does not have.
    """

    def __init__(self):
        super().__init__()
        release = "0.16.1" if MEGATRON_CORE_VERSION < (0, 17, 0) else "0.19.2"
        self.places = {place for place in PLACES if release in place.versions}
        for place in self.places:
            place.check()
        self.asked: set[Place] = set()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        caller = sys._getframe(1)
        if device is not None and torch.device(device).type == "cuda":
            if self.is_core(caller, DEVICE):
                kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda and self.is_core(caller, CUDA):
            return args[0]
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        if asks_type and self.is_core(caller, TYPE):  # which core compares with names of CUDA's
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)

    def answer(self, text: str, value: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """In the place of a function of `torch.cuda`."""
        if self.is_core(sys._getframe(1), text):
            return value
        return original(*args, **kwargs)

    def is_core(self, frame: FrameType, text: str) -> bool:
        """Whether megatron-core asks, and notes that it did."""
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("megatron.core."):
            return False
        function = frame.f_code.co_qualname.partition(".<locals>")[0]
        for place in self.places:
            if (place.module, place.function, place.text) == (module, function, text):
                self.asked.add(place)
                return True
        raise RuntimeError(
            f"{module}.{function} asks for CUDA by `{text}`, which PLACES does not have. If the "
            "CPU serves as well, add it there, in megatron_hybrid/training/cpu_seam.py."
        )


def _set_states(self: Any, model_param: Any, tensors: dict, core: Callable) -> None:
    """In the place of `DistributedOptimizer._set_main_param_and_optimizer_states` (0.16.1, 0.19.2).

    Core copies all that the optimizer keeps of a parameter: of torch's Adam, which it uses without
    Transformer Engine and apex, `step` too. Checkpoints in the formats 'fully_reshardable' and
    'dp_zero_gather_scatter' do not have that (KeyError: 'step'); of 'dp_reshardable' it takes the
    step from before the load, in silence. Moreover its `load_state_dict` gives one tensor to all
    parameters, so that each of them counts the steps of all. Here each gets a copy of its own, with
    the value that was loaded.
    """
    group, index = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
    state["step"] = state["step"].clone()
    core(self, model_param, {**tensors, "step": state["step"]})


@contextlib.contextmanager
def cpu_seam() -> Iterator[CpuSeam]:
    """megatron-core's training code runs on the CPU in here; afterwards all is as before."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    seam = CpuSeam()
    set_states = "_set_main_param_and_optimizer_states"
    path = f"DistributedOptimizer.{set_states}"
    Place("megatron.core.optimizer.distrib_optimizer", path, "in dst_tensors:").check()
    core = getattr(DistributedOptimizer, set_states)
    answers = {
        "current_device": (CURRENT, torch.device("cpu")),
        "synchronize": (SYNCHRONIZE, None),
        "current_stream": (STREAM, None),
    }
    with contextlib.ExitStack() as stack:
        for name, (text, value) in answers.items():
            original = getattr(torch.cuda, name)
            answer = partial(seam.answer, text, value, original)
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        fixed = partialmethod(_set_states, core=core)
        stack.enter_context(mock.patch.object(DistributedOptimizer, set_states, fixed))
        stack.enter_context(seam)
        yield seam
