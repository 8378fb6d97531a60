"""A packed weight on each of several ranks is the slice of the unpacked one."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_hybrid import ops
from megatron_hybrid.models.packed_weight import (
    PackedWeight,
    Packing,
    common_group,
    linear,
    named_weights,
)
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel, shard
from megatron_hybrid.ops import unpack
from megatron_hybrid.ops.packed import format_of

KINDS = [
    (torch.float8_e4m3fn, torch.float32),
    (torch.int8, torch.bfloat16),
    (torch.uint8, torch.bfloat16),
    (torch.uint8, torch.float8_e4m3fn),
]
PARTS = ("codes", "scale", "outer", "zero", "rest")


@st.composite
def cases(draw):
    """(shape of a weight, its cut, how it is packed)."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    lead = draw(st.sampled_from([(), (2,)]))
    codes, scale = draw(st.sampled_from(KINDS))
    by_row = draw(st.booleans())
    copies = draw(st.sampled_from([None, (1, num_ranks)])) if by_row else None
    sections = tuple(8 * draw(st.integers(1, 3)) for _ in range(2 if by_row else 1))
    rows, columns = (sum(sections), 48) if by_row else (6, 4 * sum(sections))
    if not by_row:
        sections = (columns,)
    rest = 0 if lead or not by_row else draw(st.sampled_from([0, sections[-1]]))
    cut = Cut(len(lead) + (0 if by_row else 1), sections, num_ranks, copies=copies)
    group = draw(st.sampled_from([columns, 16, 12, 6]))
    is_four = codes == torch.uint8
    packing = (codes, scale, group, is_four and draw(st.booleans()), rest)
    return (*lead, rows, columns), cut, packing


def check_slices(shape, cut, kind):
    """Slices of codes and scales stand for slices of the weight."""
    codes, scale, group, has_outer, num_rest = kind
    local = list(shape)
    local[cut.dim] = sum(cut.local_sections)
    parameter = nn.Parameter(torch.empty(local, dtype=torch.bfloat16))
    mark_tensor_parallel(parameter, cut)
    group = common_group(parameter, group)
    packing = Packing(codes, scale, group, has_outer, None, num_rest)
    generator = torch.Generator().manual_seed(0)
    *lead, rows, columns = shape
    rows -= num_rest
    whole = {
        "codes": torch.randint(
            0, 110, (*lead, rows, columns // packing.columns_per_code), generator=generator
        )
        .to(torch.uint8)
        .view(codes),
        "scale": (torch.rand(*lead, rows, columns // group, generator=generator) + 0.5).to(scale),
        "outer": torch.rand(*lead, rows, 1, generator=generator) if has_outer else None,
        "zero": None,
        "rest": torch.randn(*lead, num_rest, columns).bfloat16() if num_rest else None,
    }
    expected = unpack(*whole.values())
    for rank in range(cut.num_ranks):
        weight = PackedWeight(parameter, packing)
        for name, value in whole.items():
            assert (getattr(weight, name) is None) == (value is None)
            if value is not None:
                part = getattr(weight, name)
                part.copy_(shard(value, part, rank))
        assert torch.equal(weight.unpacked(), shard(expected, parameter, rank))
        assert weight.unpacked().shape == weight.shape and weight.numel() == parameter.numel()


@settings(max_examples=60, deadline=None)
@given(cases())
def test_slices_over_ranks_are_slices_of_the_unpacked_weight(case):
    check_slices(*case)


@settings(max_examples=60, deadline=None)
@given(
    local=st.integers(1, 40),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    group=st.sampled_from([2, 6, 16, 32, 128]),
    scale=st.sampled_from([torch.bfloat16, torch.float8_e4m3fn]),
)
def test_columns_of_4_bits_are_cut_between_bytes_or_refused(local, num_ranks, group, scale):
    """Groups may be cut, bytes of two columns not: the last number of a rank would be lost."""
    columns = local * num_ranks
    assume(columns % 2 == 0)
    case = (4, columns), Cut(1, (columns,), num_ranks), (torch.uint8, scale, group, False, 0)
    if local % 2 == 0:
        check_slices(*case)
        return
    most = max(n for n in range(1, num_ranks) if columns % (2 * n) == 0)
    words = (
        f"{columns} columns are cut into pieces of {local} for {num_ranks} .* {most} is the largest"
    )
    with pytest.raises(ValueError, match=words):
        check_slices(*case)


def test_rows_that_are_no_whole_block_cannot_stay_unpacked():
    parameter = nn.Parameter(torch.empty(24, 32, dtype=torch.bfloat16))
    mark_tensor_parallel(parameter, Cut(0, (16, 8), 1))
    with pytest.raises(ValueError, match="last 4 rows"):
        PackedWeight(parameter, Packing(torch.int8, torch.float32, 32, num_rest=4))


def test_a_packed_weight_keeps_its_dtypes_and_counts_as_one():
    layer = nn.Linear(32, 24, bias=True)
    weight = PackedWeight(layer.weight, Packing(torch.float8_e4m3fn, torch.float32, 16))
    del layer.weight
    layer.weight = weight
    weight.codes.copy_(torch.randn(24, 32).to(torch.float8_e4m3fn))
    weight.scale.fill_(0.37)
    before = weight.unpacked()
    layer.bfloat16().double()
    assert weight.codes.dtype == torch.float8_e4m3fn and weight.scale.dtype == torch.float32
    assert torch.equal(weight.unpacked(), before)
    assert dict(named_weights(layer)).keys() == {"weight", "bias"}
    x = torch.randn(3, 32)
    assert torch.equal(linear(x, weight, layer), ops.linear(x, before))


def test_every_kind_of_packing_has_a_format():
    assert {format_of(*kind).name for kind in KINDS} == {"fp8", "int8", "int4", "fp4"}
