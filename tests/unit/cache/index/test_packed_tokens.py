"""PackedTokens: what goes in comes out, in the bytes that it says."""

import sys

import numpy as np
import pytest

from megatron_hybrid.cache.index.packed_tokens import PackedTokens


@pytest.mark.parametrize("bits", [1, 8, 16, 17, 18, 24, 31])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_any_tokens_come_back(bits, length):
    tokens = np.random.default_rng(bits).integers(0, 1 << bits, length).astype(np.int32)
    tokens[:1] = (1 << bits) - 1
    unpacked = PackedTokens(tokens).unpack()
    assert unpacked.dtype == np.int32
    assert unpacked.tolist() == tokens.tolist()


def test_negative_ids_and_views_come_back():
    tokens = np.array([5, -1, 7, -(2**31), 9, 2**31 - 1], np.int32)
    assert PackedTokens(tokens[1:]).unpack().tolist() == tokens[1:].tolist()
    assert PackedTokens(tokens[::2]).unpack().tolist() == tokens[::2].tolist()


@pytest.mark.parametrize(("bits", "per_token"), [(16, 2.0), (17, 2.125), (18, 2.25)])
def test_bytes_per_token(bits, per_token):
    packed = PackedTokens(np.full(80_000, (1 << bits) - 1, np.int32))
    assert sys.getsizeof(packed._bytes) == pytest.approx(per_token * 80_000, rel=1e-3)
