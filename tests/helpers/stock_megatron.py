"""megatron-core's own hybrid model and mixers, made to run on a CPU, to compare ours with.

Their kernels (mamba_ssm, causal_conv1d, fla, Transformer Engine, CUDA) are replaced by naive
float64 versions written here; everything else is theirs.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention, multi_token_prediction
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import nn

from megatron_hybrid import HybridConfig, compat
from megatron_hybrid.compat import MLATransformerConfig, TransformerConfig, activations
from megatron_hybrid.models.sharding.one_rank_group import (
    ONE_RANK_BACKEND,
    register_one_rank_backend,
)
from megatron_hybrid.models.sharding.parallel_setup import core_process_groups


@contextlib.contextmanager
def _importable_without_triton():
    """mamba_mixer decorates kernels at import, which are never run here."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.language, triton.jit, language.constexpr = language, lambda function: function, int
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


with _importable_without_triton():
    from megatron.core.ssm import mamba_mixer

IS_0_16 = compat.MEGATRON_CORE_VERSION < (0, 17, 0)
if IS_0_16:
    from megatron.core.ssm import gated_delta_net as gdn_module
    from megatron.core.ssm import mamba_block as stack_module
else:
    from megatron.core.models.hybrid import hybrid_block as stack_module
    from megatron.core.ssm.gated_delta_net import common as gdn_module


class SplitByRows(nn.Module):
    """A module whose parameters are split over the tensor-parallel ranks, as in core."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class GroupedRMSNorm(SplitByRows):
    """mamba_ssm's RMSNormGated without a gate: the kernel below has gated already."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x):
        groups = x.double().unflatten(-1, (-1, self.group_size))
        groups = groups / (groups.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (groups.flatten(-2) * self.weight).to(x.dtype)


def split_conv1d_scan(
    zxbcdt, conv_weight, conv_bias, dt_bias, A, D, chunk_size, headdim, ngroups, **_
):
    """mamba_ssm's mamba_split_conv1d_scan_combined as the plain recurrence, in float64."""
    dtype = zxbcdt.dtype
    zxbcdt, conv_weight, conv_bias, dt_bias, A, D = (
        t.double() for t in (zxbcdt, conv_weight, conv_bias, dt_bias, A, D)
    )
    heads = D.numel()
    inner = heads * headdim
    states = (conv_weight.shape[0] - inner) // (2 * ngroups)
    batch, length, _ = zxbcdt.shape
    z, xbc, dt = zxbcdt.split([inner, conv_weight.shape[0], heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (conv_weight.shape[1] - 1, 0))
    convolved = F.conv1d(padded, conv_weight.unsqueeze(1), conv_bias, groups=len(conv_weight))
    x, B, C = (
        F.silu(convolved).transpose(1, 2).split([inner, ngroups * states, ngroups * states], -1)
    )
    x = x.unflatten(-1, (heads, headdim))
    B, C = (
        t.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, 2) for t in (B, C)
    )
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(batch, heads, headdim, states)
    ys = []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        ys.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = torch.stack(ys, 1).flatten(-2) * F.silu(z)
    return y.to(dtype)


class CenteredRMSNorm(nn.Module):
    """A norm whose factor is 1 + weight, which among core's only Transformer Engine has."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, 1.0 + self.weight, self.eps)


def norm_of_core(new, kind, config, hidden_size, eps=1e-5, **others):
    """core's own norm, by its `new`, or one that it does not have."""
    if config.layernorm_zero_centered_gamma:
        return CenteredRMSNorm(hidden_size, eps)
    return new(kind, config, hidden_size, eps, **others)


class PlainCoreAttention(SplitByRows):
    """Causal softmax attention in float64, in place of core's and Transformer Engine's."""

    def __init__(self, config, layer_number=1, softmax_scale=None, **_):
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0] + 1
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.randn(heads))

    def forward(self, query, key, value, attention_mask=None, **_):
        q, k, v = (t.permute(1, 2, 0, 3).double() for t in (query, key, value))  # b h s d
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if hasattr(self, "softmax_offset"):
            sink = self.softmax_offset.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        o = scores.softmax(-1)[..., : k.shape[2]] @ v
        return o.permute(2, 0, 1, 3).flatten(-2).to(query.dtype)


def l2norm(x):
    """fla's l2norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def on_host(tensor, as_numpy=False, record_stream=False):
    """core's maybe_move_tensor_to_cpu, which leaves tensors of the CPU as they are."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def core_groups() -> None:
    """Set up core's groups for this one process, as scripts of Megatron do; they stay."""
    if not dist.is_initialized():
        parallel_state.destroy_model_parallel()  # what another test has left of ended groups
        register_one_rank_backend()
        dist.init_process_group(ONE_RANK_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        core_process_groups(HybridConfig(layer_pattern="M", hidden_size=64, vocab_size=64))


@contextlib.contextmanager
def on_cpu():
    """Within it, megatron-core's hybrid modules build and run on the CPU."""
    core_groups()
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        # Core's token dispatchers copy sizes to the host on a stream of their own.
        event = SimpleNamespace(synchronize=lambda: None)
        stream = SimpleNamespace(record_event=lambda: event)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream)
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", on_host)
        for module in (mamba_mixer, gdn_module):
            patch.setattr(module, "get_cuda_rng_tracker", lambda: tracker)
        patch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", True)
        patch.setattr(mamba_mixer, "ExtendedRMSNorm", GroupedRMSNorm)
        patch.setattr(
            mamba_mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan, raising=False
        )
        patch.setattr(stack_module, "TENorm", WrappedTorchNorm)
        new = WrappedTorchNorm.__new__
        patch.setattr(WrappedTorchNorm, "__new__", lambda *a, **k: norm_of_core(new, *a, **k))
        # 0.16 asks whether a layer is one, of a mock.
        patch.setattr(multi_latent_attention, "TELinear", type("TELinear", (), {}))
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        # From 0.20 on, too, of the heads' projection.
        name = "is_inference_column_parallel_linear"
        patch.setattr(multi_token_prediction, name, lambda layer: False, raising=False)
        patch.setattr(gdn_module, "HAVE_FLA", True)
        patch.setattr(gdn_module, "l2norm", l2norm, raising=False)
        yield


def core_config(**fields):
    """A small TransformerConfig of core, to be run on the CPU."""
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return kind(
        **{
            "num_layers": 2,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_query_groups": 2,
            "ffn_hidden_size": 80,
            "mamba_head_dim": 16,
            "mamba_state_dim": 12,
            "mamba_num_groups": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "normalization": "RMSNorm",
            "init_method_std": 0.15,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "deterministic_mode": True,
            "use_cpu_initialization": True,
            **fields,
        }
    )


def scramble(model):
    """Random values for the tensors that start as ones or zeros, which hide mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_(std=0.2)


def mamba_model(config):
    """MambaModel (0.16) or HybridModel (0.19) of a HybridConfig, local layers; use in `on_cpu`.

    Distributed checkpoints carry the names of the transformer_engine spec, as those of core's
    local specs do.
    """
    return hybrid_model(
        config,
        config.layer_pattern,
        vocab_size=config.vocab_size,
        mixer={
            "expand": config.mamba_expand,
            "d_conv": config.mamba_conv_kernel,
            "chunk_size": config.mamba_chunk_size,
        },
        position_embedding_type=config.position_embedding_type,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
    )


def transformer_layer(**parts):
    """core's TransformerLayer of these parts alone."""
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**parts))


def hybrid_model(config, pattern, *, mixer=None, **arguments):
    """MambaModel (0.16) or HybridModel (0.19) of a TransformerConfig, local layers; use in
    `on_cpu`.

    Args:
        mixer: arguments of the Mamba-2 mixers.
        arguments: of the model.
    """
    head_norm = WrappedTorchNorm if config.qk_layernorm else None
    mlp = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    if IS_0_16:
        mlp_spec = ModuleSpec(module=MLP, submodules=MLPSubmodules(**mlp))
        kinds = {}
    else:
        mlp_spec = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(**mlp))
        prediction = MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            layer_norm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
        )
        kinds = {
            "mtp_block_spec": ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    [ModuleSpec(module=MultiTokenPredictionLayer, submodules=prediction)]
                ),
            ),
            "gdn_layer": transformer_layer(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(module=GatedDeltaNet, submodules=GDN_SUBMODULES),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=_fused_keys("in_proj", True),
            ),
        }
        if config.multi_latent_attention:
            latent = get_gpt_layer_local_spec(
                multi_latent_attention=True, normalization="RMSNorm"
            ).submodules.self_attention
            latent.submodules.core_attention = PlainCoreAttention
            kinds["mla_layer"] = transformer_layer(
                input_layernorm=WrappedTorchNorm,
                self_attention=latent,
                self_attn_bda=get_bias_dropout_add,
            )
    if config.num_moe_experts is not None:
        kinds["moe_layer"] = transformer_layer(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=moe_spec(config),
            mlp_bda=get_bias_dropout_add,
        )
    spec = ModuleSpec(
        module=stack_module.MambaStack,
        submodules=stack_module.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=ModuleSpec(
                        module=mamba_mixer.MambaMixer,
                        params=mixer or {},
                        submodules=mamba_mixer.MambaMixerSubmodules(
                            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                        ),
                    ),
                    mamba_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
                ),
            ),
            attention_layer=transformer_layer(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=SelfAttentionSubmodules(
                        linear_qkv=ColumnParallelLinear,
                        core_attention=PlainCoreAttention,
                        linear_proj=RowParallelLinear,
                        q_layernorm=head_norm,
                        k_layernorm=head_norm,
                    ),
                ),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=_fused_keys("linear_qkv", True),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=WrappedTorchNorm,
                    mlp=mlp_spec,
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={
                        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
                    },
                ),
            ),
            **kinds,
        ),
    )
    pattern_name = "hybrid_override_pattern" if IS_0_16 else "hybrid_layer_pattern"
    return MambaModel(
        config,
        spec,
        max_sequence_length=512,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **{pattern_name: pattern},
        **arguments,
    )


def gpt_model(config, **arguments):
    """GPTModel of a TransformerConfig, local layers, with MTP heads where it has them; use in
    `on_cpu`.

    Distributed checkpoints carry the names of the transformer_engine spec.

    Args:
        arguments: of the model.
    """
    variant, config.experimental_attention_variant = config.experimental_attention_variant, None
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    config.experimental_attention_variant = variant
    spec = copy.deepcopy(spec)
    layers = [copy.deepcopy(layer) for layer in spec.layer_specs]
    for number, layer in enumerate(layers, 1):
        attention = layer.submodules.self_attention
        attention.submodules.core_attention = PlainCoreAttention
        attention_input = None if config.multi_latent_attention else "linear_qkv"
        freq = config.linear_attention_freq
        is_linear = freq[number - 1] if isinstance(freq, list) else freq and number % freq
        if variant is not None and is_linear:
            attention_input = "in_proj"
            layer.submodules.self_attention = ModuleSpec(
                module=GatedDeltaNet, submodules=GDN_SUBMODULES
            )
        freq = config.moe_layer_freq
        is_moe = freq[number - 1] if isinstance(freq, list) else (number - 1) % freq == 0
        has_experts = config.num_moe_experts is not None and is_moe
        layer.submodules.sharded_state_dict_keys_map = _fused_keys(attention_input, has_experts)
    spec.layer_specs = layers
    if config.mtp_num_layers:
        arguments["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
    return GPTModel(
        config,
        spec,
        max_sequence_length=512,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **arguments,
    )


def _fused_keys(attention_input, has_experts):
    """Local names of a GPT layer's norms -> those that Transformer Engine's layers have."""
    latents = {f"self_attention.{x}_layernorm.": x for x in ("q", "kv")}
    keys = {
        name: f"self_attention.linear_{x}_up_proj.layer_norm_"
        for name, x in latents.items()
        if attention_input is None
    }
    if attention_input is not None:
        keys["input_layernorm."] = f"self_attention.{attention_input}.layer_norm_"
    if not has_experts:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return keys


def stock_model(config, pattern, **arguments):
    """`hybrid_model` of a pattern, whose layers count, or `gpt_model` for None; in eval mode."""
    if pattern is None:
        return gpt_model(config, **arguments).eval()
    config.num_layers = len(pattern.partition("/")[0])
    return hybrid_model(config, pattern, **arguments).eval()


def logits_of(model, tokens):
    """A stock model's logits of tokens [b, s]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with on_cpu(), torch.no_grad():
        return model(tokens, position_ids=positions, attention_mask=None)


OF_THE_RUN = {"hidden_dropout", "attention_dropout", "recompute_granularity", "attention_backend"}
OF_THE_RUN |= {f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")}


def model_of_args(args, pattern=None, **sizes):
    """The model that Megatron-LM builds of the arguments in a checkpoint, small and of local
    layers; use in `on_cpu`.

    Args:
        pattern: of a hybrid model, where the arguments may say it by ratios.
        sizes: of its parallel groups, such as tensor_model_parallel_size.
    """
    latent = getattr(args, "multi_latent_attention", False)
    is_hybrid = getattr(args, "is_hybrid_model", pattern is not None)
    kind = MLATransformerConfig if latent else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)} & vars(args).keys() - OF_THE_RUN
    values = {name: getattr(args, name) for name in names}
    if not getattr(args, "group_query_attention", True):
        values["num_query_groups"] = args.num_attention_heads
    values["layernorm_epsilon"] = args.norm_epsilon
    values["layernorm_zero_centered_gamma"] = args.apply_layernorm_1p
    values["num_moe_experts"] = args.num_experts
    values["bias_activation_fusion"] = args.bias_gelu_fusion
    if args.swiglu or getattr(args, "quick_geglu", False):
        values["gated_linear_unit"] = True
        values["activation_func"] = F.silu if args.swiglu else activations.quick_gelu
    elif args.squared_relu:
        values["activation_func"] = activations.squared_relu
    config = core_config(**values, **sizes)
    arguments = {
        "vocab_size": args.padded_vocab_size,
        "position_embedding_type": "rope" if latent else args.position_embedding_type,
        "rotary_base": args.rotary_base,
        "rotary_percent": args.rotary_percent,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "seq_len_interpolation_factor": getattr(args, "rotary_seq_len_interpolation_factor", None),
    }
    if not is_hybrid:
        arguments["rope_scaling"] = getattr(args, "use_rope_scaling", False)
    if args.position_embedding_type == "yarn":
        for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"):
            setattr(config, f"yarn_{name}", getattr(args, name))
        for name in filter(lambda name: name.startswith("yarn_"), vars(args)):
            setattr(config, name, getattr(args, name))
    if not is_hybrid:
        return gpt_model(config, **arguments)
    mixer = {"expand": args.mamba_expand} if hasattr(args, "mamba_expand") else None
    return hybrid_model(config, pattern or args.hybrid_layer_pattern, mixer=mixer, **arguments)


def moe_spec(config):
    """core's MoE layer with local experts."""
    return get_moe_module_spec(
        use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False
    )


def moe_layer(config) -> MoELayer:
    """core's MoE layer with local experts; use in `on_cpu`."""
    spec = moe_spec(config)
    arguments = {
        "config": config,
        "layer_number": 1,
        "pg_collection": moe_utils.get_default_pg_collection(),
    }
    return build_module(spec, **arguments) if IS_0_16 else spec(**arguments)


GDN_SUBMODULES = GatedDeltaNetSubmodules(
    in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
)


def gated_delta_net(config):
    """core's GatedDeltaNet on its torch path (config.deterministic_mode); use in `on_cpu`."""
    assert config.deterministic_mode
    return GatedDeltaNet(
        config,
        GDN_SUBMODULES,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
