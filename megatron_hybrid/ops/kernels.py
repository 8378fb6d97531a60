"""What backends of Triton kernels share: they are imported when a call first needs them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.ops.checks import has_tangent
from megatron_hybrid.ops.contracts import BYTES, FLOATS, INTEGERS
from megatron_hybrid.ops.dispatch import Backend
from megatron_hybrid.ops.gradients import are_wanted
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates
from megatron_hybrid.ops.to_device import all_to_device, to_device

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels on the CPU, as tests do; read at import, as Triton does."""


def kernel_backend(
    name: str,
    module: str,
    libraries: Mapping[str, str] | None = None,
    suffix: str = "",
    has_gradient: bool = True,
) -> Backend:
    """Make the backend of a module with `run` and, where it has more to say than what no kernel
    takes, `verify` and `REMARKS`. It is imported at the first call. Gradients are those of what its
    `again` returns for the inputs, or of the reference.

    Args:
        name: of the backend.
        module: its full name.
        suffix: of the names of its functions.
        has_gradient: whether inputs stay as they are until the backward pass.
        libraries: modules without which the backend is missing, and what has them; Triton is one.
    """
    load = functools.cache(lambda: importlib.import_module(module))

    def run(*inputs: Any) -> Any:
        with _on_device_of(inputs):
            return getattr(load(), f"run{suffix}")(*inputs)

    def verify(*inputs: Any) -> str | None:
        if (reason := _refusal(inputs, has_gradient)) is not None:
            return reason
        own = getattr(load(), f"verify{suffix}", None)
        return None if own is None else own(*inputs)

    def again(*inputs: Any) -> Callable[..., Any] | None:
        own = getattr(load(), "again", None)
        return None if own is None else own(*inputs)

    def remarks() -> Sequence[str]:
        return getattr(load(), "REMARKS", ())

    libraries = {"triton": "triton", **(libraries or {})}
    absent = [what for library, what in libraries.items() if not is_there(library)]
    missing = f"{absent[0]} is not installed" if absent else None
    device_type = None if INTERPRETED else "cuda"
    return Backend(name, run, verify, missing, device_type, again=again, remarks=remarks)


def _on_device_of(inputs: tuple) -> AbstractContextManager:
    """Return a context with the device of the inputs, as Triton launches on the current one."""
    if INTERPRETED:
        return nullcontext()
    return torch.cuda.device(next(x.device for x in inputs if isinstance(x, torch.Tensor)))


def is_there(library: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


@dataclass(frozen=True)
class SequenceTable:
    """A layout as int32 tensors, made once per device and cached in the layout."""

    boundaries: Tensor
    """Flat row of each sequence's first token, and the number of tokens: `[R + 1]`."""
    starts: Tensor
    """Position of each sequence's first token: `[R]`."""
    numbers: Tensor
    """0, 1, .., one for each sequence and each capture."""
    rows: Tensor
    """The sequence of each token: `[num_tokens]`."""
    captures: Tensor
    """The layout's captures: `[n]`."""
    capture_owners: Tensor
    """The sequence of each: `[n]`."""
    capture_offsets: Tensor
    """Number of each sequence's first capture, and n: `[R + 1]`."""

    @classmethod
    def of(cls, layout: RaggedLayout, device: torch.device) -> SequenceTable:
        """Return the table of a layout."""

        def make() -> SequenceTable:
            owners, R = layout.capture_sequences, layout.num_sequences
            numbers = (
                layout.cu_seqlens,
                layout.start_positions,
                range(max(R, len(owners))),
                np.repeat(range(R), layout.lengths),
                layout.captures,
                owners,
                [bisect_left(owners, r) for r in range(R + 1)],
            )
            return cls(*all_to_device(numbers, device))

        return layout.cached(("sequence table", device), make)


def library_bounds(layout: RaggedLayout, device: torch.device) -> dict[str, Tensor]:
    """Return where sequences begin and end, as functions of fla-core take it: on the device, and on
    the host, so that they do not wait for it."""
    bounds = layout.cu_seqlens
    return {
        "cu_seqlens": layout.cached(("bounds", device), lambda: to_device(bounds, device)),
        "cu_seqlens_cpu": layout.cached(("bounds", "cpu"), lambda: torch.tensor(bounds)),
    }


def leave_unspecialized(kernel: Any, *names: str) -> None:
    """Let what Triton compiles of a library's kernel not depend on integers that differ between
    calls: else it compiles once more for 1 and for multiples of 16. Call it before the first
    launch.

    Args:
        kernel: a compiled or an autotuned function.
        names: of the arguments.
    """
    while not hasattr(kernel, "params") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    for param in getattr(kernel, "params", ()):  # interpreted ones have none
        if param.name in names:
            param.do_not_specialize = True


def aligned_rows(rows: Tensor) -> Tensor:
    """Return rows of a tensor as kernels take them. Triton compiles a kernel anew for a pointer
    that is no multiple of 16 bytes, so rows of another width are copied."""
    is_aligned = rows.stride(0) * rows.element_size() % 16 == 0
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


def _refusal(inputs: tuple, has_gradient: bool) -> str | None:
    """Return why no kernel of 16 and 32 bits can serve these inputs: they take vectors of
    neighbours alone, and have gradients of what nobody changes."""
    states = next((each for each in inputs if isinstance(each, SlotStates)), ())
    for tensor in states:
        if tensor is not None and tensor.is_floating_point() and tensor.dtype not in FLOATS:
            return f"it takes no states of {tensor.dtype}"
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    tensors = [each for each in tensors if each.dtype not in INTEGERS | BYTES]
    if (reason := input_refusal(*tensors)) is not None:
        return reason
    if any(map(has_tangent, tensors)):
        return "it has no derivative in forward mode, and one is wanted"
    changes = not has_gradient or any(isinstance(each, SlotStates) for each in inputs)
    if changes and are_wanted(inputs):
        return "it has no gradient of states and pages, and gradients are wanted"
    return None


def input_refusal(*tensors: Tensor | None) -> str | None:
    """Return why kernels of 16 and 32 bits cannot serve these tensors."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            return f"it takes no tensors of {tensor.dtype}"
        if tensor.is_neg():
            return "a tensor is negated when it is read"
        if tensor.dim() == 1 and not tensor.is_contiguous():
            return f"a vector has the stride {tensor.stride(0)}; it takes neighbours"
    return None


def tf32_refusal(*tensors: Tensor | None) -> str | None:
    """Return why kernels with float32 on tensor cores, which read 10 bits of it, cannot serve."""
    if INTERPRETED or torch.get_float32_matmul_precision() != "highest":
        return None
    if any(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors):
        return (
            "it multiplies float32 as TF32: torch.set_float32_matmul_precision('high') allows that"
        )
    return None
