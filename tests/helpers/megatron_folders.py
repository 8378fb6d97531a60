"""`torch_dist` folders as Megatron-LM leaves them, written by megatron-core itself."""

from argparse import Namespace

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend

from megatron_hybrid import compat
from megatron_hybrid.training.core_cpu_patch import core_cpu_patch


def megatron_args(**fields):
    """What Megatron-LM keeps of its command line, as far as it describes a small model.

    fields: those that the test is about, by Megatron's names.
    """
    return Namespace(
        **{
            "hidden_size": 48,
            "ffn_hidden_size": 80,
            "num_attention_heads": 6,
            "kv_channels": 8,
            "group_query_attention": True,
            "num_query_groups": 2,
            "position_embedding_type": "rope",
            "rotary_base": 10000,
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": None,
            "use_rope_scaling": False,
            "rope_scaling_factor": 8.0,
            "rope_type": None,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-5,
            "apply_layernorm_1p": False,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "swiglu": True,
            "squared_relu": False,
            "bias_gelu_fusion": False,
            "bias_swiglu_fusion": True,
            "untie_embeddings_and_output_weights": True,
            "hybrid_override_pattern": None,
            "num_experts": None,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": None,
            "moe_layer_freq": 1,
            "moe_aux_loss_coeff": 0.01,
            "mamba_state_dim": 12,
            "mamba_head_dim": 16,
            "mamba_num_groups": 2,
            "mamba_num_heads": None,
            "mtp_num_layers": None,
            "multi_latent_attention": False,
            "padded_vocab_size": 61,
            "vocab_size": None,
            "tokenizer_type": "HuggingFaceTokenizer",
            "params_dtype": torch.float32,
            "bf16": False,
            "fp16": False,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 4,
            "recompute_granularity": "selective",
            "attention_backend": AttnBackend.auto,
            "model_type": ModelType.encoder_or_decoder,
            **fields,
        }
    )


def save_folder(model, folder, args, iteration=100, **others):
    """Save as Megatron's `save_checkpoint` does; call it on every rank of the model.

    others: further entries of the state dict, such as "optimizer".
    """
    path = folder / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    state |= {"model": model.sharded_state_dict(), **others}
    with core_cpu_patch():
        dist_checkpointing.save(state, path, content_metadata={"singleton_local_shards": False})
    return path


def load_folder(model, path):
    """Load an iteration by megatron-core into a stock model."""
    state = {"model": model.sharded_state_dict()}
    strict = dist_checkpointing.validation.StrictHandling.RAISE_ALL
    with core_cpu_patch(), torch.no_grad():
        loaded = dist_checkpointing.load(state, path, strict=strict)
    model.load_state_dict(loaded["model"])


PATTERN_ARGUMENT = (
    "hybrid_override_pattern"
    if compat.MEGATRON_CORE_VERSION < (0, 17, 0)
    else "hybrid_layer_pattern"
)
