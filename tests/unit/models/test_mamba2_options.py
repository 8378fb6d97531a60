"""The options of the Mamba-2 mixer and the layer of parallel heads, against Falcon-H1's modules."""

import pytest
import torch
from small_models import random_tokens, small_config, small_model
from transformers import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import (
    FalconH1DecoderLayer,
    FalconH1RotaryEmbedding,
    compute_mup_vector,
)

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

FACTORS = [0.9, 0.8, 1.2, 0.7, 1.3]
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "rms_norm_eps": 1e-3,
    "attn_implementation": "eager",
}
OURS = {"kv_channels": 12, "mamba_num_heads": 4, "mamba_norm_epsilon": 1e-3, "rotary_base": 1e4}
CASES = {
    "gate first": (
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "time_step_limit": (0.5, 0.9)},
        {"mamba_gated_norm": "gate_first", "mamba_dt_min": 0.5, "mamba_dt_max": 0.9},
    ),
    "norm first": (
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "ssm_multipliers": FACTORS},
        {"mamba_gated_norm": "norm_first", "mamba_section_multipliers": FACTORS},
    ),
    "no norm, other biases": (
        {"mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False},
        {"mamba_gated_norm": "none", "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
}


def falcon_layer(**fields) -> FalconH1DecoderLayer:
    config = FalconH1Config(**SHAPE, **fields)
    layer = FalconH1DecoderLayer(config, 0).eval()
    layer.mamba.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    return layer


def run(layer, hidden_Th: torch.Tensor) -> torch.Tensor:
    layout = RaggedLayout.uniform(1, len(hidden_Th))
    output, bias = layer.mixer(hidden_Th, UncachedContext(layout, hidden_Th.device))
    return output if bias is None else output + bias


@pytest.mark.parametrize(("theirs", "ours"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_options_of_mamba2(theirs, ours):
    torch.manual_seed(0)
    reference = falcon_layer(**theirs).mamba
    layer = small_model("M", **OURS, **ours).decoder.layers[0]
    layer.mixer.load_state_dict(reference.state_dict())
    x_Th = torch.randn(29, 48)
    expected = reference(x_Th[None])[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(run(layer, x_Th), expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_parallel_heads():
    torch.manual_seed(0)
    factors = {
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6,
    }
    reference = falcon_layer(**factors)
    layer = small_model(
        "H",
        **OURS,
        mamba_gated_norm="none",
        attention_input_multiplier=1.1,
        attention_output_multiplier=0.9,
        mamba_input_multiplier=1.25,
        mamba_output_multiplier=0.6,
    ).decoder.layers[0]
    attention = reference.self_attn
    groups = [getattr(attention, f"{name}_proj").weight.unflatten(0, (2, -1)) for name in "qkv"]
    layer.mixer.mamba.load_state_dict(reference.mamba.state_dict())
    layer.mixer.attention.linear_qkv.weight.copy_(torch.cat(groups, 1).flatten(0, 1))
    layer.mixer.attention.linear_proj.weight.copy_(attention.o_proj.weight)

    x_Th = torch.randn(21, 48)
    rotary = FalconH1RotaryEmbedding(attention.config)(x_Th, torch.arange(21)[None])
    causal = torch.full((21, 21), -torch.inf).triu(1)[None, None]
    mamba = reference.mamba(x_Th[None])[0] * 0.6  # it has ssm_in_multiplier inside
    expected = mamba + attention(x_Th[None] * 1.1, rotary, causal)[0][0] * 0.9
    torch.testing.assert_close(run(layer, x_Th), expected, atol=2e-5, rtol=1e-5)


def test_parallel_heads_keep_both_kinds_of_memory_and_learn():
    model = small_model("H-", mamba_section_multipliers=FACTORS, mlp_gate_multiplier=0.7)
    cache = model.cache_requirements()[0]
    assert cache.kv.num_heads == 2
    assert [state.name for state in cache.states] == ["conv", "ssm"]
    tokens = random_tokens(2, 20)
    model(tokens, labels=tokens).mean().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


@torch.no_grad()
def test_multipliers_of_an_mlp():
    torch.manual_seed(0)
    mlp = small_model("-", mlp_gate_multiplier=0.3, mlp_output_multiplier=1.7).decoder.layers[0].mlp
    x_Th = torch.randn(5, 48)
    gate, up = (x_Th @ mlp.linear_fc1.weight.T).chunk(2, -1)
    expected = (torch.nn.functional.silu(0.3 * gate) * up) @ mlp.linear_fc2.weight.T * 1.7
    torch.testing.assert_close(mlp(x_Th, None)[0], expected)


@pytest.mark.parametrize(
    ("pattern", "fields", "message"),
    [
        ("M", {"mamba_gated_norm": "last"}, "use 'gate_first', 'norm_first' or 'none'"),
        ("M", {"mamba_dt_min": 0.5, "mamba_dt_max": 0.1}, r"mamba_dt_max are \(0.5, 0.1\)"),
        ("H", {"mamba_section_multipliers": [1.0]}, "takes five factors"),
        ("-", {"mlp_gate_multiplier": 2.0, "gated_linear_unit": False}, "has no gate"),
        ("-", {"mlp_gate_multiplier": 2.0, "bias_activation_fusion": True}, "do not know"),
    ],
)
def test_one_clear_error(pattern, fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(pattern, **fields)
