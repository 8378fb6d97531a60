"""Gated norms with a sigmoid, and rounded before their gate; others: models of transformers."""

import pytest
import torch

from megatron_hybrid.ops import gated_rms_norm

T, G, C, EPS = 7, 3, 20, 1e-3


@pytest.mark.parametrize("norm_first", [False, True])
def test_with_a_sigmoid_the_gate_is_one_of_silu_over_its_input(norm_first):
    x, gate, weight = torch.randn(T, G, C), torch.randn(T, G, C).exp(), torch.randn(C)
    expected = gated_rms_norm(x if norm_first else x / gate, gate, weight, 1e-9, "silu", norm_first)
    found = gated_rms_norm(x, gate, weight, 1e-9, "sigmoid", norm_first)
    torch.testing.assert_close(found, expected / gate if norm_first else expected)


def test_a_norm_may_be_rounded_before_the_gate():
    x, gate, weight = torch.randn(T, G, C).bfloat16(), torch.randn(T, G, C), torch.randn(C)
    open_gate = torch.full_like(gate, torch.inf)
    normed = gated_rms_norm(x, open_gate, weight, EPS, "sigmoid", norm_first=True)
    expected = (normed.float() * torch.nn.functional.silu(gate)).bfloat16()
    found = gated_rms_norm(x, gate, weight, EPS, norm_first=True, rounds_norm=True)
    assert torch.equal(found, expected)
    assert not torch.equal(found, gated_rms_norm(x, gate, weight, EPS, norm_first=True))
