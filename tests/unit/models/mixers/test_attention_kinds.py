"""Every kind of attention gives the same in pieces and at once, over latents as of expanded heads;
keys and values that are shared; the attention that latents are an economy of."""

import pytest
import torch
from small_models import random_tokens, small_config, small_model
from test_mixer_context import check_pieces

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

LENGTH, WINDOW, CHUNK = 37, 7, 8
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}


KINDS = {
    "sinks, biases, yarn, window": (
        "W",
        {"softmax_type": "learnable", "add_bias_linear": True, "rotary_scaling": YARN},
    ),
    "sinks of nought": ("*", {"softmax_type": "off-by-one", "add_bias_linear": True}),
    "chunks, neighbouring pairs, L2 norm": ("L", {"rotary_interleaved": True, "qk_l2_norm": True}),
    "no RoPE, temperature": (
        "*",
        {
            "position_embedding_type": "none",
            "attention_temperature_scale": 0.7,
            "attention_temperature_floor": 5,
        },
    ),
    "softcap, scale": ("W", {"attention_logit_softcap": 1.5, "softmax_scale": 5**-0.5}),
    "value norm, keys as values, part of the pairs": (
        "*",
        {
            "qk_layernorm": True,
            "value_l2_norm": True,
            "keys_as_values": True,
            "rotary_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
    ),
    "norms after RoPE": ("W", {"qk_layernorm": True, "qk_layernorm_after_rope": True}),
    "norm of all heads": ("*", {"qk_layernorm": True, "qk_layernorm_scope": "all_heads"}),
    "gates, partial rotary": ("*", {"attention_output_gate": True, "rotary_percent": 0.25}),
    "latents, low-rank queries": ("+-+", {}),
    "latents, one query projection": ("+", {"q_lora_rank": None}),
    "latents, no rope": ("+", {"position_embedding_type": "none"}),
    "latents, neighbouring pairs": ("+", {"rotary_interleaved": True}),
    "latents, yarn": ("+", {"rotary_scaling": YARN, "softmax_scale": 0.4}),
    "latents, softcap": ("+", {"attention_logit_softcap": 3.0}),
    "latents, wide values": ("+", {"v_head_dim": 32, "kv_lora_rank": 8}),
}


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_pieces_equal_the_whole(name):
    """Positions, windows and chunks are absolute, wherever a call begins."""
    pattern, fields = KINDS[name]
    model = small_model(pattern, kv_channels=16, attention_chunk_size=CHUNK, **fields)
    for parameter in model.decoder.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    check_pieces(model)


@torch.inference_mode()
def test_a_sink_of_nought_is_one_that_learned_nothing():
    models = [
        small_model("*", softmax_type=kind, add_bias_linear=True)
        for kind in ("off-by-one", "learnable")
    ]
    models[1].load_state_dict(models[0].state_dict(), strict=False)
    models[1].decoder.layers[0].self_attention.core_attention.softmax_offset.zero_()
    tokens = random_tokens(1, LENGTH)
    assert torch.equal(models[0](tokens), models[1](tokens))


@torch.inference_mode()
def test_shared_keys_and_values_from_a_cache():
    overrides = {"3": {"kv_source_layer": 1}, "5": {"kv_source_layer": 2}}
    model = small_model("W*W-*", layer_overrides=overrides)
    kept = [layer.kv for layer in model.cache_requirements()]
    assert [kv is None for kv in kept] == [False, False, True, True, True]
    check_pieces(model)


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


@pytest.mark.parametrize("width", [6, 5])  # rope could not rotate the second one
@torch.no_grad()
def test_equals_plain_attention_written_out(width):
    fields = {"position_embedding_type": "none", "qk_pos_emb_head_dim": width}
    model = small_model("+", **fields).double()
    mixer, length = model.decoder.layers[0].self_attention, 11
    for norm in (mixer.q_layernorm, mixer.kv_layernorm):
        norm.weight.normal_(1.0, 0.3)
    x = torch.randn(length, 48, dtype=torch.double)
    layout = RaggedLayout.uniform(1, length)
    output, _ = mixer(x, UncachedContext(layout, x.device))

    q = mixer.q_layernorm(x @ mixer.linear_q_down_proj.weight.T)
    q = mixer.linear_q_up_proj.weight @ q.T
    down = x @ mixer.linear_kv_down_proj.weight.T
    kv = mixer.linear_kv_up_proj.weight @ mixer.kv_layernorm(down[:, :28]).T
    heads = []
    for q_h, kv_h in zip(q.view(4, 10 + width, length), kv.view(4, 24, length)):
        scores = (q_h[:10].T @ kv_h[:10] + q_h[10:].T @ down[:, 28:].T) / (10 + width) ** 0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ kv_h[10:].T)
    expected = torch.cat(heads, 1) @ mixer.linear_proj.weight.T
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
