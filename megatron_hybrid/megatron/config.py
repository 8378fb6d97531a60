"""Megatron's InferenceConfig, and its translation for our engine.

Fields and defaults are those of megatron-core 0.19 and of Megatron-LM main.
`docs/reference/megatron_fields.md` has the table of all fields.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import InitVar, dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Literal

import torch

from megatron_hybrid.cache.pages.spec import BlockSize, CacheSpec
from megatron_hybrid.distributed.ranks import replica_of
from megatron_hybrid.inference.config import InferenceConfig as EngineConfig
from megatron_hybrid.inference.config import LogprobsMode, Positive
from megatron_hybrid.inference.memory.cache_pool import cache_spec_of
from megatron_hybrid.inference.sampling_params import Share
from megatron_hybrid.megatron.errors import require
from megatron_hybrid.models.hybrid_model import HybridModel, unwrap
from megatron_hybrid.utils.validation import Range, check_fields, type_hints

GB = 1 << 30
DEFAULT_MAX_TOKENS = 16384
"""Most tokens of a forward pass, if `max_tokens` is None."""
DEFAULT_SEED = 42
"""Seed of draws, if the model's config has no `inference_sampling_seed`."""
SLOT_SHARE = 0.5
"""Largest part of the buffer for live slots if neither `max_requests` nor `mamba_memory_ratio` is
given; the rest is KV and cache."""
REQUEST_MULTIPLE = 4
"""Number whose multiple a derived `max_requests` is."""
MEGATRON_STATES = 3
"""Most states that Megatron extracts from one request in a step."""


class InvalidConfigError(AssertionError, ValueError):
    """A setting is refused. It has two bases, since Megatron asserts some and checks others."""


class PrefixCachingEvictionPolicy(StrEnum):
    """Orders in which cached blocks are evicted."""

    REF_ZERO = "ref_zero"
    LRU = "lru"


class PrefixCachingCoordinatorPolicy(StrEnum):
    """Rules by which a coordinator spreads requests over replicas."""

    LONGEST_PREFIX = "longest_prefix"
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    LOAD_BALANCED = "load_balanced"
    ROUND_ROBIN = "round_robin"


class KVCacheManagementMode(StrEnum):
    """Ways to treat the cache of a suspended engine."""

    PERSIST = "persist"
    """The cache stays in device memory."""
    OFFLOAD = "offload"
    """The cache waits in host memory; device memory is given back."""
    RECOMPUTE = "recompute"
    """The cache is dropped; device memory is given back."""


class CudaGraphSizingDistribution(StrEnum):
    """Spacings of the sizes of CUDA graphs."""

    EXPONENTIAL = "exponential"
    LINEAR = "linear"


class AsyncScheduleMode(StrEnum):
    """Times at which a step is prepared."""

    LEGACY = "legacy"
    ASYNC = "async"


@dataclass
class MambaInferenceStateConfig:
    """Recurrent states of a model, as Megatron declares them. Ours follow from the model itself.

    Raises:
        ValueError: Mamba-2 and Gated DeltaNet are among the layers, whose states differ in shape.
    """

    layer_type_list: list[str]
    conv_states_shape: tuple[int, ...]
    ssm_states_shape: tuple[int, ...]
    conv_states_dtype: torch.dtype
    ssm_states_dtype: torch.dtype
    mamba_chunk_size: int = 128
    ssm_chunk_alignment: int | None = None
    """Megatron saves states at multiples of it, default `mamba_chunk_size`; we at any token."""
    gdp_num_householder: int = 0

    def __post_init__(self):
        if self.ssm_chunk_alignment is None:
            self.ssm_chunk_alignment = self.mamba_chunk_size
        if {"M", "G"} <= set(self.layer_type_list):
            raise ValueError(
                "layer_type_list has M (Mamba-2) and G (Gated DeltaNet), whose states differ in "
                "shape: leave mamba_inference_state_config None, since states follow from the "
                "model here"
            )

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        conv_states_dtype: torch.dtype | None = None,
        ssm_states_dtype: torch.dtype | None = None,
    ) -> MambaInferenceStateConfig | None:
        """Read it from a model, wrapped or bare. Return None for a model with neither Mamba-2 nor
        Gated DeltaNet layers.

        Raises:
            ValueError: the model has both.
        """
        model = unwrap(model)
        decoder = model.decoder
        symbols = list(getattr(decoder, "layer_type_list", None) or ())
        kind = next((symbol for symbol in symbols if symbol in "MG"), None)
        if kind is None:
            return None
        conv_shape, ssm_shape = decoder.mamba_state_shapes_per_request()
        mixer = getattr(decoder.layers[symbols.index(kind)], "mixer", None)
        dtype = model.config.params_dtype
        return cls(
            symbols,
            conv_shape,
            ssm_shape,
            conv_states_dtype or dtype,
            ssm_states_dtype or dtype,
            getattr(mixer, "chunk_size", cls.mamba_chunk_size),
        )


@dataclass
class InferenceConfig:
    """Megatron's inference settings; `docs/reference/megatron_fields.md` says what each of them
    does here. A config of megatron-core itself works as well.

    Raises:
        InvalidConfigError: a field has an illegal value; the message names the legal ones.
    """

    block_size_tokens: BlockSize = 256
    buffer_size_gb: Annotated[float, Range(gt=0, le=1e9)] = 20
    paused_buffer_size_gb: float | None = None
    mamba_inference_state_config: Any = None
    mamba_memory_ratio: Annotated[float, Range(gt=0, lt=1)] | None = None
    max_requests: Positive | None = None
    max_tokens: Positive | None = None
    unified_memory_level: int = 0
    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.PERSIST
    num_cuda_graphs: Annotated[int, Range(ge=-1)] | None = None
    cuda_graph_mixed_prefill_count: int | None = 16
    cuda_graph_sizing_distribution: CudaGraphSizingDistribution = (
        CudaGraphSizingDistribution.EXPONENTIAL
    )
    use_cuda_graphs_for_non_decode_steps: bool = True
    cuda_graph_all_prefills: bool = False
    cuda_graph_max_tokens: int = 512
    static_kv_memory_pointers: bool = False
    max_sequence_length: Positive = 2560
    pg_collection: Any = None
    use_flashinfer_fused_rope: bool | None = False
    materialize_only_last_token_logits: bool = True
    enable_chunked_prefill: bool = False
    num_speculative_tokens: int = 0
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = (
        PrefixCachingEvictionPolicy.REF_ZERO
    )
    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = (
        PrefixCachingCoordinatorPolicy.LOAD_BALANCED
    )
    prefix_caching_routing_alpha: Share = 0.5
    prefix_caching_mamba_gb: Annotated[float, Range(ge=0, le=1e9)] | None = None
    track_paused_request_events: bool = False
    track_generated_token_events: bool = False
    metrics_writer: Any = None
    logging_step_interval: int = 0
    sampling_backend: Literal["torch", "flashinfer"] = "torch"
    offset_sampling_seed_by_dp_rank: bool = True
    async_sched_mode: AsyncScheduleMode = AsyncScheduleMode.LEGACY
    logprobs_mode: LogprobsMode = "raw_logprobs"
    request_metadata_types: list[tuple[str, torch.dtype]] | None = None
    use_synchronous_zmq_collectives: bool = False
    disable_ep_consensus: bool = False
    ep_consensus_interval: int = 20
    image_preprocessing_config: Any = None
    verbose: InitVar[bool] = False

    def __post_init__(self, verbose: bool):
        for name, kind in type_hints(InferenceConfig).items():
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                setattr(self, name, _member(name, kind, getattr(self, name)))
        try:
            check_fields(self, "InferenceConfig.")
        except ValueError as error:
            raise InvalidConfigError(*error.args) from error

    @classmethod
    def of(cls, config: Any) -> InferenceConfig:
        """Copy a config, ours or megatron-core's own.

        Raises:
            TypeError: it is of neither class.
        """
        require(config, cls, "inference_config", "block_size_tokens", "max_sequence_length")
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})


def _member(name: str, kind: type[StrEnum], value: object) -> StrEnum:
    """Return the member of an enum for its value, or for a member of megatron-core's."""
    try:
        return kind(getattr(value, "value", value))
    except ValueError:
        raise InvalidConfigError(
            f"InferenceConfig.{name} is {value!r}; use one of {', '.join(kind)}"
        ) from None


WITHOUT_EFFECT = {
    "paused_buffer_size_gb": "paused requests wait in host memory, which grows as needed",
    "unified_memory_level": "the pool is in device memory; there is no unified memory",
    "num_cuda_graphs": "there is a graph for each of a few numbers of decodes, up to max_requests",
    "cuda_graph_mixed_prefill_count": "steps with a part of a prompt have graphs in pieces",
    "cuda_graph_sizing_distribution": "sizes of graphs follow from max_requests",
    "cuda_graph_all_prefills": "steps with a part of a prompt have graphs in pieces",
    "cuda_graph_max_tokens": "sizes of graphs follow from max_requests",
    "static_kv_memory_pointers": "graphs are captured again where memory moves",
    "use_flashinfer_fused_rope": "our kernel rotates, or plain torch",
    "prefix_caching_eviction_policy": "blocks and states are kept by their value for later prompts",
    "metrics_writer": "engine.engine.metrics() has the metrics, in Prometheus' format",
    "logging_step_interval": "engine.engine.stats() has the counters",
    "sampling_backend": "sampling is a pure function of logits and seed, in torch",
    "request_metadata_types": "the engine keeps a request's own parameters",
    "use_synchronous_zmq_collectives": "replicas meet in changes of state alone",
    "disable_ep_consensus": "all expert-parallel ranks run the same steps",
    "ep_consensus_interval": "all expert-parallel ranks run the same steps",
}
"""Fields without effect, and why. A value other than the default gets a warning."""


def check(config: InferenceConfig) -> None:
    """Check a config, and warn of its fields without effect.

    Raises:
        InvalidConfigError: a field has a value that is not supported; the message says why.
    """
    defaults = {field.name: field.default for field in fields(config)}
    if (images := config.image_preprocessing_config) is not None:
        raise InvalidConfigError(
            f"InferenceConfig.image_preprocessing_config is {images!r}: prompts are text; leave it "
            "None"
        )
    for name, reason in WITHOUT_EFFECT.items():
        if (value := getattr(config, name)) != defaults[name]:
            warnings.warn(f"InferenceConfig.{name}={value!r} has no effect: {reason}", stacklevel=3)
    if (states := config.mamba_inference_state_config) is not None:
        if not hasattr(states, "ssm_states_dtype"):
            raise InvalidConfigError(
                f"InferenceConfig.mamba_inference_state_config is {states!r}; leave it None"
            )
        if states.ssm_states_dtype != torch.float32:
            warnings.warn(
                f"ssm_states_dtype={states.ssm_states_dtype} has no effect: states have the "
                "model's recurrent_state_dtype, fp32 unless its config says otherwise",
                stacklevel=3,
            )


def _states_budget(
    config: InferenceConfig, spec: CacheSpec, max_requests: int, max_tokens: int
) -> int:
    """Return the bytes that Megatron sets aside for the states of prefixes; 0 if it keeps none.

    Raises:
        ValueError: there are fewer bytes than Megatron needs: for the states that one step can
            extract, and one that stays.
    """
    given = config.prefix_caching_mamba_gb
    if not config.enable_prefix_caching or not spec.state_bytes:
        return 0
    if not given:
        warnings.warn(
            f"InferenceConfig.prefix_caching_mamba_gb is {given!r}: equal prefixes share KV "
            "blocks, and every prompt token is computed. Set it to the GB for recurrent states, "
            "so that matched tokens are skipped",
            stacklevel=4,
        )
        return 0
    extracted = min(spec.num_blocks(max_tokens), MEGATRON_STATES * max_requests)
    least = (extracted + 1) * spec.state_bytes
    if given * GB < least:
        raise ValueError(
            f"InferenceConfig.prefix_caching_mamba_gb is {given!r}; it must be {least / GB:.4g} or "
            f"more, for {extracted + 1} states of {spec.state_bytes} bytes: raise it, or lower "
            "max_tokens"
        )
    return int(given * GB)


def engine_config(config: InferenceConfig, model: HybridModel, model_config: Any) -> EngineConfig:
    """Translate a config for our engine. The live slots of `max_requests` come out of
    `buffer_size_gb` first, as in Megatron; the rest, and `prefix_caching_mamba_gb`, is the pool.

    model_config: that of the model that the script built; it has the seed, and says whether
        decodes are captured as CUDA graphs.

    Raises:
        InvalidConfigError: the buffer is too small for this model, or a field has an illegal value.
    """
    parameter = next(model.parameters())
    spec = cache_spec_of(
        model.cache_requirements(),
        model.config.hidden_size,
        parameter.dtype,
        config.block_size_tokens,
    )
    total = int(config.buffer_size_gb * GB)
    max_tokens = config.max_tokens or DEFAULT_MAX_TOKENS
    max_requests = config.max_requests
    tp_size = model.pg_collection.tp.size()
    if (max_requests or 0) % tp_size:
        raise InvalidConfigError(
            f"InferenceConfig.max_requests is {max_requests}; it must be a multiple of the "
            f"tensor-parallel size {tp_size}"
        )
    if max_tokens < (max_requests or 0):
        raise InvalidConfigError(
            f"InferenceConfig.max_tokens is {max_tokens}, less than max_requests={max_requests}: "
            "each running request has a token in a forward pass, so raise one or lower the other"
        )
    if max_requests is None:
        share = config.mamba_memory_ratio or SLOT_SHARE
        max_requests = _derived_requests(spec, total, int(total * share), max_tokens, model)
    left = total - max_requests * spec.slot_bytes
    if left <= 0:
        raise InvalidConfigError(
            f"max_requests={max_requests} take {max_requests * spec.slot_bytes} bytes of states, "
            f"and buffer_size_gb={config.buffer_size_gb} is {total}: raise the buffer or lower "
            "max_requests"
        )
    seed = getattr(model_config, "inference_sampling_seed", DEFAULT_SEED)
    is_deterministic = getattr(model_config, "deterministic_mode", False)
    if config.offset_sampling_seed_by_dp_rank and not is_deterministic:
        seed += replica_of(model.pg_collection)[0]
    states = _states_budget(config, spec, max_requests, max_tokens)
    skips = states or not spec.state_bytes
    mode = ("restore" if skips else "memory_only") if config.enable_prefix_caching else "off"
    # Megatron's engines replay graphs if layers have core's own; the second name is older.
    has_graphs = getattr(model_config, "cuda_graph_impl", "none") == "local"
    has_graphs |= bool(getattr(model_config, "enable_cuda_graph", False))
    return EngineConfig(
        prefix_caching=mode,
        block_size_tokens=config.block_size_tokens,
        cache_bytes=left + states,
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_sequence_length=config.max_sequence_length,
        speculation="lookup" if config.num_speculative_tokens else "off",
        num_speculative_tokens=config.num_speculative_tokens or 1,
        cuda_graphs=has_graphs,
        async_scheduling=config.async_sched_mode is not AsyncScheduleMode.LEGACY,
        logprobs_mode=config.logprobs_mode,
        random_seed=seed,
    )


def _derived_requests(
    spec: CacheSpec, total: int, slots_total: int, max_tokens: int, model: HybridModel
) -> int:
    """Return how many requests fit: their live slots into `slots_total` bytes, one block of each
    into the buffer, one token of each into a forward pass."""
    block_bytes = spec.page_bytes * max(1, spec.kv_pages_per_block)
    count = min(slots_total // spec.slot_bytes, total // block_bytes, max_tokens)
    multiple = math.lcm(REQUEST_MULTIPLE, model.pg_collection.tp.size())
    return max(1, count - count % multiple if count >= multiple else count)
