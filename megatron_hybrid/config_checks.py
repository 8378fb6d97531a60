"""What makes a configuration legal: one function for each group of a HybridConfig's fields.

They fill in the defaults that follow from other fields, and raise ValueErrors that name the field,
the value, the limit and what to do.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from megatron_hybrid.models.layer_pattern import KINDS
from megatron_hybrid.models.mixers.rotary import check_rotary_scaling
from megatron_hybrid.ops.activations import ACTIVATIONS

if TYPE_CHECKING:
    from megatron_hybrid.config import HybridConfig

logger = logging.getLogger(__name__)

_EXPERT_BIAS = (
    "moe_router_enable_expert_bias (megatron-core's finalize_model_grads moves it in each step)"
)

# Fields of TransformerConfig that HybridModel does not act upon: the one value it accepts, and what
# to do instead. Without this table they would be ignored in silence.
_FIXED_FIELDS: dict[str, tuple[Any, str]] = {
    "attention_dropout": (0.0, "use hidden_dropout"),
    "window_size": (None, "use the symbol W in layer_pattern and sliding_window"),
    "no_rope_freq": (None, "use layer_overrides with position_embedding_type"),
    "multi_latent_attention": (False, "use the symbol + in layer_pattern"),
    "window_attn_skip_freq": (None, "place the symbols W and * in layer_pattern"),
    "experimental_attention_variant": (None, "use the symbol G in layer_pattern"),
    "linear_attention_freq": (None, "place the symbol G in layer_pattern"),
    "mrope_section": (None, "use rotary_scaling"),
    "num_layers_in_first_pipeline_stage": (None, "mark the stages with | in layer_pattern"),
    "num_layers_in_last_pipeline_stage": (None, "mark the stages with | in layer_pattern"),
    "account_for_embedding_in_pipeline_split": (False, "mark the stages with | in layer_pattern"),
    "account_for_loss_in_pipeline_split": (False, "mark the stages with | in layer_pattern"),
    "pipeline_model_parallel_layout": (None, "mark the stages with | in layer_pattern"),
    "virtual_pipeline_model_parallel_size": (None, "use one stage per pipeline rank"),
    "context_parallel_size": (1, "shard by tensor_model_parallel_size"),
    "hybrid_context_parallel": (False, "shard by tensor_model_parallel_size"),
    "sequence_parallel": (False, "shard by tensor_model_parallel_size alone"),
    "heterogeneous_block_specs": (False, "use layer_overrides"),
    "gtp_weight_remat_size": (1, "shard by tensor_model_parallel_size"),
    "expert_gtp_weight_remat_size": (1, "shard by tensor_model_parallel_size"),
    "moe_extended_tp": (False, "shard by tensor_model_parallel_size"),
    "enable_autocast": (False, "use params_dtype=torch.bfloat16"),
    "expert_model_parallel_size": (1, "shard by tensor_model_parallel_size"),
    "mtp_num_layers": (None, "train without multi-token prediction"),
    "moe_layer_freq": (1, "place the symbols E and - in layer_pattern"),
    "moe_aux_loss_coeff": (0.0, f"balance the experts by {_EXPERT_BIAS}"),
    "moe_z_loss_coeff": (None, f"balance the experts by {_EXPERT_BIAS}"),
    "moe_input_jitter_eps": (None, "use hidden_dropout"),
    "moe_router_dtype": ("fp32", "route in fp32"),
    "moe_router_force_load_balancing": (False, "route by the router"),
    "moe_router_force_biased": (None, "route by the router"),
    "moe_router_topk_limited_devices": (None, "use moe_router_group_topk"),
    "moe_token_dropping": (False, "let each expert take every token routed to it"),
    "moe_expert_capacity_factor": (None, "let each expert take every token routed to it"),
    "moe_expert_rank_capacity_factor": (None, "let each expert take every token routed to it"),
    "moe_mlp_glu_interleave_size": (None, "keep gates and values apart"),
    "moe_shared_expert_glu_interleave_size": (None, "keep gates and values apart"),
    "moe_shared_expert_overlap": (False, "run the shared expert after the others"),
    "moe_enable_routing_replay": (False, "route by the router"),
    "qk_clip": (False, "use qk_layernorm"),
    "apply_rope_fusion": (False, "use the unfused RoPE"),
    "apply_residual_connection_post_layernorm": (False, "use pre-norm residuals"),
    "fp32_residual_connection": (False, "use params_dtype=torch.float32"),
    "recompute_granularity": (None, "train with a smaller micro batch"),
    "moe_layer_recompute": (False, "train with a smaller micro batch"),
    "num_microbatches_with_partial_activation_checkpoints": (
        None,
        "train with a smaller micro batch",
    ),
    "fine_grained_activation_offloading": (False, "train with a smaller micro batch"),
    "activation_func_fp8_input_store": (False, "train with a smaller micro batch"),
    "use_te_activation_func": (False, "use activation_func"),
    "cpu_offloading": (False, "train with a smaller micro batch"),
    "cuda_graph_impl": ("none", "run eagerly"),
    "enable_cuda_graph": (False, "run eagerly"),
    "external_cuda_graph": (False, "run eagerly"),
    "delay_wgrad_compute": (False, "let each backward compute all gradients"),
    "overlap_moe_expert_parallel_comm": (False, "run one micro batch after the other"),
    "batch_invariant_mode": (False, "compare within a tolerance"),
    "inference_sampling_seed": (42, "use InferenceConfig.random_seed"),
    "mamba_training_ssm_states_dtype": (None, "train with states in fp32"),
    "flash_decode": (False, "use DynamicInferenceEngine"),
    "fp8": (None, "use params_dtype=torch.bfloat16"),
    "fp4": (None, "use params_dtype=torch.bfloat16"),
    "quant_recipe": (None, "use params_dtype=torch.bfloat16"),
    "use_kitchen": (False, "use params_dtype=torch.bfloat16"),
    "use_kitchen_attention": (False, "use params_dtype=torch.bfloat16"),
    "use_mup": (False, "scale the learning rates outside of the model"),
}

# Fields of TransformerConfig that ask for speed or memory, not for other numbers or other shards.
# HybridModel does not act upon them either.
_FIELDS_WITHOUT_EFFECT = (
    "transformer_impl",
    "attention_backend",
    "flash_attention_version",
    "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
    "masked_softmax_fusion",
    "fused_single_qkv_rope",
    "log_max_attention_logit",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "fused_residual_rmsnorm",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "use_fused_weighted_squared_relu",
    "use_mamba_mem_eff_path",
    "use_transformer_engine_op_fuser",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
    "use_inference_optimized_layers",
    "inference_fuse_tp_communication",
    "mlp_chunks_for_prefill",
    "mlp_chunks_for_training",
    "moe_grouped_gemm",
    "moe_use_legacy_grouped_gemm",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_token_dispatcher_type",
    "moe_enable_deepep",
    "moe_paged_stash",
    "tp_comm_overlap",
    "symmetric_ar_type",
    "nccl_all_reduce_for_prefill",
    "defer_embedding_wgrad_compute",
    "distribute_saved_activations",
)


_NUMBERS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def check_types(config_class: type[HybridConfig], fields: Mapping[str, Any]) -> None:
    """Whether the fields that are annotated as numbers or booleans have such values."""
    hints = _type_hints(config_class)
    for name, value in fields.items():
        kinds = get_args(hints[name]) or (hints[name],)
        accepted = [kind for kind in _NUMBERS if kind in kinds]
        if not accepted or (value is None and type(None) in kinds):
            continue
        numeric = (int, float) if float in kinds else (int,) if int in kinds else ()
        fits = bool in kinds if isinstance(value, bool) else isinstance(value, numeric)
        if not fits:
            known = " or ".join(_NUMBERS[kind] for kind in accepted)
            raise ValueError(f"{name} is {value!r}; it must be {known}.")


_type_hints = cache(get_type_hints)


def check_kind(config: HybridConfig, symbol: str) -> None:
    """What the layers of one kind need, and the defaults that follow from other fields."""
    if config.norm_placement not in ("pre", "post", "sandwich"):
        raise ValueError(
            f"norm_placement is {config.norm_placement!r}; use 'pre', 'post' or 'sandwich'."
        )
    if config.layernorm_epsilon < 0:
        raise ValueError(f"layernorm_epsilon is {config.layernorm_epsilon}; it must be 0 or more.")
    for group in KINDS[symbol].fields:
        _GROUPS[group](config)


def check_overrides(
    config: HybridConfig,
    symbols: list[str],
    layer_fields: Sequence[str],
    left_out: set[str],
) -> None:
    """Whether overrides name layers that are there, and fields that a layer may have for itself.
    left_out: fields that followed from others."""
    for layers, fields in config.layer_overrides.items():
        is_number = isinstance(layers, str) and layers.isdecimal()
        if layers not in symbols and not (is_number and 1 <= int(layers) <= len(symbols)):
            raise ValueError(
                f"layer_overrides has the key {layers!r}, but keys are symbols of the "
                f"layer_pattern {config.layer_pattern!r} or layer numbers from '1' to "
                f"'{len(symbols)}'."
            )
        unknown = sorted(set(fields) - set(layer_fields))
        if unknown:
            raise ValueError(
                f"layer_overrides[{layers!r}] sets {unknown[0]!r}, which is no field of a "
                f"single layer. Such fields: {', '.join(layer_fields)}."
            )
        check_types(type(config), fields)
    for number, symbol in enumerate(symbols, start=1):
        _check_following(config, number, symbol, left_out)
    layers = [config.for_layer(number) for number in range(1, len(symbols) + 1)]
    for number, layer in enumerate(layers, start=1):
        attends = "attention" in KINDS[symbols[number - 1]].fields
        if attends and layer.kv_source_layer is not None:
            _check_kv_source(number, symbols, layers)


_FOLLOWING = {
    "attention": {"num_attention_heads": ("num_query_groups", "kv_channels")},
    "mamba": {"mamba_expand": ("mamba_num_heads",), "mamba_head_dim": ("mamba_num_heads",)},
    "linear": {"linear_key_head_dim": ("linear_num_key_heads",)},
    "gated_delta_net": {"linear_num_key_heads": ("linear_num_value_heads",)},
}
"""By group of fields: those from which others follow where these are left out."""


def left_out_fields(config: HybridConfig) -> set[str]:
    """The fields that will follow from others. Call it before they do."""
    return {
        name
        for followers_of in _FOLLOWING.values()
        for followers in followers_of.values()
        for name in followers
        if getattr(config, name) is None
    }


def _check_following(config: HybridConfig, number: int, symbol: str, left_out: set[str]) -> None:
    """What has followed from the model's fields would stay when a layer overrides these."""
    fields = config.overrides_of(number, symbol)
    for group in KINDS[symbol].fields:
        for name, followers in _FOLLOWING.get(group, {}).items():
            stale = [one for one in followers if one in left_out and one not in fields]
            if stale and fields.get(name, getattr(config, name)) != getattr(config, name):
                raise ValueError(
                    f"layer_overrides sets {name}={fields[name]!r} for layer {number} ({symbol}), "
                    f"but not {' and '.join(stale)}, which would stay as for the other layers. "
                    "Set all of them."
                )


def _check_kv_source(number: int, symbols: list[str], layers: list[HybridConfig]) -> None:
    layer = layers[number - 1]
    source = layer.kv_source_layer
    if layer.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"layer {number} has kv_source_layer={source}, which needs both layers on one "
            f"pipeline stage, but there are {layer.pipeline_model_parallel_size}. Use 1."
        )
    alike = ("num_query_groups", "kv_channels", "sliding_window", "attention_chunk_size")
    if (
        not 1 <= source < number
        or symbols[source - 1] != symbols[number - 1]
        or layers[source - 1].kv_source_layer is not None
        or any(getattr(layers[source - 1], name) != getattr(layer, name) for name in alike)
    ):
        raise ValueError(
            f"layer {number} ({symbols[number - 1]}) has kv_source_layer={source}; it must be "
            "a layer before it of the same symbol, with keys and values of its own and the "
            f"same {', '.join(alike)}."
        )


def require_positive(config: HybridConfig, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{field} is {value!r}; it must be a whole number of 1 or more.")


def _require_divisible(config: HybridConfig, *fields: str) -> None:
    size = config.tensor_model_parallel_size
    for field in fields:
        value = getattr(config, field)
        if value % size:
            raise ValueError(
                f"{field} is {value}, which does not divide evenly over "
                f"tensor_model_parallel_size={size}. Use a multiple of {size}, or fewer ranks."
            )


def check_fixed_fields(config: HybridConfig) -> None:
    for field, (accepted, instead) in _FIXED_FIELDS.items():
        value = getattr(config, field, accepted)  # a few exist in one release only
        if value != accepted:
            raise ValueError(
                f"{field} is {value!r}, which HybridModel does not support: leave it at "
                f"{accepted!r} and {instead}."
            )
    tp_size = config.tensor_model_parallel_size
    if config.expert_tensor_parallel_size not in (None, tp_size):
        raise ValueError(
            f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}, but experts are "
            f"sharded by tensor_model_parallel_size={tp_size}. Leave it at None."
        )
    if config.activation_func not in ACTIVATIONS.values():
        raise ValueError(
            f"activation_func is {config.activation_func!r}; "
            f"use one of config.ACTIVATIONS: {', '.join(ACTIVATIONS)}."
        )
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        raise ValueError(
            f"normalization is {config.normalization!r}; use 'RMSNorm' or 'LayerNorm'."
        )


def tell_fields_without_effect(config: HybridConfig) -> None:
    """Logs the fields that are set and make no difference, the same ones only once."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    idle = [
        name
        for name in _FIELDS_WITHOUT_EFFECT
        if name in defaults and getattr(config, name) != defaults[name]
    ]
    if config.tensor_model_parallel_size > 1 and "cross_entropy_loss_fusion" in idle:
        idle.remove("cross_entropy_loss_fusion")  # core's loss over a split vocabulary has it
    if idle:
        _tell_once(", ".join(idle))


@cache
def _tell_once(names: str) -> None:
    logger.warning("without effect in HybridModel, results are the same: %s", names)


def _check_attention(config: HybridConfig) -> None:
    require_positive(config, "num_query_groups", "kv_channels")
    if config.num_attention_heads % config.num_query_groups:
        raise ValueError(
            f"num_attention_heads is {config.num_attention_heads}, not a multiple of "
            f"num_query_groups={config.num_query_groups}. Each group serves as many heads."
        )
    _require_divisible(config, "num_query_groups")
    _check_position_embedding(config)
    if config.position_embedding_type == "rope":
        if not 0.0 < config.rotary_percent <= 1.0:
            raise ValueError(
                f"rotary_percent is {config.rotary_percent}; it must lie in (0, 1]. "
                "For no rotation use position_embedding_type='none'."
            )
        if config.rotary_dim % 2 or not config.rotary_dim:
            raise ValueError(
                f"RoPE rotates {config.rotary_dim} of kv_channels={config.kv_channels} dimensions "
                f"(rotary_percent={config.rotary_percent}); it needs an even number of 2 or more."
            )
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        raise ValueError(
            f"softmax_type is {config.softmax_type!r}; use 'vanilla', 'off-by-one' or 'learnable'."
        )

    if config.qk_layernorm_scope not in ("head", "all_heads"):
        raise ValueError(
            f"qk_layernorm_scope is {config.qk_layernorm_scope!r}; use 'head' or 'all_heads'."
        )
    if config.qk_layernorm_scope == "all_heads" and config.tensor_model_parallel_size > 1:
        raise ValueError(
            "qk_layernorm_scope='all_heads' needs all heads on one rank, but "
            f"tensor_model_parallel_size is {config.tensor_model_parallel_size}. Use 1."
        )
    for name in ("attention_logit_softcap", "attention_temperature_floor"):
        if (value := getattr(config, name)) is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0.")


def _check_latent_attention(config: HybridConfig) -> None:
    sizes = ["kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
    if config.q_lora_rank is not None:
        sizes.append("q_lora_rank")
    require_positive(config, *sizes)
    _require_divisible(config, "num_attention_heads")
    _check_position_embedding(config)
    if config.position_embedding_type == "rope" and config.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"RoPE rotates qk_pos_emb_head_dim={config.qk_pos_emb_head_dim} dimensions; it needs "
            "an even number. For no rotation use position_embedding_type='none'."
        )


def _check_position_embedding(config: HybridConfig) -> None:
    if config.position_embedding_type not in ("rope", "none"):
        raise ValueError(
            f"position_embedding_type is {config.position_embedding_type!r}; use 'rope' or 'none'."
        )
    if config.rotary_base <= 0:
        raise ValueError(f"rotary_base is {config.rotary_base}; it must be above 0.")
    if config.rotary_scaling is not None:
        check_rotary_scaling(config.rotary_scaling)


def _check_window(config: HybridConfig) -> None:
    _require_for_symbol(config, "sliding_window", "W", "the number of positions that they see")


def _check_chunk(config: HybridConfig) -> None:
    _require_for_symbol(config, "attention_chunk_size", "L", "the number of positions of a chunk")


def _require_for_symbol(config: HybridConfig, field: str, symbol: str, value: str) -> None:
    if getattr(config, field) is None:
        raise ValueError(
            f"layer_pattern {config.layer_pattern!r} has layers of {KINDS[symbol].meaning} "
            f"({symbol}), but {field} is None. Set it to {value}."
        )
    require_positive(config, field)


def _check_per_layer_input(config: HybridConfig) -> None:
    _require_for_symbol(config, "per_layer_input_size", "P", "the width of such an input")
    if config.pipeline_model_parallel_size > 1:
        raise ValueError(
            "per-layer inputs (P) are made of the tokens, which the first pipeline stage alone "
            f"sees, but there are {config.pipeline_model_parallel_size} stages. Use 1."
        )


def _check_mlp(config: HybridConfig) -> None:
    require_positive(config, "ffn_hidden_size")
    _require_divisible(config, "ffn_hidden_size")
    if config.mlp_gate_multiplier != 1.0:
        if not config.gated_linear_unit:
            raise ValueError(
                f"mlp_gate_multiplier is {config.mlp_gate_multiplier}, but an MLP with "
                "gated_linear_unit=False has no gate. Leave it at 1."
            )
        if config.bias_activation_fusion:
            raise ValueError(
                f"mlp_gate_multiplier is {config.mlp_gate_multiplier}, which the kernels of "
                "bias_activation_fusion=True do not know. Use bias_activation_fusion=False."
            )


def _check_moe(config: HybridConfig) -> None:
    if config.num_moe_experts is None:
        raise ValueError(
            f"num_moe_experts is None, but layer_pattern {config.layer_pattern!r} has layers with "
            "a mixture of experts. Set it, moe_router_topk and moe_ffn_hidden_size."
        )
    check_routing(config)
    sizes = ["moe_ffn_hidden_size"]
    if config.moe_shared_expert_intermediate_size is not None:
        sizes.append("moe_shared_expert_intermediate_size")
    elif config.moe_shared_expert_gate:
        raise ValueError(
            "moe_shared_expert_gate=True gates a shared expert, but there is none: "
            "moe_shared_expert_intermediate_size is None. Set it, or leave out the gate."
        )
    require_positive(config, *sizes)
    _require_divisible(config, *sizes)
    if config.moe_latent_size is not None:
        require_positive(config, "moe_latent_size")
    if (config.mlp_gate_multiplier, config.mlp_output_multiplier) != (1.0, 1.0):
        raise ValueError(
            f"mlp_gate_multiplier is {config.mlp_gate_multiplier} and mlp_output_multiplier "
            f"{config.mlp_output_multiplier}, which experts do not have. Leave both at 1, or set "
            "them by layer_overrides for the symbol -."
        )


def _check_dense_and_experts(config: HybridConfig) -> None:
    for name in ("moe_latent_size", "moe_shared_expert_intermediate_size"):
        if (value := getattr(config, name)) is not None:
            raise ValueError(
                f"{name} is {value}, but the experts of a layer D work on the whole hidden state, "
                "beside an MLP instead of a shared expert. Leave it out, or set it for the layers "
                "E alone, by layer_overrides."
            )


def check_routing(config: HybridConfig) -> None:
    require_positive(config, "num_moe_experts", "moe_router_topk")
    experts, topk = config.num_moe_experts, config.moe_router_topk
    if topk > experts:
        raise ValueError(
            f"moe_router_topk is {topk}, but num_moe_experts is {experts}. "
            "A token cannot go to more experts than there are."
        )
    if config.moe_router_score_function not in ("softmax", "sigmoid"):
        raise ValueError(
            f"moe_router_score_function is {config.moe_router_score_function!r}; "
            "use 'softmax' or 'sigmoid'."
        )
    # A name, several or None; with a coefficient of 0 the others do nothing.
    balancing = config.moe_router_load_balancing_type
    if any(name in (balancing or ()) for name in ("sinkhorn", "quantile_balancing")):
        raise ValueError(
            f"moe_router_load_balancing_type is {balancing!r}, which HybridModel does not support: "
            f"balance the experts by {_EXPERT_BIAS}."
        )
    softmax = config.moe_router_score_function == "softmax"
    if softmax and topk == 1 and not config.moe_router_pre_softmax:
        raise ValueError(
            "moe_router_topk=1 with a softmax over the one chosen expert weighs it 1 whatever "
            "the router says. Set moe_router_pre_softmax=True or use 'sigmoid' scores."
        )
    if softmax and config.moe_router_enable_expert_bias:
        raise ValueError(
            "moe_router_enable_expert_bias=True needs moe_router_score_function='sigmoid': "
            "a bias that only selects is defined for independent scores."
        )
    if config.moe_apply_probs_on_input and topk != 1:
        raise ValueError(
            f"moe_apply_probs_on_input=True needs moe_router_topk=1, but it is {topk}."
        )
    if config.add_bias_linear and config.tensor_model_parallel_size > 1:
        raise ValueError(
            "add_bias_linear=True with experts needs every bias on one rank, but "
            f"tensor_model_parallel_size is {config.tensor_model_parallel_size}. Use 1."
        )
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    if (groups is None) != (chosen is None):
        raise ValueError(
            f"moe_router_num_groups is {groups} and moe_router_group_topk is {chosen}; "
            "set both, or none to choose among all experts."
        )
    if groups is None:
        return
    require_positive(config, "moe_router_num_groups", "moe_router_group_topk")
    per_group, rest = divmod(topk, chosen)
    if experts % groups or chosen > groups or rest or per_group > experts // groups:
        raise ValueError(
            f"moe_router_num_groups={groups} and moe_router_group_topk={chosen} do not fit "
            f"num_moe_experts={experts} and moe_router_topk={topk}: groups must divide the "
            "experts evenly, and each chosen group must give an equal share of the top-k."
        )


def _check_mamba(config: HybridConfig) -> None:
    require_positive(
        config,
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_expand",
        "mamba_chunk_size",
    )
    _require_conv_kernel(config, "mamba_conv_kernel")
    if config.mamba_num_heads is None:
        width = config.mamba_expand * config.hidden_size
        if width % config.mamba_head_dim:
            raise ValueError(
                f"the inner width mamba_expand * hidden_size = {width} is not a multiple of "
                f"mamba_head_dim={config.mamba_head_dim}. Change one, or set mamba_num_heads."
            )
        config.mamba_num_heads = width // config.mamba_head_dim
    require_positive(config, "mamba_num_heads")
    if config.mamba_num_heads % config.mamba_num_groups:
        raise ValueError(
            f"mamba_num_heads is {config.mamba_num_heads}, not a multiple of "
            f"mamba_num_groups={config.mamba_num_groups}. Each group serves as many heads."
        )
    _require_divisible(config, "mamba_num_groups")
    if config.mamba_gated_norm not in ("gate_first", "norm_first", "none"):
        raise ValueError(
            f"mamba_gated_norm is {config.mamba_gated_norm!r}; "
            "use 'gate_first', 'norm_first' or 'none'."
        )
    limits = (config.mamba_dt_min, config.mamba_dt_max)
    if limits[0] < 0 or (limits[1] is not None and limits[1] < limits[0]):
        raise ValueError(
            f"mamba_dt_min and mamba_dt_max are {limits}; time steps are positive, so the "
            "limits need 0 <= mamba_dt_min <= mamba_dt_max (None: no upper limit)."
        )
    multipliers = config.mamba_section_multipliers
    if multipliers is not None and len(multipliers) != 5:
        raise ValueError(
            f"mamba_section_multipliers is {multipliers}; it takes five factors, those of z, "
            "x, B, C and dt."
        )


def _check_linear(config: HybridConfig) -> None:
    require_positive(config, "linear_key_head_dim", "linear_value_head_dim", "linear_chunk_size")
    _require_conv_kernel(config, "linear_conv_kernel_dim")
    if config.linear_num_key_heads is None:
        config.linear_num_key_heads = max(1, config.hidden_size // config.linear_key_head_dim)
    require_positive(config, "linear_num_key_heads")
    _require_divisible(config, "linear_num_key_heads")


def _check_mamba1(config: HybridConfig) -> None:
    if config.mamba1_inner_size is None:
        config.mamba1_inner_size = 2 * config.hidden_size
    if config.mamba1_dt_rank is None:
        config.mamba1_dt_rank = -(-config.hidden_size // 16)
    require_positive(
        config, "mamba1_state_dim", "mamba1_inner_size", "mamba1_dt_rank", "mamba1_chunk_size"
    )
    _require_conv_kernel(config, "mamba1_conv_kernel")
    _require_divisible(config, "mamba1_inner_size")
    if config.mamba1_norm not in ("none", "weighted", "weightless"):
        raise ValueError(
            f"mamba1_norm is {config.mamba1_norm!r}; use 'none', 'weighted' or 'weightless'."
        )


def _check_short_conv(config: HybridConfig) -> None:
    _require_conv_kernel(config, "short_conv_kernel")
    _require_divisible(config, "hidden_size")


def _check_shared_block(config: HybridConfig) -> None:
    require_positive(config, "num_shared_blocks", "shared_block_adapter_rank")
    for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        if (size := getattr(config, name)) > 1:
            raise ValueError(
                f"{name} is {size}, but shared blocks (Z in layer_pattern "
                f"{config.layer_pattern!r}) lie whole on one rank. Use 1."
            )
    plain = {
        "norm_placement": "pre",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "kv_source_layer": None,
        "keys_as_values": False,
        "attention_output_gate": False,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "mlp_gate_multiplier": 1.0,
        "mlp_output_multiplier": 1.0,
    }
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)!r}, but shared blocks (Z in layer_pattern "
                f"{config.layer_pattern!r}) need {value!r}. Set it for the other layers alone, "
                "by layer_overrides."
            )


def _check_gated_delta_net(config: HybridConfig) -> None:
    if config.linear_num_value_heads is None:
        config.linear_num_value_heads = 2 * config.linear_num_key_heads
    require_positive(config, "linear_num_value_heads")
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise ValueError(
            f"linear_num_value_heads is {config.linear_num_value_heads}, not a multiple of "
            f"linear_num_key_heads={config.linear_num_key_heads}. "
            "Each key head serves as many value heads."
        )


def _require_conv_kernel(config: HybridConfig, field: str) -> None:
    if getattr(config, field) < 2:
        raise ValueError(
            f"{field} is {getattr(config, field)}; a causal convolution needs a width of 2 "
            "or more (4 is usual)."
        )


_GROUPS: dict[str, Callable[[HybridConfig], None]] = {
    "attention": _check_attention,
    "window": _check_window,
    "chunk": _check_chunk,
    "latent_attention": _check_latent_attention,
    "mamba": _check_mamba,
    "mamba1": _check_mamba1,
    "short_conv": _check_short_conv,
    "linear": _check_linear,
    "gated_delta_net": _check_gated_delta_net,
    "shared_block": _check_shared_block,
    "per_layer_input": _check_per_layer_input,
    "mlp": _check_mlp,
    "moe": _check_moe,
    "dense_and_experts": _check_dense_and_experts,
}
"""What `LayerKind.fields` names."""
