"""Puts our names in the place of megatron-core's, for scripts that run unchanged."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType

import megatron_hybrid.megatron as door
from megatron_hybrid.compat import HAVE_COORDINATOR

_CORE = "megatron.core.inference"
_CONTEXT = (
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "RequestOverflowError",
    "TokenOverflowError",
)
_ENGINE = ("DynamicInferenceEngine", "EngineSuspendedError")
_REQUEST = (
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "FinishedRequestRecord",
    "Status",
)

NAMES = {
    f"{_CORE}.config": (
        "AsyncScheduleMode",
        "CudaGraphSizingDistribution",
        "InferenceConfig",
        "KVCacheManagementMode",
        "MambaInferenceStateConfig",
        "PrefixCachingCoordinatorPolicy",
        "PrefixCachingEvictionPolicy",
    ),
    f"{_CORE}.sampling_params": ("SamplingParams",),
    f"{_CORE}.inference_request": _REQUEST,
    f"{_CORE}.contexts": (*_CONTEXT, "StaticInferenceContext"),
    f"{_CORE}.contexts.static_context": ("StaticInferenceContext",),
    f"{_CORE}.contexts.dynamic_context": (
        *_CONTEXT,
        "ContextErrorFactory",
        "MaxSequenceLengthOverflowError",
        "TensorStateDeallocatedError",
    ),
    f"{_CORE}.engines": (*_ENGINE, "StaticInferenceEngine"),
    f"{_CORE}.engines.dynamic_engine": (*_ENGINE, "EngineState"),
    f"{_CORE}.engines.static_engine": ("StaticInferenceEngine",),
    f"{_CORE}.model_inference_wrappers.gpt.gpt_inference_wrapper": ("GPTInferenceWrapper",),
    f"{_CORE}.text_generation_controllers.text_generation_controller": (
        "TextGenerationController",
    ),
    # Newer releases' own client speaks with their own coordinator.
    **({} if HAVE_COORDINATOR else {f"{_CORE}.inference_client": ("InferenceClient",)}),
    f"{_CORE}.apis": (
        "DynamicInferenceRequest",
        "DynamicInferenceRequestRecord",
        "MegatronAsyncLLM",
        "MegatronLLM",
        "SamplingParams",
        "ServeConfig",
    ),
    f"{_CORE}.apis.async_llm": ("MegatronAsyncLLM",),
    f"{_CORE}.apis.llm": ("MegatronLLM",),
    f"{_CORE}.apis.serve_config": ("ServeConfig",),
}
"""Module of megatron-core -> the names in it that are replaced. Its other names stay."""


def install() -> None:
    """Replace the names, in this process. Call it before a script imports them."""
    for path, names in NAMES.items():
        module = _module(path)
        for name in names:
            setattr(module, name, getattr(door, name))


def _module(path: str) -> ModuleType:
    """The module of megatron-core, or an empty one where this release has none, or it cannot be
    imported on this machine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about GPU libraries that our names do not need
            return import_module(path)
    except ImportError:
        # A package, so that the modules in it are found: those that are in `NAMES`.
        module = sys.modules[path] = module_from_spec(ModuleSpec(path, None, is_package=True))
        parent, _, name = path.rpartition(".")
        setattr(_module(parent), name, module)
        return module
