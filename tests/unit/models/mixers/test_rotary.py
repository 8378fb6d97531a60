"""RoPE equals megatron-core's for any positions, its frequencies are transformers' for each kind of
scaling, and its tables outlive inference mode."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_hybrid.models.mixers.rotary import RotaryEmbedding, frequencies
from megatron_hybrid.ops.ragged import RaggedLayout


def cos_sin(rotary, positions, dtype):
    layout = RaggedLayout((1,) * len(positions), tuple(positions.tolist()))
    return rotary.cos_sin_of_batch(layout, positions, dtype)


def test_tables_made_in_inference_mode_serve_training():
    rotary = RotaryEmbedding(8, 123.0)
    positions = torch.arange(10)
    with torch.inference_mode():
        cos_sin(rotary, positions, torch.float32)
    x = torch.randn(10, 2, 8, requires_grad=True)
    rotary.rotate(x, cos_sin(rotary, positions, x.dtype)).sum().backward()
    assert x.grad is not None


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama3 of Llama 4": {  # a band of no width
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn of GPT-OSS": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 512,
    },
    "yarn with a factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 512,
    },
    "yarn of no ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "stretched proportional": {
        "rope_type": "proportional",
        "partial_rotary_factor": 1.0,
        "factor": 2.0,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 150000.0])
def test_frequencies_are_those_of_transformers(name, base):
    scaling = SCALINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, **scaling},
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    radians, own_amplitude = frequencies(64, base, scaling)
    torch.testing.assert_close(radians, expected, atol=0, rtol=2e-6)
    assert own_amplitude == pytest.approx(amplitude)
    assert not torch.allclose(radians, frequencies(64, base, {})[0], atol=0, rtol=1e-3)
