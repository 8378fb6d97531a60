"""The mixer of Gated DeltaNet against the modules of Qwen3.5 and OLMo Hybrid."""

import pytest
import torch
from small_models import small_model
from transformers import OlmoHybridConfig, Qwen3_5TextConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megatron_hybrid.models.mixers.base import StateTensor
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

KEY_HEADS, VALUE_HEADS, KEY, VALUE, EPSILON = 2, 4, 16, 24, 1e-2
SIZES = {
    "hidden_size": 48,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
}


def qwen3_5():
    module = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**SIZES, rms_norm_eps=EPSILON), 0)
    parts = [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
    fields = {"linear_norm_epsilon": EPSILON, "linear_norm_zero_centered_gamma": False}
    # The norms of the rest of the model are zero-centered, this one is not.
    fields["layernorm_zero_centered_gamma"] = True
    return module, parts, module.norm, module.out_proj, fields


def olmo_hybrid():
    """Negative eigenvalues."""
    module = OlmoHybridGatedDeltaNet(OlmoHybridConfig(**SIZES, linear_allow_neg_eigval=True), 0)
    parts = [getattr(module, f"{name}_proj") for name in "qkvgba"]
    fields = {"linear_norm_epsilon": 1e-5, "linear_allow_neg_eigval": True}
    return module, parts, module.o_norm, module.o_proj, fields


@pytest.mark.parametrize("make", [qwen3_5, olmo_hybrid])
@torch.no_grad()
def test_equals_transformers(make):
    module, parts, norm, output, fields = make()
    for parameter in module.eval().parameters():
        parameter.normal_(std=0.3)
    norm.weight.add_(1.0)
    mixer = small_model("G", **fields).decoder.layers[0].self_attention
    mixer.in_proj.weight.copy_(torch.cat([part.weight for part in parts]))
    mixer.conv1d.weight.copy_(module.conv1d.weight)
    mixer.A_log.copy_(module.A_log)
    mixer.dt_bias.copy_(module.dt_bias)
    mixer.out_norm.weight.copy_(norm.weight)
    mixer.out_proj.weight.copy_(output.weight)
    x_Th = torch.randn(45, 48)
    given, bias = mixer(x_Th, UncachedContext(RaggedLayout.uniform(1, 45), x_Th.device))
    assert bias is None
    expected = module(x_Th[None])[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_what_is_kept():
    (cache,) = small_model("G", recurrent_state_dtype=torch.bfloat16).cache_requirements()
    channels = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    assert cache.kv is None
    assert cache.states == (
        StateTensor("conv", (channels, 3), torch.float32),
        StateTensor("delta", (VALUE_HEADS, KEY, VALUE), torch.bfloat16),
    )
