"""Tiny random models of architectures without an adapter, with weights mapped by hand.

Those with an adapter: tests/functional/huggingface.
"""

import pytest
import torch
import transformers
from small_models import random_tokens
from state_dicts import load_state

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model

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
    load_state(model, state)
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
