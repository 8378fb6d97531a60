"""WeightWatch: whether a model has other weights than those that its cache was computed with."""

from __future__ import annotations

import operator
import weakref
from functools import cache

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megatron_hybrid.models.hybrid_model import HybridModel

_watches: weakref.WeakSet[WeightWatch] = weakref.WeakSet()


class WeightWatch:
    """Notices that the weights of a model may have changed.

    It sees `train()` and `load_state_dict`; each step of a torch optimizer (also of those inside of
    megatron-core's) over the memory of its parameters, or over the fp32 copies that core keeps of
    them; modules, parameters and buffers that were replaced or came; and what was written to one in
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
        self._held = [
            held
            for module in self._model.modules()
            for held in (module._modules, module._parameters, module._buffers)
            if held
        ]
        values = self._values()
        self._references = [_nothing if value is None else weakref.ref(value) for value in values]
        self._accepted = self._counts(values)

    def has_changed(self) -> bool:
        """Whether they may be others than those that were accepted last. Waits for no device; takes
        some 0.2 us for each module and parameter."""
        values = self._values()
        same = [reference() for reference in self._references]
        return (
            len(values) != len(same)
            or not all(map(operator.is_, values, same))
            or self._counts(values) != self._accepted
        )

    def _values(self) -> list[nn.Module | Tensor | None]:
        return [value for held in self._held for value in held.values()]

    def _counts(self, values: list) -> list[int]:
        """What rises when they are written, and where they lie."""
        counts = [self._model.num_weight_changes, self._num_steps]
        for value in values:
            if isinstance(value, Tensor):
                if not value.is_inference():
                    counts.append(value._version)
                if type(value) in (Tensor, nn.Parameter):  # others may have no memory of their own
                    counts.append(value.data_ptr())
        return counts

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer made a step."""
        own: set[int] = set()
        for parameter in self._model.parameters():
            own |= {_memory(parameter), _memory(getattr(parameter, "main_param", None))}
        own.discard(0)
        if any(_memory(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._num_steps += 1


def _nothing() -> None:
    """A reference to None."""


def _memory(tensor: Tensor | None) -> int:
    """Where the memory begins that a tensor, or another one that it is a part of, lies in; 0: it
    has none."""
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter):
        return 0
    return tensor.untyped_storage().data_ptr()


@cache
def _watch_optimizers() -> None:
    """From the first engine of a process on."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    for watch in list(_watches):
        watch.note_step(optimizer)
