"""Tensors that follow from weights alone, worked out once where somebody says when these change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

Derived = dict[tuple[nn.Module, str], tuple[Tensor, Callable[[], Tensor]]]
"""Results by module and name, each with what worked it out."""
_kept: ContextVar[Derived | None] = ContextVar("kept", default=None)


def from_weights(module: nn.Module, name: str, make: Callable[[], Tensor]) -> Tensor:
    """`make()`, or the result of an earlier call of `keep_derived`.

    Args:
        module: whose weights `make` reads, and nothing else.
        name: of the result among those of the module.
        make: works it out.
    """
    kept = _kept.get()
    if kept is None:
        return make()
    if (module, name) not in kept:
        kept[module, name] = make(), make
    return kept[module, name][0]


@torch.inference_mode()
def work_out_again(kept: Derived) -> None:
    """Set all results to what follows from the weights now, at their addresses."""
    for tensor, make in kept.values():
        if (made := make()) is not tensor:  # which may be a weight itself
            tensor.copy_(made)


@contextmanager
def keep_derived(kept: Derived) -> Iterator[None]:
    """Keep results in `kept`, which the caller clears, or has worked out again, when weights
    change. No gradient may be wanted inside."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
