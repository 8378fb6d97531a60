"""Hybrid language models on megatron-core, with prefix sharing at any token.

model, tokenizer = load_pretrained("demo")
engine = DynamicInferenceEngine(model, tokenizer, InferenceConfig(prefix_caching="restore"))
results = engine.generate(["Once upon a time"], SamplingParams(num_tokens_to_generate=32))
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
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


@cache
def _modules() -> dict[str, str]:
    """Return the module of each name, from the imports above, which only type checkers run. A name
    is imported when it is first asked for: torch and megatron-core take seconds, which `import
    megatron_hybrid` and the command line's help need not wait for."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    (imports,) = (node.body for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    if name not in _modules():
        advised = attributes_of(__name__).get(name)
        remedy = f": {advised}" if advised else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
    value = getattr(import_module(_modules()[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
