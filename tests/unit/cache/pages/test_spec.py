"""CacheSpec: page sizes and what follows from them, as tables."""

import pytest

from megatron_hybrid.cache.pages.spec import STATE_ONLY_PAGE_BYTES, CacheSpec, KVGroup


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
        # 5 and 29: one pair of 30 stays empty
        ((KVGroup(5, 512), KVGroup(29, 512, window=64)), 5 * 512 * 16, (1, 6)),
        # 10 and 52: pages of 11 pairs would leave a tenth of the first group's bytes empty
        ((KVGroup(10, 512), KVGroup(52, 512, window=64)), 2 * 512 * 16, (5, 26)),
        # other head sizes: a pair of the small group is half as large
        ((KVGroup(4, 1024), KVGroup(8, 512)), 4 * 1024 * 16, (1, 1)),
        ((KVGroup(2, 1024), KVGroup(8, 512, window=16)), 2 * 1024 * 16, (1, 2)),
        # Gemma 4, 5 local layers (16 heads of 256) to each global one (4 of 512): bytes in bf16
        ((KVGroup(10, 8192), KVGroup(50, 16384, window=1024)), 5 * 16384 * 16, (1, 10)),
        # MLA's latents (512 + 64, no values) beside windows
        ((KVGroup(12, 1152), KVGroup(36, 1024, window=128)), 5 * 1024 * 16, (3, 8)),
        # one global layer does not pay for large pages of the others
        ((KVGroup(1, 512), KVGroup(47, 512, window=64)), 512 * 16, (1, 47)),
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
    got = spec(KVGroup(2, 64, window=32), KVGroup(2, 64), KVGroup(6, 64), KVGroup(4, 64, chunk=32))
    assert got.full_groups == (1, 2)
    assert got.local_groups == (0, 3)
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


LOCAL_GROUPS = [
    KVGroup(1, 64, **{name: size})
    for name in ("window", "chunk")
    for size in (1, 2, 15, 16, 17, 32, 33, 100)
]


def seen_from(group, position):
    """The positions that a token sees, itself included, straight from the definition."""
    return [
        p
        for p in range(position + 1)
        if (group.window is None or position - group.window < p)
        and (group.chunk is None or p // group.chunk == position // group.chunk)
    ]


@pytest.mark.parametrize("group", LOCAL_GROUPS, ids=str)
@pytest.mark.parametrize("block", [16, 64])
def test_local_blocks_are_those_that_the_next_token_sees(group, block):
    got = spec(group, block=block)
    for position in range(150):
        seen = seen_from(group, position)
        assert group.first_visible(position) == seen[0]
        assert len(seen) <= group.reach
        assert got.first_local_block(0, position) == seen[0] // block
        needed = sorted({p // block for p in seen[:-1]})
        assert list(range(1000)[got.local_blocks(0, position)]) == needed


@pytest.mark.parametrize("group", LOCAL_GROUPS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 2, 16, 17, 70])
def test_max_local_blocks_is_a_bound_and_is_reached(group, chunk_tokens):
    """Forwards of chunk_tokens tokens, after which blocks are given back as the last one fills or
    the forward had several tokens."""
    got = spec(group)
    most = 0
    for offset in range(300):  # where the last block was given back
        for start in range(offset, offset // 16 * 16 + 16):  # since then: single tokens
            first = got.first_local_block(0, offset)
            most = max(most, got.num_blocks(start + chunk_tokens) - first)
    if group.window is not None:
        assert most == got.max_local_blocks(0, chunk_tokens)
    else:  # chunks that begin with blocks need less
        assert most <= got.max_local_blocks(0, chunk_tokens)


def test_bad_sizes_are_named():
    for block in (0, 8, 15, 17, 48, 512, -16):
        with pytest.raises(ValueError, match=rf"block_size_tokens is {block}; use 16, 32, 64, 128"):
            spec(KVGroup(1, 64), block=block)
    with pytest.raises(ValueError, match="state_bytes is -1"):
        spec(state=-1)
    with pytest.raises(ValueError, match=r"KVGroup\.window is 0"):
        KVGroup(1, 64, window=0)
    with pytest.raises(ValueError, match=r"window is 8 and KVGroup\.chunk is 16.*leave the other"):
        KVGroup(1, 64, window=8, chunk=16)
    with pytest.raises(ValueError, match="attention_parity is 0"):
        CacheSpec(16, (), 100, 100, attention_parity=0)
