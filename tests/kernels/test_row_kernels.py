"""Kernels of activations, time steps, rotations and products by slots against the references."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import seeded

from megatron_hybrid.ops import activate, dispatch
from megatron_hybrid.ops.activate.triton import KINDS

twenty = settings(max_examples=20, deadline=None)


def both(op, *inputs):
    """Results of the kernel and of the reference."""
    assert dispatch.OPS[op].refusals(*inputs)["triton"] is None
    return dispatch.OPS[op].backends[0].run(*inputs), dispatch.OPS[op].reference(*inputs)


@twenty
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    channels=st.sampled_from([1, 7, 300, 1100]),
    activation=st.sampled_from(list(KINDS)),
    has_factor=st.booleans(),
    in_fp32=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_activations_are_as_by_the_reference(
    shape, channels, activation, has_factor, in_fp32, seed
):
    x, factor = 5 * torch.randn(2, *shape, channels + 5, generator=seeded(seed))[..., 3:-2]
    found, expected = both("activate", x, activation, factor if has_factor else None, in_fp32)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize("in_fp32", [False, True])
def test_an_activation_is_rounded_before_its_product_or_not(in_fp32):
    x, factor = torch.randn(2, 9, 200, generator=seeded(0)).half()
    found, expected = both("activate", x, F.silu, factor, in_fp32)
    assert (found == expected).float().mean() > 0.99
    assert (found == both("activate", x, F.silu, factor, not in_fp32)[1]).float().mean() < 0.9


@twenty
@given(
    rows=st.integers(1, 3),
    channels=st.sampled_from([1, 6, 130, 600]),
    heads=st.sampled_from([None, 1, 7, 600]),
    limits=st.sampled_from([(0.0, None), (0.5, None), (0.01, 2.0)]),
    factors=st.sampled_from([0, 1, 2]),
    bound=st.sampled_from([None, -5.0]),
    seed=st.integers(0, 2**31),
)
def test_time_steps_are_as_by_the_reference(rows, channels, heads, limits, factors, bound, seed):
    generator = seeded(seed)
    x, beta = (12 * torch.randn(rows, n, 2, generator=generator)[..., 0] for n in (channels, 700))
    bias, factor = torch.randn(2, channels, generator=generator)
    factor = factor[: channels // factors] if factors and channels % factors == 0 else None
    inputs = x, bias, factor, limits
    inputs += (None if heads is None else beta[:, :heads], 2.0, bound)
    for found, expected in zip(*both("time_steps", *inputs)):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, atol=1e-7, rtol=2e-5)


def test_other_activations_are_left_to_the_reference():
    x = torch.randn(4, 9)
    assert torch.equal(activate(x, torch.tanh, x), x.tanh() * x)


def draw_heads(rows, groups, heads, width, pairs, dtype=torch.float32, seed=0):
    """Queries and keys of groups side by side, angles, weights."""
    generator = seeded(seed)
    mixed = torch.randn(rows, groups, (heads + 1) * width + 3, generator=generator).to(dtype)
    q, k, _ = mixed.split([heads * width, width, 3], -1)
    angles = torch.randn(rows, 1, pairs, generator=generator)
    weights = tuple(torch.randn(2, width, generator=generator))
    return (
        q.unflatten(-1, (heads, width)),
        k,
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        weights,
    )


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    width_pairs=st.sampled_from([(2, 1), (20, 10), (24, 5), (64, 16)]),
    interleaved=st.booleans(),
    has_norm=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotated_heads_are_as_by_the_reference(sizes, width_pairs, interleaved, has_norm, seed):
    *inputs, weights = draw_heads(*sizes, *width_pairs, seed=seed)
    form = interleaved, *(weights if has_norm else (None, None)), 1e-3
    for found, expected in zip(*both("rotate_heads", *inputs, *form)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_it_rounds_where_the_reference_does():
    *inputs, weights = draw_heads(5, 2, 3, 64, 16, torch.float16)
    for found, expected in zip(*both("rotate_heads", *inputs, False, *weights, 1e-3)):
        assert found.dtype == torch.float16 and (found == expected).float().mean() > 0.98


@twenty
@given(
    rows=st.integers(1, 5),
    inputs=st.sampled_from([1, 3, 130, 300]),
    outputs=st.sampled_from([1, 5, 70]),
    slots=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_each_row_has_the_matrix_of_its_slot(rows, inputs, outputs, slots, seed):
    generator = seeded(seed)
    x = torch.randn(rows, inputs + 2, generator=generator)[:, 1:-1]
    weights = torch.randn(slots, outputs, inputs, generator=generator)
    of_rows = torch.randint(-1, slots, (rows,), generator=generator)
    found, expected = both("slot_linear", x, weights, of_rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    for row, slot in enumerate(of_rows.tolist()):  # of no other row
        alone, _ = both("slot_linear", x[row : row + 1], weights, of_rows[row : row + 1])
        assert torch.equal(alone[0], found[row])
        assert slot >= 0 or not found[row].any()
