"""Which program of the attention kernel reads which keys: every key once, work within bounds."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import PLAIN, patterns
from recurrences import layouts

from megatron_hybrid.ops import AttentionPattern, RaggedLayout
from megatron_hybrid.ops.attention import work
from megatron_hybrid.ops.attention.work import part_size, split_keys, whole_keys

CPU = torch.device("cpu")
WINDOW = AttentionPattern(0.3, window=1024)


def programs(tiles):
    """Numbers of each program: a dict by name."""
    names = ("sequences", "row_starts", "row_ends", "key_starts", "sizes", "tokens")
    columns = [getattr(tiles, name) for name in names]
    for numbers in zip(*(c.tolist() for c in columns if c is not None), strict=True):
        yield dict(zip(names, numbers))


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts(max_length=150),
    pattern=patterns,
    group=st.sampled_from((1, 2, 3, 24)),
    most_places=st.sampled_from((1, 9, 10**6)),
)
def test_each_row_meets_each_key_that_it_sees_once(layout, pattern, group, most_places):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "PART", 8)
        patch.setattr(work, "MAX_PARTS", 4)
        launches = split_keys(layout, pattern, group, 16, most_places, CPU)
    seen, tokens = Counter(), []
    for parts in launches:
        places = parts.tiles.places.tolist()
        assert places[0] == 0 and places[-1] == parts.num_places
        stored = Counter()
        for one in programs(parts.tiles):
            r, start = one["sequences"], layout.start_positions[one["sequences"]]
            assert one["row_ends"] - one["row_starts"] <= 16
            for row in range(one["row_starts"], one["row_ends"]):
                query, head = divmod(row, group)
                low = max(pattern.first_visible(start + query), 0)
                keys = range(
                    max(low, one["key_starts"]),
                    min(start + query + 1, one["key_starts"] + one["sizes"]),
                )
                seen.update((r, query, head, key) for key in keys)
                if keys:
                    token = one["tokens"] + query - one["row_starts"] // group
                    assert parts.rows[token] == layout.cu_seqlens[r] + query
                    place = one["key_starts"] // one["sizes"] - low // one["sizes"]
                    assert place < places[token + 1] - places[token]
                    stored[places[token] + place, head] += 1
        # Each place is written by one program for each head, and is read once.
        assert stored == Counter((p, h) for p in range(parts.num_places) for h in range(group))
        tokens += parts.rows.tolist()
    few = [r for r, length in enumerate(layout.lengths) if length <= work.FEW_TOKENS]
    expected = [t for r in few for t in range(layout.cu_seqlens[r], layout.cu_seqlens[r + 1])]
    assert tokens == expected
    assert seen == Counter(
        (r, query, head, key)
        for r in few
        for query in range(layout.lengths[r])
        for position in (layout.start_positions[r] + query,)
        for key in range(max(pattern.first_visible(position), 0), position + 1)
        for head in range(group)
    )


@settings(deadline=None)
@given(layout=layouts(max_length=150), group=st.sampled_from((1, 2, 3, 24)))
def test_the_other_sequences_have_each_row_in_one_program(layout, group):
    tiles = whole_keys(layout, group, 16, CPU)
    rows = Counter(
        (one["sequences"], row)
        for one in (programs(tiles) if tiles else ())
        for row in range(one["row_starts"], one["row_ends"])
    )
    assert rows == Counter(
        (r, row)
        for r, length in enumerate(layout.lengths)
        if length > work.FEW_TOKENS
        for row in range(length * group)
    )


@given(positions=st.lists(st.integers(0, 2**17), min_size=1), pattern=patterns)
def test_parts_of_a_token_do_not_depend_on_the_batch(positions, pattern):
    alone = [int(part_size(np.array([position]), pattern)[0]) for position in positions]
    assert part_size(np.array(positions), pattern).tolist() == alone


@settings(max_examples=40, deadline=None)
@given(
    positions=st.lists(st.integers(0, 299), min_size=1, max_size=9),
    pattern=patterns,
    group=st.sampled_from((1, 3, 24)),
    most_places=st.sampled_from((1, 40, 10**6)),
)
def test_positions_on_the_device_give_the_programs_of_those_on_the_host(
    positions, pattern, group, most_places
):
    """But for programs that begin behind their token's last key, and so do nothing."""
    ones, number = (1,) * len(positions), len(positions)
    on_device = RaggedLayout(ones, (299,) * number, starts=torch.tensor(positions).int())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "PART", 8)
        patch.setattr(work, "MAX_PARTS", 4)
        expected = split_keys(RaggedLayout(ones, positions), pattern, group, 16, 10**6, CPU)
        launches = split_keys(on_device, pattern, group, 16, most_places, CPU)
    names = ("sequences", "row_starts", "row_ends", "key_starts", "sizes")
    found, counts = [], []
    for parts in launches:
        places = parts.tiles.places
        assert all(numbers.is_contiguous() for numbers in (*parts.tiles, parts.rows))
        assert all(numbers.storage_offset() % 4 == 0 for numbers in parts.tiles)  # 16 bytes
        assert places[0] == 0 and places[-1] <= parts.num_places <= max(most_places, 4)
        counts += places.diff().tolist()
        for one in programs(parts.tiles):
            assert parts.rows[one["tokens"]] == one["sequences"]
            if one["key_starts"] <= positions[one["sequences"]]:
                found.append([one[name] for name in names])
    assert counts == expected[0].tiles.places.diff().tolist()
    assert found == [[one[name] for name in names] for one in programs(expected[0].tiles)]


@pytest.mark.parametrize("position", [0, 1023, 1024, 2**15 - 1, 2**15, 131_071, 2**24])
@pytest.mark.parametrize("pattern", [PLAIN, WINDOW, AttentionPattern(0.3, chunk=8192)])
def test_a_token_has_few_parts_and_no_empty_one(position, pattern):
    (parts,) = split_keys(RaggedLayout((1,), (position,)), pattern, 4, 16, 10**6, CPU)
    low = max(pattern.first_visible(position), 0)
    reach = position + 1 - low
    assert parts.num_places <= min(work.MAX_PARTS, -(-reach // work.PART) + (low > 0))
    for one in programs(parts.tiles):
        assert one["key_starts"] <= position and one["key_starts"] + one["sizes"] > low


def test_one_long_sequence_costs_the_others_nothing():
    """256 decodes, one at 131,072 tokens, of 32 heads over 16 key/value heads of width 128."""
    layout = RaggedLayout((1,) * 256, (131_071,) + (2_000,) * 255)
    for pattern, parts_of in ((PLAIN, (32, 4)), (WINDOW, (2, 3))):
        (parts,) = split_keys(layout, pattern, 2, 16, 10**6, CPU)
        assert parts.num_places == parts_of[0] + 255 * parts_of[1]
        num_programs = 16 * len(parts.tiles.sequences)
        num_bytes = parts.num_places * 32 * (128 + 2) * 4
        assert num_programs <= 32_768 and num_bytes <= 64e6


def test_launches_share_one_piece_of_memory():
    layout = RaggedLayout((1,) * 256, (131_071,) * 256)
    launches = split_keys(layout, PLAIN, 2, 16, 4_000, CPU)
    assert len(launches) > 1
    assert all(parts.num_places <= 4_000 for parts in launches)
    assert sum(parts.num_places for parts in launches) == 256 * 32
