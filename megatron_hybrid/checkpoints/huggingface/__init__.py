"""Hugging Face architectures, one file each: their config and tensors, here and back again.

A file holds an `ADAPTER`; the names under which `config.json` knows it are its `model_types`. The
file's own name does not matter. See docs/guides/own_model.md.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from megatron_hybrid.checkpoints.huggingface.base import Adapter

_SHARED = ("base", "fields", "layouts", "tensors")  # what the adapters are made of


@cache
def adapters() -> dict[str, Adapter]:
    """Every known `model_type` of Hugging Face -> its adapter."""
    found = {}
    for module in iter_modules(__path__):
        if module.name not in _SHARED:
            adapter = import_module(f"{__name__}.{module.name}").ADAPTER
            types = adapter.model_types + adapter.composite_types
            found.update(dict.fromkeys(types, adapter))
    return found
