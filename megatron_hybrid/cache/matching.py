"""Matching: shared and skipped tokens of a prompt (q and p), and the miss reason. Read-only.

Prefixes are never shared between salts. Only the operator may learn that another salt has the
prefix: a tenant who knew could guess the prompts of other tenants, block by block. So counters and
`explain` show it, but a request's own report does not.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.index.tree import Checkpoint, Kind, Path, common_prefix
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.report import MissReason, PrefixReport

PrefixCachingMode = Literal["off", "memory_only", "restore"]
PREFIX_CACHING_MODES: tuple[PrefixCachingMode, ...] = get_args(PrefixCachingMode)
MAX_SALT_ENTRIES = 4096
"""Most first blocks whose salt is known; the least recently used is dropped first."""


@dataclass(frozen=True)
class Hit:
    """Result of one walk down the tree. Valid until the tree changes."""

    path: Path
    """The known and the held tokens of the prompt."""
    shared: int
    """q: the path's depth, or p without full attention."""
    skipped: int
    """p."""
    checkpoint: Checkpoint | None
    """The checkpoint to restore; its position is p."""
    reason: MissReason | None
    in_flight: int = 0
    """Leading tokens for which a running request will soon save a state, if more than p."""

    def report(self, prompt_tokens: int) -> PrefixReport:
        """Return the report of a request that starts here."""
        return PrefixReport(prompt_tokens, self.shared, self.skipped, self.reason)


def miss_reason(path: Path, tokens: np.ndarray, skipped: int, in_flight: int) -> MissReason | None:
    """Return why a request that may restore skips no more than `skipped` tokens: the first cause
    that applies, or None if all that was ever cached is used."""
    if skipped == len(tokens):
        return None
    if in_flight:
        return MissReason.IN_FLIGHT
    if path.known > path.depth:
        return MissReason.KV_EVICTED
    if path.depth == 0:
        return MissReason.NO_SHARED_PREFIX
    if skipped == path.depth:
        return None
    missed = path.missed_state(above=skipped)
    if missed is None:
        return MissReason.STATE_NEVER_SAVED
    return MissReason.STATE_EVICTED if missed.was_stored else MissReason.BUDGET


def in_flight(leases: Iterable[Lease], tokens: np.ndarray, salt: str, skipped: int) -> int:
    """Return the deepest position of these tokens, beyond `skipped`, whose state a running request
    has yet to save, or 0 if there is none."""
    return max((will_save(lease, tokens, salt, skipped) for lease in leases), default=0)


def will_save(lease: Lease, tokens: np.ndarray, salt: str, skipped: int) -> int:
    """Return `in_flight` of one running request."""
    if lease.salt != salt:
        return 0
    due = [
        p for p, kind in lease.wanted.items() if p > lease.done and kind is not Kind.OPPORTUNISTIC
    ]
    due += [reservation.position for reservation in lease.reservations]
    end = min(len(tokens), len(lease.tokens))
    due = [position for position in due if skipped < position <= end]
    if not due or tokens[min(due) - 1] != lease.tokens[min(due) - 1]:
        return 0
    common = common_prefix(tokens[: max(due)], lease.tokens[: max(due)])
    return max((position for position in due if position <= common), default=0)


class PrefixLookup:
    """Matches prompts with the tree. saving: leases of running requests that have yet to save
    states."""

    def __init__(self, mode: str, evictor: Evictor, saving: Iterable[Lease]):
        self._index, self._spec = evictor.index, evictor.spec
        self._mode, self._saving = mode, saving
        self.salts: OrderedDict[bytes, str] = OrderedDict()
        """Salt under which each first block was last used. The tree may have forgotten it since."""

    def note_salt(self, tokens: np.ndarray, salt: str) -> None:
        """Note that the first block of these tokens (int32, at least a block) is known under this
        salt."""
        key = tokens[: self._spec.block_size_tokens].tobytes()
        self.salts[key] = salt
        self.salts.move_to_end(key)
        if len(self.salts) > MAX_SALT_ENTRIES:
            self.salts.popitem(last=False)

    def look_up(self, tokens: np.ndarray, salt: str, recompute_reason: str | None) -> Hit:
        """Match a prompt.

        With "off" q = p = 0. With "memory_only" or a recompute_reason p = 0. With "restore" p is
        the deepest checkpoint <= q. In pure attention p = q, but the prompt's last token is
        computed for its logits if there is no checkpoint at its end.
        """
        if self._mode == "off":
            return Hit(Path(None, [], 0, 0), 0, 0, None, MissReason.MODE)
        path = self._index.walk(salt, tokens)
        shared = path.depth if self._spec.kv_pages_per_block else 0
        forced = None if recompute_reason is None else MissReason(recompute_reason)
        if self._mode == "memory_only":
            forced = MissReason.MODE
        if forced:
            reason = miss_reason(path, tokens, 0, in_flight(self._saving, tokens, salt, 0))
            if reason is not MissReason.NO_SHARED_PREFIX:  # else no mode could reuse anything
                reason = forced
            return Hit(path, shared, 0, None, reason)
        checkpoint = path.deepest_checkpoint()
        skipped = checkpoint.position if checkpoint else 0
        if not self._spec.needs_state and skipped < len(tokens):
            checkpoint, skipped = None, min(path.depth, len(tokens) - 1)
        coming = in_flight(self._saving, tokens, salt, skipped)
        reason = miss_reason(path, tokens, skipped, coming)
        return Hit(path, max(shared, skipped), skipped, checkpoint, reason, coming)

    def known_elsewhere(self, tokens: np.ndarray, salt: str, known: int) -> int:
        """Return the number of leading tokens known under another salt, or 0 if it is less than a
        block, or if at least a block is known under `salt`."""
        size = self._spec.block_size_tokens
        if known >= size or self._mode != "restore":
            return 0
        other = self.salts.get(tokens[:size].tobytes(), salt)
        elsewhere = 0 if other == salt else self._index.walk(other, tokens).known
        return elsewhere if elsewhere >= size else 0

    def whole_blocks(self, tokens: np.ndarray, salt: str, hit: Hit) -> Hit:
        """Return the part of a hit that takes no room besides the request: the whole blocks of full
        attention."""
        size = self._spec.block_size_tokens
        path = self._index.walk(salt, tokens[: hit.shared // size * size], hit.path)
        alone = 0 if self._spec.needs_state else min(path.depth, len(tokens) - 1)
        skipped = min(hit.skipped, alone)
        reason = MissReason.NO_ROOM if skipped < hit.skipped else hit.reason
        return Hit(path, path.depth, skipped, None, reason)
