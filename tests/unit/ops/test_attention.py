"""Paged and varlen attention against masks written out, one softmax over all keys of a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import assert_near, layouts, randn, seeded

from megatron_hybrid.ops import RaggedLayout, attention, paged_attention, varlen_attention

D, K_HEADS = 8, 2
SCALE = 0.3
quick = settings(max_examples=60, deadline=None)
windows = st.one_of(st.none(), st.integers(1, 260))
group_sizes = st.sampled_from((1, 2, 4))


def brute_force(q, k, v, visible, scale=SCALE):
    """q [T, H, D], k and v [S, K, D], visible [T, S] -> [T, H, D]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def visibility(query_positions, key_positions, window):
    distance = query_positions[:, None] - key_positions[None]
    return (distance >= 0) & (distance < (window or 10**9))


class Pool:
    """Pages as the engine lays them: K and V of all layers in a page, garbage where unwritten."""

    def __init__(self, keys, values, block_size, generator, dtype=torch.float32, columns=0):
        blocks = [-(-len(k) // block_size) for k in keys]
        width = max(blocks) + columns
        order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
        shape = (block_size, K_HEADS, D)
        numbers = block_size * K_HEADS * D
        self.memory = torch.full((len(order), 3 * numbers + 16), torch.nan, dtype=dtype)
        self.k_pages = self.memory[:, numbers : 2 * numbers].unflatten(1, shape)
        self.v_pages = self.memory[:, 2 * numbers : 3 * numbers].unflatten(1, shape)
        self.block_table = torch.full((len(keys), width), -1, dtype=torch.int32)
        for r, (k, v) in enumerate(zip(keys, values)):
            for block in range(blocks[r]):
                page = order.pop()
                rows = slice(block * block_size, (block + 1) * block_size)
                self.block_table[r, block] = page
                self.k_pages[page, : len(k[rows])] = k[rows].to(dtype)
                self.v_pages[page, : len(v[rows])] = v[rows].to(dtype)


def paged_case(layout, group, generator):
    lengths = [s + n for s, n in zip(layout.start_positions, layout.lengths)]
    keys, values = ([randn(generator, n, K_HEADS, D) for n in lengths] for _ in range(2))
    return randn(generator, layout.num_rows, K_HEADS * group, D), keys, values


def paged_expectation(layout, q, keys, values, window):
    outs = []
    for r, (first, end) in enumerate(zip(layout.cu_seqlens, layout.cu_seqlens[1:])):
        key_positions = torch.arange(len(keys[r]))
        visible = visibility(key_positions[layout.start_positions[r] :], key_positions, window)
        outs.append(brute_force(q[first:end], keys[r], values[r], visible))
    return torch.cat(outs)


@quick
@given(
    layout=layouts(max_length=300),
    window=windows,
    block_size=st.sampled_from((16, 32, 64)),
    group=group_sizes,
    seed=st.integers(0, 2**31),
)
def test_paged_attention_equals_brute_force(layout, window, block_size, group, seed):
    generator = seeded(seed)
    q, keys, values = paged_case(layout, group, generator)
    pool = Pool(keys, values, block_size, generator, columns=2)
    o = paged_attention(
        q.float(), pool.k_pages, pool.v_pages, pool.block_table, layout, SCALE, window
    )
    assert_near(o[: layout.num_tokens], paged_expectation(layout, q, keys, values, window))
    assert not o[layout.num_tokens :].any()


@quick
@given(
    layout=layouts(max_length=300),
    window=windows,
    group=group_sizes,
    seed=st.integers(0, 2**31),
)
def test_varlen_attention_equals_brute_force(layout, window, group, seed):
    generator, T = seeded(seed), layout.num_rows
    q = randn(generator, T, K_HEADS * group, D)
    k, v = (randn(generator, T, K_HEADS, D) for _ in range(2))
    o = varlen_attention(q.float(), k.float(), v.float(), layout, SCALE, window)
    owners, rows = layout.sequence_ids("cpu"), torch.arange(layout.num_tokens)
    visible = visibility(rows, rows, window) & (owners[:, None] == owners[None])
    q, k, v = (t[: layout.num_tokens] for t in (q, k, v))
    assert_near(o[: layout.num_tokens], brute_force(q, k, v, visible))
    assert not o[layout.num_tokens :].any()


@pytest.mark.parametrize("window", [None, 40])
def test_any_cut_of_a_prefill_gives_the_same(window):
    generator = seeded(0)
    length, whole = 333, RaggedLayout((333,), (0,))
    q, keys, values = paged_case(whole, 2, generator)
    pool = Pool(keys, values, 16, generator)
    pages = (pool.k_pages, pool.v_pages, pool.block_table)
    q = q.float()
    expected = paged_attention(q, *pages, whole, SCALE, window)
    for budget in (1, 7, 64, 128, 200):
        for first in range(0, length, budget):
            end = min(first + budget, length)
            piece = RaggedLayout((end - first,), (first,))
            o = paged_attention(q[first:end], *pages, piece, SCALE, window)
            assert_near(o, expected[first:end], 2e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_many_decodes_over_a_shared_prefix_gather_a_bounded_copy(monkeypatch, window):
    generator = seeded(1)
    shared, count = 256, 24
    layout = RaggedLayout((1,) * count, tuple(shared + 3 * r for r in range(count)))
    q, keys, values = paged_case(layout, 2, generator)
    pool = Pool(keys, values, 16, generator)
    pool.block_table[:, : shared // 16] = pool.block_table[0, : shared // 16]
    for r in range(count):
        keys[r][:shared], values[r][:shared] = keys[0][:shared], values[0][:shared]
    pages = (pool.k_pages, pool.v_pages, pool.block_table)
    gathered = []
    attend = attention.F.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        gathered.append((k.nbytes + v.nbytes, k.shape[0]))
        return attend(q, k, v, **kwargs)

    monkeypatch.setattr(attention, "GATHER_BYTES", 5 * 2 * (shared + 80) * K_HEADS * D * 4)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    o = paged_attention(q.float(), *pages, layout, SCALE, window)
    assert_near(o, paged_expectation(layout, q, keys, values, window))
    assert max(size for size, _ in gathered) <= attention.GATHER_BYTES
    assert max(rows for _, rows in gathered) > 1


def test_a_window_uses_no_memory_before_it():
    generator = seeded(2)
    layout = RaggedLayout((1, 50), (200, 170))
    q, keys, values = paged_case(layout, 1, generator)
    pool = Pool(keys, values, 16, generator)
    for r, start in enumerate(layout.start_positions):
        block, row = divmod(start - 31, 16)
        for pages in (pool.k_pages, pool.v_pages):
            pages[pool.block_table[r, block], :row] = torch.nan
        pool.block_table[r, :block] = 10**9  # no such page: reading it would raise
    o = paged_attention(
        q.float(), pool.k_pages, pool.v_pages, pool.block_table, layout, SCALE, window=32
    )
    assert_near(o, paged_expectation(layout, q, keys, values, 32))


def test_a_step_does_not_depend_on_the_other_sequences():
    generator = seeded(3)
    layout = RaggedLayout((1, 1, 1, 40), (100, 7, 53, 0))
    q, keys, values = paged_case(layout, 2, generator)
    pool = Pool(keys, values, 16, generator)
    q = q.float()
    together = paged_attention(q, pool.k_pages, pool.v_pages, pool.block_table, layout, SCALE)
    for r in range(3):
        alone = RaggedLayout((1,), layout.start_positions[r : r + 1])
        table = pool.block_table[r : r + 1]
        o = paged_attention(q[r : r + 1], pool.k_pages, pool.v_pages, table, alone, SCALE)
        assert_near(o, together[r : r + 1], 1e-6)


def test_bfloat16_pages():
    generator = seeded(4)
    layout = RaggedLayout((1, 30), (60, 5))
    q, keys, values = paged_case(layout, 2, generator)
    pool = Pool(keys, values, 16, generator, torch.bfloat16)
    o = paged_attention(q.bfloat16(), pool.k_pages, pool.v_pages, pool.block_table, layout, SCALE)
    assert o.dtype == torch.bfloat16
    assert_near(o, paged_expectation(layout, q, keys, values, None), 4e-2)


@pytest.mark.parametrize("lengths", [(9, 9), (1, 12, 140)], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_gradients_of_varlen_attention(lengths, window):
    generator = seeded(5)
    layout = RaggedLayout(lengths, (0,) * len(lengths), num_padding=1)
    q = randn(generator, layout.num_rows, 4, 4).requires_grad_()
    k, v = (randn(generator, layout.num_rows, 2, 4).requires_grad_() for _ in range(2))

    def call(q, k, v):
        return varlen_attention(q, k, v, layout, SCALE, window)

    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


def test_bad_arguments_are_named():
    layout = RaggedLayout((1, 20), (20, 0))
    q, pages = torch.zeros(21, 4, 8), torch.zeros(5, 16, 2, 8)
    table = torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="has 21 keys, but the block table has 1 columns of 16"):
        paged_attention(q, pages, pages, table[:, :1], layout, 1.0)
    with pytest.raises(ValueError, match=r"block_table has shape \[1, 2\]"):
        paged_attention(q, pages, pages, table[:1], layout, 1.0)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 kv heads"):
        paged_attention(
            q, pages.new_zeros(5, 16, 3, 8), pages.new_zeros(5, 16, 3, 8), table, layout, 1.0
        )
    with pytest.raises(ValueError, match=r"k has shape \[5, 16, 2, 4\]"):
        paged_attention(q, pages[..., :4], pages[..., :4], table, layout, 1.0)
    with pytest.raises(ValueError, match="window is 0"):
        paged_attention(q, pages, pages, table, layout, 1.0, window=0)
    with pytest.raises(ValueError, match=r"its first dimension must be the layout's 21 rows"):
        varlen_attention(q[:20], q[:20], q[:20], layout, 1.0)
