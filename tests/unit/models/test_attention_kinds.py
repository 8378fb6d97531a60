"""Every kind of attention gives what the module of transformers gives that has it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from small_models import random_tokens, small_config, small_model
from test_mixer_context import DictContext, run
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from megatron_hybrid.checkpoints.huggingface.tensors import attention_tensors
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

LENGTH, WINDOW, CHUNK = 37, 7, 8
SHAPE = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}


@dataclass
class Case:
    """One kind, on both sides."""

    module: Any
    """Of transformers."""
    prefix: str
    """Of its classes."""
    values: dict[str, Any]
    """Of its config."""
    symbol: str
    fields: dict[str, Any]
    """Of our config."""
    layer_type: str | None = None
    """Where its rotary embedding differs by that."""
    extra: dict[str, str] = field(default_factory=dict)
    """Our parameters beside those of `attention_tensors` -> theirs."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the module's forward."""


SINKS = {"core_attention.softmax_offset": "sinks"}
CASES = {
    "sinks, biases, yarn, window": Case(
        gpt_oss,
        "GptOss",
        {"rope_parameters": {"rope_theta": 500.0, **YARN}},
        "W",
        {
            "softmax_type": "learnable",
            "add_bias_linear": True,
            "rotary_base": 500.0,
            "rotary_scaling": YARN,
        },
        extra=SINKS,
    ),
    "sinks of nought": Case(
        gpt_oss,
        "GptOss",
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        "*",
        {"softmax_type": "off-by-one", "add_bias_linear": True, "rotary_base": 500.0},
    ),
    "chunks, neighbouring pairs, L2 norm": Case(
        llama4,
        "Llama4Text",
        {"no_rope_layers": [1]},
        "L",
        {"rotary_base": 500000.0, "rotary_interleaved": True, "qk_l2_norm": True},
    ),
    "no RoPE, temperature": Case(
        llama4,
        "Llama4Text",
        {"no_rope_layers": [0], "floor_scale": 5, "attn_scale": 0.7},
        "*",
        {
            "position_embedding_type": "none",
            "attention_temperature_scale": 0.7,
            "attention_temperature_floor": 5,
        },
    ),
    "softcap, scale": Case(
        gemma2,
        "Gemma2",
        {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5},
        "W",
        {"attention_logit_softcap": 1.5, "softmax_scale": 5**-0.5},
    ),
    "zero-centered norms of heads": Case(
        gemma3,
        "Gemma3",
        {"query_pre_attn_scalar": 16},
        "W",
        {"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
        layer_type="sliding_attention",
    ),
    "value norm, keys as values, part of the pairs": Case(
        gemma4,
        "Gemma4Text",
        {"attention_k_eq_v": True, "global_head_dim": 16},
        "*",
        {
            "qk_layernorm": True,
            "value_l2_norm": True,
            "keys_as_values": True,
            "softmax_scale": 1.0,
            "rotary_base": 1e6,
            "rotary_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
        layer_type="full_attention",
        arguments={"shared_kv_states": {}},
    ),
    "norm of all heads": Case(
        olmo2, "Olmo2", {}, "*", {"qk_layernorm": True, "qk_layernorm_scope": "all_heads"}
    ),
    "gates, partial rotary": Case(
        qwen3_next,
        "Qwen3Next",
        {"rope_parameters": {"rope_theta": 70.0, "partial_rotary_factor": 0.25}},
        "*",
        {
            "attention_output_gate": True,
            "rotary_base": 70.0,
            "rotary_percent": 0.25,
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
        },
    ),
}


def their_attention(case: Case):
    """The module with random parameters, and its output for hidden states [1, T, hidden]."""
    text = case.prefix.replace("Gemma3", "Gemma3Text")
    values = {**SHAPE, "num_hidden_layers": 1, "layer_types": [case.layer_type], **case.values}
    if case.layer_type is None:
        del values["layer_types"]
    config = getattr(case.module, f"{text}Config")(**values)
    module = getattr(case.module, f"{case.prefix}Attention")(config, 0)
    rotary = getattr(case.module, f"{case.prefix}RotaryEmbedding")(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
        if case.fields.get("softmax_type") == "off-by-one":
            module.sinks.zero_()
    positions = torch.arange(LENGTH)
    distance = positions[:, None] - positions
    visible = distance >= 0
    if case.symbol == "W":
        visible &= distance < WINDOW
    elif case.symbol == "L":
        visible &= (positions // CHUNK)[:, None] == positions // CHUNK
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~visible, -torch.inf)[None, None]

    def forward(hidden_1Th: torch.Tensor) -> torch.Tensor:
        arguments = [] if case.layer_type is None else [case.layer_type]
        embedding = rotary(hidden_1Th, positions[None], *arguments)
        return module(
            hidden_1Th, position_embeddings=embedding, attention_mask=mask, **case.arguments
        )[0]

    return module, forward


def our_attention(case: Case, theirs: torch.nn.Module):
    """The mixer with the same parameters."""
    model = small_model(
        case.symbol,
        kv_channels=16,
        sliding_window=WINDOW,
        attention_chunk_size=CHUNK,
        layernorm_epsilon=1e-5,
        **case.fields,
    )
    mixer = model.decoder.layers[0].self_attention
    given = {f"theirs.{name}": value for name, value in theirs.state_dict().items()}
    state = {own: given[f"theirs.{name}"] for own, name in case.extra.items()}
    for tensors in attention_tensors(model.config, "ours", "theirs"):
        values = tensors.layout.to_ours([given[name] for name in tensors.theirs])
        names = [name.removeprefix("ours.") for name in tensors.ours]
        state.update(zip(names, values, strict=True))
    mixer.load_state_dict(state, strict=True)
    return mixer


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    """The output, and the gradients of the input and of all that is not reordered."""
    case = CASES[name]
    theirs, forward = their_attention(case)
    mixer = our_attention(case, theirs)
    hidden_1Th = torch.randn(1, LENGTH, SHAPE["hidden_size"], requires_grad=True)
    expected = forward(hidden_1Th)
    context = UncachedContext(RaggedLayout.uniform(1, LENGTH), hidden_1Th.device)
    output, bias = mixer(hidden_1Th[0], context)
    if bias is not None:
        output = output + bias
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(output, expected[0], atol=3e-6, rtol=1e-5)

    weights = torch.randn_like(output)
    expected_gradient, *expected_sinks = torch.autograd.grad(
        (expected[0] * weights).sum(),
        [hidden_1Th, *(theirs.get_parameter(name) for name in case.extra.values())],
    )
    gradient, *sinks = torch.autograd.grad(
        (output * weights).sum(),
        [hidden_1Th, *(mixer.get_parameter(name) for name in case.extra)],
    )
    torch.testing.assert_close(gradient, expected_gradient, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(sinks, expected_sinks, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_pieces_equal_the_whole(name):
    """Positions, windows and chunks are absolute, wherever a call begins."""
    case = CASES[name]
    model = small_model(case.symbol, kv_channels=16, attention_chunk_size=CHUNK, **case.fields)
    for parameter in model.decoder.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tokens = random_tokens(2, LENGTH)
    whole = model(tokens)
    check_pieces(model, tokens, whole)


def check_pieces(model, tokens, whole):
    context = DictContext(model.cache_requirements(), 2)
    for cuts in ({0: (0, 13), 1: (0, 5)}, {1: (5, 6), 0: (13, 30)}, {0: (30, 37), 1: (6, 37)}):
        for (r, (start, end)), logits in zip(cuts.items(), run(model, context, tokens, cuts)):
            torch.testing.assert_close(logits, whole[r, start:end], atol=1e-5, rtol=1e-5)


def test_shared_keys_and_values_are_those_of_their_source():
    """With the source's projection of keys and values beside its own of the queries, and the same
    input, a layer with keys and values of its own does the same."""
    model = small_model("WW", layer_overrides={"2": {"kv_source_layer": 1}}, qk_layernorm=True)
    source, reader = (layer.self_attention for layer in model.decoder.layers)
    alone = small_model("W", qk_layernorm=True).decoder.layers[0].self_attention
    theirs, queries = (m.linear_qkv.weight.unflatten(0, (2, -1)) for m in (source, reader))
    with torch.no_grad():
        weight = torch.cat([queries, theirs[:, queries.shape[1] :]], 1).flatten(0, 1)
        alone.linear_qkv.weight.copy_(weight)
        alone.linear_proj.weight.copy_(reader.linear_proj.weight)
    hidden_Th = torch.randn(LENGTH, 48)
    layout = RaggedLayout.uniform(1, LENGTH)
    context = UncachedContext(layout, hidden_Th.device, shared_kv_layers={1})
    source(hidden_Th, context)
    output, _ = reader(hidden_Th, context)
    expected, _ = alone(hidden_Th, UncachedContext(layout, hidden_Th.device))
    torch.testing.assert_close(output, expected)
    assert reader.k_layernorm is None


@torch.inference_mode()
def test_shared_keys_and_values_from_a_cache():
    overrides = {"3": {"kv_source_layer": 1}, "5": {"kv_source_layer": 2}}
    model = small_model("W*W-*", layer_overrides=overrides)
    tokens = random_tokens(2, LENGTH)
    kept = [layer.kv for layer in model.cache_requirements()]
    assert [kv is None for kv in kept] == [False, False, True, True, True]
    check_pieces(model, tokens, model(tokens))


def test_gradients_reach_the_shared_projection_from_both_layers():
    model = small_model("WW", layer_overrides={"2": {"kv_source_layer": 1}})
    source = model.decoder.layers[0].self_attention
    with torch.no_grad():
        source.linear_proj.weight.zero_()  # so that only the reader uses its keys and values
    model(random_tokens(1, 9)).square().sum().backward()
    keys_values = source.linear_qkv.weight.grad.unflatten(0, (2, -1))[:, -24:]
    assert keys_values.abs().amax(-1).min() > 0


@pytest.mark.parametrize(
    ("pattern", "overrides"),
    [
        ("W*", {"2": {"kv_source_layer": 1}}),
        ("**", {"1": {"kv_source_layer": 2}}),
        ("**", {"2": {"kv_source_layer": 0}}),
        ("***", {"2": {"kv_source_layer": 1}, "3": {"kv_source_layer": 2}}),
        ("**", {"2": {"kv_source_layer": 1, "kv_channels": 8}}),
        ("WW", {"2": {"kv_source_layer": 1, "sliding_window": 3}}),
    ],
)
def test_sources_that_cannot_be_read_are_refused(pattern, overrides):
    with pytest.raises(ValueError, match=r"kv_source_layer=.; it must be a layer before it"):
        small_config(pattern, layer_overrides=overrides)


def test_sharing_needs_one_pipeline_stage():
    overrides = {"2": {"kv_source_layer": 1}}
    with pytest.raises(ValueError, match=r"one pipeline stage, but there are 2. Use 1"):
        small_config("**", layer_overrides=overrides, pipeline_model_parallel_size=2)
