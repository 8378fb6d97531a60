"""CacheSpec: page sizes and what follows from them, as tables."""

import pytest

from megatron_hybrid.cache.spec import STATE_ONLY_PAGE_BYTES, CacheSpec, KVGroup


def spec(*groups, block=16, state=0, hidden=0):
    return CacheSpec(block, groups, state_bytes=state, hidden_bytes=hidden)


@pytest.mark.parametrize(
    ("groups", "page_bytes", "pages_per_block"),
    [
        # nothing attends
        ((), STATE_ONLY_PAGE_BYTES, ()),
        # one group: a page is a block
        ((KVGroup(4, 1024),), 4 * 1024 * 16, (1,)),
        ((KVGroup(4, 1024, window=100),), 4 * 1024 * 16, (1,)),
        # 8 full layers, 24 window layers of the same heads: 8 pairs per page, no padding
        ((KVGroup(8, 512), KVGroup(24, 512, window=64)), 8 * 512 * 16, (1, 3)),
        # 7 and 23: one page of each 8 stays empty in each group (32 pairs for 30)
        ((KVGroup(7, 512), KVGroup(23, 512, window=64)), 8 * 512 * 16, (1, 3)),
        # other head sizes: a pair of the small group is half as large
        ((KVGroup(4, 1024), KVGroup(8, 512)), 4 * 1024 * 16, (1, 1)),
        ((KVGroup(2, 1024), KVGroup(8, 512, window=16)), 2 * 1024 * 16, (1, 2)),
    ],
)
def test_page_size_fits_every_group(groups, page_bytes, pages_per_block):
    got = spec(*groups)
    assert got.page_bytes == page_bytes
    assert got.pages_per_block == pages_per_block


@pytest.mark.parametrize("layers", [(1, 1), (3, 5), (6, 30), (7, 13), (1, 47)])
@pytest.mark.parametrize("token_bytes", [(256, 256), (256, 1024), (96, 2048), (640, 384)])
@pytest.mark.parametrize("block", [16, 256])
def test_every_pair_lies_inside_one_page(layers, token_bytes, block):
    groups = [KVGroup(n, size) for n, size in zip(layers, token_bytes)]
    got = spec(*groups, block=block)
    for i, group in enumerate(groups):
        assert got.pairs_per_page(i) >= 1
        assert got.pairs_per_page(i) * got.pair_bytes(i) <= got.page_bytes
        assert got.pages_per_block[i] * got.pairs_per_page(i) >= group.num_layers
        assert (got.pages_per_block[i] - 1) * got.pairs_per_page(i) < group.num_layers
    assert got.page_bytes % 16 == 0


def test_block_table_columns_follow_the_full_groups():
    got = spec(KVGroup(2, 64, window=32), KVGroup(2, 64), KVGroup(6, 64))
    assert got.full_groups == (1, 2)
    assert got.window_groups == (0,)
    assert got.kv_pages_per_block == 1 + 3
    assert got.columns == {1: slice(0, 1), 2: slice(1, 4)}


@pytest.mark.parametrize(
    ("state", "hidden", "num_bytes", "pages"),
    [(0, 0, 0, 0), (0, 1, 16, 1), (100, 100, 224, 1), (2048, 0, 2048, 1), (2048, 1, 2064, 2)],
)
def test_checkpoint_pages(state, hidden, num_bytes, pages):
    got = spec(KVGroup(2, 64), state=state, hidden=hidden)
    assert got.page_bytes == 2048
    assert (got.checkpoint_bytes, got.checkpoint_pages) == (num_bytes, pages)


@pytest.mark.parametrize(
    ("groups", "state", "needs_state"),
    [
        ((KVGroup(1, 64),), 0, False),
        ((KVGroup(1, 64),), 1, True),
        ((KVGroup(1, 64), KVGroup(1, 64, window=8)), 0, True),
        ((), 8, True),
    ],
)
def test_needs_state(groups, state, needs_state):
    assert spec(*groups, state=state).needs_state is needs_state


@pytest.mark.parametrize(
    ("position", "first"), [(1, 0), (32, 0), (33, 0), (47, 0), (48, 1), (64, 2), (1000, 60)]
)
def test_first_window_block_covers_the_window(position, first):
    got = spec(KVGroup(1, 64, window=32))
    assert got.first_window_block(0, position) == first
    assert first * 16 <= max(0, position - 32) < (first + 1) * 16


@pytest.mark.parametrize("block", [0, 8, 15, 17, 48, 512, -16])
def test_bad_block_size_is_named(block):
    with pytest.raises(ValueError, match=f"block_size_tokens is {block}.*power of two.*16 to 256"):
        spec(KVGroup(1, 64), block=block)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="state_bytes is -1"):
        spec(state=-1)
    with pytest.raises(ValueError, match=r"KVGroup\.window is 0"):
        KVGroup(1, 64, window=0)
    with pytest.raises(ValueError, match=r"KVGroup\.num_layers is 0"):
        KVGroup(0, 64)
