"""WeightWatch: notices changes of a model's weights, which make its cache invalid."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, compress

from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megatron_hybrid.models.hybrid_model import HybridModel

_WITH_MEMORY = (Tensor, nn.Parameter)
"""Types with memory of their own; a subclass may wrap other tensors."""
_version = operator.attrgetter("_version")
_watches: weakref.WeakSet[WeightWatch] = weakref.WeakSet()


class WeightWatch:
    """Notices that what a model computes may have changed.

    It sees `train()` and `load_state_dict`; steps of a torch optimizer (also one of megatron-core)
    over the memory of the parameters, or over core's fp32 copies of them; added, removed and
    replaced modules, parameters and buffers, a parametrization among them; forward hooks, also
    torch's global ones, and a `forward` that is set on a module; writes in place
    (`Tensor._version`); and new memory (`parameter.data = ...`).

    It does not see writes that count no version: those through `.data`, and those of collectives
    (`dist.broadcast`, `recv` and so on) straight into a parameter.
    """

    def __init__(self, model: HybridModel):
        self._model = model
        self._num_changes = 0  # changes that leave no other mark
        self.accept()
        _watches.add(self)
        _watch_optimizers()

    def accept(self) -> None:
        """Accept the present weights as those of the cache."""
        modules = list(self._model.modules())
        children = [module._modules for module in modules]
        hooks = [hooks for module in modules for hooks in forward_hooks(module)]
        hooks += [_global_forward_hooks, _global_forward_pre_hooks]
        held = [held for module in modules for held in (module._parameters, module._buffers)]
        self._empty = [own for own in (*children, *hooks, *held) if not own]  # they may grow
        self._children, self._hooks, self._tensors = (
            list(filter(None, own)) for own in (children, hooks, held)
        )
        self._attributes = [module.__dict__ for module in modules]
        tensors = [value for held in self._tensors for value in held.values() if value is not None]
        self._has_memory = [type(value) in _WITH_MEMORY for value in tensors]
        self._has_version = [not value.is_inference() for value in tensors]
        gone = self._gone = []  # freed objects, whose ids may be reused
        self._references = [
            weakref.ref(value, gone.append)
            for held in (*self._children, *self._tensors)
            for value in held.values()
            if value is not None
        ]
        self._accepted = list(self._marks())

    def note_change(self) -> None:
        """Count a change that the watch cannot see."""
        self._num_changes += 1

    def has_changed(self) -> bool:
        """Return whether the weights may differ from the last accepted ones. It waits for no device
        and takes about 0.2 us for each module and parameter."""
        return bool(self._gone) or any(map(operator.ne, self._marks(), self._accepted))

    def _marks(self) -> Iterator[list]:
        """Yield ids of modules and tensors, numbers of hooks (each process gives a number once) and
        functions set as `forward`; then addresses of the memory of the same tensors, then their
        counters of writes."""
        flat = chain.from_iterable
        mark: list = [self._model.num_weight_changes, self._num_changes, any(self._empty)]
        mark += map(id, flat(map(dict.values, self._children)))
        mark += flat(self._hooks)
        mark += [held["forward"] for held in self._attributes if "forward" in held]
        tensors = [t for t in flat(map(dict.values, self._tensors)) if t is not None]
        mark += map(id, tensors)
        yield mark
        yield list(map(Tensor.data_ptr, compress(tensors, self._has_memory)))
        yield list(map(_version, compress(tensors, self._has_version)))

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer over the memory of the parameters."""
        own: set[int] = set()
        for parameter in self._model.parameters():
            own |= {_memory(parameter), _memory(getattr(parameter, "main_param", None))}
        own.discard(0)
        if any(_memory(p) in own for group in optimizer.param_groups for p in group["params"]):
            self.note_change()


def unrecorded_calls(model: nn.Module) -> list[Callable]:
    """List the functions set as `forward`, and the hooks of others than the engine. They run with
    the modules of a model, but may not run in a recording of it."""
    modules = list(model.modules())
    hooks = chain.from_iterable(map(forward_hooks, modules))
    found = [*hooks, _global_forward_hooks, _global_forward_pre_hooks]
    calls = [call for own in found for call in own.values() if not hasattr(call, "is_recorded")]
    return calls + [vars(module)["forward"] for module in modules if "forward" in vars(module)]


def forward_hooks(module: nn.Module) -> tuple[dict, dict]:
    """Return the hooks that may change what a module computes, by number."""
    return module._forward_pre_hooks, module._forward_hooks


def _memory(tensor: Tensor | None) -> int:
    """Return the start of the memory of a tensor, or of the one that it is a view of, or 0."""
    if type(tensor) not in _WITH_MEMORY:
        return 0
    return tensor.untyped_storage().data_ptr()


@cache
def _watch_optimizers() -> None:
    """Register the hook, with the first engine of a process."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    for watch in list(_watches):
        watch.note_step(optimizer)
