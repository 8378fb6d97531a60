"""PrefixReport of one request, miss reasons, and the counters of the whole cache."""

from dataclasses import dataclass
from enum import StrEnum

ADMITTED, RESERVED, NOT_RESERVED, EVICTED_STATE, EVICTED_TAIL, CLEARED = range(6)
"""Kinds of decisions in the digest: integers, whose hash is the same in every process."""


class MissReason(StrEnum):
    """The reason why a prompt skips no more tokens: exactly one for each miss."""

    NO_SHARED_PREFIX = "no_shared_prefix"
    """No known prefix starts like this prompt."""
    MODE = "mode"
    """The mode computes all tokens: "off" or "memory_only"."""
    PROMPT_LOG_PROBS = "prompt_log_probs"
    """Log-probs of the prompt were requested, so every token is computed."""
    STATE_NEVER_SAVED = "state_never_saved"
    """No state was ever saved or wanted after p among the known tokens."""
    STATE_EVICTED = "state_evicted"
    """A state was saved after p among the known tokens, then evicted."""
    BUDGET = "budget"
    """A state after p was wanted, but never saved: too few candidates for eviction had a lower
    value."""
    KV_EVICTED = "kv_evicted"
    """KV of the following tokens was cached, then evicted."""
    SALT = "salt"
    """The tokens are known under another salt only. For the operator, in counters and `explain`:
    the request's own report gives the reason within its salt (usually `no_shared_prefix`), so that
    no tenant can probe the prompts of others."""
    IN_FLIGHT = "in_flight"
    """A running request will soon save a state after p for the same prefix."""
    NOT_ADMITTED = "not_admitted"
    """The request was cancelled before its prompt was looked up."""
    NO_ROOM = "no_room"
    """The pool cannot hold this request together with the state that it would have resumed from."""


@dataclass
class PrefixReport:
    """Shared and skipped tokens of one request."""

    prompt_tokens: int
    shared_tokens: int
    """q: leading prompt tokens whose full-attention KV was reused (exact, not rounded to a block);
    p without full attention. KV of a local layer can be resumed, but not shared: it is written
    again from p on."""
    skipped_tokens: int
    """p: leading prompt tokens that were not computed; p <= q."""
    miss_reason: MissReason | None
    """Why no more tokens were skipped, or None if all that was cached of this prompt was used."""
    checkpoints_saved: int = 0
    checkpoints_skipped: int = 0
    """Wanted checkpoints for which there was no room."""
    fetched_tokens: int = 0
    """Skipped tokens that were fetched from host memory or disk."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed by the first prefill; always prompt - skipped."""
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
    """`acquire`, `extend` and `fork` calls that found no room, or were held back."""
    held_back: int = 0
    """`acquire` calls that would have found room only by evicting candidates of a higher value."""
    checkpoints_saved: int = 0
    checkpoints_no_room: int = 0
    checkpoints_duplicate: int = 0
    """States saved twice by concurrent requests; the second copy was dropped."""
    checkpoints_evicted: int = 0
    kv_blocks_evicted: int = 0
    tokens_forgotten: int = 0
    """Known tokens dropped from the tree; without full attention, prompts match by known tokens
    alone."""

    def count(self, report: PrefixReport) -> None:
        """Count an admitted request."""
        self.requests += 1
        self.prompt_tokens += report.prompt_tokens
        self.shared_tokens += report.shared_tokens
        self.skipped_tokens += report.skipped_tokens
