"""Paged and varlen attention against masks written out, one softmax over all keys of a batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import (
    K_HEADS,
    PLAIN,
    SCALE,
    D,
    Pool,
    as_float,
    check_paged,
    group_sizes,
    paged_case,
    paged_expectation,
    patterns,
    random_sinks,
    value_dims,
)
from recurrences import assert_near, layouts, randn, seeded

from megatron_hybrid.ops import AttentionPattern, RaggedLayout, paged_attention, varlen_attention
from megatron_hybrid.ops.attention import reference
from megatron_hybrid.ops.attention.naive import attention

quick = settings(max_examples=60, deadline=None)
some = {
    "all": PLAIN,
    "window": AttentionPattern(SCALE, window=40),
    "chunk": AttentionPattern(SCALE, chunk=48),
    "softcap": AttentionPattern(SCALE, window=40, softcap=0.7),
    "skips_first": AttentionPattern(SCALE, skips_first=True),
}
each_pattern = pytest.mark.parametrize("pattern", some.values(), ids=some.keys())
with_or_without_sinks = pytest.mark.parametrize("with_sinks", [False, True])


@quick
@given(
    layout=layouts(max_length=300),
    pattern=patterns,
    with_sinks=st.booleans(),
    block_size=st.sampled_from((16, 32, 64)),
    group=group_sizes,
    P=value_dims,
    by_row=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_paged_attention_equals_brute_force(
    layout, pattern, with_sinks, block_size, group, P, by_row, seed
):
    check_paged(layout, pattern, block_size, group, P, with_sinks, by_row, seed)


@quick
@given(
    layout=layouts(max_length=300),
    pattern=patterns,
    with_sinks=st.booleans(),
    group=group_sizes,
    P=value_dims,
    seed=st.integers(0, 2**31),
)
def test_varlen_attention_equals_brute_force(layout, pattern, with_sinks, group, P, seed):
    generator, T = seeded(seed), layout.num_rows
    q = randn(generator, T, K_HEADS * group, D)
    k, v = randn(generator, T, K_HEADS, D), randn(generator, T, K_HEADS, P)
    sinks = random_sinks(generator, K_HEADS * group, with_sinks)
    o = varlen_attention(q.float(), k.float(), v.float(), layout, pattern, as_float(sinks))
    for first, end in zip(layout.cu_seqlens, layout.cu_seqlens[1:]):
        rows = slice(first, end)
        assert_near(o[rows], attention(q[rows], k[rows], v[rows], pattern, sinks))
    assert not o[layout.num_tokens :].any()


@pytest.mark.parametrize("local", [{}, {"window": 100}, {"chunk": 100}], ids=str)
def test_many_decodes_over_a_shared_prefix_gather_a_bounded_copy(monkeypatch, local):
    generator, pattern = seeded(1), AttentionPattern(SCALE, **local)
    shared, count = 256, 24
    layout = RaggedLayout((1,) * count, tuple(shared + 3 * r for r in range(count)))
    q, keys, values = paged_case(layout, 2, generator)
    pool = Pool(keys, values, 16, generator)
    pool.block_table[:, : shared // 16] = pool.block_table[0, : shared // 16]
    for r in range(count):
        keys[r][:shared], values[r][:shared] = keys[0][:shared], values[0][:shared]
    gathered = []
    attend = reference.F.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        gathered.append((k.nbytes + v.nbytes, k.shape[0]))
        return attend(q, k, v, **kwargs)

    monkeypatch.setattr(reference, "GATHER_BYTES", 5 * 2 * (shared + 80) * K_HEADS * D * 4)
    monkeypatch.setattr(reference.F, "scaled_dot_product_attention", spy)
    o = paged_attention(q.float(), *pool, layout, pattern)
    assert_near(o, paged_expectation(layout, q, keys, values, pattern))
    assert max(size for size, _ in gathered) <= reference.GATHER_BYTES
    assert max(rows for _, rows in gathered) > 1


@pytest.mark.parametrize(
    ("local", "first_seen"), [({"window": 32}, (169, 139)), ({"chunk": 60}, (180, 120))], ids=str
)
@with_or_without_sinks
def test_nothing_is_read_before_the_first_visible_position(local, first_seen, with_sinks):
    generator, pattern = seeded(2), AttentionPattern(SCALE, **local)
    layout = RaggedLayout((1, 50), (200, 170))
    q, keys, values = paged_case(layout, 1, generator)
    sinks = random_sinks(generator, K_HEADS, with_sinks)
    pool = Pool(keys, values, 16, generator)
    for r, position in enumerate(first_seen):
        block, row = divmod(position, 16)
        for pages in (pool.k_pages, pool.v_pages):
            pages[pool.block_table[r, block], :row] = torch.nan
        pool.block_table[r, :block] = 10**9  # no such page: reading it would raise
    o = paged_attention(q.float(), *pool, layout, pattern, as_float(sinks))
    assert_near(o, paged_expectation(layout, q, keys, values, pattern, sinks))


@with_or_without_sinks
def test_one_layout_serves_layers_of_all_patterns(with_sinks):
    generator, layout = seeded(7), RaggedLayout((1, 1), (100, 130))
    q, keys, values = paged_case(layout, 2, generator)
    sinks = random_sinks(generator, 2 * K_HEADS, with_sinks)
    pool = Pool(keys, values, 16, generator)
    for pattern in some.values():
        o = paged_attention(q.float(), *pool, layout, pattern, as_float(sinks))
        assert_near(o, paged_expectation(layout, q, keys, values, pattern, sinks))


def test_bfloat16_pages():
    generator = seeded(4)
    layout = RaggedLayout((1, 30), (60, 5))
    q, keys, values = paged_case(layout, 2, generator)
    pool = Pool(keys, values, 16, generator, torch.bfloat16)
    o = paged_attention(q.bfloat16(), *pool, layout, PLAIN)
    assert o.dtype == torch.bfloat16
    assert_near(o, paged_expectation(layout, q, keys, values, PLAIN), 4e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_softcap_and_sinks_are_float32_for_bfloat16_inputs(autocast):
    generator, pattern = seeded(6), AttentionPattern(SCALE, softcap=2.0)
    layout = RaggedLayout((1, 30), (60, 5))
    q, keys, values = paged_case(layout, 2, generator)
    q, *numbers = (t.bfloat16().double() for t in (q, *keys, *values))
    keys, values = numbers[:2], numbers[2:]
    sinks = random_sinks(generator, 2 * K_HEADS)
    pool = Pool(keys, values, 16, generator, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        o = paged_attention(q.bfloat16(), *pool, layout, pattern, sinks.float())
        exact_o = paged_attention(q.float(), *pool, layout, pattern, sinks.float())
    expected = paged_expectation(layout, q, keys, values, pattern, sinks)
    assert_near(exact_o, expected)
    assert torch.equal(o, exact_o.bfloat16())


def test_strong_sinks_and_scores_stay_finite():
    layout = RaggedLayout((3,), (0,))
    q = torch.full((3, 2, 4), 100.0)
    v = torch.ones(3, 2, 4)
    sinks = torch.tensor([-1e4, 5e4])
    o = varlen_attention(q, q, v, layout, AttentionPattern(1.0), sinks)
    assert_near(o[:, 0], torch.ones(3, 4))
    assert_near(o[:, 1], torch.zeros(3, 4))


@pytest.mark.parametrize("lengths", [(9, 9), (1, 12, 140)], ids=str)
@each_pattern
@with_or_without_sinks
def test_gradients_of_varlen_attention(lengths, pattern, with_sinks):
    generator = seeded(5)
    layout = RaggedLayout(lengths, (0,) * len(lengths), num_padding=1)
    leaves = [randn(generator, layout.num_rows, *shape) for shape in ((4, 4), (2, 4), (2, 3))]
    if with_sinks:
        leaves.append(random_sinks(generator, 4))
    for leaf in leaves:
        leaf.requires_grad_()

    def call(q, k, v, sinks=None):
        return varlen_attention(q, k, v, layout, pattern, sinks)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_bad_arguments_are_named():
    layout = RaggedLayout((1, 20), (20, 0))
    q, pages = torch.zeros(21, 4, 8), torch.zeros(5, 16, 2, 8)
    table = torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="has 21 keys, but the block table has 1 columns of 16"):
        paged_attention(q, pages, pages, table[:, :1], layout, PLAIN)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 kv heads"):
        odd = pages.new_zeros(5, 16, 3, 8)
        paged_attention(q, odd, odd, table, layout, PLAIN)
    with pytest.raises(TypeError, match=r"sinks_H of paged_attention has dtype torch\.int64"):
        paged_attention(q, pages, pages, table, layout, PLAIN, torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("fields", [{}, {"softcap": 3.0}, {"window": 40}], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dropout_zeroes_weights_and_scales_the_others(fields, with_sinks):
    """With unit vectors as values the outputs are the weights themselves."""
    torch.manual_seed(1)
    length, heads, p = 150, 2, 0.25
    q, k = torch.randn(length, heads, 16), torch.randn(length, 1, 16)
    v = torch.eye(length).unsqueeze(1)
    layout = RaggedLayout((length,), (0,))
    sinks = torch.randn(heads) if with_sinks else None
    plain = AttentionPattern(0.25, **fields)
    weights = varlen_attention(q, k, v, layout, plain, sinks)
    dropped = varlen_attention(q, k, v, layout, replace(plain, dropout=p), sinks)
    seen = weights > 1e-9
    kept = seen & (dropped != 0)
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - p), atol=1e-6, rtol=1e-5)
    assert kept.sum() / seen.sum() == pytest.approx(1 - p, abs=0.02)
    assert (kept[:, 0] != kept[:, 1]).any()  # each head drops others


def test_rows_that_a_gpu_cannot_read_16_bytes_at_a_time_are_copied():
    """As the values of latent attention, behind the keys of their head."""
    kv_tHD = torch.randn(5, 2, 30)
    keys, values = kv_tHD.split([10, 20], -1)
    for part in (keys, values):
        copied = reference.aligned(part)
        assert torch.equal(copied, part) and copied.data_ptr() != part.data_ptr()
        assert copied.is_contiguous()
    whole = torch.randn(5, 2, 32)
    for part in (whole, whole[:, :, 8:], whole[1:], whole.transpose(0, 1)):
        assert reference.aligned(part) is part


@each_pattern
@with_or_without_sinks
def test_positions_on_the_device_give_the_decodes_of_those_on_the_host(
    monkeypatch, pattern, with_sinks
):
    """In groups of two rows, over blocks that hold NaN where nothing is seen."""
    generator, positions = seeded(3), (0, 15, 16, 70, 127)
    pages = [randn(generator, 41, 16, K_HEADS, D).float() for _ in range(2)]
    table = torch.randperm(40, generator=generator).view(5, 8) + 1
    for row, position in zip(table, positions):
        for page in pages:
            page[row[position // 16], position % 16 + 1 :] = torch.nan
            page[row[position // 16 + 1 :]] = torch.nan
    sinks = as_float(random_sinks(generator, 2 * K_HEADS, with_sinks))
    q = randn(generator, 8, 2 * K_HEADS, D).float()
    ones = (1,) * 5
    on_host = RaggedLayout(ones, positions, num_padding=3)
    bounds = RaggedLayout(ones, (127,) * 5, num_padding=3, starts=torch.tensor(positions).int())
    expected = paged_attention(q, *pages, table, on_host, pattern, sinks)
    monkeypatch.setattr(reference, "GATHER_BYTES", 16 * 2 * pages[0][0].nbytes)
    given = paged_attention(q, *pages, table, bounds, pattern, sinks)
    torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-5)
