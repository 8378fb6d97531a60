"""PrefixHash: 8-byte keys of the prefixes of one token sequence, each token hashed once."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np


class PrefixHash:
    """A BLAKE2b hash of salt and tokens that moves forward along a sequence.

    Args:
        salt: prefixes of different salts have different keys.
    """

    def __init__(self, salt: str):
        self.position = 0
        """Tokens hashed so far."""
        name = salt.encode("utf-8", "surrogatepass")  # JSON has strings that are no valid Unicode
        self._hash = blake2b(digest_size=8, key=blake2b(name).digest())

    def keys(self, tokens: np.ndarray, positions: Iterable[int]) -> list[int]:
        """Keys of tokens[:p] for ascending positions p >= `position`, 64 bits each. tokens: int32
        [L], the same sequence in each call; its first `position` elements are not read."""
        data = memoryview(np.ascontiguousarray(tokens, dtype="<i4")).cast("B")
        state, before, found = self._hash, 4 * self.position, []
        for position in positions:
            state.update(data[before : 4 * position])
            before = 4 * position
            found.append(int.from_bytes(state.digest(), "little"))
        self.position = before // 4
        return found
