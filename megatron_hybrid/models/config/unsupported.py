"""Fields of TransformerConfig that HybridModel does not implement: an error or a warning."""

from __future__ import annotations

import dataclasses
import logging
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_hybrid.compat import TransformerConfig

logger = logging.getLogger(__name__)

CONTEXT_PARALLEL = (
    "shard by tensor_model_parallel_size, and sequence_parallel in training: the state of a "
    "recurrent layer passes through all tokens of a sequence in order, and pages of the cache hold "
    "whole tokens, so the tokens of one sequence cannot lie on several ranks"
)
"""Remedy for context parallelism, and the reason why there is none."""

_RESULT_REMEDIES: dict[str, tuple[str, ...]] = {
    "use the symbol W in layer_pattern and sliding_window": ("window_size",),
    "place the symbols W and * in layer_pattern": ("window_attn_skip_freq",),
    "use the symbol + in layer_pattern": ("multi_latent_attention",),
    "use the symbol G in layer_pattern": ("experimental_attention_variant",),
    "place the symbol G in layer_pattern": ("linear_attention_freq",),
    "place the symbols E and - in layer_pattern": ("moe_layer_freq",),
    "use layer_overrides with position_embedding_type": ("no_rope_freq",),
    "use layer_overrides": ("heterogeneous_block_specs",),
    "use rotary_scaling": ("mrope_section",),
    "use pre-norm residuals": ("apply_residual_connection_post_layernorm",),
    "let each expert take every token routed to it": ("moe_expert_rank_capacity_factor",),
    "keep gates and values apart": (
        "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size",
    ),
    "scale the learning rates outside of the model": ("use_mup",),
}
"""Remedy -> fields that must keep their defaults, as they change what a trained model computes."""

_RUN_REMEDIES: dict[str, tuple[str, ...]] = {
    "use the unfused RoPE": ("apply_rope_fusion",),
    "use qk_layernorm": ("qk_clip",),
    "use activation_func": ("use_te_activation_func",),
    "mark the stages with | in layer_pattern": (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
    ),
    "use one stage per pipeline rank": ("virtual_pipeline_model_parallel_size",),
    CONTEXT_PARALLEL: ("context_parallel_size",),
    "shard by tensor_model_parallel_size": (
        "hybrid_context_parallel",
        "gtp_weight_remat_size",
        "expert_gtp_weight_remat_size",
        "moe_extended_tp",
    ),
    "use params_dtype=torch.bfloat16": (
        "enable_autocast",
        "fp8",
        "fp4",
        "quant_recipe",
        "use_kitchen",
        "use_kitchen_attention",
    ),
    "train without multi-token prediction": ("mtp_num_layers",),
    "route by the router": ("moe_enable_routing_replay",),
    "use moe_expert_capacity_factor": ("moe_token_dropping",),
    "use recompute_granularity='selective' and recompute_modules=['moe']": ("moe_layer_recompute",),
    "use recompute_granularity": (
        "num_microbatches_with_partial_activation_checkpoints",
        "fine_grained_activation_offloading",
        "activation_func_fp8_input_store",
        "cpu_offloading",
    ),
    "run eagerly": ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
    "let each backward compute all gradients": ("delay_wgrad_compute",),
    "run one micro batch after the other": ("overlap_moe_expert_parallel_comm",),
    "compare within a tolerance": ("batch_invariant_mode",),
    "use InferenceConfig.random_seed": ("inference_sampling_seed",),
    "use DynamicInferenceEngine": ("flash_decode",),
    "train with states in fp32": ("mamba_training_ssm_states_dtype",),
}
"""Remedy -> fields that must keep their defaults, of training, sharding, speed or rounding: a model
that was trained with them can be served without."""

RESULT_FIELDS = tuple(name for names in _RESULT_REMEDIES.values() for name in names)
"""Fields that change what a trained model computes, and that HybridModel does not implement."""

# Fields that change speed or memory, not results or sharding.
_WITHOUT_EFFECT = (
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
    "moe_shared_expert_overlap",
    "moe_pad_expert_input_to_capacity",
    "tp_comm_overlap",
    "symmetric_ar_type",
    "nccl_all_reduce_for_prefill",
    "defer_embedding_wgrad_compute",
    "distribute_saved_activations",
)


def check_unsupported(config: TransformerConfig) -> None:
    """Raises ValueError where an unimplemented field would change results or sharding."""
    defaults = _defaults(type(config))
    for remedy, names in (*_RESULT_REMEDIES.items(), *_RUN_REMEDIES.items()):
        for name in names:
            if name in defaults and getattr(config, name) != defaults[name]:
                raise ValueError(
                    f"{name} is {getattr(config, name)!r}, which HybridModel does not support: "
                    f"leave it at {defaults[name]!r} and {remedy}."
                )


def warn_fields_without_effect(config: TransformerConfig) -> None:
    """Logs a warning with the fields that are set without effect, once per set of fields."""
    defaults = _defaults(type(config))
    idle = [
        name
        for name in _WITHOUT_EFFECT
        if name in defaults and getattr(config, name) != defaults[name]
    ]
    if config.tensor_model_parallel_size > 1 and "cross_entropy_loss_fusion" in idle:
        idle.remove("cross_entropy_loss_fusion")  # core's loss over a split vocabulary has it
    if config.moe_token_dispatcher_type == "alltoall" and config.expert_model_parallel_size > 1:
        idle.remove("moe_token_dispatcher_type")  # on CUDA
    if idle:
        _warn_once(", ".join(idle))


@cache
def _warn_once(names: str) -> None:
    logger.warning("without effect in HybridModel, results are the same: %s", names)


@cache
def _defaults(config_class: type[TransformerConfig]) -> dict[str, object]:
    """Field -> default, of the fields that the installed megatron-core has."""
    return {field.name: field.default for field in dataclasses.fields(config_class)}
