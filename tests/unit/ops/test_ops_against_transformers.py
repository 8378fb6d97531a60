"""The ops against the torch paths of transformers' Mamba-2 and Qwen3-Next layers."""

import pytest
import torch
import torch.nn.functional as F
from recurrences import assert_near
from transformers import Mamba2Config, Qwen3NextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from megatron_hybrid.ops import RaggedLayout, causal_conv1d, gated_delta_rule, ssd_scan

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
@pytest.mark.parametrize("key_heads", [2, 4])
def test_gated_delta_rule(length, key_heads):
    torch.manual_seed(0)
    heads, N, P = 4, 16, 8
    q, k = torch.randn(length, key_heads, N), torch.randn(length, key_heads, N)
    v, g, beta = (
        torch.randn(length, heads, P),
        -torch.rand(length, heads),
        torch.rand(length, heads),
    )
    state = torch.randn(1, heads, N, P)
    o, final, _ = gated_delta_rule(q, k, v, g, beta, state, RaggedLayout((length,), (0,)), 32)
    for reference in (
        modeling_qwen3_next.torch_chunk_gated_delta_rule,
        modeling_qwen3_next.torch_recurrent_gated_delta_rule,
    ):
        expected_o, expected_final = reference(
            *(t[None] for t in (q, k, v, g, beta)),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_near(o, expected_o[0])
        assert_near(final, expected_final)


def in_pieces(module, config, forward, hidden):
    """The module with its cache, and `forward(rows, states, layout)`, both cut in 33 + 16 + 1."""
    cache, states, first = DynamicCache(config=config), (None, None), 0
    for end in (33, 49, 50):
        layout = RaggedLayout((end - first,), (first,))
        with torch.no_grad():
            expected = module(hidden[:, first:end], cache_params=cache)
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
