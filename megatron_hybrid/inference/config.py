"""InferenceConfig: the settings of an engine."""

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Annotated, Literal, get_args

import torch

from megatron_hybrid.cache.matching import PrefixCachingMode
from megatron_hybrid.cache.pages.spec import BlockSize
from megatron_hybrid.cache.policy.protocol import POLICIES
from megatron_hybrid.inference.drafters import DRAFTERS
from megatron_hybrid.inference.sampling_params import Seed
from megatron_hybrid.utils.other_names import names_arguments
from megatron_hybrid.utils.validation import Range, check_fields

StateEncoding = Literal["exact", "bf16", "int8"]
STATE_ENCODINGS: tuple[StateEncoding, ...] = get_args(StateEncoding)
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Positive = Annotated[int, Range(ge=1, le=2**63 - 1)]


@names_arguments()
@dataclass
class InferenceConfig:
    """Settings of an engine: sizes, and the prefix-caching mode.

    Raises:
        ValueError: a field has an illegal value; the message names it and the limit.
        TypeError: there is no such field; the message gives the right one.
    """

    prefix_caching: PrefixCachingMode = "restore"
    """Mode of sharing. With "off" requests share nothing. With "memory_only" they share KV blocks,
    and every prompt token is computed. With "restore" recurrent states are restored, too, and the
    prefill starts at the end of the match."""

    block_size_tokens: BlockSize = 16
    """Tokens of one KV block."""

    cache_bytes: Positive | None = None
    """Size of the page pool on each rank, which holds the KV of running requests and the cache. By
    default it is the part `memory_fraction` of the memory that weights, live slots and one step of
    `max_tokens` leave free on the device. The engine's own `config` has the number."""

    memory_fraction: Annotated[float, Range(gt=0, le=1)] = 0.9
    """Part of the free memory that the page pool takes if `cache_bytes` is not set. On a CPU, whose
    memory other programs use, too, the pool takes at most a quarter."""

    max_requests: Positive = 64
    """Most requests that run at a time; each has a live slot outside the pool."""

    max_tokens: Positive = 2048
    """Token budget of one forward pass, for decodes and prefill chunks together. Layers with
    windows hold the KV of all these tokens during the pass, so a smaller budget leaves the cache
    more room."""

    short_prompt_share: Annotated[float, Range(ge=0, lt=1)] = 0.25
    """Part of the tokens of a step, after its decodes, that is reserved for short prompts, of which
    at most this many tokens are to be computed. So their first tokens do not wait until a long
    prompt is computed. With 0 prompts are computed one after the other."""

    max_sequence_length: Positive = 8192
    """Most tokens of one request, prompt and answer together."""

    kv_cache_dtype: torch.dtype | None = None
    """dtype of keys and values in the pool; by default it is that of the model's parameters."""

    state_encoding: StateEncoding = "exact"
    """Encoding of recurrent states in checkpoints; convolution tails and live states are always
    exact. "exact" keeps their own dtype. "bf16" rounds them to half of fp32's bytes. "int8" takes
    one byte per element, a quarter of fp32's bytes; its errors are about as large as those of bf16,
    but several times larger in small heads, such as 16 x 16 (docs/how/encodings.md)."""

    host_cache_bytes: Annotated[int, Range(ge=0, le=2**63 - 1)] = 0
    """Size of the host memory on each rank for records evicted from the page pool; 0 means none."""

    cache_dir: str | PathLike[str] | None = None
    """Folder for records evicted from host memory, or from the pool if `host_cache_bytes` is 0. The
    folder outlives the engine: the next engine with the same model and configuration uses its
    records. Each rank has its own folder in this one. Prompts of fewer tokens than a block are not
    saved."""

    disk_cache_bytes: Positive = 64 << 30
    """Most bytes of records in `cache_dir`, for each rank."""

    cache_policy: str = "hybrid"
    """Name of the policy that decides which states are saved and what is evicted first. "hybrid"
    decides by expected uses, which it learns (docs/how/policy.md). Other policies are those that a
    package of yours registers (docs/guides/own_model.md)."""

    speculation: str = "off"
    """Source of drafts, of which a step checks several; outputs are the same. "off" makes no
    drafts. "lookup" takes the tokens that followed the same tokens before, in the request or in
    other answers of its salt. "mtp" runs the model's MTP head (docs/guides/speculation.md). Other
    sources are those that a package of yours registers."""

    num_speculative_tokens: Positive = 3
    """Most drafts of a request in a step; a step has fewer drafts, or none, if more would lower the
    tokens per second. Each draft takes room for a live state of every request that may run."""

    cuda_graphs: bool = False
    """Capture the forward of decodes as CUDA graphs, one for each of a few numbers of decodes (two
    with drafts), when the engine is made. Other steps of up to 1,024 rows, such as the rest of a
    prompt after a prefix, are captured in pieces, with the ops over sequences between them. A
    forward that cannot be captured runs without a graph, and the log says why."""

    async_scheduling: bool = False
    """Plan and launch a step while the device runs the one before, whose tokens it takes there.
    Steps wait that follow a preemption, samples that fork or log-probs of a prompt, and so do all
    steps with `speculation` or over pipeline stages. Answers are the same; as a slot is free one
    step later, later prompts may find other prefixes."""

    warm_up: bool = True
    """On a CUDA device, run steps without a request before the first request, so that no request
    waits for kernels to be compiled, loaded and tuned. These steps have no other effect. A CPU
    compiles nothing. With `speculation` the warm-up times a few steps on any device, to see how
    many drafts save time; without a warm-up every draft counts as worth its time."""

    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Kind of log-probabilities that requests return. "raw_logprobs" are the model's own.
    "processed_logprobs" are those of the distribution that a token is drawn from, after all of the
    request's sampling parameters, and -inf for tokens that cannot be drawn. To prompt tokens, which
    were not drawn, only temperature and truncation apply."""

    random_seed: Seed = 0
    """Seed from which requests without a seed of their own get theirs."""

    verify_ranks: bool = False
    """For debugging: compare the decisions and computed tokens of all ranks of the model at every
    step."""

    rank_timeout: Annotated[float, Range(gt=0)] | None = None
    """Seconds without progress of another rank of the model, after which the job ends on all ranks.
    The limit holds for a rank that has not begun to make its engine, and for a rank within a step;
    within a call that loads, saves or moves memory it is ten times as long. A rank that computes
    makes progress; a rank in the caller's own code may take any time. By default it is 30 for
    making the engine and 120 in a step."""

    max_adapters: int = 0
    """Most low-rank adapters that the engine can hold, for requests to choose from
    (`load_adapter`). Each takes about max_adapter_rank * (in + out) numbers of each projection."""

    max_adapter_rank: Positive = 64
    """Largest rank of an adapter. Adapters of `q_proj`, `k_proj` and `v_proj` together count as one
    of three times their rank, as these are one projection here."""

    otlp_traces_endpoint: str = ""
    """URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, that gets spans
    of each request (OTLP over HTTP). They are children of the caller's span if the request has a
    header traceparent. It needs `pip install -e '.[tracing]'`. Without a URL there are no spans."""

    def __post_init__(self) -> None:
        check_fields(self)
        POLICIES.require(self.cache_policy, "cache_policy")
        DRAFTERS.require(self.speculation, "speculation", others=("off",))
        if self.cache_dir is not None and not fspath(self.cache_dir):
            raise ValueError(f"cache_dir is {self.cache_dir!r}; it must be a path, or None.")
        if (self.host_cache_bytes or self.cache_dir) and self.prefix_caching != "restore":
            raise ValueError(
                f"host_cache_bytes and cache_dir need prefix_caching='restore', it is "
                f"{self.prefix_caching!r}: where every token is computed nothing is fetched."
            )
        url = self.otlp_traces_endpoint
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"otlp_traces_endpoint is {url!r}; give a URL that begins with http.")
        if self.kv_cache_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype}; use torch.float32, torch.bfloat16, "
                "torch.float16 or None (that of the parameters)."
            )
