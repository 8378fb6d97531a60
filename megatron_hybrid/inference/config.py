"""InferenceConfig: the settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath

import torch

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.utils.validation import is_int, is_number

STATE_ENCODINGS = ("exact", "bf16", "int8")
SPECULATIONS = ("off", "lookup", "mtp")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


@dataclass
class InferenceConfig:
    """Settings of an engine: sizes, and the prefix-caching mode.

    Raises:
        ValueError, TypeError: a field has an illegal value; the message names it and the limit.
    """

    prefix_caching: str = "restore"
    """The mode of sharing. "off": requests share nothing. "memory_only": requests share KV blocks,
    and every prompt token is computed. "restore": recurrent states are restored, too, and the
    prefill starts at the end of the match."""

    block_size_tokens: int = 16
    """Tokens of one KV block: a power of two from 16 to 256."""

    cache_bytes: int | None = None
    """Bytes of the page pool on each rank, which holds the KV of running requests and the cache.
    None: the part `memory_fraction` of the memory that weights, live slots and one step of
    `max_tokens` leave free on the device. The engine's own `config` has the number."""

    memory_fraction: float = 0.9
    """Part of the free memory that the pool takes if `cache_bytes` is None: above 0, up to 1. On a
    CPU, whose memory other programs use, too, the pool takes at most a quarter."""

    max_requests: int = 64
    """Most requests that run at a time; each has a live slot outside the pool."""

    max_tokens: int = 2048
    """Token budget of one forward pass, for decodes and prefill chunks together. Layers with
    windows hold the KV of all these tokens during the pass, so a smaller budget leaves the cache
    more room."""

    max_sequence_length: int = 8192
    """Most tokens of one request, prompt and answer together."""

    kv_cache_dtype: torch.dtype | None = None
    """dtype of keys and values in the pool; None: the dtype of the model's parameters."""

    state_encoding: str = "exact"
    """Encoding of recurrent states in checkpoints; convolution tails and live states are always
    exact. "exact": in their own dtype. "bf16": rounded, in half of fp32's bytes. "int8": one byte
    per element, a quarter of fp32's bytes; errors are about as large as those of bf16, but several
    times larger in small heads, such as 16 x 16 (docs/how/encodings.md)."""

    host_cache_bytes: int = 0
    """Bytes of host memory on each rank for records evicted from the pool; 0: none."""

    cache_dir: str | PathLike[str] | None = None
    """Folder for records evicted from host memory, or from the pool if `host_cache_bytes` is 0. The
    folder outlives the engine: the next engine with the same model and configuration uses its
    records."""

    disk_cache_bytes: int = 64 << 30
    """Most bytes of records in `cache_dir`, for each rank."""

    speculation: str = "off"
    """Source of drafts, of which a step checks several; outputs are the same. "off": there are no
    drafts. "lookup": the tokens that followed the same tokens before, in the request or in other
    answers of its salt. "mtp": the model's part for multi-token prediction
    (docs/guides/speculation.md)."""

    num_speculative_tokens: int = 3
    """Most drafts of a request in a step; a step has fewer drafts, or none, if more would lower the
    tokens per second. Each draft takes room for a live state of every request that may run."""

    cuda_graphs: bool = False
    """Capture the forward of decodes as CUDA graphs, one for each of a few numbers of decodes (two
    with drafts). The warm-up captures them; without a warm-up, the first step of each number does.
    A forward that cannot be captured runs without a graph, and the log says why. Steps with a part
    of a prompt always run without a graph."""

    warm_up: bool = True
    """On a CUDA device, run steps without a request before the first request, so that no request
    waits for kernels to be compiled, loaded and tuned. These steps leave nothing else behind. A CPU
    compiles nothing. With `speculation` the warm-up times a few steps on any device, to see how
    many drafts save time; without a warm-up every draft counts as worth its time."""

    logprobs_mode: str = "raw_logprobs"
    """Kind of log-probabilities that requests return. "raw_logprobs": the model's own.
    "processed_logprobs": those of the distribution that a token is drawn from, after all of the
    request's sampling parameters; -inf for tokens that cannot be drawn. To prompt tokens, which
    were not drawn, only temperature and truncation apply."""

    random_seed: int = 0
    """Source of the seeds of requests that have no seed."""

    verify_ranks: bool = False
    """For debugging: compare the decisions and computed tokens of all ranks of the model at every
    step."""

    rank_timeout: float | None = None
    """Seconds without progress of another rank of the model, after which the job ends on all ranks.
    The limit holds for a rank that has not begun to make its engine, and for a rank within a step;
    within a call that loads, saves or moves memory it is ten times as long. A rank that computes
    makes progress; a rank in the caller's own code may take any time. None: 30 for making the
    engine, 120 in a step."""

    def __post_init__(self) -> None:
        if self.prefix_caching not in PREFIX_CACHING_MODES:
            raise ValueError(
                f"prefix_caching is {self.prefix_caching!r}; use one of {PREFIX_CACHING_MODES}."
            )
        if self.state_encoding not in STATE_ENCODINGS:
            raise ValueError(
                f"state_encoding is {self.state_encoding!r}; use one of {STATE_ENCODINGS}."
            )
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"logprobs_mode is {self.logprobs_mode!r}; use one of {LOGPROBS_MODES}."
            )
        if self.speculation not in SPECULATIONS:
            raise ValueError(f"speculation is {self.speculation!r}; use one of {SPECULATIONS}.")
        for field in (
            "num_speculative_tokens",
            "block_size_tokens",
            "cache_bytes",
            "max_requests",
            "max_tokens",
            "max_sequence_length",
            "disk_cache_bytes",
            "host_cache_bytes",
        ):
            value, least = getattr(self, field), int(field != "host_cache_bytes")
            if field == "cache_bytes" and value is None:
                continue
            if not is_int(value) or not least <= value < 1 << 63:
                raise ValueError(
                    f"{field} is {value!r}; it must be a whole number from {least} to 2^63 - 1."
                )
            setattr(self, field, int(value))
        if not is_number(self.memory_fraction) or not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction is {self.memory_fraction!r}; it must be a number above 0, and at "
                "most 1."
            )
        if self.cache_dir is not None and (
            not isinstance(self.cache_dir, (str, PathLike)) or not fspath(self.cache_dir)
        ):
            raise ValueError(f"cache_dir is {self.cache_dir!r}; it must be a path, or None.")
        if (self.host_cache_bytes or self.cache_dir) and self.prefix_caching != "restore":
            raise ValueError(
                f"host_cache_bytes and cache_dir need prefix_caching='restore', it is "
                f"{self.prefix_caching!r}: where every token is computed nothing is fetched."
            )
        timeout = self.rank_timeout
        if timeout is not None and not (is_number(timeout) and timeout > 0):
            raise ValueError(
                f"rank_timeout is {timeout!r}; it must be a number of seconds above 0, or None."
            )
        if not is_int(self.random_seed):
            raise ValueError(f"random_seed is {self.random_seed!r}; it must be a whole number.")
        self.random_seed = int(self.random_seed)
        for field in ("cuda_graphs", "warm_up", "verify_ranks"):
            if not isinstance(value := getattr(self, field), bool):
                raise ValueError(f"{field} is {value!r}; it must be True or False.")
        block = self.block_size_tokens
        if not 16 <= block <= 256 or block & (block - 1):
            raise ValueError(f"block_size_tokens is {block}; use a power of two from 16 to 256.")
        if self.kv_cache_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype}; use torch.float32, torch.bfloat16, "
                "torch.float16 or None (that of the parameters)."
            )
