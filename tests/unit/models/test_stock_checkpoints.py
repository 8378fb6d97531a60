"""Weights of megatron-core's own models load by name, and give the same numbers."""

import pytest
import stock_megatron
import torch
from sharded_tensors import pieces
from small_models import small_config
from state_dicts import load_state
from stock_megatron import scramble

from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.models.parameter_names import canonical_name
from megatron_hybrid.ops.ragged import RaggedLayout


def config(pattern, **fields):
    own = {"num_attention_heads": 6, "deterministic_mode": True}
    return small_config(pattern, **{**own, **fields})


def compare(monkeypatch, model_config, tolerance=2e-5):
    ours = build_hybrid_model(model_config).eval()
    tokens = torch.randint(0, model_config.vocab_size, (3, 37))
    with stock_megatron.on_cpu(monkeypatch), torch.no_grad():
        stock = stock_megatron.mamba_model(model_config).eval()
        scramble(stock)
        expected = stock(tokens, position_ids=None, attention_mask=None)
        ours.load_state_dict(stock.state_dict(), strict=True)
    torch.testing.assert_close(ours(tokens), expected, atol=tolerance, rtol=1e-5)
    assert expected.abs().max() > 0.5, "the model says too little to compare"
    return ours, stock


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("M", {}),
        ("M", {"mamba_num_heads": 4, "mamba_num_groups": 1, "mamba_conv_kernel": 3}),
        ("*", {}),
        ("*", {"position_embedding_type": "none"}),
        ("*", {"qk_layernorm": True, "rotary_percent": 0.5, "rotary_base": 500.0}),
        ("*", {"attention_output_gate": True}),
        ("*", {"add_bias_linear": True, "kv_channels": 10, "softmax_scale": 0.4}),
        ("*", {"add_qkv_bias": True, "normalization": "LayerNorm", "num_query_groups": 6}),
        ("-", {}),
        ("-", {"gated_linear_unit": False, "add_bias_linear": True}),
        ("M*-M-", {"share_embeddings_and_output_weights": True}),
        ("MM*-MM*-", {"normalization": "LayerNorm"}),
        # The patterns of 0.16 have no G: its GatedDeltaNet is compared on its own, below.
        *([] if stock_megatron.IS_0_16 else [("MG*-G", {})]),
    ],
)
def test_stock_model_gives_the_same_logits(monkeypatch, pattern, fields):
    compare(monkeypatch, config(pattern, **fields))


def test_load_state_takes_a_stock_state_dict(monkeypatch):
    ours, stock = compare(monkeypatch, config("M*-"))
    again = build_hybrid_model(ours.config)
    load_state(again, stock.state_dict())
    expected = {canonical_name(name): value for name, value in stock.named_parameters()}
    loaded = full_state_dict(again)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_gated_delta_net_gives_the_same_output(monkeypatch, normalization):
    model_config = config("G", normalization=normalization)
    mixer = build_hybrid_model(model_config).decoder.layers[0].self_attention
    hidden = torch.randn(33, 2, model_config.hidden_size)  # [s, b, h], as core wants it
    with stock_megatron.on_cpu(monkeypatch), torch.no_grad():
        stock = stock_megatron.gated_delta_net(model_config)
        scramble(stock)
        mixer.load_state_dict(stock.state_dict(), strict=True)
        expected, _ = stock(hidden, attention_mask=None)
        context = UncachedContext(RaggedLayout.uniform(2, 33), hidden.device)
        output, _ = mixer(hidden.transpose(0, 1).flatten(0, 1), context)
    output = output.unflatten(0, (2, 33)).transpose(0, 1)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("pattern", ["M*-" if stock_megatron.IS_0_16 else "MG*-"])
@pytest.mark.parametrize("fields", [{}, {"gated_linear_unit": False, "add_bias_linear": True}])
def test_distributed_checkpoints_are_those_of_the_stock_model(monkeypatch, pattern, fields):
    """Keys, places and values of every piece, and the keys of what is no tensor."""
    ours, stock = compare(monkeypatch, config(pattern, qk_layernorm=True, **fields))
    sharded, expected = ours.sharded_state_dict(), stock.sharded_state_dict()
    for piece, stock_piece in zip(pieces(sharded), pieces(expected), strict=True):
        assert piece[:-1] == stock_piece[:-1]
        assert torch.equal(piece[-1], stock_piece[-1]), piece[0]
    assert {value.key for value in sharded.values()} == {value.key for value in expected.values()}


MOE = {"num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_shared_expert_intermediate_size": 28, "moe_shared_expert_gate": True},
        {"moe_router_pre_softmax": True, "gated_linear_unit": False},
        {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}
        | {"moe_apply_probs_on_input": True, "moe_shared_expert_intermediate_size": 28},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        | {"moe_router_num_groups": 3, "moe_router_group_topk": 2}
        | {"moe_router_topk_scaling_factor": 2.5},
        {"add_bias_linear": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.6},
    ],
)
def test_mixture_of_experts_is_the_stock_one(monkeypatch, fields):
    """Its output, its state dict and its distributed checkpoint."""
    model = build_hybrid_model(config("E", **{**MOE, **fields}))
    path = "decoder.layers.0.mlp."
    hidden = torch.randn(33, 2, model.config.hidden_size)
    with stock_megatron.on_cpu(monkeypatch), torch.no_grad():
        stock = stock_megatron.moe_layer(model.config).eval()
        scramble(stock)
        state = model.state_dict() | {path + k: v for k, v in stock.state_dict().items()}
        for name in [n for n in state if n.startswith(f"{path}experts.linear")]:
            del state[name]
        model.load_state_dict(state, strict=True)
        expected, bias = stock(hidden)
        assert bias is None
        context = UncachedContext(RaggedLayout.uniform(1, 66), hidden.device)
        output, _ = model.decoder.layers[0].mlp(hidden.flatten(0, 1), context)
        stock_pieces = pieces(stock.sharded_state_dict(path))
    torch.testing.assert_close(output.view_as(expected), expected, atol=5e-6, rtol=1e-5)
    assert expected.abs().max() > 0.1
    ours = [piece for piece in pieces(model.sharded_state_dict()) if piece[0].startswith(path)]
    for piece, stock_piece in zip(ours, stock_pieces, strict=True):
        assert piece[:-1] == stock_piece[:-1]
        assert torch.equal(piece[-1], stock_piece[-1]), piece[0]
    again = build_hybrid_model(model.config)
    load_state(again, state)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
