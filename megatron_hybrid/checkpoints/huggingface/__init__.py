"""Hugging Face architectures, one file a family: their config and tensors, here and back again.

See docs/guides/own_model.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from megatron_hybrid.checkpoints.huggingface.base import Adapter
from megatron_hybrid.utils.registry import Registry, check_class


def _own() -> dict[str, type[Adapter]]:
    """Collect the adapters in the files of this folder, by the `model_type`s that they read."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    things = dict.fromkeys(
        thing
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Adapter)
    )
    del things[Adapter]
    return {kind: each for each in things for kind in each.model_types + each.composite_types}


def _check(model_type: str, adapter: type[Adapter]) -> None:
    what = f"the adapter of the model_type {model_type!r}"
    check_class(what, adapter, Adapter)
    if model_type not in (types := adapter.model_types + adapter.composite_types):
        raise ValueError(f"{what} is {adapter.__name__}, which reads {', '.join(types)} alone")


ADAPTERS: Registry[type[Adapter]] = Registry("adapter", "megatron_hybrid.adapters", _check, _own())
"""Every known `model_type` of Hugging Face, and the class of its adapter."""
