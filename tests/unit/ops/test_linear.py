"""Products on a CPU: bits of rows, the layout that an engine keeps, and gradients."""

import sys

import pytest
import torch
import torch.nn.functional as F

from megatron_hybrid import ops
from megatron_hybrid.ops.linear import reordered

ROWS = 80
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def given(inputs, outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, inputs), (outputs, inputs), (outputs,)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_onednn", [True, False])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_number(dtype, has_onednn, monkeypatch):
    if not has_onednn:
        monkeypatch.setattr(sys.modules[ops.linear.__module__], "_DTYPES", ())
    for inputs, outputs in ((64, 48), (100, 7), (1536, 40)):
        x, weight, bias = given(inputs, outputs, dtype)
        expected = ops.linear(x, weight, bias)
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
        right = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(expected.double(), right, rtol=bound, atol=inputs * bound / 4)
        other = reordered(weight)
        for number in (1, 2, 3, 4, 5, 7, 8, 9, 33):
            for start in (0, ROWS - number):
                rows = slice(start, start + number)
                for own in (weight, other):
                    assert torch.equal(ops.linear(x[rows], own, bias), expected[rows])
        one = ops.linear(x, weight[:1], bias[:1])  # an output has them, too
        assert dtype == torch.float64 or not has_onednn or torch.equal(one, expected[:, :1])
        assert torch.equal(ops.linear(x.view(8, 10, -1), weight, bias).flatten(0, 1), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 5, ROWS])
def test_gradients_are_those_of_torch(dtype, number):
    x, *rest = given(48, 20, dtype)
    inputs = [each.requires_grad_() for each in (x[:number].clone(), *rest)]
    seed = torch.randn(number, 20).to(dtype)
    found, expected = (
        torch.autograd.grad(product(*inputs), inputs, seed) for product in (ops.linear, F.linear)
    )
    torch.testing.assert_close(found, expected)


def test_what_is_frozen_keeps_no_input():
    x, weight, _ = given(48, 20)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        ops.linear(x.requires_grad_(), weight)
    assert [each is None or each.data_ptr() for each in kept] == [weight.data_ptr()]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(0, 48), (0, 3, 48), (2, 0, 48), (48,)])
def test_inputs_without_rows_or_with_one_have_the_shape_of_torch(dtype, shape):
    _, weight, bias = given(48, 20, dtype)
    x = torch.ones(shape, dtype=dtype)
    torch.testing.assert_close(ops.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.bits
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_an_engine_has_the_bits_of_a_weight_that_is_part_of_a_tensor(dtype):
    x, whole, _ = given(100, 80, dtype)
    for weight in (whole[::2], whole[3:40], whole.T[:, 5:69]):
        own = x[:, : weight.shape[1]]
        assert torch.equal(ops.linear(own, reordered(weight)), ops.linear(own, weight))
