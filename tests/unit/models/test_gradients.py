"""Gradients of a model of all mixers against the same model written out: token by token, sequence
by sequence, in float64, from the parameters alone. And against megatron-core's own models.

Against transformers: tests/functional/huggingface/test_loss_gradients.py.
"""

import pytest
import stock_megatron
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from small_models import random_tokens, small_model

from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.ops.conv.naive import causal_conv1d
from megatron_hybrid.ops.delta_rule.naive import delta_rule
from megatron_hybrid.ops.selective_scan.naive import selective_scan
from megatron_hybrid.ops.ssd.naive import ssd_scan

LENGTHS = (23, 1, 17)
PATTERN = "MGSKA*W-"


def rms(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def conv(p, x, activation=F.silu):
    """A short convolution from no inputs before the first."""
    weight = p["conv1d.weight"].squeeze(1)
    bias = p.get("conv1d.bias", weight.new_zeros(len(weight)))
    return causal_conv1d(x, weight, bias, weight[:, 1:] * 0, activation)[0]


def mamba2(c, p, x):
    H, P = c.mamba_num_heads, c.mamba_head_dim
    G, N = c.mamba_num_groups, c.mamba_state_dim
    z, xBC, dt = (x @ p["in_proj.weight"].T).split([H * P, H * P + 2 * G * N, H], -1)
    v, B, C = conv(p, xBC).split([H * P, G * N, G * N], -1)
    dt = F.softplus(dt + p["dt_bias"])
    inputs = v.unflatten(1, (H, P)), dt, -p["A_log"].exp()
    B, C = B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    y, _ = ssd_scan(*inputs, B, C, p["D"], x.new_zeros(H, P, N))
    y = (y.flatten(1) * F.silu(z)).unflatten(1, (G, -1))
    y = rms(y, 1.0, c.mamba_norm_epsilon).flatten(1) * p["norm.weight"]
    return y @ p["out_proj.weight"].T


def mamba1(c, p, x):
    rank, N = p["dt_proj.weight"].shape[1], p["A_log"].shape[1]
    v, z = (x @ p["in_proj.weight"].T).chunk(2, -1)
    v = conv(p, v)
    dt, B, C = (v @ p["x_proj.weight"].T).split([rank, N, N], -1)
    dt = F.softplus(dt @ p["dt_proj.weight"].T + p["dt_proj.bias"])
    A = -p["A_log"].exp()
    y, _ = selective_scan(v, dt, A, B, C, p["D"], torch.zeros_like(A))
    return (y * F.silu(z)) @ p["out_proj.weight"].T


def gated_delta_net(c, p, x):
    K, V = c.linear_num_key_heads, c.linear_num_value_heads
    N, P = c.linear_key_head_dim, c.linear_value_head_dim
    sizes = [2 * K * N + V * P, V * P, V, V]
    qkv, z, beta, alpha = (x @ p["in_proj.weight"].T).split(sizes, -1)
    q, k, v = conv(p, qkv).split([K * N, K * N, V * P], -1)
    g = -p["A_log"].exp() * F.softplus(alpha + p["dt_bias"])
    inputs = q.unflatten(1, (K, N)), k.unflatten(1, (K, N)), v.unflatten(1, (V, P)), g
    o, _ = delta_rule(*inputs, beta.sigmoid(), x.new_zeros(V, N, P))
    o = rms(o, p["out_norm.weight"], c.layernorm_epsilon).flatten(1) * F.silu(z)
    return o @ p["out_proj.weight"].T


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


def lightning_attention(c, p, x):
    H, N, P = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    z, qkv = (x @ p["in_proj.weight"].T).split([H * P, 2 * H * N + H * P], -1)
    q, k, v = (part.unflatten(1, (H, -1)) for part in F.silu(qkv).split([H * N, H * N, H * P], -1))
    rates = 2.0 ** (-8 * torch.arange(1, H + 1).double() / H)
    o, _ = ssd_scan(v, x.new_ones(len(x), H), -rates, k, q, rates * 0, x.new_zeros(H, P, N))
    o = rms(o.flatten(1), p["norm.weight"], c.layernorm_epsilon) * z.sigmoid()
    return o @ p["out_proj.weight"].T


def rotated(x, base):
    """[T, heads, D]: the pair (i, i + D/2) as a complex number, turned."""
    half = x.shape[-1] // 2
    # Frequencies are fp32 numbers in all models.
    radians = (1.0 / base ** (torch.arange(0, 2 * half, 2).float() / (2 * half))).double()
    angles = torch.arange(len(x)).double()[:, None, None] * radians
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones(()).double(), angles
    )
    return torch.cat([turned.real, turned.imag], -1)


def attention(c, p, x, window=None):
    G, D = c.num_query_groups, c.kv_channels
    heads = c.num_attention_heads // G
    mixed = (x @ p["linear_qkv.weight"].T).unflatten(1, (G, heads + 2, D))
    q, k, v = mixed.split([heads, 1, 1], 2)
    q = rotated(q.flatten(1, 2), c.rotary_base).unflatten(1, (G, heads))
    k = rotated(k.squeeze(2), c.rotary_base)
    scores = torch.einsum("tghd,sgd->ghts", q, k) * D**-0.5
    t, s = torch.arange(len(x))[:, None], torch.arange(len(x))
    hidden = (s > t) if window is None else (s > t) | (s <= t - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    o = torch.einsum("ghts,sgd->tghd", weights, v.squeeze(2)).flatten(1)
    return o @ p["linear_proj.weight"].T


def mlp(c, p, x):
    gate, value = (x @ p["linear_fc1.weight"].T).chunk(2, -1)
    return (F.silu(gate) * value) @ p["linear_fc2.weight"].T


MIXERS = {
    "M": mamba2,
    "S": mamba1,
    "G": gated_delta_net,
    "K": kimi_delta_attention,
    "A": lightning_attention,
    "*": attention,
    "W": lambda c, p, x: attention(c, p, x, c.sliding_window),
    "-": mlp,
}


def below(parameters, prefix):
    length = len(prefix)
    return {name[length:]: p for name, p in parameters.items() if name.startswith(prefix)}


def naive_loss(config, parameters, tokens, labels):
    """Sum over the tokens of one sequence."""
    x, zero = parameters["embedding.word_embeddings.weight"][tokens], 0.0
    if config.layernorm_zero_centered_gamma:
        zero = 1.0
    for i, symbol in enumerate(config.layer_pattern):
        layer = below(parameters, f"decoder.layers.{i}.")
        (norm,) = (p for name, p in layer.items() if name.count(".") == 1 and "norm" in name)
        (mixer,) = {name.split(".")[0] for name in layer if name.count(".") == 2}
        x = x + MIXERS[symbol](
            config, below(layer, f"{mixer}."), rms(x, norm + zero, config.layernorm_epsilon)
        )
    x = rms(x, parameters["decoder.final_norm.weight"] + zero, config.layernorm_epsilon)
    logits = x @ parameters["output_layer.weight"].T
    return F.cross_entropy(logits, labels, reduction="sum")


def packed(lengths):
    bounds = torch.tensor((0, *lengths)).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


OPTIONS = [
    {"linear_allow_neg_eigval": True, "linear_norm_epsilon": 1e-2},
    {"layernorm_zero_centered_gamma": True},
    {"layernorm_zero_centered_gamma": True, "linear_norm_zero_centered_gamma": False},
]
"""Of Kimi Delta Attention."""


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [*((pattern, {}) for pattern in (PATTERN, *PATTERN)), *(("K", fields) for fields in OPTIONS)],
)
def test_gradients_of_packed_sequences(pattern, fields):
    model = small_model(pattern, **fields).train()
    parameters = {
        name: p.detach().double().requires_grad_() for name, p in model.named_parameters()
    }
    tokens, labels = random_tokens(sum(LENGTHS)), random_tokens(sum(LENGTHS))
    pairs = zip(tokens.split(LENGTHS), labels.split(LENGTHS))
    expected_loss = sum(naive_loss(model.config, parameters, *pair) for pair in pairs)
    expected_loss.backward()

    loss = model(tokens[None], labels=labels[None], packed_seq_params=packed(LENGTHS)).sum()
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
def test_gradients_are_those_of_core(monkeypatch, pattern, fields):
    """Of its MambaModel (0.16) or HybridModel, loaded with the same weights."""
    ours = small_model(pattern, deterministic_mode=True, **fields)
    tokens, labels = random_tokens(2, 33), random_tokens(2, 33)
    with stock_megatron.on_cpu(monkeypatch):
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
