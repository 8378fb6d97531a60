"""Triton's kernels on a CPU, by its interpreter. It is chosen before Triton is imported."""

import contextlib
import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton.runtime.interpreter
from gpu_stub import one_config


def _no_cuda_device() -> None:
    """The launchers of megatron-core's kernels ask which device is current, and its kind."""
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def _unseen_interpreter() -> None:
    """What the interpreter asks of tensors is no call of ours: `no_host_syncs` sees none of it."""
    call = triton.runtime.interpreter.GridExecutor.__call__

    def unseen(self, *args, **kwargs):
        with torch._C.DisableTorchFunction():
            return call(self, *args, **kwargs)

    triton.runtime.interpreter.GridExecutor.__call__ = unseen


one_config()  # no device, no times to choose by
_unseen_interpreter()
_no_cuda_device()
torch.set_num_threads(1)


@pytest.fixture
def loops_over_tensors(monkeypatch):
    """fla-core's kernels ask numbers of loops for a dtype, which the interpreter's have not."""

    def numbers(*bounds):
        plain = [int(one.handle.data.item()) if hasattr(one, "handle") else one for one in bounds]
        return map(triton.runtime.interpreter._implicit_cvt, range(*plain))

    for name in ("gated_delta_rule", "kda"):
        importlib.import_module(f"fla.ops.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            monkeypatch.setattr(module, "range", numbers, raising=False)
