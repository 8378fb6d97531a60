"""The reference of gated norms against the modules of transformers."""

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from megatron_hybrid.ops import gated_rms_norm

T, G, C, EPS = 7, 3, 20, 1e-3
MODULES = {
    "gate first": (Zamba2RMSNormGated(C, C, eps=EPS), {}),
    "gate first, in groups": (
        FalconH1RMSNormGated(G * C, eps=EPS, n_groups=G, norm_before_gate=False),
        {},
    ),
    "norm first, in groups": (
        FalconH1RMSNormGated(G * C, eps=EPS, n_groups=G, norm_before_gate=True),
        {"norm_first": True},
    ),
    "norm first": (Qwen3NextRMSNormGated(C, eps=EPS), {"norm_first": True}),
}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("module", "form"), MODULES.values(), ids=MODULES)
@torch.no_grad()
def test_it_is_as_in_transformers(module, form, zero_centered):
    x, gate, weight = torch.randn(T, G, C), torch.randn(T, G, C), torch.randn(module.weight.shape)
    module.weight.copy_(weight)
    # Those over groups take them as one row.
    rows = (T, -1) if len(weight) == G * C else (T, G, C)
    expected = module(x.reshape(1, *rows), gate.reshape(1, *rows)).view(T, G, C)
    weight = (weight - 1 if zero_centered else weight).view(-1, C).squeeze(0)
    found = gated_rms_norm(x, gate, weight, EPS, zero_centered=zero_centered, **form)
    torch.testing.assert_close(found, expected)


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
