"""WantedStates: the positions of running requests whose states are saved, or only watched.
ExpectedRequests: waiting requests, which give the states that they will resume from a known use."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Origin, unless_opportunistic
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.policy.protocol import Prompt


class WantedStates:
    """Lets the policy choose these positions, and keeps the records of them in the tree."""

    def __init__(self, evictor: Evictor):
        self.saving: dict[Lease, None] = {}
        """Leases that `saves_more`: look-ups scan only these."""
        self._evictor, self._index, self._policy = evictor, evictor.index, evictor.policy

    def choose(
        self,
        lease: Lease,
        resumed: Checkpoint | None,
        known: int,
        declared: Sequence[int],
        messages: Sequence[int],
        has_room: bool,
    ) -> None:
        """Choose the positions of a prefill whose states are worth saving, as if there were no
        opportunistic states. Arguments as in `Prompt`; resumed: the state that it resumes from."""
        skipped = lease.skipped_tokens
        if resumed is not None and resumed.kind is Kind.OPPORTUNISTIC:
            kept = unless_opportunistic(resumed)
            skipped = kept.position if kept else 0
        length = lease.prompt_tokens
        prompt = Prompt(length, skipped, known, declared, messages, lease.lost_fork, has_room)
        wanted, watched = self._policy.positions(prompt)
        lease.unwatched.update(watched)
        if lease.skipped_tokens in wanted:
            self.keep(resumed, wanted[lease.skipped_tokens], lease.origin)
        self.set(lease, {p: kind for p, kind in wanted.items() if p > lease.skipped_tokens})

    def set(self, lease: Lease, wanted: dict[int, Kind]) -> None:
        """Set the positions whose state a prefill should save."""
        lease.wanted = dict(sorted(wanted.items()))
        self.note_saving(lease)
        lease.unwatched.update(
            (p, k) for p, k in wanted.items() if p > lease.done and k is not Kind.OPPORTUNISTIC
        )

    def note_saving(self, lease: Lease) -> None:
        if lease.saves_more:
            self.saving[lease] = None
        else:
            self.saving.pop(lease, None)

    def kind(self, lease: Lease, position: int) -> Kind:
        """Return the kind of a position in a request."""
        if position in lease.wanted:  # also in an answer: a repeated prefill has a part of it
            return lease.wanted[position]
        if position >= lease.next_interval and position % self._policy.interval_tokens == 0:
            return Kind.INTERVAL
        if position >= lease.prompt_tokens:
            return Kind.PROMPT_END if position == lease.prompt_tokens else Kind.ANSWER_END
        return Kind.JUNCTION

    def watch_up_to(self, lease: Lease, edge: Edge, num_tokens: int) -> None:
        """Watch a lease's positions among its first num_tokens tokens. edge: that of the last."""
        for position in [p for p in lease.unwatched if p <= num_tokens]:
            self.watch(lease, edge.at(position), position, lease.unwatched.pop(position))

    def watch(self, lease: Lease, edge: Edge, position: int, kind: Kind) -> Checkpoint:
        """Return the checkpoint at a position of a lease's path, and watch it from now on."""
        checkpoint = edge.checkpoints.get(position)
        if checkpoint is None:
            checkpoint = self._index.watch(edge, position, kind, self._policy.now, lease.origin)
            if kind is not Kind.OPPORTUNISTIC:
                self._policy.on_watch(checkpoint)
        elif checkpoint.kind is Kind.OPPORTUNISTIC:
            self.keep(checkpoint, kind, lease.origin)
        elif kind is Kind.ANSWER_END and checkpoint.kind is Kind.INTERVAL:
            checkpoint.kind, checkpoint.origin = kind, lease.origin  # the answer ends with it
            self._index.note(edge)
        checkpoint.refused |= position in lease.refused
        return checkpoint

    def keep(self, checkpoint: Checkpoint, kind: Kind, origin: Origin) -> None:
        """Note that a stored state is wanted as one of this kind. If it was opportunistic, it is
        kept by its value from now on."""
        if checkpoint.kind is Kind.OPPORTUNISTIC and kind is not Kind.OPPORTUNISTIC:
            self._evictor.opportunistic.discard(checkpoint)
            checkpoint.kind, checkpoint.origin = kind, origin
            checkpoint.born = checkpoint.last_use = self._policy.now
            self._index.note(checkpoint.edge)
            self._policy.on_watch(checkpoint)
            self._evictor.on_store(checkpoint)


class ExpectedRequests:
    """Reports waiting requests to the policy. restores: whether requests resume from states."""

    def __init__(self, evictor: Evictor, restores: bool):
        self._evictor, self._restores = evictor, restores
        self.resumed: dict[int, Checkpoint | None] = {}  # by request, what it is to resume from

    def __len__(self) -> int:
        return len(self.resumed)

    def add(self, request_id: int, tokens: np.ndarray, salt: str = "") -> None:
        """Note that a request with these tokens (int32 [L]) waits. Until `discard`, the state that
        it will resume from has a known use. A second call for the same request does nothing."""
        if not self._restores or request_id in self.resumed:
            return
        self.resumed[request_id] = found = None
        with suppress(MemoryError):
            path = self._evictor.index.walk(salt, tokens)
            found = unless_opportunistic(path.deepest_checkpoint())
            if not self._evictor.spec.needs_state:
                found = max(path.checkpoints(), key=lambda each: each.position, default=None)
        if found is not None:
            self.resumed[request_id] = found
            self._evictor.policy.on_wait(found, 1)

    def discard(self, request_id: int) -> None:
        """Note that a request starts, or is gone, if `add` was called for it."""
        found = self.resumed.pop(request_id, None)
        if found is not None:
            self._evictor.policy.on_wait(found, -1)
            if found.pages is not None:
                with suppress(MemoryError):  # its price then waits for `refresh`
                    self._evictor.update(found)

    def clear(self) -> None:
        for request_id in list(self.resumed):
            self.discard(request_id)
