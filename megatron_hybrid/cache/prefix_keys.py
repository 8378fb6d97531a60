"""Names for what a prefix leaves behind, for memories that keep no tokens.

The key of a full block is a hash of the salt and of all tokens up to the block's end; that of a
state also of the tokens behind the last full block. 256 bits of BLAKE2b: two prefixes with one key
are as good as impossible, also for somebody who looks for them.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

_BYTES = 32


class PrefixKeys:
    """Keys of the prefixes of one token sequence, computed as far as they are asked for.

    Args:
        tokens: int32 [L].
        salt: prefixes of different salts have different keys.
        block_size_tokens: B.
    """

    def __init__(self, tokens: np.ndarray, salt: str, block_size_tokens: int):
        self.num_tokens = len(tokens)
        self._bytes = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        self._block_bytes = 4 * block_size_tokens
        self._chain = [blake2b(_bytes_of(salt), digest_size=_BYTES, person=b"salt").digest()]

    def block(self, index: int) -> bytes:
        """Key of block `index`, which must be full: of the first (index + 1) * B tokens."""
        chain, size = self._chain, self._block_bytes
        while len(chain) <= index + 1:
            start = (len(chain) - 1) * size
            block = self._bytes[start : start + size]
            chain.append(
                blake2b(block, digest_size=_BYTES, key=chain[-1], person=b"block").digest()
            )
        return chain[index + 1]

    def blocks(self, count: int) -> list[bytes]:
        """Keys of the first `count` blocks."""
        if count:
            self.block(count - 1)
        return self._chain[1 : count + 1]

    def state(self, position: int) -> bytes:
        """Key of the state after `position` tokens."""
        full = position * 4 // self._block_bytes
        before = self.block(full - 1)
        tail = self._bytes[full * self._block_bytes : position * 4]
        return blake2b(tail, digest_size=_BYTES, key=before, person=b"state").digest()


def _bytes_of(salt: str) -> bytes:
    """Different for different strings, also for those that are no valid Unicode (JSON has some)."""
    return salt.encode("utf-8", "surrogatepass")
