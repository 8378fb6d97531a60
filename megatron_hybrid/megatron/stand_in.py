"""Puts our names in the place of megatron-core's, for scripts that run unchanged."""

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType

import megatron_hybrid.megatron as door
from megatron_hybrid.compat import HAVE_COORDINATOR

_CORE = "megatron.core.inference"
MODULES = (
    f"{_CORE}.config",
    f"{_CORE}.sampling_params",
    f"{_CORE}.inference_request",
    f"{_CORE}.contexts",
    f"{_CORE}.contexts.static_context",
    f"{_CORE}.contexts.dynamic_context",
    f"{_CORE}.engines",
    f"{_CORE}.engines.dynamic_engine",
    f"{_CORE}.engines.static_engine",
    f"{_CORE}.model_inference_wrappers.gpt.gpt_inference_wrapper",
    f"{_CORE}.text_generation_controllers.text_generation_controller",
    # The client of newer releases speaks with their own coordinator.
    *(() if HAVE_COORDINATOR else (f"{_CORE}.inference_client",)),
    f"{_CORE}.apis",
    f"{_CORE}.apis.async_llm",
    f"{_CORE}.apis.llm",
    f"{_CORE}.apis.serve_config",
)
"""Modules of megatron-core that get all names of `door`. Their other names stay."""


def install() -> None:
    """Replace the names in this process. Call it before a script imports them."""
    for path in MODULES:
        vars(_module(path)).update({name: getattr(door, name) for name in door.__all__})


def _module(path: str) -> ModuleType:
    """Import a module of megatron-core, or make an empty one if this release lacks it, or it cannot
    be imported on this machine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about GPU libraries that our names do not need
            return import_module(path)
    except ImportError:
        # A package, so that the modules in it are found: those that are in `MODULES`.
        module = sys.modules[path] = module_from_spec(ModuleSpec(path, None, is_package=True))
        parent, _, name = path.rpartition(".")
        setattr(_module(parent), name, module)
        return module
