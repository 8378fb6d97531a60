"""Options of the recurrent ops."""

import importlib

import pytest
import torch
from recurrences import (
    CHANNELS,
    CONV,
    DELTA_RULES,
    SELECTIVE_SCAN,
    WIDTH,
    H,
    N,
    P,
    assert_near,
    randn,
    seeded,
    to,
)

from megatron_hybrid.ops import RaggedLayout
from megatron_hybrid.ops.conv.reference import causal_conv1d
from megatron_hybrid.ops.selective_scan.reference import selective_scan

LAYOUT = RaggedLayout((1, 20), (3, 7))
T = LAYOUT.num_rows


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_the_selective_scan_has_no_grid(chunk_size, monkeypatch):
    """Its recurrence is taken token by token: neither chunks nor blocks round differently."""
    layout = RaggedLayout((1, 50, 33, 50), (3, 7, 0, 9), (1, 20, 60))
    generator = seeded(1)
    x, dt, B, C = to(torch.float32, SELECTIVE_SCAN.inputs(layout.num_rows, generator))
    A, D = to(torch.float32, SELECTIVE_SCAN.parameters(generator))
    states = SELECTIVE_SCAN.states(layout.num_sequences, generator).float()
    expected = selective_scan(x, dt, A, B, C, D, states, layout)
    module = importlib.import_module("megatron_hybrid.ops.selective_scan.reference")
    for bytes_at_once in (1, 5 * states[0].nbytes):
        monkeypatch.setattr(module, "BLOCK_BYTES", bytes_at_once)
        actual = selective_scan(x, dt, A, B, C, D, states, layout, chunk_size)
        assert_near(actual[0], expected[0], 1e-6)
        for left, right in zip(actual[1:], expected[1:]):
            assert torch.equal(left, right)


@pytest.mark.parametrize("op", DELTA_RULES, ids=lambda op: op.name)
def test_equal_keys_stay_stable(op):
    """The system of a chunk is at its worst when every key is the same and is written in full."""
    layout, generator = RaggedLayout((256,), (0,)), seeded(1)
    q, k, v, g, beta = op.inputs(256, generator)
    k[:], g[:], beta[:] = k[0].clone(), 0.0, 1.0
    inputs, states = (q, k, v, g, beta), torch.zeros(1, H, N, P)
    o, final, _ = op.call(to(torch.float32, inputs), (), states, layout, 64)
    expected_o, states = op.naive(inputs, (), states[0].double())
    assert_near(o, expected_o)
    assert_near(final[0], states[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conv_tails_are_the_inputs_to_the_bit(dtype):
    """A tail is a copy of inputs, so that of an fp16 model is fp16 and loses nothing."""
    generator = seeded(0)
    (x,), (weight, bias) = CONV.inputs(T, generator), CONV.parameters(generator)
    x = x.to(dtype)
    tails = randn(seeded(2), 2, CHANNELS, WIDTH - 1).to(dtype)
    y, final, _ = causal_conv1d(x, weight.to(dtype), bias.to(dtype), tails, LAYOUT)
    assert (y.dtype, final.dtype) == (dtype, dtype)
    assert torch.equal(final[0], torch.cat([tails[0], x[:1].t()], dim=1)[:, 1:])
    assert torch.equal(final[1], x[-(WIDTH - 1) :].t())
    in_fp32 = (t.to(dtype).float() for t in (weight, bias))
    exact, _, _ = causal_conv1d(x.float(), *in_fp32, tails.float(), LAYOUT)
    assert torch.equal(y, exact.to(dtype))
