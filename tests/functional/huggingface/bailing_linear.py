"""Ring linear and Ling 2.5: Ling 3 of transformers with attention as in the makers' code, every
token of a layer at once, as transformers has no class for them."""

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BailingHybridConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridForCausalLM,
    BailingHybridRMSNorm,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention


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


AutoConfig.register("bailing_moe_linear", RingConfig)
AutoModelForCausalLM.register(RingConfig, RingForCausalLM)
OF_DELTA = ("f_proj", "dt_bias", "A_log", "conv1d")
names = [
    each
    for each in get_checkpoint_conversion_mapping("bailing_hybrid")
    if not any(part in str(each.source_patterns) for part in OF_DELTA)
]
for each in ("bailing_moe_linear", "BailingMoeV2_5ForCausalLM"):
    register_checkpoint_conversion_mapping(each, names)
