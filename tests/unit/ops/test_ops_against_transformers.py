"""The ops against the torch paths of the transformers models that have such layers."""

import pytest
import torch
import torch.nn.functional as F
from recurrences import assert_near
from transformers import (
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import DynamicCache
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next import modeling_qwen3_next

from megatron_hybrid.ops import RaggedLayout
from megatron_hybrid.ops.conv.reference import causal_conv1d
from megatron_hybrid.ops.delta_rule.reference import gated_delta_rule, kimi_delta_attention
from megatron_hybrid.ops.selective_scan.reference import selective_scan
from megatron_hybrid.ops.ssd.reference import ssd_scan

lengths = pytest.mark.parametrize("length", [1, 7, 64, 150])


@lengths
def test_causal_conv1d(length):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(length, 12), torch.randn(12, 4), torch.randn(12)
    y, final, _ = causal_conv1d(x, weight, bias, None, RaggedLayout((length,), (0,)))
    expected = modeling_mamba2.causal_conv1d_fn(x.t()[None], weight, bias, activation="silu")
    assert_near(y, expected[0].t())

    step = torch.randn(1, 12)
    state = final.clone()
    expected_step = modeling_mamba2.causal_conv1d_update(
        step.t()[None], state, weight, bias, activation="silu"
    )
    y_step, after, _ = causal_conv1d(step, weight, bias, final, RaggedLayout((1,), (length,)))
    assert_near(y_step, expected_step[0].t())
    assert torch.equal(after, state)


@lengths
@pytest.mark.parametrize("groups", [1, 2])
def test_ssd_scan(length, groups):
    torch.manual_seed(0)
    heads, P, N = 4, 8, 16
    x, dt, A = torch.randn(length, heads, P), torch.rand(length, heads), -4 * torch.rand(heads)
    B, C = torch.randn(length, groups, N), torch.randn(length, groups, N)
    D, state = torch.randn(heads), torch.randn(1, heads, P, N)
    layout = RaggedLayout((length,), (0,))
    y, final, _ = ssd_scan(x, dt, A, B, C, D, state, layout, 32)
    expected_y, expected_final = modeling_mamba2.mamba2_chunk_scan(
        x[None],
        dt[None],
        A,
        B[None],
        C[None],
        32,
        D,
        initial_states=state,
        return_final_states=True,
    )
    assert_near(y, expected_y[0], 2e-5)
    assert_near(final, expected_final, 2e-5)


@lengths
@pytest.mark.parametrize(
    ("key_heads", "strength", "modeling"),
    [(2, 1, modeling_qwen3_next), (4, 1, modeling_qwen3_next), (4, 2, modeling_olmo_hybrid)],
)
def test_gated_delta_rule(length, key_heads, strength, modeling):
    """OlmoHybrid writes with up to twice the strength, for negative eigenvalues."""
    torch.manual_seed(0)
    heads, N, P = 4, 16, 8
    q, k = torch.randn(length, key_heads, N), torch.randn(length, key_heads, N)
    v, g, beta = (
        torch.randn(length, heads, P),
        -torch.rand(length, heads),
        strength * torch.rand(length, heads),
    )
    state = torch.randn(1, heads, N, P)
    o, final, _ = gated_delta_rule(q, k, v, g, beta, state, RaggedLayout((length,), (0,)), 32)
    for reference in (
        modeling.torch_chunk_gated_delta_rule,
        modeling.torch_recurrent_gated_delta_rule,
    ):
        expected_o, expected_final = reference(
            *(t[None] for t in (q, k, v, g, beta)),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_near(o, expected_o[0])
        assert_near(final, expected_final)


@lengths
def test_selective_scan(length):
    torch.manual_seed(0)
    C, N = 24, 16
    x, dt, A, D = (
        torch.randn(length, C),
        torch.rand(length, C),
        -4 * torch.rand(C, N),
        torch.ones(C),
    )
    B, C_ = torch.randn(length, N), torch.randn(length, N)
    y, final, _ = selective_scan(x, dt, A, B, C_, D, None, RaggedLayout((length,), (0,)))
    columns = (t.t()[None] for t in (x, dt, B, C_))
    x_1CT, dt_1CT, B_1NT, C_1NT = columns
    expected_y, state = modeling_mamba.mamba_selective_scan(
        x_1CT, dt_1CT, A, B_1NT, C_1NT, D, return_last_state=True
    )
    assert_near(y, expected_y[0].t())
    assert_near(final, state)

    step = (x[:1], dt[:1], A, B[:1], C_[:1], D)
    expected_step = modeling_mamba.mamba_selective_state_update(state, *step)
    y_step, after, _ = selective_scan(*step, final, RaggedLayout((1,), (length,)))
    assert_near(y_step, expected_step)
    assert_near(after, state)


@lengths
def test_kimi_delta_attention(length):
    torch.manual_seed(0)
    heads, N, P = 4, 16, 8
    q, k, v = (torch.randn(length, heads, size) for size in (N, N, P))
    g, beta = -3 * torch.rand(length, heads, N), torch.rand(length, heads)
    state = torch.randn(1, heads, N, P)
    layout = RaggedLayout((length,), (0,))
    o, final, _ = kimi_delta_attention(q, k, v, g, beta, state, layout, 32)
    for reference in (
        modeling_kimi_linear.chunk_kimi_delta_attention,
        modeling_kimi_linear.recurrent_kimi_delta_attention,
    ):
        expected_o, expected_final = reference(
            *(t[None] for t in (q, k, v, g, beta)),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_near(o, expected_o[0])
        assert_near(final, expected_final)


def in_pieces(module, config, forward, hidden, ends=(33, 49, 50)):
    """The module with its cache, and `forward(rows, states, layout)`, both cut at `ends`."""
    cache, states, first = DynamicCache(config=config), (None, None), 0
    for end in ends:
        layout = RaggedLayout((end - first,), (first,))
        with torch.no_grad():
            expected = module(hidden[:, first:end], cache=cache)
            actual, states = forward(hidden[0, first:end], states, layout)
        assert_near(actual, expected.view_as(actual))
        first = end


def test_whole_mamba2_mixer():
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, expand=2, state_size=16, n_groups=2, chunk_size=16
    )
    mixer = modeling_mamba2.Mamba2Mixer(config, layer_idx=0).eval()
    torch.nn.init.uniform_(mixer.D, -1, 1)

    def forward(hidden, states, layout):
        z, xBC, dt = mixer.in_proj(hidden).split([64, 64 + 2 * 2 * 16, 8], dim=-1)
        conv = mixer.conv1d
        xBC, tail, _ = causal_conv1d(xBC, conv.weight.squeeze(1), conv.bias, states[0], layout)
        x, B, C = xBC.split([64, 32, 32], dim=-1)
        y, final, _ = ssd_scan(
            x.unflatten(1, (8, 8)),
            F.softplus(dt + mixer.dt_bias),
            -mixer.A_log.exp(),
            B.unflatten(1, (2, 16)),
            C.unflatten(1, (2, 16)),
            mixer.D,
            states[1],
            layout,
            16,
        )
        return mixer.out_proj(mixer.norm(y.flatten(1), z)), (tail, final)

    in_pieces(mixer, config, forward, torch.randn(1, 50, 32))


def test_whole_gated_delta_net():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, layer_idx=0).eval()

    def forward(hidden, states, layout):
        qkvz, ba = layer.in_proj_qkvz(hidden)[None], layer.in_proj_ba(hidden)[None]
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
        qkv = torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1)[0]
        weight = layer.conv1d.weight.squeeze(1)
        qkv, tail, _ = causal_conv1d(qkv, weight, None, states[0], layout)
        q, k, v = qkv.split([32, 32, 32], dim=-1)
        o, final, _ = gated_delta_rule(
            q.unflatten(1, (2, 16)),
            k.unflatten(1, (2, 16)),
            v.unflatten(1, (4, 8)),
            -layer.A_log.exp() * F.softplus(a[0] + layer.dt_bias),
            b[0].sigmoid(),
            states[1],
            layout,
            16,
        )
        o = layer.norm(o.reshape(-1, 8), z.reshape(-1, 8)).reshape(len(hidden), -1)
        return layer.out_proj(o), (tail, final)

    in_pieces(layer, config, forward, torch.randn(1, 50, 32))


def test_whole_mamba_mixer():
    """Its torch path continues right by single tokens only."""
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=16, state_size=8, time_step_rank=4, num_hidden_layers=1)
    mixer = modeling_mamba.MambaMixer(config, layer_idx=0).eval()
    torch.nn.init.uniform_(mixer.D, -1, 1)

    def forward(hidden, states, layout):
        x, z = mixer.in_proj(hidden).chunk(2, dim=-1)
        weight = mixer.conv1d.weight.squeeze(1)
        x, tail, _ = causal_conv1d(x, weight, mixer.conv1d.bias, states[0], layout)
        dt, B, C = mixer.x_proj(x).split([4, 8, 8], dim=-1)
        dt, A = F.softplus(mixer.dt_proj(dt)), -mixer.A_log.exp()
        y, final, _ = selective_scan(x, dt, A, B, C, mixer.D, states[1], layout)
        return mixer.out_proj(y * F.silu(z)), (tail, final)

    in_pieces(mixer, config, forward, torch.randn(1, 50, 16), ends=(48, 49, 50))


def test_whole_kimi_delta_attention():
    torch.manual_seed(0)
    config = KimiLinearConfig(
        hidden_size=32,
        linear_num_heads=4,
        linear_head_dim=16,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = modeling_kimi_linear.KimiLinearDeltaAttention(config, layer_idx=0).eval()
    for parameter in (layer.forget_gate.A_log, layer.forget_gate.dt_bias):
        torch.nn.init.uniform_(parameter, -1, 1)

    def forward(hidden, states, layout):
        qkv = torch.cat([proj(hidden) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
        weight = layer.conv1d.weight.squeeze(1)
        qkv, tail, _ = causal_conv1d(qkv, weight, None, states[0], layout)
        q, k, v = qkv.unflatten(-1, (3, 4, 16)).unbind(1)
        g, beta = layer.forget_gate(hidden[None])[0], layer.b_proj(hidden).sigmoid()
        o, final, _ = kimi_delta_attention(q, k, v, g, beta, states[1], layout, 16)
        gate = layer.g_b_proj(layer.g_a_proj(hidden)).view_as(o)
        return layer.o_proj(layer.o_norm(o, gate).flatten(1)), (tail, final)

    in_pieces(layer, config, forward, torch.randn(1, 50, 32))


def test_whole_short_convolution():
    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=16, conv_L_cache=3, conv_bias=True, num_hidden_layers=1, layer_types=["conv"]
    )
    layer = modeling_lfm2.Lfm2ShortConv(config, layer_idx=0).eval()

    def forward(hidden, states, layout):
        B, C, x = layer.in_proj(hidden).chunk(3, dim=-1)
        weight = layer.conv.weight.squeeze(1)
        y, tail, _ = causal_conv1d(B * x, weight, layer.conv.bias, states[0], layout, None)
        return layer.out_proj(C * y), (tail, None)

    in_pieces(layer, config, forward, torch.randn(1, 50, 16))
