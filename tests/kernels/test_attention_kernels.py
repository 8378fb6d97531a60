"""Paged attention in Triton against brute force in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import matrix_rows
from paged import (
    K_HEADS,
    PLAIN,
    Pool,
    check_paged,
    group_sizes,
    paged_case,
    patterns,
    value_dims,
)
from recurrences import assert_near, layouts, seeded

from megatron_hybrid.ops import RaggedLayout, dispatch, paged_attention, varlen_attention
from megatron_hybrid.ops.attention import reference, work
from megatron_hybrid.ops.attention import triton as kernels


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setattr(dispatch, "forced", "triton")


@settings(max_examples=8, deadline=None)
@given(
    layout=layouts(max_length=120),
    pattern=patterns,
    sinks=st.booleans(),
    block_size=st.sampled_from((16, 20, 64)),
    group=group_sizes,
    P=value_dims,
    by_row=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_equals_brute_force(layout, pattern, sinks, block_size, group, P, by_row, seed):
    check_paged(layout, pattern, block_size, group, P, sinks, by_row, seed)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(work, "PART", 64)
    monkeypatch.setattr(work, "MAX_PARTS", 4)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        PLAIN,
        kernels.AttentionPattern(0.3, window=50, skips_first=True),
        kernels.AttentionPattern(0.3, chunk=200),
    ],
)
@pytest.mark.usefixtures("small_parts")
def test_keys_of_few_queries_are_split_and_joined(pattern, sinks):
    """Parts get larger inside of the second sequence, at position 256."""
    check_paged(RaggedLayout((1, 12, 1, 30), (300, 250, 0, 70), (), 2), pattern, sinks=sinks)


@pytest.mark.usefixtures("small_parts")
def test_several_launches_share_the_memory_of_parts(monkeypatch):
    layout = RaggedLayout((1, 12, 1, 30), (300, 250, 0, 70), (), 2)
    one = check_paged(layout, PLAIN)
    monkeypatch.setattr(kernels, "PARTIAL_BYTES", 12 * 4 * 4 * (8 + 2))  # 12 results of 4 heads
    assert torch.equal(check_paged(layout, PLAIN), one)


@pytest.mark.usefixtures("small_parts")
def test_other_sequences_change_no_bit_of_a_row():
    generator = seeded(1)
    layout = RaggedLayout((1, 7, 40), (250, 90, 20))
    q, keys, values = paged_case(layout, 2, generator)
    pool = Pool(keys, values, 16, generator)
    together = paged_attention(q.float(), *pool, layout, PLAIN)
    bounds = layout.cu_seqlens
    for r in range(3):
        one = RaggedLayout((layout.lengths[r],), (layout.start_positions[r],))
        rows = slice(bounds[r], bounds[r + 1])
        table = pool.block_table[r : r + 1]
        alone = paged_attention(q[rows].float(), pool.k_pages, pool.v_pages, table, one, PLAIN)
        assert torch.equal(alone, together[rows])


WIDTHS = [(80, 80), (192, 192), (256, 256), (192, 128), (320, 320), (512, 512), (576, 512)]
ROWS = [(*widths, num_bytes) for widths in WIDTHS for num_bytes in (2, 4)]


@pytest.mark.parametrize(
    ("D", "P", "num_bytes"), matrix_rows(ROWS, (80, 80, 4), (192, 128, 2), (576, 512, 2))
)
def test_wide_heads_are_split_as_for_16_bits_and_for_32(monkeypatch, D, P, num_bytes):
    """In fp32: the interpreter's bf16 is wrong. What no query sees is NaN."""
    of_bytes = kernels.configuration
    monkeypatch.setattr(
        kernels, "configuration", lambda D, P, _, few: of_bytes(D, P, num_bytes, few)
    )
    generator = seeded(D)
    layout = RaggedLayout((1, 20), (40, 10))  # 80 rows: two programs of 64
    pages = torch.full((9, 16, 1, D), torch.nan)
    table = torch.tensor([[3, 1, 7], [0, 2, 5]])
    for blocks, length in zip(table, (41, 30)):
        keys = torch.randn(length, 1, D, generator=generator)
        pages[blocks] = F.pad(keys, (0, 0, 0, 0, 0, 48 - length), value=torch.nan).view(3, 16, 1, D)
    q = torch.randn(21, 4, D, generator=generator)
    sinks = torch.randn(4, generator=generator)
    scale = D**-0.5
    forms = [
        (kernels.AttentionPattern(scale), None),
        (kernels.AttentionPattern(scale, window=20), sinks),
        (kernels.AttentionPattern(scale, chunk=24, softcap=2.0), None),
    ]
    for pattern, sinks_H in forms:
        given = (q, pages, pages[..., :P], table, layout, pattern, sinks_H)
        assert_near(paged_attention(*given), kernels_reference(*given))


@pytest.mark.parametrize(("B", "entry"), [(16, 0), (1, 0), (1, 2**30)])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_what_lies_in_a_first_place_that_is_skipped_does_not_matter(B, entry, length):
    """Neither NaN there, nor with pages of one token the entry of the block table."""
    generator = seeded(length)
    k, v = (torch.randn(33, B, 1, 16, generator=generator) for _ in range(2))
    table = torch.arange(1, 33, dtype=torch.int32)[None]
    q, layout = torch.randn(length, 1, 16, generator=generator), RaggedLayout((length,), (5,))
    pattern = kernels.AttentionPattern(0.25, skips_first=True)
    expected = kernels_reference(q, k, v, table, layout, pattern)
    v[1, 0] = k[1, 0] = v[0] = torch.nan
    if B == 1:
        table[0, 0] = entry
    found = paged_attention(q, k, v, table, layout, pattern)
    assert_near(found, expected)


def kernels_reference(*inputs):
    return dispatch.OPS["paged_attention"].reference(*inputs)


WIDTHS = ((8, 8), (8, 5), (8, 11), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256))
"""Of keys and values: odd ones, and those of published models."""


@settings(max_examples=6, deadline=None)
@given(
    layout=layouts(max_length=150),
    pattern=patterns,
    sinks=st.booleans(),
    group=group_sizes,
    widths=st.sampled_from(WIDTHS),
    dtype=st.sampled_from((torch.float32, torch.float16)),
)
def test_gradients_with_a_soft_cap_are_those_in_float64(
    layout, pattern, sinks, group, widths, dtype
):
    generator, (D, P) = seeded(layout.num_rows), widths
    dtype = torch.float16 if D == 256 else dtype  # wider ones are refused
    pattern = replace(pattern, softcap=1.5)
    layout = replace(layout, start_positions=(0,) * layout.num_sequences, captures=())
    heads = (K_HEADS * group, D), (K_HEADS, D), (K_HEADS, P), (K_HEADS * group, P)
    *qkv, weights = (torch.randn(layout.num_rows, *each, generator=generator) for each in heads)
    given = [*qkv, torch.randn(K_HEADS * group, generator=generator)][: 3 + sinks]
    results = []
    for run, own in ((reference.varlen_attention, torch.float64), (varlen_attention, dtype)):
        inputs = [each.to(dtype).to(own).requires_grad_() for each in given]
        y = run(*inputs[:3], layout, pattern, *inputs[3:])
        results.append((y, *torch.autograd.grad((y * weights.to(own)).sum(), inputs)))
    for right, found in zip(*results, strict=True):
        error = (1e-5 if dtype == torch.float32 else 5e-3) * right.abs().max().item()
        torch.testing.assert_close(found.double(), right, rtol=0, atol=error)
