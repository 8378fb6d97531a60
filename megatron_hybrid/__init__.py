"""Hybrid language models on megatron-core, with prefix sharing at any token.

model, tokenizer = load_pretrained("demo")
engine = DynamicInferenceEngine(model, tokenizer, InferenceConfig(prefix_caching="restore"))
results = engine.generate(["Once upon a time"], SamplingParams(num_tokens_to_generate=32))
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from megatron_hybrid.utils.other_names import attributes_of
from megatron_hybrid.version import __version__

if TYPE_CHECKING:
    from megatron_hybrid.cache.policy.protocol import POLICIES
    from megatron_hybrid.cache.report import MissReason, PrefixReport
    from megatron_hybrid.checkpoints.checkpoint import (
        CheckpointError,
        save_checkpoint,
        save_huggingface,
    )
    from megatron_hybrid.checkpoints.huggingface import ADAPTERS
    from megatron_hybrid.checkpoints.megatron.built_model import from_megatron
    from megatron_hybrid.checkpoints.megatron.torch_dist import load_megatron
    from megatron_hybrid.checkpoints.pretrained import load_pretrained
    from megatron_hybrid.distributed.ranks import RankError
    from megatron_hybrid.distributed.watchdog import RankFailedError
    from megatron_hybrid.inference.async_engine import AsyncEngine
    from megatron_hybrid.inference.config import InferenceConfig
    from megatron_hybrid.inference.drafters import DRAFTERS
    from megatron_hybrid.inference.engine import DynamicInferenceEngine
    from megatron_hybrid.inference.exclusive import EngineBusyError, EngineSuspendedError
    from megatron_hybrid.inference.requests.options import RequestOptions
    from megatron_hybrid.inference.requests.request import GenerationResult, Request, RequestOutput
    from megatron_hybrid.inference.sampling_params import SamplingParams, ThinkingBudget
    from megatron_hybrid.models.config.hybrid_config import HybridConfig
    from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
    from megatron_hybrid.models.layer_pattern import LAYER_KINDS
    from megatron_hybrid.text.guide import Guide

# MKL then gives a row of a product the same bits in any number of rows on an Intel CPU, at no cost,
# in attention and in what `ops.linear` leaves to it. It reads this at a process's first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = [
    "ADAPTERS",
    "DRAFTERS",
    "LAYER_KINDS",
    "POLICIES",
    "AsyncEngine",
    "CheckpointError",
    "DynamicInferenceEngine",
    "EngineBusyError",
    "EngineSuspendedError",
    "GenerationResult",
    "Guide",
    "HybridConfig",
    "HybridModel",
    "InferenceConfig",
    "MissReason",
    "PrefixReport",
    "RankError",
    "RankFailedError",
    "Request",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ThinkingBudget",
    "__version__",
    "build_hybrid_model",
    "from_megatron",
    "load_megatron",
    "load_pretrained",
    "save_checkpoint",
    "save_huggingface",
]

_MODULES = {
    "ADAPTERS": "checkpoints.huggingface",
    "DRAFTERS": "inference.drafters",
    "LAYER_KINDS": "models.layer_pattern",
    "POLICIES": "cache.policy.protocol",
    "AsyncEngine": "inference.async_engine",
    "CheckpointError": "checkpoints.checkpoint",
    "DynamicInferenceEngine": "inference.engine",
    "EngineBusyError": "inference.exclusive",
    "EngineSuspendedError": "inference.exclusive",
    "GenerationResult": "inference.requests.request",
    "Guide": "text.guide",
    "HybridConfig": "models.config.hybrid_config",
    "HybridModel": "models.hybrid_model",
    "InferenceConfig": "inference.config",
    "MissReason": "cache.report",
    "PrefixReport": "cache.report",
    "RankError": "distributed.ranks",
    "RankFailedError": "distributed.watchdog",
    "Request": "inference.requests.request",
    "RequestOptions": "inference.requests.options",
    "RequestOutput": "inference.requests.request",
    "SamplingParams": "inference.sampling_params",
    "ThinkingBudget": "inference.sampling_params",
    "build_hybrid_model": "models.hybrid_model",
    "from_megatron": "checkpoints.megatron.built_model",
    "load_megatron": "checkpoints.megatron.torch_dist",
    "load_pretrained": "checkpoints.pretrained",
    "save_checkpoint": "checkpoints.checkpoint",
    "save_huggingface": "checkpoints.checkpoint",
}
"""Modules of names. A module is imported when a name is first asked for: torch and megatron-core
take seconds, which `import megatron_hybrid` and the command line's help need not wait for."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        advised = attributes_of(__name__).get(name)
        remedy = f": {advised}" if advised else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
