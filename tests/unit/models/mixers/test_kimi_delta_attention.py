"""Kimi Delta Attention's mixer against its recurrence, token by token in float64."""

import pytest
import torch
import torch.nn.functional as F
from small_models import small_config, small_model

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.delta_rule.naive import delta_rule
from megatron_hybrid.ops.ragged import RaggedLayout

HEADS, KEY, VALUE, WIDTH = 2, 16, 24, 4


def recurrence(mixer, x_Th, max_beta):
    """The layer as the paper writes it (arXiv 2510.26692, section 4)."""
    weights = {name: value.double() for name, value in mixer.named_parameters()}
    x_Th = x_Th.double()
    sizes = [HEADS * KEY, HEADS * KEY, HEADS * VALUE, HEADS]
    q, k, v, beta = (x_Th @ weights["in_proj.weight"].T).split(sizes, -1)
    qkv = torch.cat((q, k, v), -1)
    padded = F.pad(qkv, (0, 0, WIDTH - 1, 0))
    taps = weights["conv1d.weight"][:, 0].T
    qkv = F.silu(sum(padded[i : i + len(x_Th)] * taps[i] for i in range(WIDTH)))
    q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in qkv.split(sizes[:3], -1))
    decay = x_Th @ weights["f_a_proj.weight"].T @ weights["f_b_proj.weight"].T
    decay = F.softplus(decay + weights["dt_bias"]).unflatten(-1, (HEADS, KEY))
    log_decay = -weights["A_log"].exp()[:, None] * decay
    beta = beta.sigmoid() * max_beta
    gate = x_Th @ weights["g_a_proj.weight"].T @ weights["g_b_proj.weight"].T
    o, _ = delta_rule(q, k, v, log_decay, beta, q.new_zeros(HEADS, KEY, VALUE))
    o = o / o.square().mean(-1, keepdim=True).add(mixer.config.linear_norm_epsilon).sqrt()
    factor = weights["out_norm.weight"] + mixer.out_norm.zero_centered
    o = o * factor * gate.sigmoid().view_as(o)
    return o.flatten(1) @ weights["out_proj.weight"].T


NORMS = {
    "as all": ({}, False),
    "zero-centred as all": ({"layernorm_zero_centered_gamma": True}, True),
    "unlike all": (
        {"layernorm_zero_centered_gamma": True, "linear_norm_zero_centered_gamma": False},
        False,
    ),
}


@pytest.mark.parametrize("fields, zero_centered", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_equals_the_recurrence(negative, fields, zero_centered):
    model = small_model("K", linear_allow_neg_eigval=negative, linear_norm_epsilon=1e-2, **fields)
    mixer = model.decoder.layers[0].self_attention
    assert mixer.out_norm.zero_centered == zero_centered
    mixer.out_norm.weight.normal_(1.0, 0.3)
    mixer.dt_bias.normal_()
    x_Th = torch.randn(21, 48)
    output, bias = mixer(x_Th, UncachedContext(RaggedLayout.uniform(1, 21), x_Th.device))
    assert bias is None
    expected = recurrence(mixer, x_Th, 2.0 if negative else 1.0)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.1


def test_heads_follow_from_the_width():
    config = small_config("K", linear_num_key_heads=None, linear_num_value_heads=None)
    assert config.linear_num_key_heads == 3
    assert config.linear_num_value_heads is None  # has no meaning here
