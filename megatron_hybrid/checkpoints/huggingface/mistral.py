"""Mistral, Ministral 3 and Mixtral: attention, within a window or not, and an MLP or experts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames


def _mixers(hf: Mapping[str, Any]) -> str:
    if hf.get("layer_types"):  # transformers reads such a Mistral as a Ministral
        return fields.windows(hf, "full_attention", 1)
    return fields.windows_everywhere(hf)


class Mistral(Adapter):
    model_types = ("mistral",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"num_key_value_heads": 8, "sliding_window": 4096, **hf}
        return fields.transformer(hf, _mixers(hf))


_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What Ministral 3 has where its config.json leaves it out."""


class Ministral3(Adapter):
    """`Ministral3ForCausalLM`: queries grow with the logarithm of their position."""

    model_types = ("ministral3",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, **hf}
        rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or _MINISTRAL_ROPE)
        scale = rope.pop("llama_4_scaling_beta", None)
        found = fields.transformer({**hf, "rope_scaling": rope}, _mixers(hf))
        if scale is not None:
            found |= {
                "attention_temperature_scale": scale,
                "attention_temperature_floor": fields.required(
                    rope, "original_max_position_embeddings"
                ),
                "attention_temperature_offset": 0,
            }
        return found


class Mixtral(Adapter):
    model_types = ("mixtral",)
    moe = partial(tensors.moe, projections=("w1", "w3", "w2"))
    names = TensorNames({**tensors.TRANSFORMER, "E": ("block_sparse_moe", moe)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **hf}
        fields.only(hf, router_jitter_noise=0.0)
        mlps = "E" * fields.required(hf, "num_hidden_layers")
        return {
            **fields.transformer(hf, _mixers(hf), mlps, base=1000000.0),
            **fields.experts(hf, 8, 2),
        }
