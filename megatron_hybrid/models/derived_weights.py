"""Tensors that follow from weights alone, worked out once where somebody says when these change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

_kept: ContextVar[dict[tuple[nn.Module, str], Tensor] | None] = ContextVar("kept", default=None)


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
        kept[module, name] = make()
    return kept[module, name]


@contextmanager
def keep_derived(kept: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Keep results in `kept`, which the caller clears when weights change. No gradient may be
    wanted inside."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
