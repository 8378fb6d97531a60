"""Packing of sequences in rows: whole, within the capacity, tight, and as the seed says."""

import numpy as np
import pytest

from megatron_hybrid.training.data.rows import pack


def packed(lengths, capacity, seed=0):
    return [row.tolist() for row in pack(np.array(lengths), capacity, np.random.RandomState(seed))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("longest", "capacity"), [(3, 64), (30, 64), (64, 64), (1, 1)])
def test_rows_hold_every_sequence_once_and_little_else(seed, longest, capacity):
    lengths = np.random.default_rng(seed).integers(1, longest + 1, 500)
    rows = packed(lengths, capacity, seed)
    sizes = [lengths[row].sum() for row in rows]
    assert sorted(i for row in rows for i in row) == list(range(500)) and max(sizes) <= capacity
    # No two rows fit in one, so on average they are more than half full; short ones do better.
    assert sum(sorted(sizes)[:2]) > capacity
    assert (
        len(rows) <= np.ceil(lengths.sum() / capacity) * (1.02 if longest < capacity else 1.1) + 1
    )


def test_the_best_fit_is_found():
    assert sorted(map(len, packed([6, 5, 4, 3, 2, 1, 7], 7))) == [1, 2, 2, 2]


def test_equal_sequences_change_company_with_the_seed():
    lengths = [8] * 40 + [4] * 40
    assert packed(lengths, 16, 1) == packed(lengths, 16, 1) != packed(lengths, 16, 2)
    company = {frozenset(row) for row in packed(lengths, 16, 1)}
    assert company != {frozenset(row) for row in packed(lengths, 16, 2)}


def test_nothing_is_packed_in_no_rows():
    assert packed([], 8) == []
