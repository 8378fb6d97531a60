"""LFM2 with experts: its first layers as in LFM2, the MLPs of the others mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.fields import check_sigmoid_topk, only, required
from megatron_hybrid.checkpoints.huggingface.lfm2 import Lfm2, decoder_fields, mixer_symbols

_ROUTER_EPSILON = 1e-6


class Lfm2Moe(Lfm2):
    """`Lfm2MoeForCausalLM`."""

    model_types = ("lfm2_moe",)
    ignored = (r"model\.pos_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        only(hf, norm_topk_prob=True)
        mixers, dense = mixer_symbols(hf), hf.get("num_dense_layers", 2)
        pattern = "".join(f"{mixer}{'-' if i < dense else 'E'}" for i, mixer in enumerate(mixers))
        fields = {
            **decoder_fields(hf),
            "layer_pattern": pattern,
            "ffn_hidden_size": required(hf, "intermediate_size"),
        }
        if "E" in pattern:
            topk = hf.get("num_experts_per_tok", 4)
            check_sigmoid_topk(topk)
            fields |= {
                "num_moe_experts": required(hf, "num_experts"),
                "moe_ffn_hidden_size": required(hf, "moe_intermediate_size"),
                "moe_router_topk": topk,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": hf.get("use_expert_bias", True),
                "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
                "moe_router_topk_epsilon": _ROUTER_EPSILON,
            }
        return fields


ADAPTER = Lfm2Moe()
