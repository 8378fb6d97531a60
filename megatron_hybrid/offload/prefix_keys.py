"""PrefixKeys: keys of blocks and states for tiers, which store no tokens.

The key of a full block is a hash of the salt and all tokens up to the block's end; the key of a
state also covers the tokens after the last full block. Keys are 256 bits of BLAKE2b, so that
nobody can find two prefixes with the same key.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

import numpy as np

from megatron_hybrid.cache.index.tree import common_prefix

_BYTES = 32
MAX_RECENT = 8
"""Number of sequences whose keys are cached (10 bytes per token with blocks of 16)."""


class PrefixKeys:
    """Keys of the prefixes of one token sequence, computed on demand.

    Args:
        tokens: int32 [L].
        salt: prefixes of different salts have different keys.
        block_size_tokens: B.
    """

    def __init__(self, tokens: np.ndarray, salt: str, block_size_tokens: int):
        self.num_tokens = len(tokens)
        self.salt = salt
        self._bytes = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        self._block_bytes = 4 * block_size_tokens
        given = salt.encode("utf-8", "surrogatepass")  # it may be invalid Unicode, as in some JSON
        self._chain = [blake2b(given, digest_size=_BYTES, person=b"salt").digest()]

    @property
    def tokens(self) -> np.ndarray:
        """int32 [L]."""
        return np.frombuffer(self._bytes, dtype="<i4")

    def block(self, index: int) -> bytes:
        """Return the key of block `index`, which must be full, a hash of the first (index + 1) * B
        tokens."""
        chain, size = self._chain, self._block_bytes
        while len(chain) <= index + 1:
            start = (len(chain) - 1) * size
            block = self._bytes[start : start + size]
            chain.append(
                blake2b(block, digest_size=_BYTES, key=chain[-1], person=b"block").digest()
            )
        return chain[index + 1]

    def blocks(self, count: int) -> list[bytes]:
        """Return the keys of the first `count` blocks."""
        if count:
            self.block(count - 1)
        return self._chain[1 : count + 1]

    def state(self, position: int) -> bytes:
        """Return the key of the state after `position` tokens."""
        full = position * 4 // self._block_bytes
        before = self.block(full - 1)
        tail = self._bytes[full * self._block_bytes : position * 4]
        return blake2b(tail, digest_size=_BYTES, key=before, person=b"state").digest()


class RecentKeys:
    """Keys of the last sequences, so that the common prefix of a chat's turns is hashed once.

    Args:
        block_size_tokens: B.
    """

    def __init__(self, block_size_tokens: int):
        self._size = block_size_tokens
        self._recent: deque[PrefixKeys] = deque(maxlen=MAX_RECENT)

    def of(self, tokens: np.ndarray, salt: str) -> PrefixKeys:
        """Return the keys of a sequence (int32 [L])."""
        keys = PrefixKeys(tokens, salt, self._size)
        best, common = None, 0
        for other in self._recent:
            if other.salt == salt:
                shared = common_prefix(keys.tokens, other.tokens)
                if shared > common:
                    best, common = other, shared
        if best is not None:
            keys._chain = best._chain[: 1 + common // self._size]
            if common == min(best.num_tokens, keys.num_tokens):  # keep only the longer one
                self._recent.remove(best)
                if common < best.num_tokens:
                    self._recent.append(best)
                    return keys
        self._recent.append(keys)
        return keys
