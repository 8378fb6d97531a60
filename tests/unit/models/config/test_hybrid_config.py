"""HybridConfig: defaults that work, its JSON form, and one clear error for what does not fit, such
as contradictions of a layer kind's fields."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import stock_megatron
import torch
import torch.nn.functional as F
from small_models import small_config

from megatron_hybrid.compat import TransformerConfig
from megatron_hybrid.models.config import unsupported
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.moe import DenseAndExpertsFields
from megatron_hybrid.models.config.recurrent import GatedMemoryFields
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.ops.activations import ACTIVATIONS

FOUR = {"tensor_model_parallel_size": 4}


def config(pattern="MG*W-", **fields):
    return HybridConfig(
        **{
            "layer_pattern": pattern,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 100,
            "sliding_window": 8,
            **fields,
        }
    )


def test_derived_sizes():
    made = config()
    assert made.num_layers == 5
    assert made.num_query_groups == 4
    assert made.kv_channels == 16
    assert made.ffn_hidden_size == 256
    assert made.mamba_num_heads == 2  # 2 * 64 / 64
    assert (made.linear_num_key_heads, made.linear_num_value_heads) == (1, 2)
    assert config(hidden_size=512).linear_num_key_heads == 4
    kimi = config("K", hidden_size=512)
    assert (kimi.linear_num_key_heads, kimi.linear_num_value_heads) == (4, None)
    assert config(rotary_percent=0.25).rotary_dim == 4
    mamba1 = config("S", hidden_size=40)
    assert (mamba1.mamba1_inner_size, mamba1.mamba1_dt_rank) == (80, 3)


def test_a_pattern_without_attention_needs_no_heads():
    made = HybridConfig(layer_pattern="MG-", hidden_size=64, vocab_size=100)
    assert not made.has_attention
    sharded = HybridConfig.from_dict(
        made.to_dict(),
        tensor_model_parallel_size=2,
        mamba_num_groups=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    assert sharded.num_attention_heads == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "MX"}, "unknown symbol 'X' at place 2 of 2"),
        ({"num_layers": 3}, "num_layers is 3, but layer_pattern 'MG*W-' has 5 layers"),
        ({"layer_overrides": {2: {"rotary_base": 1e4}}}, "layer_overrides has the key 2, but keys"),
        ({"num_query_groups": 3}, "num_attention_heads is 4, not a multiple of num_query_groups=3"),
        ({"sliding_window": None}, "sliding-window attention (W), but sliding_window is None"),
        ({"kv_channels": 15}, "RoPE rotates 15 of kv_channels=15 dimensions"),
        ({"mamba_head_dim": 48}, "mamba_expand * hidden_size = 128 is not a multiple of mamba_"),
        ({"mamba_num_groups": 4}, "mamba_num_heads is 2, not a multiple of mamba_num_groups=4"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "linear_num_value_heads is 3"),
        ({"recurrent_state_dtype": torch.float16}, "whose range ends at 65504"),
        ({"recurrent_state_dtype": torch.float64}, "recurrent_state_dtype is torch.float64; use"),
        ({"params_dtype": torch.float64}, "params_dtype is torch.float64; use one of"),
        ({"bf16": True, "params_dtype": torch.float16}, "contradict params_dtype=torch.float16"),
        ({"activation_func": F.elu}, "use one of ops.activations.ACTIVATIONS: silu, gelu"),
        ({"layer_overrides": {"-": {"activation_func": F.elu}}}, "ops.activations.ACTIVATIONS"),
        (
            {"layer_overrides": {"M": {"mamba_head_dim": 32}}},
            "sets mamba_head_dim=32 for layer 1 (M), but not mamba_num_heads, which would stay",
        ),
        (
            {"layer_overrides": {"3": {"num_attention_heads": 8, "kv_channels": 8}}},
            "num_attention_heads=8 for layer 3 (*), but not num_query_groups, which",
        ),
        ({"layer_overrides": {"G": {"linear_key_head_dim": 32}}}, "2 (G), but not linear_num_key_"),
        ({"heterogeneous_block_specs": True}, "heterogeneous_block_specs is True, which Hybrid"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph is True, which means nothing to"),
        (
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size is 2, which does not divide tensor_model_parallel_size=1",
        ),
        (
            {"account_for_loss_in_pipeline_split": True},
            "account_for_loss_in_pipeline_split is True, which HybridModel spells otherwise: leave "
            "it at False and mark the stages with | in layer_pattern",
        ),
        (
            {"tensor_model_parallel_size": 4, "mamba_num_heads": 12, "mamba_num_groups": 6},
            "mamba_num_groups is 6, neither a multiple nor a divisor of "
            "tensor_model_parallel_size=4. Use a multiple, of which each rank holds an equal part, "
            "or a divisor, of which each rank holds a copy of one.",
        ),
        (
            {**FOUR, "mamba_num_heads": 6, "pattern": "M"},
            "mamba_num_heads is 6, which does not di",
        ),
        (
            {**FOUR, "num_attention_heads": 12, "num_query_groups": 6, "pattern": "*"},
            "num_query_groups is 6, neither a multiple nor a divisor of",
        ),
        (
            {"tensor_model_parallel_size": 8, "num_query_groups": 2, "pattern": "*"},
            "num_attention_heads is 4, which does not divide evenly over",
        ),
        ({**FOUR, "linear_num_value_heads": 6, "pattern": "G"}, "value_heads is 6, which does not"),
        ({"pattern": "-", "tensor_model_parallel_size": 3}, "ffn_hidden_size is 256, which does"),
        ({"sequence_parallel": True}, "Cannot use sequence parallelism without tensor parallelism"),
        (
            {"context_parallel_size": 2},
            "leave it at 1 and shard by tensor_model_parallel_size, and sequence_parallel in "
            "training: the state of a recurrent layer passes through all tokens of a sequence in "
            "order, and pages of the cache hold whole tokens",
        ),
        (
            {"pipeline_model_parallel_size": 6},
            "5 layers, but pipeline_model_parallel_size is 6, and each stage needs a layer. Use at "
            "most 5 stages.",
        ),
    ],
)
def test_one_clear_error(fields, message):
    with pytest.raises(ValueError) as error:
        config(**fields)
    assert message in str(error.value)


HINTS = {
    "moe_grouped_gemm": True,
    "cross_entropy_loss_fusion": True,
    "bias_dropout_fusion": True,
    "tp_comm_overlap": True,
    "distribute_saved_activations": True,
}


def test_fields_without_effect_are_named_once(caplog):
    unsupported._warn_once.cache_clear()
    config()
    config("-", tensor_model_parallel_size=2, cross_entropy_loss_fusion=True)  # core fuses that
    assert not caplog.records
    config(**HINTS)
    config(**HINTS)
    (record,) = caplog.records
    assert set(HINTS) == set(record.message.split(": ")[1].split(", "))
    config(moe_token_dispatcher_type="alltoall", attention_softmax_in_fp32=False)
    assert caplog.messages[1].endswith(": attention_softmax_in_fp32, moe_token_dispatcher_type")


REASONS = (unsupported.SPELT_OTHERWISE, unsupported.MEANS_NOTHING, unsupported.NOT_SUPPORTED)


def test_each_field_has_one_reason():
    names = [name for fields in (*REASONS, unsupported.WITHOUT_EFFECT) for name in fields]
    assert len(names) == len(set(names))
    assert len(unsupported.NOT_SUPPORTED) <= 10
    known = {field.name for field in dataclasses.fields(HybridConfig)}
    if stock_megatron.IS_0_16:
        assert len(known & set(names)) > 60
    else:  # but those that core has removed since
        assert len(set(names) - known) <= 5, set(names) - known


def test_the_reference_lists_all_of_them():
    text = Path(__file__).parents[4].joinpath("docs/reference/megatron_fields.md").read_text()
    _, _, text = text.partition("## Fields of TransformerConfig")
    parts = text.split("\n### ")[1:5]
    for part, fields in zip(parts, (*REASONS, unsupported.WITHOUT_EFFECT), strict=True):
        listed = set(re.findall(r"`(\w+)`", part.partition("\n## ")[0]))
        assert set(fields) <= listed, part[:40]


def test_the_derived_expert_tensor_parallel_size_may_be_given():
    made = config("-", tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    assert config("-", tensor_model_parallel_size=2).expert_tensor_parallel_size == 2
    assert made.expert_tensor_parallel_size == 2


def test_overrides_beside_what_does_not_follow():
    made = config(
        num_query_groups=2,
        kv_channels=16,
        mamba_num_heads=2,
        layer_overrides={
            "W": {"num_attention_heads": 2},
            "M": {"mamba_head_dim": 32},
            "G": {"linear_key_head_dim": 128},  # the model's own
        },
    )
    again = HybridConfig.from_dict(json.loads(json.dumps(made.to_dict())))
    for one in (made, again):
        assert (one.for_layer(4).num_attention_heads, one.for_layer(4).num_query_groups) == (2, 2)
        assert (one.for_layer(1).mamba_head_dim, one.for_layer(1).mamba_num_heads) == (32, 2)


@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_flag_and_dtype_say_the_same(flag):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[flag]
    for made in (config(**{flag: True}), config(params_dtype=dtype)):
        assert made.params_dtype == made.pipeline_dtype == dtype
        assert (made.bf16, made.fp16) == (flag == "bf16", flag == "fp16")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_json_round_trip(activation):
    made = config(
        params_dtype=torch.bfloat16,
        recurrent_state_dtype=torch.bfloat16,
        activation_func=ACTIVATIONS[activation],
        qk_layernorm=True,
        mamba_chunk_size=32,
        softmax_scale=0.25,
    )
    values = json.loads(json.dumps(made.to_dict()))
    again = HybridConfig.from_dict(values)
    assert again.to_dict() == made.to_dict()
    assert again.activation_func is ACTIVATIONS[activation]
    assert again.params_dtype == torch.bfloat16


def test_each_field_that_core_has_not_is_saved_or_of_one_run():
    """One that is neither would have its default again after `save_checkpoint` and back."""
    names = {field.name for field in dataclasses.fields(HybridConfig)}
    core = {field.name for field in dataclasses.fields(TransformerConfig)}
    of_one_run = {"layer_spec", "moe_router_force_biased"}  # the latter is core's since 0.19
    assert names - core - config().to_dict().keys() == of_one_run - core


def test_each_group_of_a_layer_kind_is_part_of_the_config():
    groups = {group for kind in LAYER_KINDS.values() for group in kind.fields}
    without_fields = {DenseAndExpertsFields, GatedMemoryFields}
    assert groups - set(HybridConfig.__mro__) == without_fields


def test_a_layer_takes_no_field_of_the_whole_model():
    for name, value in {"vocab_size": 8, "num_shared_blocks": 2, "hidden_dropout": 0.1}.items():
        with pytest.raises(ValueError, match=f"sets '{name}', which is no field of a single layer"):
            config(layer_overrides={"M": {name: value}})


def test_overrides_are_fields_of_the_run():
    values = config(mamba_num_groups=2, linear_num_key_heads=2).to_dict()
    again = HybridConfig.from_dict(values, tensor_model_parallel_size=2, hidden_dropout=0.1)
    assert again.tensor_model_parallel_size == 2
    assert again.to_dict() == values, "and no part of what is saved"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, "unknown key 'n_layer'"),
        ({"params_dtype": "float8"}, "params_dtype is 'float8' in the config; use one of"),
        ({"activation_func": "swish"}, "activation_func is 'swish' in the config"),
        ({"activation_func": None}, "activation_func is None in the config"),
    ],
)
def test_unusable_json(change, message):
    with pytest.raises(ValueError) as error:
        HybridConfig.from_dict({**config().to_dict(), **change})
    assert message in str(error.value)


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
