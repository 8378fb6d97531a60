"""DeepSeek-V3: multi-head latent attention, and experts after the first few layers. Kimi Linear:
also Kimi Delta Attention, and no RoPE."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import reshaped
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
    reads_predictions = True
    """Whether an MTP head is read."""
    names = TensorNames({**tensors.TRANSFORMER, "+": ("self_attn", tensors.latent_attention)})

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
            "layer_pattern": "".join(map("".join, zip(mixers, mlps))),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf),
        }
        _complete_yarn(found.get("rotary_scaling", {}))
        if (scale := _softmax_scale(found)) is not None:
            found["softmax_scale"] = scale
        return {**found, **self._experts(hf, mlps)}

    def _mixers(self, hf: Mapping[str, Any]) -> str:
        """Return a symbol for each of their layers."""
        return self.mixer * fields.required(hf, "num_hidden_layers")

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        """Choose - or E for each of their layers."""
        return fields.dense_mlps_first(hf, 3)

    def _experts(self, hf: Mapping[str, Any], mlps: str) -> dict[str, Any]:
        """Read the experts, if there are any. mlps: - or E for each of their layers."""
        if "E" not in mlps:
            return {}
        sizes = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
        groups = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
        return fields.grouped_experts(hf, n_shared_experts=1, **sizes, **groups)

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from super().tensors(config)
        theirs = f"{self.names.layers}.{config.num_layers // 2}"
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        around = [f"{theirs}.{name}" for name in names]
        yield from self.names.prediction(config, around, self.names.layers, config.num_layers)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        if not self.reads_predictions:
            return ""
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


MIXERS = {"linear_attention": "K", "full_attention": "+"}


def delta_attention_tensors(
    config: HybridConfig, ours: str, theirs: str, output: str = "o_proj"
) -> Iterator[TensorMap]:
    """Map Kimi Delta Attention (arguments: see `tensors.attention`)."""
    heads, low_rank = config.linear_num_key_heads, config.kda_low_rank_gates
    sizes = (heads * config.linear_key_head_dim,) * 3
    shape = (1, 1, heads, 1) if low_rank else (heads,)
    form = dict(output=output, decays=reshaped((heads,), shape))
    yield from tensors.delta_rule(config, ours, theirs, "qkvb", (*sizes, heads), sizes, **form)
    gates = [f"{name}_proj" for name in (("f_a", "f_b", "g_a", "g_b") if low_rank else "fg")]
    yield from tensors.weights(ours, theirs, dict(zip(gates, gates)))


class KimiLinear(DeepseekV3):
    model_types = ("kimi_linear",)
    reads_predictions = False
    names = TensorNames(
        {
            "K": ("self_attn", delta_attention_tensors),
            "+": ("self_attn", tensors.latent_attention),
            "-": ("mlp", tensors.mlp),
            "E": ("block_sparse_moe", partial(tensors.moe, projections=("w1", "w3", "w2"))),
        }
    )
    module_names = (
        (r"self_attn\.(f_[ab]_proj)", r"self_attn.forget_gate.\1"),
        (r"\.block_sparse_moe\b", ".mlp"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, hidden_act="silu", tie_word_embeddings=False, mla_use_nope=True)
        fields.only(hf, moe_renormalize=True, moe_router_activation_func="sigmoid")
        fields.only(hf, num_nextn_predict_layers=(0, None))
        # Of later models with this model_type.
        fields.only(hf, mla_use_output_gate=(False, None), routed_expert_hidden_size=None)
        fields.only(hf, attn_res_block_size=None)
        linear = hf.get("linear_attn_config") or {}
        head_dim = linear.get("head_dim", hf.get("linear_head_dim", 128))
        heads = linear.get("num_heads", hf.get("linear_num_heads", 32))
        kernel = hf.get("linear_conv_kernel_dim", 4)
        left_out = {"rms_norm_eps": 1e-5, "q_lora_rank": None, "moe_intermediate_size": 1024}
        left_out |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}
        hf = {**fields.renamed({**left_out, **hf}, fields.AS_DEEPSEEK), **fields.WITHOUT_ROPE}
        return {
            **super().config(hf),
            "position_embedding_type": "none",
            "rotary_interleaved": False,
            **fields.linear_heads(heads, head_dim),
            "linear_conv_kernel_dim": linear.get("short_conv_kernel_size", kernel),
        }

    def _mixers(self, hf: Mapping[str, Any]) -> str:
        return fields.symbols_of(_kimi_types(hf), MIXERS, hf["num_hidden_layers"])

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        return fields.dense_mlps_first(hf, 1)

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`: transformers writes the names of experts for dense MLPs too."""
        others = tuple(name.replace(".mlp.", ".block_sparse_moe.") for name in tensor_map.theirs)
        if others != tensor_map.theirs:
            yield replace(tensor_map, theirs=others)


def _kimi_types(hf: Mapping[str, Any]) -> list[str | None]:
    """Return "linear_attention" or "full_attention" for each layer, None where it has no entry."""
    numbers, types = range(1, fields.required(hf, "num_hidden_layers") + 1), hf.get("layer_types")
    linear = hf.get("linear_attn_config") or {}
    if types is None and {"full_attn_layers", "kda_layers"} <= linear.keys():
        kinds = {number: "full_attention" for number in linear["full_attn_layers"]}
        kinds |= {number: "linear_attention" for number in linear["kda_layers"]}
        types = [kinds.get(number) for number in numbers]
    elif types is None:
        types = ["linear_attention" if i == 1 or i % 4 != 1 else "full_attention" for i in numbers]
    return types


def _complete_yarn(scaling: dict[str, Any]) -> None:
    """Set the factor of cos and sin where a file says one of `mscale` and `mscale_all_dim`: the
    other one is 1 or 0 in the published code. transformers passes over one without the other."""
    whole = {"mscale": 1.0, "mscale_all_dim": 0.0}
    given = {name: scaling[name] for name in whole if scaling.get(name) is not None}
    if len(given) == 1 and scaling.get("attention_factor") is None:
        numerator, denominator = (
            yarn_scale(scaling["factor"], m) for m in (whole | given).values()
        )
        scaling["attention_factor"] = numerator / denominator


def _softmax_scale(hybrid: Mapping[str, Any]) -> float | None:
    """Return the factor of q . k of a YaRN with one for all dimensions (arXiv 2309.00071, 3.4)."""
    scaling = hybrid.get("rotary_scaling", {})
    if not scaling.get("mscale_all_dim"):
        return None
    temperature = yarn_scale(scaling["factor"], scaling["mscale_all_dim"])
    return temperature**2 * (hybrid["qk_head_dim"] + hybrid["qk_pos_emb_head_dim"]) ** -0.5
