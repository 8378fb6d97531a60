"""Models that transformers has no class for, put together of its layers and of what their makers'
code does, every token of a layer at once."""

import copy
from typing import ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from samba_y import Phi4FlashForCausalLM, SambaYConfig
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BailingHybridConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    conversion_mapping,
)
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridForCausalLM,
    BailingHybridRMSNorm,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen


@strict
class RingConfig(BailingHybridConfig):
    model_type = "bailing_moe_linear"
    group_norm_size: int = 1
    partial_rotary_factor: float = 1.0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.partial_rotary_factor = kwargs.get("partial_rotary_factor", self.partial_rotary_factor)


class Attention(nn.Module):
    """Grouped-query attention, or lightning attention with a key head for each query head."""

    def __init__(self, config, index):
        super().__init__()
        self.config = config
        self.is_linear = config.layer_types[index] == "linear_attention"
        width, heads, self.dim = config.hidden_size, config.num_attention_heads, config.head_dim
        groups = heads if self.is_linear else config.num_key_value_heads
        self.heads = [heads, groups, groups]
        self.query_key_value = nn.Linear(width, sum(self.heads) * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, width, bias=False)
        self.query_layernorm = BailingHybridRMSNorm(self.dim, config.rms_norm_eps)
        self.key_layernorm = BailingHybridRMSNorm(self.dim, config.rms_norm_eps)
        if self.is_linear:
            self.g_proj = nn.Linear(width, heads * self.dim, bias=False)
            self.g_norm = BailingHybridRMSNorm(heads * self.dim)
            self.factor = 1 - (index - 1) / (config.num_hidden_layers - 1) + 1e-5

    def forward(self, hidden_states, **_):
        qkv = self.query_key_value(hidden_states).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, 1)
        q, k = self._turned(self.query_layernorm(q)), self._turned(self.key_layernorm(k))
        if not self.is_linear:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o_proj(o.transpose(1, 2).flatten(2)), None
        heads, positions = self.heads[0], torch.arange(q.shape[2], dtype=q.dtype)
        rates = self.factor * 2 ** (-8 * torch.arange(1, heads + 1, dtype=q.dtype) / heads)
        ages = (positions[:, None] - positions).clamp(min=0)
        decays = (-rates[:, None, None] * ages).exp().tril()
        o = (q @ k.transpose(-2, -1) * self.dim**-0.5 * decays) @ v
        o = o.transpose(1, 2).flatten(2).unflatten(-1, (self.config.group_norm_size, -1))
        o = F.rms_norm(o, o.shape[-1:], eps=self.config.rms_norm_eps).flatten(2)
        return self.o_proj(o * self.g_norm.weight * self.g_proj(hidden_states).sigmoid())

    def _turned(self, x):
        size = int(self.dim * self.config.partial_rotary_factor)
        base = self.config.rope_parameters["rope_theta"]
        rates = base ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * rates
        first, second, rest = x.split([size // 2, size // 2, self.dim - size], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class RingForCausalLM(BailingHybridForCausalLM):
    config_class = RingConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, index)
        self.post_init()


class LingConfig(RingConfig):
    model_type = "bailing_hybrid"
    rope_interleave = True


class BailingMoeV2_5ForCausalLM(RingForCausalLM):
    config_class = LingConfig

    def __init__(self, config):
        super().__init__(config)
        for index, kind in enumerate(config.layer_types):
            if kind == "full_attention":
                self.model.layers[index].self_attn = DeepseekV3Attention(config, index)
        self.post_init()


LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


@strict
class PuzzleConfig(NemotronHConfig):
    model_type = "nemotron_h_puzzle"
    block_configs: list | None = None

    def __post_init__(self, **kwargs):
        types = [block["block_type"] for block in self.block_configs or ()]
        self.layers_block_type = [LAYER_TYPES.get(each, each) for each in types] or None
        super().__post_init__(**kwargs)


class PuzzleForCausalLM(NemotronHForCausalLM):
    config_class = PuzzleConfig

    def __init__(self, config):
        super().__init__(config)
        for i, block in enumerate(config.block_configs):
            own = copy.copy(config)
            for key in block.keys() - {"block_type"}:
                setattr(own, key, block[key])
            self.model.layers[i] = NemotronHBlock(own, i)
        self.post_init()


@strict
class Step3Config(Qwen3MoeConfig):
    model_type = "step3_text"
    attribute_map: ClassVar = {"moe_num_experts": "num_experts", "moe_top_k": "num_experts_per_tok"}
    default_theta = 500000.0
    num_experts: int = 48
    num_experts_per_tok: int = 3
    moe_intermediate_size: int = 5120
    share_expert_dim: int = 5120
    share_q_dim: int = 2048
    num_key_value_heads: int = 1
    head_dim: int = 256
    rms_norm_eps: float = 1e-5
    moe_layers_enum: str = ",".join(map(str, range(4, 60)))

    def __post_init__(self, **kwargs):
        sparse = self.moe_layers_enum.split(",")
        self.mlp_only_layers = [i for i in range(self.num_hidden_layers) if str(i) not in sparse]
        super().__post_init__(**kwargs)


class Step3TextForCausalLM(Qwen3MoeForCausalLM):
    """Attention of Llama whose queries come by way of a norm, and a shared expert."""

    config_class = Step3Config

    def __init__(self, config):
        super().__init__(config)
        hidden, rank = config.hidden_size, config.share_q_dim
        queries = config.num_attention_heads * config.head_dim
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = attention = LlamaAttention(config, number)
            attention.q_proj = nn.Linear(hidden, rank, bias=False)
            attention.inter_norm = qwen.Qwen3MoeRMSNorm(rank, config.rms_norm_eps)
            attention.wq = nn.Linear(rank, queries, bias=False)
            attention.q_proj.register_forward_hook(
                lambda module, inputs, q, own=attention: own.wq(own.inter_norm(q))
            )
            if number not in config.mlp_only_layers:
                layer.share_expert = qwen.Qwen3MoeMLP(config, config.share_expert_dim)
                layer.mlp.register_forward_hook(
                    lambda module, inputs, output, own=layer: output + own.share_expert(*inputs)
                )
        self.post_init()


for config, model in (
    (RingConfig, RingForCausalLM),
    (PuzzleConfig, PuzzleForCausalLM),
    (Step3Config, Step3TextForCausalLM),
    (SambaYConfig, Phi4FlashForCausalLM),
):
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)
OF_DELTA = ("f_proj", "dt_bias", "A_log", "conv1d")
known = conversion_mapping.get_checkpoint_conversion_mapping
bailing, puzzle, step = map(known, ("bailing_hybrid", "nemotron_h", "step3p7"))
bailing = [m for m in bailing if not any(part in str(m.source_patterns) for part in OF_DELTA)]
for name, mapping in (
    ("bailing_moe_linear", bailing),
    ("BailingMoeV2_5ForCausalLM", bailing),
    ("nemotron_h_puzzle", puzzle[1:]),
    ("step3_text", [step[5], step[7], step[10]]),
):
    conversion_mapping.register_checkpoint_conversion_mapping(name, mapping)
