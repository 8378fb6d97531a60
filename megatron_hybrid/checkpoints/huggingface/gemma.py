"""Gemma 2, 3, 3n and 4 (text): sandwich norms, windows between full attention.

Gemma 4 has other heads in full attention, keys and values that several layers share, and per-layer
embeddings. Gemma 3n has the last two of these, several residual streams and sparse activations.
RecurrentGemma has Griffin's recurrent blocks, and sliding windows between them.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined, reshaped, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SHARED_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "vocab_size": 256000,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
}
"""What config.json files leave out, as transformers fills it in."""
_DEFAULTS_4 = {
    **_SHARED_DEFAULTS,
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "global_head_dim": 512,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
_DEFAULTS_3N = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "sliding_window_pattern": 5,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
}


def _experts_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map an MLP and experts, each with norms of its own, and a router."""
    for own, name in (
        ("pre_dense_layernorm.weight", "pre_feedforward_layernorm.weight"),
        ("post_dense_layernorm.weight", "post_feedforward_layernorm_1.weight"),
        ("pre_experts_layernorm.weight", "pre_feedforward_layernorm_2.weight"),
        ("post_experts_layernorm.weight", "post_feedforward_layernorm_2.weight"),
        ("router.weight", "router.proj.weight"),
        ("router_scale", "router.scale"),
        ("expert_scale", "router.per_expert_scale"),
        ("experts.linear_fc1.weight", "experts.gate_up_proj"),
        ("experts.linear_fc2.weight", "experts.down_proj"),
    ):
        yield same(f"{ours}.{own}", f"{theirs}.{name}")
    yield from tensors.mlp(config, f"{ours}.dense", f"{theirs}.mlp")


_PARTS = {
    **tensors.TRANSFORMER,
    "B": ("", _experts_tensors),
    "P": ("", tensors.modules(gate="per_layer_input_gate", projection="per_layer_projection")),
}
_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


class Gemma3(Adapter):
    """`Gemma3ForCausalLM`, the language model of `Gemma3ForConditionalGeneration`, and
    `Gemma2ForCausalLM`."""

    model_types = ("gemma3_text", "gemma2")
    composite_types = ("gemma3",)
    names = TensorNames(_PARTS, _NORMS, _POST_NORMS)
    composite_tied = True
    ignored = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {**_SHARED_DEFAULTS, **_DEFAULTS[hf["model_type"]], **hf}
        fields.only(hf, attention_bias=False, use_bidirectional_attention=(False, None))
        is_gemma3 = hf["model_type"] == "gemma3_text"
        if is_gemma3:
            fields.only(hf, attn_logit_softcapping=None)  # transformers' Gemma 3 does not apply it
        pattern = fields.windows(hf, "sliding_attention", hf["sliding_window_pattern"])
        rotary = fields.rotary_by_symbol(hf, pattern, _BASES) if is_gemma3 else {}
        return {
            **_transformer({**hf, **fields.WITHOUT_ROPE} if is_gemma3 else hf, pattern),
            "layer_overrides": rotary,
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": is_gemma3,
            "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
            "attention_logit_softcap": hf["attn_logit_softcapping"],
            "final_logit_softcap": hf["final_logit_softcapping"],
        }


def _transformer(hf: Mapping[str, Any], mixers: str) -> dict[str, Any]:
    """Read `fields.transformer`, with what all of them have. hf: complete."""
    return {
        **fields.transformer({**hf, "hidden_act": hf["hidden_activation"]}, mixers),
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
        "round_embedding_multiplier": True,
        "norm_placement": "sandwich",
    }


_BASES = {
    "full_attention": ("rope_theta", 1000000.0),
    "sliding_attention": ("rope_local_base_freq", 10000.0),
}
"""Layer type -> key of its base of RoPE, and the value where there is none; Gemma 2 has one."""


class Gemma4(Adapter):
    """`Gemma4ForCausalLM`, and the language model of `Gemma4ForConditionalGeneration`."""

    model_types = ("gemma4_text",)
    composite_types = ("gemma4",)
    composite_tied = True
    ignored = (r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",)
    rope_parameters: ClassVar = _ROPE

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {**_DEFAULTS_4, **hf}
        # "vision" is causal among text tokens.
        fields.only(hf, attention_bias=False, use_bidirectional_attention=(None, "vision"))
        if hf["hidden_size_per_layer_input"]:
            fields.only(hf, vocab_size_per_layer_input=hf["vocab_size"])
        kinds = self.layer_types(hf)
        hf["rope_parameters"] = hf.get("rope_parameters") or self.rope_parameters
        symbols = fields.symbols_of(kinds, fields.WINDOW_SYMBOLS, hf["num_hidden_layers"])
        overrides = fields.rotary_by_symbol(hf, symbols, _BASES)
        if hf.get("attention_k_eq_v"):
            overrides["*"]["keys_as_values"] = True
        experts: dict[str, Any] = {}
        if hf.get("enable_moe_block"):
            topk = {"num_experts_per_tok": fields.required(hf, "top_k_experts")}
            experts = fields.experts(hf | topk, None, 0, "moe_intermediate_size")
            overrides["B"] = {"norm_placement": "post"}  # it has norms of its own before
        layer = _layer(hf)
        if layer.endswith("P"):
            overrides["P"] = {"norm_placement": "post"}
        overrides.setdefault(layer[-1], {})["layer_scalar"] = True
        for number, found in _single_layers(hf, kinds, len(layer)):
            if found:
                overrides[str(number)] = found
        return {
            **_transformer({**hf, **fields.WITHOUT_ROPE}, symbols),
            "layer_pattern": "".join(symbol + layer for symbol in symbols),
            "layer_overrides": overrides,
            "per_layer_input_size": hf["hidden_size_per_layer_input"] or None,
            "qk_layernorm": True,
            "value_l2_norm": True,
            "softmax_scale": 1.0,
            "final_logit_softcap": hf.get("final_logit_softcapping"),
            **experts,
        }

    def layer_types(self, hf: Mapping[str, Any]) -> list[str]:
        """Return the types; transformers makes the last one full attention, whatever is given."""
        kinds = fields.layer_types(hf, "sliding_attention", hf["sliding_window_pattern"])
        return [*kinds[:-1], "full_attention"]

    def ignored_names(self, names: Collection[str], config: HybridConfig) -> set[str]:
        """See `Adapter.ignored_names`: released folders have keys and values that nobody reads, in
        layers that read those of others."""
        step = 2 if config.per_layer_input_size is None else 3
        layers = [config.for_layer(number) for number in range(1, config.num_layers, step)]
        shared = [i for i, layer in enumerate(layers) if layer.kv_source_layer is not None]
        unused = tuple(f"model.layers.{i}.self_attn.{part}_" for i in shared for part in "kv")
        found = super().ignored_names(names, config)
        return found | {name for name in names if name.startswith(unused)}

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        step = 2
        if config.per_layer_input_size is not None:
            step = 3
            for ours, theirs in (
                ("weight", "embed_tokens_per_layer"),
                ("projection.weight", "per_layer_model_projection"),
                ("norm.weight", "per_layer_projection_norm"),
            ):
                yield same(f"per_layer_embedding.{ours}", f"model.{theirs}.weight")
        norms, post_norms = (*_NORMS, "")[:step], (*_POST_NORMS, "post_per_layer_input_norm")[:step]
        yield from TensorNames(_PARTS, norms, post_norms).tensors(config)
        for i in range(config.num_layers // step):
            last = step * (i + 1) - 1
            if config.for_layer(last + 1).layer_scalar:
                yield same(f"decoder.layers.{last}.layer_scalar", f"model.layers.{i}.layer_scalar")


class Gemma3n(Gemma4):
    """`Gemma3nForCausalLM`, and the language model of `Gemma3nForConditionalGeneration`."""

    model_types = ("gemma3n_text",)
    composite_types = ("gemma3n",)
    rope_parameters: ClassVar = None

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # altup_coef_clip bounds weights in training, at a hundred times what they are.
        fields.only(hf, altup_active_idx=0, altup_correct_scale=True, per_layer_config=(None, {}))
        hf = {**_DEFAULTS_4, **_DEFAULTS_3N, **hf, "per_layer_config": {}}
        layers = hf["num_hidden_layers"]
        sparse = [0.95 if i < 10 < layers else 0.0 for i in range(layers)]
        shares = fields.of_each_layer(hf, "activation_sparsity_pattern", sparse)
        widths = fields.of_each_layer(hf, "intermediate_size")
        whole = {"intermediate_size": widths[0], "vocab_size_per_layer_input": hf["vocab_size"]}
        found = super().config({**hf, **whole})
        overrides, half = found["layer_overrides"], 0.5**0.5
        overrides["P"] = {"norm_placement": "post", "stream_multiplier": 0.0}
        for symbol in overrides.keys() & {*"*W"}:
            overrides[symbol]["residual_rank"] = hf["laurel_rank"]
            overrides[symbol] |= {"stream_multiplier": half, "residual_multiplier": half}
        for i, (width, share) in enumerate(zip(widths, shares)):
            if (width, share) != (widths[0], 0.0):
                overrides[str(3 * i + 2)] = {"ffn_hidden_size": width, "activation_sparsity": share}
        found["num_residual_streams"] = hf["altup_num_inputs"]
        found["per_layer_vocab_size"] = hf["vocab_size_per_layer_input"]
        return found

    def layer_types(self, hf: Mapping[str, Any]) -> list[str]:
        return fields.layer_types(hf, "sliding_attention", hf["sliding_window_pattern"])

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from super().tensors(config)
        for i in range(config.num_residual_streams - 1):
            for name in ("projections", "unembed_projections"):
                yield same(f"decoder.streams.{name}.{i}.weight", f"model.altup_{name}.{i}.weight")
        for i in range(config.num_layers // 3):
            for name in _LAUREL:
                theirs = f"model.layers.{i}.laurel.{name}.weight"
                yield same(f"decoder.layers.{3 * i}.laurel.{name}.weight", theirs)
            for name in _ALTUP:
                yield same(f"decoder.streams.updates.{i}.{name}", f"model.layers.{i}.altup.{name}")


_LAUREL = ("linear_left", "linear_right", "post_laurel_norm")
_ALTUP = (
    *("router_norm.weight", "modality_router.weight", "prediction_coefs.weight"),
    *("correction_coefs.weight", "correct_output_scale"),
)


def _layer(hf: Mapping[str, Any]) -> str:
    """Return our layers after the attention of one of theirs."""
    mlp = "B" if hf.get("enable_moe_block") else "-"
    return mlp + ("P" if hf["hidden_size_per_layer_input"] else "")


def _single_layers(
    hf: Mapping[str, Any], kinds: list[str], following: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields of the layers of ours that are unlike others of their symbol.

    Args:
        kinds: layer types.
        following: how many layers of ours follow the attention of each of theirs.
    """
    given = hf.get("per_layer_config")
    if given is not None:  # transformers pads the numbers: "05"
        given = {int(layer): values for layer, values in given.items()}
        if unknown := sorted(given.keys() - range(len(kinds))):
            raise ValueError(f"config.json has per_layer_config for the layer {unknown[0]}")
    heads = {"head_dim": hf["global_head_dim"]}
    if hf.get("attention_k_eq_v") and hf.get("num_global_key_value_heads"):
        heads["num_key_value_heads"] = hf["num_global_key_value_heads"]
    names = {"head_dim": "kv_channels", "num_key_value_heads": "num_query_groups"}
    unshared = len(kinds) - hf["num_kv_shared_layers"]
    for i, kind in enumerate(kinds):
        number = 1 + i * (1 + following)
        own = heads if kind == "full_attention" else {}
        if given is not None:
            own = given.get(i, {})
        if unknown := sorted(set(own) - names.keys()):
            raise ValueError(f"config.json has per_layer_config with {unknown[0]!r} for layer {i}")
        found = {names[name]: value for name, value in own.items()}
        if i >= unshared:
            if kind not in kinds[:unshared]:
                raise ValueError(
                    f"config.json has num_kv_shared_layers={hf['num_kv_shared_layers']}, but layer "
                    f"{i} ({kind}) finds none of its type before them whose keys it could share"
                )
            source = max(j for j in range(unshared) if kinds[j] == kind)
            found["kv_source_layer"] = 1 + source * (1 + following)
            if hf.get("use_double_wide_mlp"):
                yield number + 1, {"ffn_hidden_size": 2 * hf["intermediate_size"]}
        yield number, found


_RECURRENT_SYMBOLS = {"recurrent": "U", "attention": "W"}


def _recurrent_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    width, blocks = config.lru_width, config.lru_num_blocks
    block = width // blocks
    for kind in ("weight", "bias"):
        yield TensorMap(
            (f"{ours}.in_proj.{kind}",),
            (f"{theirs}.linear_y.{kind}", f"{theirs}.linear_x.{kind}"),
            joined((width, width)),
        )
        yield same(f"{ours}.conv1d.{kind}", f"{theirs}.conv_1d.{kind}")
        yield same(f"{ours}.out_proj.{kind}", f"{theirs}.linear_out.{kind}")
        shapes = ((width, block), (blocks, block, block))
        shapes = shapes if kind == "weight" else ((width,), (blocks, block))
        for gate in ("input_gate", "recurrent_gate"):
            name = f"{gate}_{kind}"
            yield same(f"{ours}.{name}", f"{theirs}.rg_lru.{name}", reshaped(*shapes))
    yield same(f"{ours}.recurrent_param", f"{theirs}.rg_lru.recurrent_param")


class RecurrentGemma(Adapter):
    model_types = ("recurrent_gemma",)
    names = TensorNames(
        {
            "U": ("temporal_block", _recurrent_tensors),
            "W": ("temporal_block", tensors.attention),
            "-": ("mlp_block", tensors.mlp),
        },
        norms=("temporal_pre_norm", "channel_pre_norm"),
        final_norm="model.final_norm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"tie_word_embeddings": True, "partial_rotary_factor": 0.5, **hf}
        hf["sliding_window"] = hf.get("attention_window_size", 2048)
        layers = fields.required(hf, "num_hidden_layers")
        blocks = hf.get("block_types") or ("recurrent", "recurrent", "attention")
        mixers = fields.symbols_of([*blocks] * layers, _RECURRENT_SYMBOLS, layers * len(blocks))[
            :layers
        ]
        width = fields.required(hf, "hidden_size")
        heads = fields.required(hf, "num_attention_heads")
        fields.only(hf, head_dim=(width // heads, None))
        attention = {"add_qkv_bias": hf.get("attention_bias", False), "attention_output_bias": True}
        overrides = {"-": {"add_bias_linear": True}}
        return {
            **fields.transformer(hf, mixers, partial=True),
            "layer_overrides": overrides | ({"W": attention} if "W" in mixers else {}),
            "lru_width": hf.get("lru_width") or width,
            "lru_num_blocks": heads,
            "lru_conv_kernel": hf.get("conv1d_width", 4),
            "ffn_hidden_size": fields.required(hf, "intermediate_size") // 2,
            "activation_func": fields.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
            "layernorm_zero_centered_gamma": True,
            # In bfloat16 in models of any dtype.
            "embedding_multiplier": torch.tensor(width**0.5).bfloat16().item(),
            "final_logit_softcap": hf.get("logits_soft_cap", 30.0),
        }
