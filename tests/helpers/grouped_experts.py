"""The backend `grouped_mm` of `expert_mlps`, which a CPU is not given by default."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from megatron_hybrid.ops import dispatch

OP = dispatch.OPS["expert_mlps"]
BACKEND = next(backend for backend in OP.backends if backend.name == "grouped_mm")


@contextmanager
def grouped_experts() -> Iterator[None]:
    """Let it serve on the CPU, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "forced", "grouped_mm")
        patch.setattr(OP, "backends", [replace(BACKEND, device_type=None)])
        yield
