"""Names of GPTModel's parameters."""

import pytest

from megatron_hybrid.checkpoints.megatron.names import gpt_to_hybrid_name, hybrid_to_gpt_name
from megatron_hybrid.models.parameter_names import canonical_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.final_layernorm.bias", "decoder.final_norm.bias"),
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.6.input_layernorm.weight"),
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.6.input_layernorm.weight",
        ),
        ("decoder.layers.12.mlp.router.weight", "decoder.layers.25.mlp.router.weight"),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_bias",
            "decoder.layers.1.pre_mlp_layernorm.bias",
        ),
        (
            "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.2.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.2.self_attention.q_layernorm.weight",
        ),
    ],
)
def test_gpt_names_become_ours(name, expected):
    assert canonical_name(gpt_to_hybrid_name(name)) == expected
    assert hybrid_to_gpt_name(gpt_to_hybrid_name(name)) == name
