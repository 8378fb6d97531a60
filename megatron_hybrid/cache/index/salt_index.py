"""Who else came with this prompt? Which salt last used a first block of tokens.

Prefixes are never shared between salts. That they could have been is worth knowing to who runs the
engine, and to nobody else: a tenant who learns that a prompt of his is known elsewhere could guess
other tenants' prompts, block by block. So a request's own report never says it; counters and
`explain` do.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

MAX_FIRST_BLOCKS = 4096
"""First blocks that are remembered; the longest unused goes first."""


class SaltIndex:
    """The salt under which each first block was last used. One look-up, however many salts there
    are. It may be wrong about what is known by now: ask the tree."""

    def __init__(self, block_size_tokens: int):
        self._block_size = block_size_tokens
        self._salts: OrderedDict[bytes, str] = OrderedDict()

    def note(self, tokens: np.ndarray, salt: str) -> None:
        """The first block of these tokens (int32, at least a block) is known under this salt."""
        key = tokens[: self._block_size].tobytes()
        self._salts[key] = salt
        self._salts.move_to_end(key)
        if len(self._salts) > MAX_FIRST_BLOCKS:
            self._salts.popitem(last=False)

    def other_salt(self, tokens: np.ndarray, salt: str) -> str | None:
        """The salt under which the first block of these tokens was last used, if it is another."""
        found = self._salts.get(tokens[: self._block_size].tobytes())
        return None if found == salt else found

    def clear(self) -> None:
        """Forget everything."""
        self._salts.clear()
