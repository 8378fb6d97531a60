"""Activation recompute: the backward pass computes again what a part would else have saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_hybrid.models.layer_pattern import LAYER_KINDS

if TYPE_CHECKING:
    from megatron_hybrid.models.config.hybrid_config import HybridConfig
    from megatron_hybrid.models.mixers.base import Mixer

T = TypeVar("T")
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
_once: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("once", default=None)


def is_recomputing() -> bool:
    """Return whether a part runs for the second time, in the backward pass: what is counted or
    logged in a forward pass is not counted again."""
    return _recomputing.get()


def once(function: Callable[[], T]) -> T:
    """Return `function()`; in a part that is recomputed, the result of its first run again, as
    other micro-batches may have changed meanwhile what it reads."""
    known = _once.get()
    return function() if known is None else known(function)


def recompute(function: Callable, *args: Any) -> Any:
    """Return `function(*args)`, of which the backward pass keeps the arguments alone, and runs it
    again: with the same random numbers, so with equal results.

    torch's checkpoint without re-entrance, as core's own needs CUDA, and takes no gradients to what
    `function` reads in addition to its arguments.
    """
    return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts)


def recompute_if(wanted: bool, module: nn.Module, function: Callable, *args: Any) -> Any:
    """Return `function(*args)`, recomputed if that is wanted and the module trains."""
    if wanted and module.training and torch.is_grad_enabled():
        return recompute(function, *args)
    return function(*args)


@contextmanager
def recompute_output(output: Tensor, function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator:
    """Recompute an output around all of its uses, `output = function(x)`: the backward pass
    computes it again from x, which is kept, where the uses would have saved it."""
    address, again = output.untyped_storage().data_ptr(), []

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != address:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not again:
            with torch.no_grad():
                again.append(function(x))
        return again[0].as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def is_selected(config: HybridConfig, *names: str | None) -> bool:
    """Return whether a part's name is in the config's `recompute_modules` and those are in use."""
    if config.recompute_granularity != "selective":
        return False
    return any(name in config.recompute_modules for name in names)


def check_recompute_modules(config: HybridConfig, mixers: Mapping[str, type[Mixer]]) -> None:
    """Check that the config's `recompute_modules` are parts of the model's layers.

    Args:
        mixers: of the whole model, by the symbols of the layer pattern.

    Raises:
        ValueError: another name; the message lists those that there are.
    """
    if config.recompute_granularity != "selective":
        return
    known: dict[str, set[str]] = {"layernorm": {"each layer"}}
    for symbol, mixer in mixers.items():
        for name in {mixer.recompute_name, *mixer.recompute_parts} - {None}:
            known.setdefault(name, set()).add(LAYER_KINDS[symbol].meaning)
    for name in config.recompute_modules:
        if name not in known:
            choices = ", ".join(
                f"{part!r} ({', '.join(sorted(kinds))})" for part, kinds in sorted(known.items())
            )
            raise ValueError(
                f"recompute_modules has {name!r}, which no layer of layer_pattern "
                f"{config.layer_pattern!r} can recompute. Use names of {choices}, or "
                "recompute_granularity='full'."
            )


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return what torch enters around the forward and around the recomputation."""
    tracker, results = get_cuda_rng_tracker(), []
    states = tracker.get_states() if tracker.is_initialized() else None

    def run(function: Callable[[], Any]) -> Any:
        results.append(function())
        return results[-1]

    return _set(_once, run), _recomputation(states, results)


@contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def _recomputation(tracker_states: dict | None, results: list) -> Iterator[None]:
    """Restore core's generators (torch restores its own), and keep the results of `once`."""
    tracker, known = get_cuda_rng_tracker(), iter(results)
    if tracker_states is not None:
        present = tracker.get_states()
        tracker.set_states(tracker_states)
    try:
        with _set(_recomputing, True), _set(_once, lambda _: next(known)):
            yield
    finally:
        if tracker_states is not None:
            tracker.set_states(present)
