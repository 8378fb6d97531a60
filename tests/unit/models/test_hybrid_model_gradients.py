"""Gradients of packed sequences against the same model written out: token by token, sequence by
sequence, in float64, from the parameters alone. And against megatron-core's own models.

Of the other mixers, against transformers: tests/functional/huggingface/test_loss_gradients.py.
"""

import pytest
import stock_megatron
import torch
import torch.nn.functional as F
from small_models import packed_params, random_tokens, small_model

from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.ops.conv.naive import causal_conv1d
from megatron_hybrid.ops.delta_rule.naive import delta_rule

LENGTHS = (23, 1, 17)


def rms(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def conv(p, x):
    """A short convolution from no inputs before the first."""
    weight = p["conv1d.weight"].squeeze(1)
    bias = weight.new_zeros(len(weight))
    return causal_conv1d(x, weight, bias, weight[:, 1:] * 0, F.silu)[0]


def kimi_delta_attention(c, p, x):
    H, N, P = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    qkv, beta = (x @ p["in_proj.weight"].T).split([2 * H * N + H * P, H], -1)
    q, k, v = conv(p, qkv).split([H * N, H * N, H * P], -1)
    dt = F.softplus(x @ p["f_a_proj.weight"].T @ p["f_b_proj.weight"].T + p["dt_bias"])
    g = -p["A_log"].exp()[:, None] * dt.unflatten(1, (H, N))
    inputs = q.unflatten(1, (H, N)), k.unflatten(1, (H, N)), v.unflatten(1, (H, P)), g
    beta = beta.sigmoid() * (2.0 if c.linear_allow_neg_eigval else 1.0)
    o, _ = delta_rule(*inputs, beta, x.new_zeros(H, N, P))
    gate = (x @ p["g_a_proj.weight"].T @ p["g_b_proj.weight"].T).sigmoid()
    own = c.linear_norm_zero_centered_gamma
    weight = p["out_norm.weight"] + (c.layernorm_zero_centered_gamma if own is None else own)
    o = rms(o, weight, c.linear_norm_epsilon or c.layernorm_epsilon).flatten(1) * gate
    return o @ p["out_proj.weight"].T


def below(parameters, prefix):
    length = len(prefix)
    return {name[length:]: p for name, p in parameters.items() if name.startswith(prefix)}


def naive_loss(config, parameters, tokens, labels):
    """Sum over the tokens of one sequence."""
    x, zero = parameters["embedding.word_embeddings.weight"][tokens], 0.0
    if config.layernorm_zero_centered_gamma:
        zero = 1.0
    for i in range(config.num_layers):
        layer = below(parameters, f"decoder.layers.{i}.")
        normed = rms(x, layer["input_layernorm.weight"] + zero, config.layernorm_epsilon)
        x = x + kimi_delta_attention(config, below(layer, "self_attention."), normed)
    x = rms(x, parameters["decoder.final_norm.weight"] + zero, config.layernorm_epsilon)
    logits = x @ parameters["output_layer.weight"].T
    return F.cross_entropy(logits, labels, reduction="sum")


OPTIONS = [
    {},
    {"linear_allow_neg_eigval": True, "linear_norm_epsilon": 1e-2},
    {"layernorm_zero_centered_gamma": True},
    {"layernorm_zero_centered_gamma": True, "linear_norm_zero_centered_gamma": False},
]
"""Of Kimi Delta Attention. No model of transformers has them."""


@pytest.mark.parametrize("fields", OPTIONS)
def test_gradients_of_kimi_delta_attention_with_its_options(fields):
    model = small_model("KK", **fields).train()
    parameters = {
        name: p.detach().double().requires_grad_() for name, p in model.named_parameters()
    }
    tokens, labels = random_tokens(sum(LENGTHS)), random_tokens(sum(LENGTHS))
    pairs = zip(tokens.split(LENGTHS), labels.split(LENGTHS))
    expected_loss = sum(naive_loss(model.config, parameters, *pair) for pair in pairs)
    expected_loss.backward()

    packed = packed_params(0, 23, 24, 41)
    loss = model(tokens[None], labels=labels[None], packed_seq_params=packed).sum()
    loss.backward()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        wanted = parameters[name].grad
        error = (parameter.grad - wanted).norm() / wanted.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("M*-M-", {"share_embeddings_and_output_weights": True}),
        ("M-*-", {"qk_layernorm": True, "normalization": "LayerNorm", "add_bias_linear": True}),
        # The patterns of 0.16 have no G.
        *([] if stock_megatron.IS_0_16 else [("MG*-", {})]),
    ],
)
def test_gradients_are_those_of_core(pattern, fields):
    """Of its MambaModel (0.16) or HybridModel, loaded with the same weights."""
    ours = small_model(pattern, deterministic_mode=True, **fields)
    tokens, labels = random_tokens(2, 33), random_tokens(2, 33)
    with stock_megatron.on_cpu():
        stock = stock_megatron.mamba_model(ours.config).train()
        stock_megatron.scramble(stock)
        ours.load_state_dict(stock.state_dict(), strict=True)
        logits = stock(tokens, position_ids=None, attention_mask=None)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    ours.train()(tokens, labels=labels).mean().backward()
    expected = {canonical_name(name): p.grad for name, p in stock.named_parameters()}
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        error = (found[name].grad - wanted).norm() / wanted.norm()
        assert error < 3e-5, f"{name}: {error:.1e}"
