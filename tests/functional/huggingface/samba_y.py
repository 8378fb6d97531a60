"""Phi-4-mini-flash, as its makers' code computes it: transformers has no class for it."""

import math

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import JambaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


@strict
class SambaYConfig(JambaConfig):
    model_type = "phi4flash"
    layer_norm_eps: float = 1e-5
    sliding_window: int = 2047
    tie_word_embeddings: bool = True


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        middle, width = config.num_hidden_layers // 2, config.hidden_size
        heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        self.dim, self.heads = width // heads[0], heads if index <= middle + 1 else heads[:1]
        self.window = config.sliding_window if index < middle else math.inf
        self.start = 0.8 - 0.6 * math.exp(-0.3 * index)
        self.Wqkv = nn.Linear(width, sum(self.heads) * self.dim)
        self.out_proj = nn.Linear(width, width)
        self.inner_cross_attn = inner = nn.Module()
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            inner.register_parameter(name, nn.Parameter(0.1 * torch.randn(self.dim)))
        inner.subln = nn.RMSNorm(2 * self.dim, eps=1e-5)

    def forward(self, x, shared):
        q, *own = self.Wqkv(x).unflatten(-1, (-1, self.dim)).split(self.heads, 2)
        k, v = shared["kv"] = own or shared["kv"]  # the last ones there are
        v = torch.cat((v[:, :, ::2], v[:, :, 1::2]), -1)
        one, other = (self._attend(q[:, :, i::2], k[:, :, i::2], v) for i in (0, 1))
        o = self.inner_cross_attn
        part = (o.lambda_q1 @ o.lambda_k1).exp() - (o.lambda_q2 @ o.lambda_k2).exp() + self.start
        o = o.subln(one - part * other) * (1 - self.start)
        return self.out_proj(o.flatten(2))

    def _attend(self, q, k, v):
        k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.dim**-0.5
        ages = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        scores = scores.masked_fill((ages < 0) | (ages >= self.window), -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


class Mamba(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width, states, kernel = config.hidden_size, config.mamba_d_state, config.mamba_d_conv
        inner, self.sizes = config.mamba_expand * width, [math.ceil(width / 16), states, states]
        self.is_cross = index > config.num_hidden_layers // 2
        self.in_proj = nn.Linear(width, inner if self.is_cross else 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, width, bias=False)
        if not self.is_cross:
            self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
            self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
            self.dt_proj = nn.Linear(self.sizes[0], inner)
            self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
            self.D = nn.Parameter(torch.ones(inner))

    def forward(self, x, shared):
        if self.is_cross:
            return self.out_proj(F.silu(self.in_proj(x)) * shared["memory"])
        x, z = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(x).split(self.sizes, -1)
        dt, state, ys = F.softplus(self.dt_proj(dt).float()), 0.0, []
        for t in range(x.shape[1]):
            decay = (-self.A_log.float().exp() * dt[:, t, :, None]).exp()
            state = decay * state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
            ys.append((state * c[:, t, None]).sum(-1) + self.D * x[:, t])
        shared["memory"] = torch.stack(ys, 1).to(z.dtype)  # the last one there is
        return self.out_proj(F.silu(z) * shared["memory"])


class Phi4FlashForCausalLM(PreTrainedModel):
    config_class = SambaYConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        width, eps = config.hidden_size, config.layer_norm_eps
        self.model, self.lm_head = nn.Module(), nn.Linear(width, config.vocab_size, bias=False)
        self.model.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.model.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            layer = nn.Module()
            layer.input_layernorm = nn.LayerNorm(width, eps)
            layer.attn = (Attention if index % 2 else Mamba)(config, index)
            layer.post_attention_layernorm = nn.LayerNorm(width, eps)
            layer.mlp, ffn = nn.Module(), config.intermediate_size
            layer.mlp.fc1 = nn.Linear(width, 2 * ffn, bias=False)
            layer.mlp.fc2 = nn.Linear(ffn, width, bias=False)
            self.model.layers.append(layer)
        self.model.final_layernorm = nn.LayerNorm(width, eps)
        self.post_init()

    def forward(self, tokens, **_):
        embedded, shared = self.model.embed_tokens(tokens), {}
        x, dtype = embedded.float(), embedded.dtype
        for layer in self.model.layers:
            x = x + layer.attn(layer.input_layernorm(x.to(dtype)), shared)
            gate, value = layer.mlp.fc1(layer.post_attention_layernorm(x.to(dtype))).chunk(2, -1)
            x = x + layer.mlp.fc2(F.silu(gate) * value)
        return CausalLMOutput(logits=self.lm_head(self.model.final_layernorm(x.to(dtype))))
