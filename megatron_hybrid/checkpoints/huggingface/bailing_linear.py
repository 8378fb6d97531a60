"""Ring linear: lightning attention, sometimes grouped-query attention, and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields
from megatron_hybrid.checkpoints.huggingface.bailing_hybrid import BailingHybrid
from megatron_hybrid.checkpoints.huggingface.base import TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same
from megatron_hybrid.checkpoints.huggingface.lightning import lightning, lightning_fields
from megatron_hybrid.checkpoints.huggingface.phi3 import joined_qkv
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _attention(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield from joined_qkv(config, ours, f"{theirs}.query_key_value", f"{theirs}.dense")
    for own, name in {"q": "query", "k": "key"}.items():
        yield same(f"{ours}.{own}_layernorm.weight", f"{theirs}.{name}_layernorm.weight")


class BailingLinear(BailingHybrid):
    """`BailingMoeLinearV2ForCausalLM`. Its MTP head is not read."""

    model_types = ("bailing_moe_linear",)
    names = TensorNames(
        {
            **BailingHybrid.names.parts,
            "A": ("attention", lightning),
            "*": ("attention", _attention),
        },
        embedding=BailingHybrid.names.embedding,
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, norm_topk_prob=True, score_function="sigmoid", norm_head=False)
        fields.only(hf, rope_traditional=False, moe_router_enable_expert_bias=True)
        hf = self._as_deepseek(hf)
        mixers, mlps = self._mixers(hf), self._mlps(hf)
        return {
            **fields.transformer(hf, mixers, mlps, base=600_000.0, partial=True),
            **self._experts(hf, mlps),
            "qk_layernorm": True,
            **lightning_fields(hf, mixers),
        }

    def _symbols(self, hf: Mapping[str, Any]) -> dict[str, str]:
        return {"linear_attention": "A", "full_attention": "*"}
