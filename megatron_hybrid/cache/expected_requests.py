"""ExpectedRequests: what waiting requests are to resume from has a known use."""

from contextlib import suppress

import numpy as np

from megatron_hybrid.cache.eviction import Evictor
from megatron_hybrid.cache.index.tree import Checkpoint, unless_opportunistic


class ExpectedRequests:
    """Reports waiting requests to the policy. restores: whether requests resume from states."""

    def __init__(self, evictor: Evictor, restores: bool):
        self._evictor, self._restores = evictor, restores
        self._resumed: dict[int, Checkpoint | None] = {}  # by request, what it is to resume from

    def __len__(self) -> int:
        return len(self._resumed)

    def add(self, request_id: int, tokens: np.ndarray, salt: str = "") -> None:
        """A request with these tokens (int32 [L]) waits for its start: until `discard`, what
        it is to resume from has a known use. A second call for the same request does nothing."""
        if not self._restores or request_id in self._resumed:
            return
        self._resumed[request_id] = found = None
        with suppress(MemoryError):
            path = self._evictor.index.walk(salt, tokens)
            found = unless_opportunistic(path.deepest_checkpoint())
            if not self._evictor.spec.needs_state:
                found = max(path.checkpoints(), key=lambda each: each.position, default=None)
        if found is not None:
            self._resumed[request_id] = found
            self._evictor.policy.on_wait(found, 1)

    def discard(self, request_id: int) -> None:
        """A request starts, or is gone: the counterpart of `add`, if that was called."""
        found = self._resumed.pop(request_id, None)
        if found is not None:
            self._evictor.policy.on_wait(found, -1)
            if found.pages is not None:
                with suppress(MemoryError):  # its price then waits for `refresh`
                    self._evictor.update(found)

    def clear(self) -> None:
        for request_id in list(self._resumed):
            self.discard(request_id)
