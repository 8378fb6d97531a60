"""PackedTokens: compact token ids, for edges without KV, whose tokens are seldom read."""

from __future__ import annotations

import numpy as np


class PackedTokens:
    """int32 [n], exact: the low 16 bits of each token, then a bit plane for each higher bit in use.
    A vocabulary of 2^17 takes 2.125 bytes per token."""

    __slots__ = ("_bytes", "_length")

    def __init__(self, tokens: np.ndarray):
        bits = tokens.view(np.uint32)
        high = bits >> 16
        used = int(high.max(initial=0)).bit_length()
        planes = [np.packbits((high & (1 << bit)) != 0) for bit in range(used)]
        self._bytes = b"".join([bits.astype(np.uint16), *planes])
        self._length = len(tokens)

    def unpack(self) -> np.ndarray:
        """Return the tokens, int32 [n]."""
        n, size = self._length, (self._length + 7) // 8
        bits = np.frombuffer(self._bytes, np.uint16, n).astype(np.uint32)
        planes = np.frombuffer(self._bytes, np.uint8)[2 * n :].reshape(-1, max(1, size))
        for bit, plane in enumerate(planes, 16):
            bits |= np.unpackbits(plane, count=n).astype(np.uint32) << bit
        return bits.view(np.int32)
