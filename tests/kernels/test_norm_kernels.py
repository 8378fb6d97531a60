"""Kernels of norms against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import seeded

from megatron_hybrid.ops import dispatch, gated_rms_norm
from megatron_hybrid.ops.norm.triton import MAX_CHANNELS

OP = dispatch.OPS["gated_rms_norm"]
(BACKEND,) = OP.backends
twenty = settings(max_examples=20, deadline=None)


def draw(rows, groups, channels, shared=False, seed=0):
    """Inputs, the gate as one part of a wider tensor."""
    generator = seeded(seed)
    x = torch.randn(rows, groups, channels, generator=generator)
    wide = torch.randn(rows, 3 + 2 * groups * channels, generator=generator)
    gate = 3 * wide[:, 3 : 3 + groups * channels].unflatten(-1, (groups, channels))
    weight = torch.randn(channels if shared else (groups, channels), generator=generator)
    return x, gate, weight


@twenty
@given(
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    channels=st.integers(1, 300),
    shared=st.booleans(),
    eps=st.sampled_from([1e-6, 1e-2]),
    form=st.tuples(st.sampled_from(["silu", "sigmoid"]), *[st.booleans()] * 3),
    seed=st.integers(0, 2**31),
)
def test_gated_norms_are_as_by_the_reference(rows, groups, channels, shared, eps, form, seed):
    inputs = draw(rows, groups, channels, shared, seed)
    found, expected = (run(*inputs, eps, *form, None) for run in (BACKEND.run, OP.reference))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


def test_a_row_of_many_channels():
    x, gate, weight = draw(3, 2, 5000)
    found = gated_rms_norm(x, gate, weight, 1e-5)
    torch.testing.assert_close(found, OP.reference(x, gate, weight, 1e-5), atol=2e-6, rtol=2e-5)


def test_a_norm_may_be_rounded_before_the_gate():
    x, gate, weight = draw(9, 3, 40)
    inputs = x.half(), gate, weight, 1e-5, "silu", True, False
    found, expected = BACKEND.run(*inputs, True, None), OP.reference(*inputs, True)
    assert (found == expected).float().mean() > 0.99
    assert (found == OP.reference(*inputs, False)).float().mean() < 0.9


@twenty
@given(channels=st.integers(1, 300), norm_first=st.booleans(), data=st.data())
def test_a_row_has_the_same_bits_in_every_batch(channels, norm_first, data):
    x, gate, weight = draw(30, 2, channels)
    whole = gated_rms_norm(x, gate, weight, 1e-5, "silu", norm_first)
    rows = data.draw(st.lists(st.integers(0, 29), min_size=1, max_size=30))
    some = gated_rms_norm(x[rows], gate[rows], weight, 1e-5, "silu", norm_first)
    assert torch.equal(some, whole[rows])


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (draw(1, 1, 8), None),
        ([x.double() for x in draw(1, 1, 8)], "it takes no tensors of torch.float64"),
        (draw(1, 1, MAX_CHANNELS + 1), "groups have 16385 channels; a program holds 16384"),
    ],
)
def test_what_it_cannot_serve(inputs, reason):
    assert OP.refusals(*inputs, 1e-5)["triton"] == reason


@twenty
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    channels=st.integers(1, 300),
    is_sum=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_plain_norms_and_those_of_sums_are_as_by_the_reference(
    shape, channels, is_sum, dtype, seed
):
    generator, op = seeded(seed), dispatch.OPS["rms_norm"]
    x, added = torch.randn(2, *shape, channels + 5, generator=generator).to(dtype)[..., 3:-2]
    inputs = x, torch.randn(channels, generator=generator), 1e-5, added if is_sum else None
    assert op.refusals(*inputs)["triton"] is None
    (found, sums), (expected, expected_sums) = op.backends[0].run(*inputs), op.reference(*inputs)
    assert torch.equal(sums, expected_sums) and found.dtype == dtype
    near = dict(atol=2e-6, rtol=2e-5) if dtype == torch.float32 else {}
    torch.testing.assert_close(found, expected, **near)
