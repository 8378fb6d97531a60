"""WeightWatch: whether a model has other weights than those that its cache was computed with."""

from __future__ import annotations

import weakref
from functools import cache

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megatron_hybrid.models.hybrid_model import HybridModel

_watches: weakref.WeakSet[WeightWatch] = weakref.WeakSet()


class WeightWatch:
    """Notices that the weights of a model may have changed.

    It sees `train()` and `load_state_dict`, each step of a torch optimizer (also of those inside of
    megatron-core's) over its parameters or the fp32 copies that core keeps of them, a parameter or
    buffer that was replaced, and writes in place to one (`Tensor._version`). It does not see writes
    through `.data`.

    Args:
        model: its modules stay the same ones.
    """

    def __init__(self, model: HybridModel):
        self._model = model
        modules = list(model.modules())
        self._parameters = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        self._num_steps = 0
        self.accept()
        _watches.add(self)
        _watch_optimizers()

    def accept(self) -> None:
        """The weights as they are now are the ones that count."""
        self._accepted = self._mark()

    def has_changed(self) -> bool:
        """Whether they may be others than those that were accepted last. Waits for no device."""
        return self._mark() != self._accepted

    def _mark(self) -> tuple:
        tensors = [
            (id(tensor), 0 if tensor.is_inference() else tensor._version)
            for named in (*self._parameters, *self._buffers)
            for tensor in named.values()
            if tensor is not None
        ]
        return self._model.num_weight_changes, self._num_steps, tensors

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer made a step."""
        own: set[int] = set()
        for named in self._parameters:
            for parameter in named.values():
                own |= {id(parameter), id(getattr(parameter, "main_param", None))}
        own.discard(id(None))
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._num_steps += 1


@cache
def _watch_optimizers() -> None:
    """From the first engine of a process on."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    for watch in list(_watches):
        watch.note_step(optimizer)
