"""Weights of megatron-core's own models load by name, and give the same numbers; what scripts of
Megatron read of a model, and how they call it."""

import inspect

import pytest
import stock_megatron
import torch
from megatron.core.models.mamba import MambaModel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model
from sharded_tensors import pieces
from small_models import small_config
from state_dicts import load_state
from stock_megatron import scramble

from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout


def config(pattern, **fields):
    own = {"num_attention_heads": 6, "deterministic_mode": True}
    return small_config(pattern, **{**own, **fields})


def compare(model_config, tolerance=2e-5):
    ours = build_hybrid_model(model_config).eval()
    tokens = torch.randint(0, model_config.vocab_size, (3, 37))
    with stock_megatron.on_cpu(), torch.no_grad():
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
def test_stock_model_gives_the_same_logits(pattern, fields):
    compare(config(pattern, **fields))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_gated_delta_net_gives_the_same_output(normalization):
    model_config = config("G", normalization=normalization)
    mixer = build_hybrid_model(model_config).decoder.layers[0].self_attention
    hidden = torch.randn(33, 2, model_config.hidden_size)  # [s, b, h], as core wants it
    with stock_megatron.on_cpu(), torch.no_grad():
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
def test_distributed_checkpoints_are_those_of_the_stock_model(pattern, fields):
    """Keys, places and values of every piece, and the keys of what is no tensor."""
    ours, stock = compare(config(pattern, qk_layernorm=True, **fields))
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
def test_mixture_of_experts_is_the_stock_one(fields):
    """Its output, its state dict and its distributed checkpoint."""
    model = build_hybrid_model(config("E", **{**MOE, **fields}))
    path = "decoder.layers.0.mlp."
    hidden = torch.randn(33, 2, model.config.hidden_size)
    with stock_megatron.on_cpu(), torch.no_grad():
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


@pytest.fixture(params=["ours", "stock"])
def model(request):
    """In bf16, in core's wrapper."""
    config = small_config("-M*M", params_dtype=torch.bfloat16, mamba_chunk_size=48)
    ours = build_hybrid_model(config)
    if request.param == "ours":
        return Float16Module(config, ours)
    with stock_megatron.on_cpu():
        return Float16Module(config, stock_megatron.mamba_model(config))


def test_reads_of_an_inference_config(model):
    """The attributes that Megatron-LM's `to_inference_config` takes through the wrappers."""

    def read(name):
        return get_attr_wrapped_model(model, name)

    assert read("position_embedding_type") == "rope"
    assert read("max_sequence_length") in (None, 512)  # ours has no limit
    assert read("pg_collection").tp.size() == 1
    assert read("vocab_size") == read("config").vocab_size
    decoder = read("decoder")
    assert "".join(decoder.layer_type_list) == "-M*M"
    chunks = [layer.mixer.chunk_size for layer in decoder.layers if hasattr(layer, "mixer")]
    assert chunks == [48, 48]
    config = read("config")
    conv, state = decoder.mamba_state_shapes_per_request()
    heads, groups = config.mamba_num_heads, config.mamba_num_groups
    channels = heads * config.mamba_head_dim + 2 * groups * config.mamba_state_dim
    assert conv == (channels, config.mamba_conv_kernel)
    assert state == (heads, config.mamba_head_dim, config.mamba_state_dim)
    if not stock_megatron.IS_0_16:  # where scripts put these together
        from megatron.core.inference.config import MambaInferenceStateConfig

        made = MambaInferenceStateConfig.from_model(model)
        assert (made.conv_states_shape, made.ssm_states_shape) == (conv, state)
        assert (made.mamba_chunk_size, made.ssm_states_dtype) == (48, torch.bfloat16)


def test_a_model_without_mamba_layers_has_no_state_shapes():
    model = build_hybrid_model(small_config("*-"))
    assert model.decoder.mamba_state_shapes_per_request() is None
    assert model.vp_stage is None


def parameters(model_class) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model_class.forward).parameters)


def test_forward_takes_the_arguments_of_the_stock_model():
    stock, ours = parameters(MambaModel), parameters(HybridModel)
    missing = set(stock) - set(ours)
    assert not missing
    positional = [
        [name for name, p in each.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for each in (stock, ours)
    ]
    assert positional[0] == positional[1]


@torch.no_grad()
def test_a_decoder_input_takes_the_place_of_the_embedding():
    model = build_hybrid_model(small_config("M*-")).eval()
    tokens = torch.arange(14).view(2, 7)
    rows_sbh = model.embedding(tokens, None)
    expected = model(tokens)
    assert torch.equal(model(None, None, None, rows_sbh), expected)
    assert torch.equal(model(tokens + 1, decoder_input=rows_sbh), expected)
    with pytest.raises(ValueError, match="the first pipeline stage needs tokens"):
        model(None)


@torch.no_grad()
def test_routers_are_told_the_padding():
    model = build_hybrid_model(small_config("M")).eval()
    tokens, mask = torch.arange(14).view(2, 7), torch.rand(2, 7) > 0.5
    told = []
    model.decoder.register_forward_pre_hook(lambda module, args: told.append(args[1]))
    model(tokens, padding_mask=mask)
    assert torch.equal(told[0].padding_mask_T, mask.flatten())
    for wrong in (mask.float(), mask[:1]):
        with pytest.raises(ValueError, match=r"it must be torch\.bool \[2, 7\], True where a tok"):
            model(tokens, padding_mask=wrong)


@torch.no_grad()
def test_masks_of_the_loss_and_of_padding_change_nothing():
    model = build_hybrid_model(small_config("M*-")).eval()
    tokens = torch.arange(14).view(2, 7)
    masks = {"loss_mask": torch.zeros(2, 7), "padding_mask": torch.ones(2, 7, dtype=torch.bool)}
    assert torch.equal(model(tokens, labels=tokens, **masks), model(tokens, labels=tokens))
