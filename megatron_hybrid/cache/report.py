"""What a request is told about its prefix, and the counters of the whole cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ADMITTED, RESERVED, NOT_RESERVED, EVICTED_STATE, EVICTED_TAIL, CLEARED = range(6)
"""Kinds of decisions in the digest (plain integers: their hash is the same in every process)."""


class MissReason(StrEnum):
    """Why a prompt's cached part was not used further. Exactly one per miss."""

    NO_SHARED_PREFIX = "no_shared_prefix"
    """Nothing that starts like this prompt is in the cache, or ever was as far as is known."""
    MODE = "mode"
    """The mode forbids it: "off", or "memory_only", where all tokens are computed."""
    PROMPT_LOG_PROBS = "prompt_log_probs"
    """The request asked for log-probs of its prompt, so every token has to be computed."""
    STATE_NEVER_SAVED = "state_never_saved"
    """The tokens are known further than any state that was ever saved or wanted."""
    STATE_EVICTED = "state_evicted"
    """A state was saved after p among the known tokens, and had to make room."""
    BUDGET = "budget"
    """A state after p was wanted and never saved: it found no room among what is worth less."""
    KV_EVICTED = "kv_evicted"
    """The tokens after the known ones were cached, and had to make room."""
    SALT = "salt"
    """The tokens are known under another salt only. For who runs the engine, in counters and
    `explain`: the report of such a request says what holds within its own salt (`no_shared_prefix`,
    as a rule), or one tenant could probe for the prompts of others."""
    IN_FLIGHT = "in_flight"
    """A running request is computing a state that would have served; it is not finished."""
    NOT_ADMITTED = "not_admitted"
    """The request was cancelled before its prompt was looked up."""
    NO_ROOM = "no_room"
    """The pool cannot hold this request beside what it would have resumed from."""


@dataclass
class PrefixReport:
    """What one request shared and skipped of its prompt."""

    prompt_tokens: int
    shared_tokens: int
    """q: leading prompt tokens whose KV of full attention was reused; p where no layer attends to
    everything. A local layer's KV can be resumed, not shared: it is written again from p on."""
    skipped_tokens: int
    """p: leading prompt tokens that were not computed; p <= q."""
    miss_reason: MissReason | None
    """None when nothing that was ever cached of this prompt went unused."""
    checkpoints_saved: int = 0
    checkpoints_skipped: int = 0
    """Checkpoints that were wanted and found no room."""
    fetched_tokens: int = 0
    """Of the skipped tokens those that host memory or the disk had, and the pool had not."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the first prefill runs; skipped + computed == prompt, always."""
        return self.prompt_tokens - self.skipped_tokens


@dataclass
class CacheStats:
    """Counters since the cache was made. A fork is a request that skips what is there of its
    prompt, as it would be if it came a moment later."""

    requests: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    skipped_tokens: int = 0
    refused: int = 0
    """`acquire`, `extend` and `fork` calls that did not fit, or were held back."""
    held_back: int = 0
    """`acquire` calls that would have fitted at the cost of what is worth more."""
    checkpoints_saved: int = 0
    checkpoints_no_room: int = 0
    checkpoints_duplicate: int = 0
    """Saved twice by requests that ran side by side; the second copy was given back."""
    checkpoints_evicted: int = 0
    kv_blocks_evicted: int = 0
    tokens_forgotten: int = 0
    """Known tokens that were dropped from the index; where nothing attends to everything they are
    all that a prompt can be matched by."""

    def count(self, report: PrefixReport) -> None:
        """A request was admitted."""
        self.requests += 1
        self.prompt_tokens += report.prompt_tokens
        self.shared_tokens += report.shared_tokens
        self.skipped_tokens += report.skipped_tokens
