"""Whole Jacobians in float64, entry by entry against finite differences, as training calls the ops.

Several sequences in a row, with boundaries inside of chunks, some of them of one token, and rows of
padding. By random projections: recurrent ops in `test_ops_recurrent.py`, attention without pages in
`test_attention.py`.
"""

import pytest
import torch
from recurrences import CONV, randn, seeded

from megatron_hybrid.ops import AttentionPattern, RaggedLayout, paged_attention
from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.ops.conv.reference import causal_conv1d

RAGGED = RaggedLayout((1, 4), (0, 0), num_padding=1)


def assert_right(function, *tensors):
    """Tensors are leaves; the Jacobian of each output by each of them is that of differences."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    for output in outputs(function(*leaves)):
        assert output.dtype == torch.float64
    assert torch.autograd.gradcheck(function, leaves, nondet_tol=0.0)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def test_a_convolution_without_optional_inputs():
    generator = seeded(5)
    (x,), (weight, _) = CONV.inputs(RAGGED.num_rows, generator), CONV.parameters(generator)
    assert_right(lambda *t: causal_conv1d(*t, None, None, RAGGED)[:2], x, weight)


PATTERNS = {
    "all": AttentionPattern(0.3),
    "chunk": AttentionPattern(0.3, chunk=4),
    "window and softcap": AttentionPattern(0.3, window=3, softcap=0.8),
}


@pytest.mark.parametrize(
    ("name", "with_sinks"),
    [*((name, False) for name in PATTERNS), ("all", True), ("window and softcap", True)],
)
def test_paged_attention(name, with_sinks):
    """Queries, and the pages that are read; decodes and a prefill that goes on."""
    generator, layout = seeded(7), RaggedLayout((1, 1, 4), (6, 2, 3))
    table = torch.tensor([[4, 1], [0, 0], [3, 2]])
    tensors = [randn(generator, *shape) for shape in ((6, 4, 3), (5, 4, 2, 3), (5, 4, 2, 2))]
    if with_sinks:
        tensors.append(randn(generator, 4))

    def call(q, k, v, sinks=None):
        return paged_attention(q, k, v, table, layout, PATTERNS[name], sinks)

    assert_right(call, *tensors)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    assert_right(ACTIVATIONS[name], randn(seeded(11), 4, 5))
