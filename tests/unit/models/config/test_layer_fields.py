"""Contradictions of a layer kind's fields: refused by name, with the value and the limit."""

import pytest
from small_models import small_config

TWO = {"tensor_model_parallel_size": 2}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 20, "moe_router_topk": 3}
REFUSED = {
    "S": [
        ({"mamba1_num_heads": 5}, "inner_size is 96, not a multiple of mamba1_num_heads=5"),
        ({"mamba1_num_heads": 2, "mamba1_norm": "weighted"}, "mamba1_norm is 'weighted'"),
        ({"mamba1_inner_size": 95, **TWO}, "mamba1_inner_size is 95, which does not divide evenly"),
    ],
    "J": [({}, "layer 1 .J. reads the last Mamba-1 layer .S. before it")],
    "SJ": [
        ({"layer_overrides": {"J": {"mamba1_inner_size": 64}}}, "same mamba1_inner_size=64"),
        ({"pipeline_model_parallel_size": 2}, "have one pipeline stage, not"),
    ],
    "C": [
        ({"hidden_size": 49, "tensor_model_parallel_size": 2}, "hidden_size is 49, which does not"),
    ],
    "K": [
        ({"linear_num_key_heads": 3, "tensor_model_parallel_size": 2}, "linear_num_key_heads"),
    ],
    "A": [
        ({"lightning_norm_groups": 3}, "not a multiple of lightning_norm_groups=3"),
        ({"lightning_rope": True, "rotary_percent": 0.07}, "RoPE rotates 1 of linear_key"),
    ],
    "U": [
        ({"lru_num_blocks": 5}, "lru_width is 48, not a multiple of lru_num_blocks=5"),
        ({"tensor_model_parallel_size": 2}, "lru_num_blocks is 1, which does not divide evenly"),
    ],
    "*": [
        ({"keys_as_values": True, "value_channels": 6}, "value_channels is 6, but keys_as_values"),
        ({"differential_lambda": 0.3}, "differential_lambda is 0.3, which needs an even"),
        ({"query_rank": 5}, "query_rank is 5, which needs num_query_groups=1"),
    ],
    "+": [
        ({"qk_pos_emb_head_dim": 5}, "qk_pos_emb_head_dim=5"),
        ({"rotary_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'; use one of"),
        ({"rotary_scaling": {"factor": 2.0}}, "rope_type None"),
        ({"rotary_scaling": {"rope_type": "linear"}}, r"\['factor'\] is None"),
        ({"rotary_scaling": {"rope_type": "yarn", "factor": -1}}, "is -1"),
        (
            {"rotary_scaling": {"rope_type": "proportional", "partial_rotary_factor": "0.5"}},
            "is '0.5'",
        ),
        ({**TWO, "layer_overrides": {"+": {"num_attention_heads": 3}}}, "multiple of 2"),
    ],
    "M": [
        ({"mamba_dt_min": 0.5, "mamba_dt_max": 0.1}, r"mamba_dt_max are \(0.5, 0.1\)"),
    ],
    "H": [
        ({"mamba_section_multipliers": [1.0]}, "takes five factors"),
    ],
    "-": [
        ({"activation_clamp_after": True, "gated_linear_unit": False}, "has no gate"),
        ({"activation_sparsity": 0.9, "bias_activation_fusion": True}, "do not know"),
    ],
    "ZZ": [
        ({"gated_linear_unit": False}, "need True"),
        ({"attention_output_bias": True}, "attention_output_bias is True, but shared blocks"),
        ({"shared_block_adapter_rank": None, "shared_block_attention_adapters": True}, "a rank"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0, but shared blocks"),
    ],
    "*E": [
        ({"num_moe_experts": None, "moe_ffn_hidden_size": None}, "num_moe_experts is None, but la"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "other experts in training than in"),
        ({"moe_token_dropping": True}, "use moe_expert_capacity_factor"),
        ({"moe_router_topk": 9}, "moe_router_topk is 9, but num_moe_experts is 8"),
        ({"moe_router_topk": 1}, "moe_router_pre_softmax=True"),
        ({"moe_apply_probs_on_input": True}, "needs moe_router_topk=1"),
        ({"moe_shared_expert_gate": True}, "there is none"),
        ({"moe_router_num_groups": 4}, "moe_router_group_topk is None"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "do not fit"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "do not fit"),
        ({"activation_sparsity": 0.5}, "activation_sparsity is 0.5, which experts do not have"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "a bias that checkpoints and"),
        ({"moe_aux_loss_coeff": [0.01]}, "moe_aux_loss_coeff is .0.01.. Give one loss and one"),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.01],
            },
            "a list of each, of the same length",
        ),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "aux_loss"],
                "moe_aux_loss_coeff": [0.01, 0.1],
            },
            "name each loss once",
        ),
        ({"add_bias_linear": True, "tensor_model_parallel_size": 2}, "needs whole experts"),
        ({**TWO, "expert_tensor_parallel_size": 4}, "4, which does not divide tensor_model_paral"),
        ({"expert_model_parallel_size": 3}, "num_moe_experts is 8, which does not divide evenly"),
        ({"moe_ffn_hidden_size": 21, "tensor_model_parallel_size": 2}, "moe_ffn_hidden_size is 21"),
    ],
    "P-": [
        ({}, "per_layer_input_size is None. Set it"),
        ({"num_residual_streams": 3}, "num_residual_streams is 3, for which layer_pattern has to"),
        ({"per_layer_input_size": 8, "pipeline_model_parallel_size": 2}, "are 2 stages. Use 1"),
    ],
}
"""Pattern -> fields, and words of the error."""


@pytest.mark.parametrize(
    ("pattern", "fields", "message"),
    [(pattern, *row) for pattern, rows in REFUSED.items() for row in rows],
)
def test_contradictions_are_refused(pattern, fields, message):
    experts = EXPERTS if "E" in pattern else {}
    with pytest.raises(ValueError, match=message):
        small_config(pattern, **{**experts, **fields})
