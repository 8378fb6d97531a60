"""Tensors that follow from weights alone, worked out once where somebody says when these change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

import torch
from torch import Tensor, nn

from megatron_hybrid.ops.linear import reordered
from megatron_hybrid.ops.tape import once
from megatron_hybrid.utils.huge_pages import use_huge_pages

Derived = dict[tuple[nn.Module, str], tuple[Tensor, Callable[[], Tensor]]]
"""Results by module and name, each with what worked it out."""
_kept: ContextVar[tuple[Derived | None, bool]] = ContextVar("kept", default=(None, False))


def from_weights(module: nn.Module, name: str, make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, or the result of an earlier call of `keep_derived`.

    Args:
        module: whose weights `make` reads, and nothing else.
        name: of the result among those of the module.
        make: works it out.
    """
    kept, _ = _kept.get()
    if kept is None:
        return make()
    if (module, name) not in kept:
        kept[module, name] = once(make), make
    return kept[module, name][0]


def reordered_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a module's weight for `ops.linear`: in the layout that is read fastest, where an
    engine keeps that."""
    kept, has_room = _kept.get()
    if kept is None or not has_room:
        return weight
    found = kept.get((module, "reordered"))  # in one look: a product may take as long as two
    return found[0] if found else from_weights(module, "reordered", lambda: reordered(weight))


@torch.inference_mode()
def work_out_again(kept: Derived) -> None:
    """Set all results to what follows from the weights now, at their addresses."""
    for tensor, make in kept.values():
        if (made := make()) is not tensor:  # which may be a weight itself
            tensor.copy_(made)


@contextmanager
def keep_derived(kept: Derived, has_room: bool = False) -> Iterator[None]:
    """Keep results in `kept`, which the caller clears, or has worked out again, when weights
    change. No gradient may be wanted inside. has_room: for `reordered_weight`."""
    token, count = _kept.set((kept, has_room)), len(kept)
    try:
        yield
    finally:
        _kept.reset(token)
    if has_room and len(kept) > count:
        use_huge_pages(tensor for tensor, _ in islice(kept.values(), count, None))
