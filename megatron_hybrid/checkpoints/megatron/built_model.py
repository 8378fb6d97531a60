"""from_megatron: a model that megatron-core built, served with its own parameters."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_hybrid import compat
from megatron_hybrid.checkpoints.megatron.args import (
    FIRST_OF_MTP,
    YARN_DEFAULTS,
    has_head_norms,
)
from megatron_hybrid.checkpoints.megatron.core_config import hybrid_config_fields, rotary_fields
from megatron_hybrid.checkpoints.megatron.names import gpt_to_hybrid_name
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel, unwrap
from megatron_hybrid.models.layer_pattern import split_predictions
from megatron_hybrid.models.mixers.experts import SeparateLinear
from megatron_hybrid.models.mixers.rotary import frequencies
from megatron_hybrid.models.parameter_names import (
    canonical_name,
    group_experts,
    is_of_prediction,
    is_parameter,
)
from megatron_hybrid.models.sharding.gathering import mark_experts, num_experts_of
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.models.sharding.tensor_sharding import copy_marks
from megatron_hybrid.utils.other_names import names_arguments

logger = logging.getLogger(__name__)

_ACCEPTED = "megatron-core's MambaModel, HybridModel or GPTModel, bare or wrapped"


@names_arguments()
def from_megatron(model: nn.Module) -> HybridModel:
    """Build a HybridModel in eval mode over the parameters of a model that megatron-core built.

    The parameters are the model's own objects: nothing is copied, and a later optimizer step or
    `load_state_dict` of the model changes both. A parameter that is put in the place of another one
    is not noticed: call this again.

    Args:
        model: MambaModel, HybridModel or GPTModel of megatron-core, of local layers or of those of
            Transformer Engine; bare, or in wrappers that have it as `module` (Float16Module,
            DistributedDataParallel), or in a list of one. Its process groups are used.

    Raises:
        TypeError: not such a model.
        ValueError: the model computes what HybridModel does not implement, or is split in another
            way; the message names the field or the parameter.
    """
    stock = _core_model(model)
    is_gpt = compat.core_model_kind(stock) == "gpt"
    config = HybridConfig(**_config_fields(stock, is_gpt))
    with torch.device("meta"):
        served = HybridModel(config, stock.pg_collection, stock.pre_process, stock.post_process)
    _check_rotary(served, stock)
    _adopt(served, stock, is_gpt)
    return served.eval()


def _core_model(model: Any) -> nn.Module:
    """Return the model of megatron-core inside of its wrappers."""
    inner = unwrap(model)
    if isinstance(inner, HybridModel):
        raise TypeError("model is a HybridModel of megatron_hybrid: pass it to the engine itself.")
    if compat.core_model_kind(inner) is None:
        advice = " Pass one of its items." if isinstance(model, list | tuple) else ""
        raise TypeError(
            f"model is of type {type(model).__name__}, but from_megatron takes {_ACCEPTED}.{advice}"
        )
    return inner


def _config_fields(stock: nn.Module, is_gpt: bool) -> dict[str, Any]:
    """Return fields of the HybridConfig of a model of megatron-core."""
    core = stock.config
    stages = core.virtual_pipeline_model_parallel_size
    if stages not in (None, 1):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {stages}, so the model is one of several "
            "pieces of a pipeline rank. Build it with one stage per rank."
        )
    groups, tp_size = core.num_query_groups, stock.pg_collection.tp.size()
    if groups < tp_size and any("linear_qkv" in name for name, _ in stock.named_parameters()):
        raise ValueError(
            f"num_query_groups is {groups}, less than tensor_model_parallel_size={tp_size}: "
            "megatron-core cuts a key/value head over the ranks, where HybridModel gives each rank "
            f"a copy. Build the model on at most {groups} ranks, or save it and use load_megatron."
        )
    experts = ExpertGroups.of(stock.pg_collection)
    weight = next(p for p in stock.decoder.parameters() if p.dim() > 1)
    return hybrid_config_fields(
        core,
        layer_pattern=None if is_gpt else _layer_pattern(stock),
        vocab_size=stock.vocab_size,
        share_embeddings_and_output_weights=stock.share_embeddings_and_output_weights,
        params_dtype=weight.dtype,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=stock.pg_collection.pp.size(),
        expert_model_parallel_size=experts.num_parts,
        expert_tensor_parallel_size=experts.tp.size(),
        layer_spec="local",
        mtp_num_layers=None if is_gpt else core.mtp_num_layers,
        qk_layernorm=has_head_norms(dict(stock.decoder.named_parameters(prefix="decoder"))),
        qk_l2_norm="L2Norm" in {type(module).__name__ for module in stock.decoder.modules()},
        **_mamba_fields(stock.decoder),
        **_position_fields(stock),
    )


def _layer_pattern(stock: nn.Module) -> str:
    """Return the pattern of a hybrid model, which 0.16 may have made from ratios."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if pattern := getattr(stock, name, None):
            main, parts = split_predictions(pattern)
            if not parts or FIRST_OF_MTP in dict(stock.named_parameters()):
                return pattern
            logger.warning("the layers for multi-token prediction are not here, and left out")
            return main
    return "".join(stock.decoder.layer_type_list)


def _mamba_fields(decoder: nn.Module) -> dict[str, Any]:
    """Return fields that a Mamba-2 mixer of core has from its spec, not from the config. (It
    asserts that its projections have no bias and that its norm comes after the gate.)"""
    mixers = (getattr(layer, "mixer", None) for layer in decoder.layers)
    mixer = next((mixer for mixer in mixers if hasattr(mixer, "d_conv")), None)
    if mixer is None:
        return {}
    names = {canonical_name(f"decoder.layers.0.mixer.{n}") for n, _ in mixer.named_parameters()}
    return {
        "mamba_num_heads": mixer.nheads,
        "mamba_conv_kernel": mixer.d_conv,
        "mamba_chunk_size": mixer.chunk_size,
        "mamba_conv_bias": "decoder.layers.0.mixer.conv1d.bias" in names,
        "mamba_gated_norm": "gate_first" if mixer.rmsnorm else "none",
    }


def _position_fields(stock: nn.Module) -> dict[str, Any]:
    """Return fields of the position embedding; core keeps most in the embedding alone."""
    kind, embedding = stock.position_embedding_type, getattr(stock, "rotary_pos_emb", None)
    if kind == "yarn" and embedding is None:
        kind = "none"  # hybrid models of some releases take it, and turn nothing
    if kind == "yarn":
        names = (*YARN_DEFAULTS, "mscale", "mscale_all_dim", "correction_range_round_to_int")
        yarn = {name: getattr(embedding, name) for name in names}
        yarn["rotary_scaling_factor"] = embedding.scaling_factor
        return rotary_fields(kind, rotary_base=embedding.rotary_base, yarn=yarn)
    if kind != "rope" or embedding is None:
        # Latent attention has its own embedding whatever the model's is.
        return {} if stock.config.multi_latent_attention else rotary_fields(kind)
    turns = embedding.inv_freq.double().cpu()
    dim = 2 * len(turns)
    base, factor = getattr(stock, "rotary_base", None), None
    if base is None:
        base = _base(float(turns[-1]), dim)
    if getattr(stock, "rotary_scaling", False):
        factor = _llama3_factor(base ** (-(dim - 2) / dim), float(turns[-1]))
    return rotary_fields(
        kind,
        rotary_base=float(base),
        rotary_percent=dim / stock.config.kv_channels,
        seq_len_interpolation_factor=embedding.seq_len_interpolation_factor,
        rope_scaling_factor=factor,
    )


def _base(last: float, dim: int) -> float:
    """Find the base of `dim` rotated dimensions whose last frequency is given, in fp32: that is
    base^-((dim - 2) / dim). Bases of few digits are exact."""
    base = last ** (-dim / (dim - 2)) if dim > 2 else 10000.0
    short = float(f"{base:.6g}")
    return short if math.isclose(base, short, rel_tol=3e-7) else base


def _llama3_factor(plain: float, scaled: float) -> float:
    """Find the rope_scaling_factor of a lowest frequency before and after core's scaling, which
    keeps a share of those with 1 to 4 turns in 8192 tokens."""
    kept = min(max((8192 * plain / (2 * math.pi) - 1.0) / 3.0, 0.0), 1.0)
    return 1.0 if kept == 1.0 else round((1.0 - kept) * plain / (scaled - kept * plain), 3)


def _check_rotary(served: HybridModel, stock: nn.Module) -> None:
    """Raise ValueError where RoPE would turn in another way than the model's: its embedding does
    not say what it was made of."""
    embedding, config = getattr(stock, "rotary_pos_emb", None), served.config
    if embedding is None or stock.position_embedding_type != "rope" or not config.has_attention:
        return
    scaling = config.rotary_scaling or {}
    is_linear = scaling.get("rope_type") == "linear"  # core divides the positions
    turns, _ = frequencies(config.rotary_dim, config.rotary_base, {} if is_linear else scaling)
    theirs = embedding.inv_freq.float().cpu()
    if turns.shape != theirs.shape or not torch.allclose(turns, theirs, rtol=1e-6, atol=0.0):
        raise ValueError(
            "the model's rotary_pos_emb.inv_freq does not follow from a base and a scaling of "
            f"megatron-core (rotary_base={config.rotary_base}, rotary_percent="
            f"{config.rotary_percent}, rotary_scaling={config.rotary_scaling} were read from it). "
            "Only core's own RoPE can be served."
        )


def _adopt(served: HybridModel, stock: nn.Module, is_gpt: bool) -> None:
    """Put the model's parameters and buffers in place of the served model's."""
    given, experts = group_experts(_tensors(stock, is_gpt, hasattr(served, "mtp")))
    own = {*filter(is_parameter, served.state_dict()), *dict(served.named_buffers())}
    own = {name for name in own if name.rpartition(".")[2] not in _COUNTS}
    unknown = [name for name, tensor in given.items() if isinstance(tensor, nn.Parameter)]
    lacking = sorted(own - given.keys() - experts.keys())
    unknown = sorted({*unknown, *experts} - own)
    if lacking or unknown:
        raise ValueError(
            f"the model's parameters are not those of a HybridModel with layer_pattern "
            f"{served.config.layer_pattern!r}: it lacks {_some(lacking)}, and HybridModel does not "
            f"know {_some(unknown)}. Models of megatron-core's own layer specs can be served."
        )
    for path in sorted({name.rpartition(".")[0] for name in experts}):
        _adopt_experts(served, path, experts)
    device = next(stock.parameters()).device
    for path, module in served.named_modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                full = f"{path}.{name}"
                if old is not None and full in given:
                    held[name] = _checked(full, given[full], old)
                elif name in _COUNTS:
                    held[name] = torch.zeros_like(old, device=device)


_COUNTS = {"local_tokens_per_expert"}
"""Buffers that only training reads, and starts at zero."""


def _adopt_experts(served: HybridModel, path: str, experts: Mapping[str, list[Tensor]]) -> None:
    """Put a model's separate experts in place of a StackedLinear."""
    stacked = served.get_submodule(path)
    adopted: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    for kind, tensors in adopted.items():
        name, old = f"{path}.{kind}", getattr(stacked, kind)
        given = experts.get(name, [])
        if len(given) != (0 if old is None else len(old)):
            config = served.config
            raise ValueError(
                f"the model has {len(given)} tensors {name} on this rank, but num_moe_experts is "
                f"{config.num_moe_experts} and expert_model_parallel_size "
                f"{config.expert_model_parallel_size}: give each rank an equal part."
            )
        for tensor in given:
            one = old[0]
            copy_marks(old, one, dropped_dims=1)
            tensors.append(_checked(name, tensor, one))
            mark_experts(tensor, num_experts_of(old))
    parent, _, name = path.rpartition(".")
    setattr(served.get_submodule(parent), name, SeparateLinear(*adopted.values()))


def _checked(name: str, given: Tensor, old: Tensor) -> Tensor:
    """Return the model's tensor, with the marks of the one that it replaces.

    Raises:
        ValueError: another shape, or a parameter that wraps other tensors.
    """
    if given.shape != old.shape:
        raise ValueError(
            f"{name} has shape {list(given.shape)} on this rank, but a HybridModel of the same "
            f"sizes has {list(old.shape)}. Models of megatron-core's own layer specs, sharded by "
            "tensor_model_parallel_size and expert_model_parallel_size, can be served."
        )
    if type(given) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{name} is a {type(given).__name__}; only plain parameters can be served, not those "
            "kept in FP8 or FP4 (fp8_param, fp4_param) or split by FSDP."
        )
    copy_marks(old, given)
    return given


def _tensors(stock: nn.Module, is_gpt: bool, has_mtp: bool) -> dict[str, Tensor]:
    """Collect parameters and buffers by the names of a HybridModel. has_mtp: whether it has one
    for multi-token prediction."""
    tensors = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    if not has_mtp:
        served = {name: tensor for name, tensor in tensors.items() if not is_of_prediction(name)}
        if is_gpt and len(served) < len(tensors):
            logger.warning("the layers for multi-token prediction are not served")
        tensors = served
    return {
        canonical_name(gpt_to_hybrid_name(name) if is_gpt else name): tensor
        for name, tensor in tensors.items()
    }


def _some(names: list[str]) -> str:
    """Write the first names of a list, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "nothing") + more
