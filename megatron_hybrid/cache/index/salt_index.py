"""SaltIndex: which salt last used a first block of tokens.

Prefixes are never shared between salts. Only the operator may learn that another salt has the
prefix: a tenant who knew could guess the prompts of other tenants, block by block. So counters and
`explain` tell it, a request's own report does not.
"""

from collections import OrderedDict

import numpy as np

MAX_SALT_ENTRIES = 4096
"""Most first blocks kept; the least recently used is dropped first."""


class SaltIndex:
    """The salt under which each first block was last used: one look-up for any number of salts. The
    tree may have forgotten the tokens since."""

    def __init__(self, block_size_tokens: int):
        self._block_size = block_size_tokens
        self._salts: OrderedDict[bytes, str] = OrderedDict()

    def note(self, tokens: np.ndarray, salt: str) -> None:
        """Record that the first block of these tokens (int32, at least a block) is known under this
        salt."""
        key = tokens[: self._block_size].tobytes()
        self._salts[key] = salt
        self._salts.move_to_end(key)
        if len(self._salts) > MAX_SALT_ENTRIES:
            self._salts.popitem(last=False)

    def other_salt(self, tokens: np.ndarray, salt: str) -> str | None:
        """Return the salt under which the first block of these tokens was last used; None if it is
        `salt` or unknown."""
        found = self._salts.get(tokens[: self._block_size].tobytes())
        return None if found == salt else found

    def clear(self) -> None:
        self._salts.clear()
