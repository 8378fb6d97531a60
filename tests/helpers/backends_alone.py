"""Keeps tests on a GPU from comparing an op's reference with itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_hybrid.ops import dispatch


def let_backends_serve_alone(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """From now on a test fails where tensors of a device are served by the reference of an op that
    has backends, and skips where the libraries of all its backends are missing.

    Returns:
        The references by the names of their ops, to compare with.
    """
    references = {name: op.reference for name, op in dispatch.OPS.items()}
    for name, op in dispatch.OPS.items():
        if op.backends:
            monkeypatch.setattr(op, "reference", partial(_on_a_cpu, op, references[name]))
    return references


def _on_a_cpu(op: dispatch.Op, reference: Callable[..., Any], *inputs: Any) -> Any:
    if all(each.device.type == "cpu" for each in inputs if isinstance(each, torch.Tensor)):
        return reference(*inputs)
    if all(backend.missing for backend in op.backends):
        pytest.skip(f"{op.name}: {', '.join(str(backend.missing) for backend in op.backends)}")
    pytest.fail(f"{op.name} is served by its reference: {op.refusals(*inputs)}")
