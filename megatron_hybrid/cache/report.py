"""PrefixReport of one request, miss reasons, and the counters of the whole cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ADMITTED, RESERVED, NOT_RESERVED, EVICTED_STATE, EVICTED_TAIL, CLEARED = range(6)
"""Kinds of decisions in the digest: integers, whose hash is the same in every process."""


class MissReason(StrEnum):
    """Why a prompt skips no more tokens. Exactly one per miss."""

    NO_SHARED_PREFIX = "no_shared_prefix"
    """No known prefix starts like this prompt."""
    MODE = "mode"
    """The mode computes all tokens: "off" or "memory_only"."""
    PROMPT_LOG_PROBS = "prompt_log_probs"
    """Log-probs of the prompt were requested, so every token has to be computed."""
    STATE_NEVER_SAVED = "state_never_saved"
    """No state was ever saved or wanted after p among the known tokens."""
    STATE_EVICTED = "state_evicted"
    """A state was saved after p among the known tokens, and evicted."""
    BUDGET = "budget"
    """A state after p was wanted and never saved: too little of lesser value could be evicted."""
    KV_EVICTED = "kv_evicted"
    """KV of the following tokens was cached, and evicted."""
    SALT = "salt"
    """The tokens are known under another salt only. For the operator, in counters and `explain`:
    the request's own report gives the reason within its salt (usually `no_shared_prefix`), so that
    no tenant can probe for the prompts of others."""
    IN_FLIGHT = "in_flight"
    """A running request is still computing a state that would serve."""
    NOT_ADMITTED = "not_admitted"
    """The request was cancelled before its prompt was looked up."""
    NO_ROOM = "no_room"
    """The pool cannot hold this request together with the state that it would have resumed from."""


@dataclass
class PrefixReport:
    """Shared and skipped tokens of one request."""

    prompt_tokens: int
    shared_tokens: int
    """q: leading prompt tokens whose full-attention KV was reused; p without full attention. A
    local layer's KV can be resumed, not shared: it is written again from p on."""
    skipped_tokens: int
    """p: leading prompt tokens that were not computed; p <= q."""
    miss_reason: MissReason | None
    """None: all of this prompt that was ever cached was used."""
    checkpoints_saved: int = 0
    checkpoints_skipped: int = 0
    """Wanted checkpoints that found no room."""
    fetched_tokens: int = 0
    """Skipped tokens that were fetched from host memory or disk."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the first prefill runs; skipped + computed == prompt, always."""
        return self.prompt_tokens - self.skipped_tokens


@dataclass
class CacheStats:
    """Counters since the cache was made. A fork counts as a request that skips the computed part of
    its prompt."""

    requests: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    skipped_tokens: int = 0
    refused: int = 0
    """`acquire`, `extend` and `fork` calls that did not fit, or were held back."""
    held_back: int = 0
    """`acquire` calls that would have fitted, by evicting candidates of a higher value."""
    checkpoints_saved: int = 0
    checkpoints_no_room: int = 0
    checkpoints_duplicate: int = 0
    """Saved twice by concurrent requests; the second copy was dropped."""
    checkpoints_evicted: int = 0
    kv_blocks_evicted: int = 0
    tokens_forgotten: int = 0
    """Known tokens that were dropped from the tree; without full attention, prompts are matched by
    them alone."""

    def count(self, report: PrefixReport) -> None:
        """A request was admitted."""
        self.requests += 1
        self.prompt_tokens += report.prompt_tokens
        self.shared_tokens += report.shared_tokens
        self.skipped_tokens += report.skipped_tokens
