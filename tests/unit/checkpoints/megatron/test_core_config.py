"""Fields of core's config and those of the HybridConfig that serves its model."""

import logging

import pytest
import torch
import torch.nn.functional as F
from megatron.core import activations

from megatron_hybrid.checkpoints.megatron.core_config import hybrid_config_fields
from megatron_hybrid.compat import TransformerConfig
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.ops.activations import ACTIVATIONS

SIZES = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
LATENT = {"multi_latent_attention": True, "qk_layernorm": True}


def served(fields, layer_pattern=None, **model_fields):
    """The HybridConfig for a mapping of core's fields, or for one of its configs."""
    fields = {**SIZES, **fields} if isinstance(fields, dict) else fields
    return HybridConfig(
        **hybrid_config_fields(fields, layer_pattern=layer_pattern, vocab_size=99, **model_fields)
    )


def test_fields_left_out_have_defaults_of_core():
    made, core = served({}, "MM*-"), TransformerConfig(**SIZES)
    for name in ("normalization", "add_bias_linear", "gated_linear_unit", "mamba_num_groups"):
        assert getattr(made, name) == getattr(core, name)
    assert made.activation_func is F.gelu
    assert served(core, "MM*-").to_dict() == made.to_dict()


def test_what_concerns_training_or_the_run_is_left_out():
    run = {
        "bf16": True,
        "sequence_parallel": True,
        "num_layers_in_first_pipeline_stage": 1,
        "expert_model_parallel_size": 2,
        "cpu_offloading": True,
        "fp8": "hybrid",
        "mtp_num_layers": 2,
        "moe_router_dtype": "fp64",
        "moe_expert_capacity_factor": 1.0,
        "num_moe_experts": 4,
        "cuda_graph_impl": "local",
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "a_field_of_tomorrow": 3,
    }
    made = served(run, "M*-E")
    changing = {"bf16": True, "num_moe_experts": 4, "activation_func": ACTIVATIONS["gelu_tanh"]}
    assert made.to_dict() == served(changing, "M*-E").to_dict()
    assert made.params_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "pattern", "message"),
    [
        ({"moe_mlp_glu_interleave_size": 32}, "M*-", "moe_mlp_glu_interleave_size is 32"),
        ({"activation_func": torch.tanh}, "M*-", "activation_func is"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}, "*E", "sinkhorn"),
        ({"experimental_attention_variant": "dsa"}, None, "'dsa', which HybridModel does not"),
        ({}, "MD-", "symbol 'D' at place 2, DeepSeek sparse attention"),
        ({}, "MX", "symbol 'X' at place 2"),
        (
            {"linear_attention_freq": [1, 0], "experimental_attention_variant": "gated_delta_net"},
            None,
            "linear_attention_freq is .* a list of 4 entries",
        ),
        ({"rotary_interleaved": True}, "M*", "rotary_interleaved is True"),
        ({}, "MG", "Gated DeltaNet of megatron-core uses too"),
        ({**LATENT, "mla_down_proj_fusion": True}, None, "mla_down_proj_fusion is True"),
        ({**LATENT, "softmax_type": "off-by-one"}, None, "softmax_type is 'off-by-one', but multi"),
        ({**LATENT, "window_size": (3, 0)}, None, r"window_size is \(3, 0\), but multi-head"),
    ],
)
def test_what_cannot_be_served_is_named(fields, pattern, message):
    with pytest.raises(ValueError, match=message):
        served(fields, pattern, position_embedding_type="rope")


def test_layers_for_multi_token_prediction_are_taken_or_left_out(caplog):
    assert served({}, "M*-M/*-/*-").layer_pattern == "M*-M/*-/*-"
    with caplog.at_level(logging.WARNING):
        assert served({}, "M*|-M/*-/*-").layer_pattern == "M*|-M"
    assert "the last pipeline stage has no embedding" in caplog.text


def test_layers_without_rope():
    made = served({"no_rope_freq": 2}, position_embedding_type="rope")
    assert made.layer_overrides.keys() == {"3", "7"}
    made = served({"no_rope_freq": [0, 0, 1, 0]}, "*M*-", position_embedding_type="rope")
    kinds = [made.for_layer(i).position_embedding_type for i in (1, 3)]
    assert kinds == ["rope", "none"]


@pytest.mark.parametrize("name", ["squared_relu", "quick_gelu", "fast_gelu"])
def test_activations_of_core_compute_the_same(name):
    function = getattr(activations, name)
    x = torch.linspace(-4, 4, 101)
    with torch.compiler.set_stance("force_eager"):
        expected = function(x)
    torch.testing.assert_close(served({"activation_func": function}).activation_func(x), expected)
