"""WeightWatch: whether a model has other weights than those that its cache was computed with."""

from __future__ import annotations

import weakref
from functools import cache

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megatron_hybrid.models.hybrid_model import HybridModel

_WITH_MEMORY = (Tensor, nn.Parameter)
"""Types whose memory is their own; that of a subclass may lie in other tensors."""
_watches: weakref.WeakSet[WeightWatch] = weakref.WeakSet()


class WeightWatch:
    """Notices that the weights of a model may have changed.

    It sees `train()` and `load_state_dict`; each step of a torch optimizer (also of those inside of
    megatron-core's) over the memory of its parameters, or over the fp32 copies that core keeps of
    them; modules, parameters and buffers that were replaced; and what was written to one in
    place (`Tensor._version`) or lies at another place (`parameter.data = ...`). It does not see
    writes through `.data`, nor hooks that were added.
    """

    def __init__(self, model: HybridModel):
        self._model = model
        self._num_steps = 0
        self.accept()
        _watches.add(self)
        _watch_optimizers()

    def accept(self) -> None:
        """The weights as they are now are the ones that count."""
        modules = list(self._model.modules())
        self._children = [module._modules for module in modules if module._modules]
        tensors = [held for module in modules for held in (module._parameters, module._buffers)]
        self._tensors = [held for held in tensors if held]
        gone = self._gone = []  # an id may come again, but not before its first owner has gone
        self._references = [
            weakref.ref(value, gone.append)
            for held in (*self._children, *self._tensors)
            for value in held.values()
            if value is not None
        ]
        self._accepted = self._mark()

    def has_changed(self) -> bool:
        """Whether they may be others than those that were accepted last. Waits for no device; takes
        some 0.3 us for each module and parameter."""
        return bool(self._gone) or self._mark() != self._accepted

    def _mark(self) -> list[int]:
        """Which modules and tensors there are, what rises when they are written, where they lie."""
        mark = [self._model.num_weight_changes, self._num_steps]
        mark += [id(module) for held in self._children for module in held.values()]
        for held in self._tensors:
            for tensor in held.values():
                mark.append(id(tensor))
                if type(tensor) in _WITH_MEMORY:
                    mark.append(tensor.data_ptr())
                if tensor is not None and not tensor.is_inference():
                    mark.append(tensor._version)
        return mark

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer made a step."""
        own: set[int] = set()
        for parameter in self._model.parameters():
            own |= {_memory(parameter), _memory(getattr(parameter, "main_param", None))}
        own.discard(0)
        if any(_memory(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._num_steps += 1


def _memory(tensor: Tensor | None) -> int:
    """Where the memory begins that a tensor, or another one that it is a part of, lies in; 0: it
    has none."""
    if type(tensor) not in _WITH_MEMORY:
        return 0
    return tensor.untyped_storage().data_ptr()


@cache
def _watch_optimizers() -> None:
    """From the first engine of a process on."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    for watch in list(_watches):
        watch.note_step(optimizer)
