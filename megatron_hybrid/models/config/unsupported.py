"""Fields of TransformerConfig that HybridModel does not read: an error by reason, or a warning."""

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

SPELT_OTHERWISE: dict[str, str] = {
    "window_size": "use the symbol W in layer_pattern and sliding_window",
    "window_attn_skip_freq": "place the symbols W and * in layer_pattern",
    "multi_latent_attention": "use the symbol + in layer_pattern",
    "experimental_attention_variant": "use the symbol G in layer_pattern",
    "linear_attention_freq": "place the symbol G in layer_pattern",
    "moe_layer_freq": "place the symbols E and - in layer_pattern",
    "no_rope_freq": "use layer_overrides with position_embedding_type",
    "heterogeneous_block_specs": "use layer_overrides",
    "num_layers_in_first_pipeline_stage": "mark the stages with | in layer_pattern",
    "num_layers_in_last_pipeline_stage": "mark the stages with | in layer_pattern",
    "account_for_embedding_in_pipeline_split": "mark the stages with | in layer_pattern",
    "account_for_loss_in_pipeline_split": "mark the stages with | in layer_pattern",
    "pipeline_model_parallel_layout": "mark the stages with | in layer_pattern",
    "use_te_activation_func": "use activation_func",
    "enable_autocast": "use params_dtype=torch.bfloat16",
    "mtp_hybrid_override_pattern": "write the parts after / in layer_pattern",
    "moe_expert_rank_capacity_factor": "let each rank take every token routed to it",
    "moe_extended_tp": "use expert_tensor_parallel_size",
    "gtp_weight_remat_size": "use tensor_model_parallel_size",
    "expert_gtp_weight_remat_size": "use expert_tensor_parallel_size",
    "moe_token_dropping": "use moe_expert_capacity_factor",
    "moe_layer_recompute": ("use recompute_granularity='selective' and recompute_modules=['moe']"),
    "num_microbatches_with_partial_activation_checkpoints": "use recompute_granularity",
    "fine_grained_activation_offloading": "use recompute_granularity",
    "cpu_offloading": "use recompute_granularity",
    "activation_func_fp8_input_store": "use recompute_granularity",
    "inference_sampling_seed": "use InferenceConfig.random_seed",
}
"""Field -> the field or symbol that does the same, or serves the same end, here."""

_GRAPHS = (
    "core's graphs are of its own layers: InferenceConfig.cuda_graphs has those of served models"
)
MEANS_NOTHING: dict[str, str] = {
    "mrope_section": "it places images, and inputs are text: use rotary_scaling for long texts",
    "moe_mlp_glu_interleave_size": "gates and values lie apart: convert the weights",
    "moe_shared_expert_glu_interleave_size": "gates and values lie apart: convert the weights",
    "cuda_graph_impl": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "delay_wgrad_compute": "each backward pass computes all gradients",
    "overlap_moe_expert_parallel_comm": "micro batches run one after the other",
    "flash_decode": "DynamicInferenceEngine serves the model",
    "batch_invariant_mode": "kernels of core have it: compare within a tolerance",
    "mamba_training_ssm_states_dtype": "states between chunks are fp32 in training",
    "use_kitchen": "no layer is of that library",
    "use_kitchen_attention": "no layer is of that library",
    "hybrid_context_parallel": "there is no context parallelism",
}
"""Field -> why it has no meaning here."""

NOT_SUPPORTED: dict[str, str] = {
    "context_parallel_size": CONTEXT_PARALLEL,
    "virtual_pipeline_model_parallel_size": "use one stage per pipeline rank",
    "fp8": "use params_dtype=torch.bfloat16",
    "fp4": "use params_dtype=torch.bfloat16",
    "quant_recipe": "use params_dtype=torch.bfloat16",
    "use_mup": "scale the learning rates outside of the model",
    "qk_clip": "use qk_layernorm",
    "moe_enable_routing_replay": "route by the router",
    "mtp_detach_heads": "train the model by all losses",
}
"""Field -> what to do without it."""

_REASONS = (
    (SPELT_OTHERWISE, "which HybridModel spells otherwise", "and"),
    (MEANS_NOTHING, "which means nothing to HybridModel", "since"),
    (NOT_SUPPORTED, "which HybridModel does not support", "and"),
)

RESULT_FIELDS = {
    "heterogeneous_block_specs",
    "mrope_section",
    "moe_expert_rank_capacity_factor",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
}
"""Those of the refused fields that change what a trained model computes, in no way that the layer
pattern or overrides of layers say. The others are of training, sharding, speed or rounding: a model
that was trained with them can be served without."""

WITHOUT_EFFECT = (
    "transformer_impl",
    "attention_backend",
    "flash_attention_version",
    "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
    "apply_residual_connection_post_layernorm",  # core reads it nowhere
    "apply_rope_fusion",
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
    "moe_shared_expert_overlap",
    "moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type",
    "moe_enable_deepep",
    "moe_paged_stash",
    "tp_comm_overlap",
    "symmetric_ar_type",
    "nccl_all_reduce_for_prefill",
    "defer_embedding_wgrad_compute",
    "distribute_saved_activations",
)
"""Fields of speed or memory, not of results or sharding."""


def check_unsupported(config: TransformerConfig) -> None:
    """Raise ValueError where a field that HybridModel does not read would change something."""
    defaults = _defaults(type(config))
    for fields, verdict, link in _REASONS:
        for name, remedy in fields.items():
            if name in defaults and getattr(config, name) != defaults[name]:
                raise ValueError(
                    f"{name} is {getattr(config, name)!r}, {verdict}: leave it at "
                    f"{defaults[name]!r}{',' if link == 'since' else ''} {link} {remedy}."
                )


def warn_fields_without_effect(config: TransformerConfig) -> None:
    """Log a warning with the fields that are set without effect, once per set of fields."""
    defaults = _defaults(type(config))
    idle = [
        name
        for name in WITHOUT_EFFECT
        if name in defaults and getattr(config, name) != defaults[name]
    ]
    if config.tensor_model_parallel_size > 1 and "cross_entropy_loss_fusion" in idle:
        idle.remove("cross_entropy_loss_fusion")  # core's loss over a split vocabulary has it
    if idle:
        _warn_once(", ".join(idle))


@cache
def _warn_once(names: str) -> None:
    logger.warning("without effect in HybridModel, results are the same: %s", names)


@cache
def _defaults(config_class: type[TransformerConfig]) -> dict[str, object]:
    """Return the default of each field that the installed megatron-core has, by name."""
    return {field.name: field.default for field in dataclasses.fields(config_class)}
