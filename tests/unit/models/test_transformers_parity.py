"""Tiny random models of `transformers`, with weights mapped by hand, give the same logits."""

import pytest
import torch
import transformers
from small_models import random_tokens
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.checkpoint import load_state
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.mixers.base import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

HIDDEN, VOCAB = 48, 61


def randomize(model):
    """Norm weights too, which all start as ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif parameter.dim() == 2:
                parameter.normal_(std=0.12)
    return model.eval()


def compare(reference, config, state):
    model = build_hybrid_model(config).eval()
    load_state(model, state, source="transformers")
    tokens = random_tokens(2, 33)
    with torch.no_grad():
        expected = reference(tokens).logits
        torch.testing.assert_close(model(tokens), expected, atol=2e-5, rtol=1e-5)
    assert expected.abs().max() > 0.5


def qkv_rows(attention, groups):
    """Separate projections in the order of linear_qkv: of each group its queries, key, value."""
    q, k, v = (
        getattr(attention, f"{name}_proj").weight.detach().unflatten(0, (groups, -1))
        for name in "qkv"
    )
    return torch.cat([q, k, v], 1).flatten(0, 1)


def dense_state(reference, groups, qk_norm=False):
    """A decoder of attention and MLP, for the pattern "*-*-" or "W-W-"."""
    state = {
        "embedding.word_embeddings.weight": reference.model.embed_tokens.weight,
        "decoder.final_norm.weight": reference.model.norm.weight,
        "output_layer.weight": reference.lm_head.weight,
    }
    for i, layer in enumerate(reference.model.layers):
        attention, mlp = f"decoder.layers.{2 * i}.", f"decoder.layers.{2 * i + 1}."
        state |= {
            f"{attention}input_layernorm.weight": layer.input_layernorm.weight,
            f"{attention}self_attention.linear_qkv.weight": qkv_rows(layer.self_attn, groups),
            f"{attention}self_attention.linear_proj.weight": layer.self_attn.o_proj.weight,
            f"{mlp}pre_mlp_layernorm.weight": layer.post_attention_layernorm.weight,
            f"{mlp}mlp.linear_fc1.weight": torch.cat(
                [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
            ),
            f"{mlp}mlp.linear_fc2.weight": layer.mlp.down_proj.weight,
        }
        if qk_norm:
            for name in "qk":
                weight = getattr(layer.self_attn, f"{name}_norm").weight
                state[f"{attention}self_attention.{name}_layernorm.weight"] = weight
    return state


@pytest.mark.parametrize(
    ("architecture", "pattern", "reference_fields", "fields"),
    [
        ("Llama", "*-*-", {}, {}),
        ("Qwen3", "*-*-", {"head_dim": 16}, {"kv_channels": 16, "qk_layernorm": True}),
        ("Mistral", "W-W-", {"sliding_window": 9}, {"sliding_window": 9}),
    ],
)
def test_dense_decoders(architecture, pattern, reference_fields, fields):
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    reference_config = getattr(transformers, f"{architecture}Config")(**shape, **reference_fields)
    reference = randomize(
        getattr(transformers, f"{architecture}ForCausalLM")._from_config(reference_config)
    )
    config = HybridConfig(
        layer_pattern=pattern,
        hidden_size=HIDDEN,
        ffn_hidden_size=80,
        num_attention_heads=6,
        num_query_groups=2,
        vocab_size=VOCAB,
        rotary_base=5000.0,
        **fields,
    )
    compare(reference, config, dense_state(reference, 2, "qk_layernorm" in fields))


def test_mamba2():
    reference = randomize(
        transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                hidden_size=HIDDEN,
                num_hidden_layers=2,
                vocab_size=VOCAB,
                num_heads=6,
                head_dim=16,
                state_size=12,
                n_groups=1,
                expand=2,
                chunk_size=16,
                use_bias=False,
                tie_word_embeddings=False,
            )
        )
    )
    config = HybridConfig(
        layer_pattern="MM",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        mamba_head_dim=16,
        mamba_state_dim=12,
        mamba_chunk_size=8,
    )
    state = {
        "embedding.word_embeddings.weight": reference.backbone.embeddings.weight,
        "decoder.final_norm.weight": reference.backbone.norm_f.weight,
        "output_layer.weight": reference.lm_head.weight,
    }
    for i, layer in enumerate(reference.backbone.layers):
        state[f"decoder.layers.{i}.norm.weight"] = layer.norm.weight
        for name, parameter in layer.mixer.named_parameters():
            state[f"decoder.layers.{i}.mixer.{name}"] = parameter
    compare(reference, config, state)


def test_gated_delta_net_of_qwen3_next():
    key_heads, value_heads, key_dim, value_dim = 2, 4, 16, 24
    reference = randomize(
        Qwen3NextGatedDeltaNet(
            transformers.Qwen3NextConfig(
                hidden_size=HIDDEN,
                linear_num_key_heads=key_heads,
                linear_num_value_heads=value_heads,
                linear_key_head_dim=key_dim,
                linear_value_head_dim=value_dim,
                linear_conv_kernel_dim=4,
                rms_norm_eps=1e-5,
            ),
            layer_idx=0,
        )
    )
    config = HybridConfig(
        layer_pattern="G",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_chunk_size=8,
    )
    # There, rows go by key head: its query, key, and the values and gates of its value heads.
    values = value_heads // key_heads * value_dim
    q, k, v, z = reference.in_proj_qkvz.weight.unflatten(0, (key_heads, -1)).split(
        [key_dim, key_dim, values, values], 1
    )
    b, a = reference.in_proj_ba.weight.unflatten(0, (key_heads, -1)).chunk(2, 1)
    mixer = build_hybrid_model(config).decoder.layers[0].self_attention
    mixer.load_state_dict(
        {
            "in_proj.weight": torch.cat([part.flatten(0, 1) for part in (q, k, v, z, b, a)]),
            "conv1d.weight": reference.conv1d.weight,
            "A_log": reference.A_log,
            "dt_bias": reference.dt_bias,
            "out_norm.weight": reference.norm.weight,
            "out_proj.weight": reference.out_proj.weight,
        },
        strict=True,
    )
    hidden = torch.randn(2, 33, HIDDEN)
    with torch.no_grad():
        expected = reference(hidden)
        context = UncachedContext(RaggedLayout.uniform(2, 33), hidden.device)
        output, _ = mixer(hidden.flatten(0, 1), context)
    torch.testing.assert_close(output.view_as(expected), expected, atol=5e-6, rtol=1e-5)
    assert expected.abs().max() > 0.1
