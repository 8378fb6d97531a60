"""DeepSeek-V3: multi-head latent attention, and experts after the first few layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.position import yarn_scale

_FURTHER = re.compile(r"(model\.layers\.(\d+)\.)(eh_proj|enorm|hnorm|shared_head)\..*")


class DeepseekV3(Adapter):
    """`DeepseekV3ForCausalLM`, and Kimi K2, which is one under another name."""

    model_types = ("deepseek_v3", "kimi_k2")
    mixer = "+"
    """Symbol of an attention layer."""
    has_partial_rotary = False
    """Whether there is a `partial_rotary_factor`, of layers of other kinds."""
    names = TensorNames(
        {
            "+": ("self_attn", tensors.latent_attention),
            "-": ("mlp", tensors.mlp),
            "E": ("mlp", tensors.moe),
        }
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"q_lora_rank": 1536, **hf}
        fields.only(hf, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc")
        fields.only(hf, moe_layer_freq=1, ep_size=1)
        mixers, mlps = self._mixers(hf), self._mlps(hf)
        found = {
            **fields.model(hf),
            **fields.latent_attention(hf),
            **fields.rotary(hf, partial=self.has_partial_rotary),
            "rotary_interleaved": hf.get("rope_interleave", True),
            "layer_pattern": "".join(mixer + mlp for mixer, mlp in zip(mixers, mlps)),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf),
        }
        _complete_yarn(found.get("rotary_scaling", {}))
        if (scale := _softmax_scale(found)) is not None:
            found["softmax_scale"] = scale
        return {**found, **self._experts(hf, mlps)}

    def _mixers(self, hf: Mapping[str, Any]) -> str:
        """A symbol for each of their layers."""
        return self.mixer * fields.required(hf, "num_hidden_layers")

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        """- or E for each of their layers."""
        return fields.dense_mlps_first(hf, 3)

    def _experts(self, hf: Mapping[str, Any], mlps: str) -> dict[str, Any]:
        """Fields of the experts, if there are any. mlps: - or E for each of their layers."""
        if "E" not in mlps:
            return {}
        return fields.grouped_experts(
            num_experts=hf.get("n_routed_experts", 256),
            topk=hf.get("num_experts_per_tok", 8),
            width=hf.get("moe_intermediate_size", 2048),
            num_shared=fields.num_shared_experts(hf, "n_shared_experts"),
            groups=hf.get("n_group", 8),
            chosen_groups=hf.get("topk_group", 4),
            scaling_factor=hf.get("routed_scaling_factor", 2.5),
        )

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from super().tensors(config)
        theirs = f"{self.names.layers}.{config.num_layers // 2}"
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        around = [f"{theirs}.{name}" for name in names]
        yield from self.names.prediction(config, around, self.names.layers, config.num_layers)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        if names is None:
            return f"{self.mixer}E" if hf.get("num_nextn_predict_layers") == 1 else ""
        number = fields.required(hf, "num_hidden_layers")
        found, further = (f"model.layers.{n}." for n in (number, number + 1))
        if not tensors.has_tensor(names, f"{found}eh_proj.") or tensors.has_tensor(names, further):
            return ""
        has_experts = tensors.has_tensor(names, f"{found}mlp.experts.")
        return self.mixer + ("E" if has_experts else "-")

    def copies(self, config: HybridConfig) -> dict[str, str]:
        if not config.pattern.predictions:
            return {}
        theirs, embedding = f"model.layers.{config.num_layers // 2}", "model.embed_tokens.weight"
        is_tied = config.share_embeddings_and_output_weights
        return {
            f"{theirs}.embed_tokens.weight": embedding,
            f"{theirs}.shared_head.head.weight": embedding if is_tied else "lm_head.weight",
        }

    def ignored_names(self, names: Collection[str], config: HybridConfig) -> set[str]:
        """See `Adapter.ignored_names`: layers after the last one that predict further tokens,
        unless the config has them.

        A layer is one by what only these have, not by its number alone: an ordinary layer that
        config.json does not count is a contradiction, and refused."""
        found = super().ignored_names(names, config)
        if config.pattern.predictions:
            return found
        num_layers = config.num_layers // 2
        further = {
            match[1]
            for name in names
            if (match := _FURTHER.fullmatch(name)) and int(match[2]) >= num_layers
        }
        return found | {name for name in names if name.startswith(tuple(further))}


def _complete_yarn(scaling: dict[str, Any]) -> None:
    """The factor of cos and sin where a file says one of `mscale` and `mscale_all_dim`: the other
    one is 1 or 0 in the published code. transformers passes over one without the other."""
    whole = {"mscale": 1.0, "mscale_all_dim": 0.0}
    given = {name: scaling[name] for name in whole if scaling.get(name) is not None}
    if len(given) == 1 and scaling.get("attention_factor") is None:
        numerator, denominator = (
            yarn_scale(scaling["factor"], m) for m in (whole | given).values()
        )
        scaling["attention_factor"] = numerator / denominator


def _softmax_scale(hybrid: Mapping[str, Any]) -> float | None:
    """The factor of q . k where YaRN has one for all dimensions (arXiv 2309.00071, section 3.4)."""
    scaling = hybrid.get("rotary_scaling", {})
    if not scaling.get("mscale_all_dim"):
        return None
    temperature = yarn_scale(scaling["factor"], scaling["mscale_all_dim"])
    return temperature**2 * (hybrid["qk_head_dim"] + hybrid["qk_pos_emb_head_dim"]) ** -0.5
