"""Keys of prefixes: equal for equal prefixes, and for nothing else."""

from hashlib import blake2b
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest

from megatron_hybrid.offload import prefix_keys
from megatron_hybrid.offload.prefix_keys import MAX_RECENT, PrefixKeys, RecentKeys


def keys_of(tokens, salt=""):
    return PrefixKeys(np.array(tokens, dtype=np.int32), salt, 16)


def test_equal_prefixes_have_equal_keys_whatever_follows():
    tokens = list(range(100))
    long, short = keys_of(tokens), keys_of([*tokens[:40], 7, 7])
    assert long.blocks(2) == short.blocks(2)
    assert long.state(40) == short.state(40)
    assert long.state(42) != short.state(42)
    assert long.blocks(6)[:2] == long.blocks(2) and long.block(5) == long.blocks(6)[5]


def test_all_prefixes_of_all_short_sequences_have_keys_of_their_own():
    """Blocks and states, two salts, sequences of two tokens that differ in one block."""
    seen: dict[bytes, tuple] = {}
    count = 0
    for salt, head, tail in product(("", "other"), product((0, 1), repeat=5), (0, 1)):
        tokens = [tail] * 11 + list(head) + [tail] * 17
        keys = keys_of(tokens, salt)
        named = [(keys.block(i), ("block", salt, *tokens[: 16 * i + 16])) for i in range(2)]
        named += [(keys.state(p), ("state", salt, *tokens[:p])) for p in range(16, 34)]
        for key, what in named:
            assert seen.setdefault(key, what) == what
            count += 1
    assert len(set(seen.values())) == len(seen) == count


@pytest.mark.parametrize("value", [255, 256, -1, 2**31 - 1])
def test_every_byte_of_a_token_counts(value):
    assert keys_of([0] * 15 + [value]).block(0) != keys_of([0] * 16).block(0)


def test_any_string_is_a_salt():
    tokens = np.arange(16, dtype=np.int32)
    salts = ["", "a", "\ud800", "\udfff", "\N{GRINNING FACE}", "\ud83d\ude00"]
    assert len({PrefixKeys(tokens, salt, 16).block(0) for salt in salts}) == len(salts)


def test_recent_keys_are_the_same_keys():
    random = np.random.default_rng(0)
    recent, families = RecentKeys(16), random.integers(0, 2, (3, 100)).astype(np.int32)
    for _ in range(300):
        head = families[random.integers(3)][: random.integers(101)]
        tokens = np.concatenate([head, random.integers(0, 2, random.integers(60))]).astype(np.int32)
        salt = str(random.choice(["", "other"]))
        keys, fresh, count = recent.of(tokens, salt), PrefixKeys(tokens, salt, 16), len(tokens)
        assert keys.num_tokens == count
        asked = random.integers(count // 16 + 1)  # a chain may be known in part
        assert keys.blocks(asked) == fresh.blocks(asked)
        if count >= 16:
            assert keys.state(count) == fresh.state(count)


def test_what_sequences_have_in_common_is_hashed_once(monkeypatch):
    hashed = Mock(wraps=blake2b)
    monkeypatch.setattr(prefix_keys, "blake2b", hashed)
    recent, tokens = RecentKeys(16), np.arange(1600, dtype=np.int32)
    recent.of(tokens, "").blocks(100)
    for turn in range(3):
        hashed.reset_mock()
        tokens = np.concatenate([tokens, np.full(32, turn, dtype=np.int32)])
        recent.of(tokens, "").blocks(len(tokens) // 16)
        recent.of(tokens[:800], "").blocks(50)
        assert hashed.call_count == 2 + 2  # two salts, two blocks
    for others, num_hashed in ((MAX_RECENT - 1, 1), (MAX_RECENT, 1 + len(tokens) // 16)):
        for other in range(others):
            recent.of(tokens, str(other))
        hashed.reset_mock()
        recent.of(tokens, "").blocks(len(tokens) // 16)
        assert hashed.call_count == num_hashed  # of the salt; it took one place, then lost it
