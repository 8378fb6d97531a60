"""ReferencePolicy: the model that a run begins with, for losses that compare with it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.training.lora import adapters_of


class ReferencePolicy:
    """The base of a model with adapters, which takes no memory; a frozen copy of any other model.

    Args:
        model: this stage of the model, with its first weights; every rank makes one.
        has_adapters: whether only its adapters are trained.
    """

    def __init__(self, model: HybridModel, has_adapters: bool):
        self._model = model
        if not has_adapters:
            groups = model.pg_collection
            self._model = build_hybrid_model(model.config, groups).requires_grad_(False).eval()
            self._model.load_state_dict(model.state_dict())
        self._adapters = [each.lora for each in adapters_of(self._model).values()]

    @contextmanager
    def policy(self) -> Iterator[nn.Module]:
        """Yield a module that computes as the reference within this context."""
        was_training = self._model.training
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield self._model.eval()
        finally:
            for adapter in self._adapters:
                adapter.is_on = True
            self._model.train(was_training)
