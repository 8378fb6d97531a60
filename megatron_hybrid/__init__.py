"""Hybrid language models on megatron-core, with prefix sharing at any token.

model, tokenizer = load_pretrained("demo")
engine = DynamicInferenceEngine(model, tokenizer, InferenceConfig(prefix_caching="restore"))
results = engine.generate(["Once upon a time"], SamplingParams(num_tokens_to_generate=32))
"""

from megatron_hybrid import compat  # noqa: F401  (explains a broken megatron-core before all else)
from megatron_hybrid.cache.report import MissReason, PrefixReport
from megatron_hybrid.checkpoints.checkpoint import (
    CheckpointError,
    save_checkpoint,
    save_huggingface,
)
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.request import GenerationResult, Request
from megatron_hybrid.inference.sampling import SamplingParams
from megatron_hybrid.inference.stream import StreamEvent
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.version import __version__

__all__ = [
    "CheckpointError",
    "DynamicInferenceEngine",
    "GenerationResult",
    "HybridConfig",
    "HybridModel",
    "InferenceConfig",
    "MissReason",
    "PrefixReport",
    "Request",
    "SamplingParams",
    "StreamEvent",
    "__version__",
    "build_hybrid_model",
    "load_pretrained",
    "save_checkpoint",
    "save_huggingface",
]
