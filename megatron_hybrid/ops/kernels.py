"""What backends of Triton kernels share: they are imported when a call first needs them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_hybrid.ops.dispatch import Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels on the CPU, as tests do; read at import, as Triton does."""


def kernel_backend(name: str, module: str, libraries: Sequence[str], priority: int) -> Backend:
    """The backend in a module with `run` and `verify`, which is imported at the first call.

    Args:
        name: of the backend.
        module: its full name.
        libraries: modules that it imports, without which the backend is missing.
        priority: see `Backend`.
    """
    load = functools.cache(lambda: importlib.import_module(module))

    def run(*inputs: Any) -> Any:
        with _on_device_of(inputs):
            return load().run(*inputs)

    def verify(*inputs: Any) -> str | None:
        return load().verify(*inputs)

    absent = [library for library in libraries if not _is_there(library)]
    missing = f"{absent[0]} is not installed" if absent else None
    return Backend(name, run, verify, priority, missing, None if INTERPRETED else "cuda")


def _on_device_of(inputs: tuple) -> AbstractContextManager:
    """Triton launches on the current device, wherever the tensors are."""
    if INTERPRETED:
        return nullcontext()
    return torch.cuda.device(next(x.device for x in inputs if isinstance(x, torch.Tensor)))


def _is_there(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def gradient_refusal(*tensors: torch.Tensor | None) -> str | None:
    """Why kernels without a backward pass cannot serve, if a gradient is wanted."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return "it has no backward pass, and gradients are wanted"
    return None


def dtype_refusal(*tensors: torch.Tensor | None) -> str | None:
    """Why kernels of 16 and 32 bits cannot serve."""
    allowed = (torch.float32, torch.bfloat16, torch.float16)
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in allowed:
            return f"it takes no tensors of {tensor.dtype}"
    return None
