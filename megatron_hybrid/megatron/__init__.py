"""The door for Megatron's inference scripts: the names that they import, over our engine.

A script changes its imports to this package, or is started unchanged with
`python -m megatron_hybrid.megatron SCRIPT ...`. `docs/guides/from_megatron.md` compares both.
"""

from megatron_hybrid.megatron.config import (
    AsyncScheduleMode,
    CudaGraphSizingDistribution,
    InferenceConfig,
    KVCacheManagementMode,
    MambaInferenceStateConfig,
    PrefixCachingCoordinatorPolicy,
    PrefixCachingEvictionPolicy,
)
from megatron_hybrid.megatron.context import DynamicInferenceContext
from megatron_hybrid.megatron.controller import GPTInferenceWrapper, TextGenerationController
from megatron_hybrid.megatron.coordination import CoordinatorError, EngineState
from megatron_hybrid.megatron.engine import DynamicInferenceEngine, EngineSuspendedError
from megatron_hybrid.megatron.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)
from megatron_hybrid.megatron.llm import InferenceClient, MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_hybrid.megatron.request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    FinishedRequestRecord,
    Status,
)
from megatron_hybrid.megatron.sampling_params import SamplingParams
from megatron_hybrid.megatron.static import StaticInferenceContext, StaticInferenceEngine

__all__ = [
    "ActiveRequestCountOverflowError",
    "AsyncScheduleMode",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "CoordinatorError",
    "CudaGraphSizingDistribution",
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EngineState",
    "EngineSuspendedError",
    "FinishedRequestRecord",
    "GPTInferenceWrapper",
    "InferenceClient",
    "InferenceConfig",
    "KVCacheManagementMode",
    "MambaInferenceStateConfig",
    "MaxSequenceLengthOverflowError",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
    "RequestOverflowError",
    "SamplingParams",
    "ServeConfig",
    "StaticInferenceContext",
    "StaticInferenceEngine",
    "Status",
    "TensorStateDeallocatedError",
    "TextGenerationController",
    "TokenOverflowError",
]
