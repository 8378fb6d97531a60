"""The kernel of norms and rotations against the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import seeded

from megatron_hybrid.ops import dispatch

OP = dispatch.OPS["rotate_heads"]


def draw(rows, groups, heads, width, pairs, dtype=torch.float32, seed=0):
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
    *inputs, weights = draw(*sizes, *width_pairs, seed=seed)
    form = interleaved, *(weights if has_norm else (None, None)), 1e-3
    assert OP.refusals(*inputs, *form)["triton"] is None
    for found, expected in zip(OP.backends[0].run(*inputs, *form), OP.reference(*inputs, *form)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_it_rounds_where_the_reference_does():
    *inputs, weights = draw(5, 2, 3, 64, 16, torch.float16)
    for found, expected in zip(
        OP.backends[0].run(*inputs, False, *weights, 1e-3),
        OP.reference(*inputs, False, *weights, 1e-3),
    ):
        assert found.dtype == torch.float16 and (found == expected).float().mean() > 0.98
