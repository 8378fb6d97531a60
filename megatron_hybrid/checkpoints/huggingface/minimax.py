"""MiniMax-Text-01 and M1: lightning attention, sometimes full attention, and experts; M2: full
attention, and experts chosen by sigmoid scores and a bias that only selects."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import ungrouped
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_KINDS = ("linear_attention", "full_attention")
_FACTORS = {
    "A": ("linear_attn", "layernorm_linear_attention"),
    "*": ("full_attn", "layernorm_full_attention"),
    "E": ("mlp", "layernorm_mlp"),
}
"""Symbol -> what transformers, and what the published code call the factors of its residual sum."""


def _lightning(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map lightning attention, whose queries, keys and values lie head by head."""
    dim, heads = config.linear_key_head_dim, config.linear_num_key_heads
    layout = ungrouped([[dim], [dim] * 3], heads)
    projections = (f"{theirs}.output_gate.weight", f"{theirs}.qkv_proj.weight")
    yield TensorMap((f"{ours}.in_proj.weight",), projections, layout)
    yield from tensors.weights(ours, theirs, {"norm": "norm", "out_proj": "out_proj"})


_moe = partial(tensors.moe, expert_bias="e_score_correction_bias", projections=("w1", "w3", "w2"))
_NAMES = TensorNames(
    {
        "A": ("self_attn", _lightning),
        "*": ("self_attn", tensors.attention),
        "E": ("block_sparse_moe", _moe),
    }
)


class MiniMax(Adapter):
    """`MiniMaxForCausalLM`, and under its names of before `MiniMaxM1ForCausalLM`."""

    model_types = ("minimax", "minimax_m1", "minimax_text_01")
    names = _NAMES
    ignored = (r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",)  # follow from the config

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, sliding_window=None, router_jitter_noise=0.0, shared_intermediate_size=0)
        fields.only(hf, postnorm=True, hidden_act=("silu", "swish"))
        hf = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **hf}
        number, heads = fields.required(hf, "num_hidden_layers"), fields.attention(hf)
        rotary_dim = hf.get("rotary_dim", heads["kv_channels"])
        is_partial = hf["model_type"] != "minimax"
        if is_partial:
            hf = {"partial_rotary_factor": rotary_dim / heads["kv_channels"], **hf}
        else:
            fields.only({"rotary_dim": rotary_dim}, rotary_dim=heads["kv_channels"])
        kinds = [_KINDS[kind] for kind in hf.get("attn_type_list") or ()]
        types = hf.get("layer_types") or kinds or [_KINDS[1 - i % 2] for i in range(number)]
        mixers = fields.symbols_of(types, dict(zip(_KINDS, "A*")), number)
        overrides: dict[str, Any] = {}
        for symbol, (name, published) in _FACTORS.items():
            alpha, beta = (
                float(hf.get(f"{name}_{which}_factor", hf.get(f"{published}_{which}", 1)))
                for which in ("alpha", "beta")
            )
            if symbol in (*mixers, "E"):
                overrides[symbol] = {"stream_multiplier": alpha, "residual_multiplier": beta}
        for i, symbol in enumerate(mixers):
            if symbol == "A":
                factor = 1 - i / (number - 1 + 1e-5) + 1e-5
                overrides[str(2 * i + 1)] = {"lightning_decay_factor": factor}
        return {
            **fields.transformer(hf, mixers, "E" * number, base=1000000.0, partial=is_partial),
            "layer_overrides": overrides,
            "norm_placement": "stream",
            **fields.linear_heads(heads["num_attention_heads"], heads["kv_channels"]),
            "linear_norm_epsilon": 1e-6,  # in the code of these models, not in their config
            **fields.experts(hf, 8, 2),
        }


class MiniMaxM2(Adapter):
    model_types = ("minimax_m2",)
    names = _NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, scoring_func="sigmoid", use_routing_bias=True, router_jitter_noise=0.0)
        fields.only(hf, use_qk_norm=True, qk_norm_type="per_layer", sliding_window=None)
        fields.only(hf, layernorm_full_attention_beta=1, layernorm_mlp_beta=1)
        fields.only(hf, shared_intermediate_size=0)
        for kind in hf.get("attn_type_list") or ():
            fields.only({"attn_type_list": kind}, attn_type_list=1)  # 0 is linear attention
        hf = {"head_dim": 128, "num_key_value_heads": 8, **hf}
        if (rotary_dim := hf.get("rotary_dim")) is not None:
            width = fields.attention(hf)["kv_channels"]
            hf = {"partial_rotary_factor": rotary_dim / width, **hf}
        experts = fields.experts(hf, 256, 8)
        fields.check_sigmoid_topk(experts["moe_router_topk"])
        mlps = "E" * fields.required(hf, "num_hidden_layers")
        return {
            **fields.transformer(hf, mlps=mlps, base=5000000.0, partial=True),
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
            **experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`: of what packages of quantization write, some has the names of
        transformers' modules, for the block, for the projections, or for both."""
        for block, projections in product((".block_sparse_moe.", ".mlp."), (_PROJECTIONS, {})):
            theirs = tuple(
                ".".join(projections.get(part, part) for part in name.split("."))
                for name in (
                    each.replace(".block_sparse_moe.", block) for each in tensor_map.theirs
                )
            )
            if theirs != tensor_map.theirs:
                yield TensorMap(tensor_map.ours, theirs, tensor_map.layout)


_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
