"""Nemotron-H: Mamba-2, attention, MLP and mixture-of-experts layers in any order."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_Blocks = list[dict[str, Any]]


class NemotronH(Adapter):
    model_types = ("nemotron_h",)
    names = TensorNames(
        {
            "M": ("mixer", tensors.mamba2),
            "*": ("mixer", tensors.attention),
            "-": ("mixer", tensors.mlp),
            "E": ("mixer", partial(tensors.moe, projections=("up_proj", "down_proj"))),
        },
        norms=("norm",),
        layers="backbone.layers",
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
    )
    module_names = ((r"^backbone\.", "model."),)
    prediction_names = (r"mtp\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, mamba_hidden_act=("silu", "swish"), attention_bias=False)
        fields.only(hf, mamba_proj_bias=False, sliding_window=None, tie_word_embeddings=False)
        head_dim = hf.get("attention_head_dim", 128)  # what the first releases call it
        sizes = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8}
        sizes |= {"mamba_d_state": 128, "mamba_chunk_size": 128, "head_dim": head_dim}
        keys = {"mamba_dt_limit": "time_step_limit", **fields.OF_MAMBA}
        hf = fields.renamed({"layer_norm_epsilon": 1e-5, **sizes, **hf}, keys)
        hf["mamba_d_ssm"] = hf["mamba_n_heads"] * hf["mamba_d_head"]
        if (pattern := hf.get("hybrid_override_pattern")) is None:
            types = fields.required(hf, "layers_block_type")  # num_hidden_layers may be stale
            pattern = fields.symbols_of(types, fields.MAMBA2_SYMBOLS, len(types))
        found = {
            **fields.model(hf, "layer_norm_epsilon"),
            **fields.attention({"num_key_value_heads": 8, **hf}),
            "position_embedding_type": "none",
            "layer_pattern": pattern,
            **fields.mamba2(hf, hf["layer_norm_epsilon"]),  # transformers clamps by time_step_min
            "ffn_hidden_size": hf.get("intermediate_size", 21504),
            "gated_linear_unit": False,
            "activation_func": fields.activation(hf, "mlp_hidden_act", "relu2"),
        }
        if "-" in pattern:
            found["layer_overrides"] = {"-": {"add_bias_linear": hf.get("mlp_bias", False)}}
        if "E" in pattern:
            found |= _moe_fields(hf)
        return found

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from super().tensors(config)
        for symbols in config.pattern.predictions:
            around = [f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")]
            around.append(f"mtp.layers.{len(symbols) - 1}.final_layernorm")
            yield from self.names.prediction(config, around)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        pattern = hf.get("mtp_hybrid_override_pattern")
        if pattern is None:
            types = hf.get("mtp_layers_block_type") or ["full_attention", "moe"]
            pattern = fields.symbols_of(types, fields.MAMBA2_SYMBOLS, len(types))
        if names is None:
            return pattern if hf.get("num_nextn_predict_layers") == 1 else ""
        is_here = tensors.has_tensor(names, "mtp.layers.0.eh_proj.")
        is_sole = not tensors.has_tensor(names, f"mtp.layers.{len(pattern)}.")
        return pattern if is_here and is_sole else ""


class NemotronHPuzzle(NemotronH):
    """`NemotronHPuzzleForCausalLM`, whose layers each have sizes of their own."""

    model_types = ("nemotron_h_puzzle",)
    names = replace(
        NemotronH.names,
        layers="model.layers",
        embedding="model.embeddings.weight",
        final_norm="model.norm_f.weight",
    )
    module_names = ()

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        blocks = _blocks(hf, "block_configs")
        heads = _blocks({"mtp_block_configs": [], **hf}, "mtp_block_configs")
        # A head's layers have no number in the pattern, so the model's own sizes are theirs.
        firsts = {block["block_type"]: block for block in reversed([*heads, *blocks])}
        found = self._sized(hf, blocks, firsts)
        overrides = {}
        for number, block in enumerate(blocks, start=1):
            own = self._sized(hf, blocks, firsts | {block["block_type"]: block})
            if own != found:
                overrides[str(number)] = {n: own[n] for n in own if own[n] != found[n]}
        return {**found, "layer_overrides": found.get("layer_overrides", {}) | overrides}

    def _sized(
        self, hf: Mapping[str, Any], blocks: _Blocks, sizes: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Read the fields where all layers of a type have the sizes of one."""
        values = {key: value for block in sizes.values() for key, value in block.items()}
        return super().config({**hf, **values, "hybrid_override_pattern": _symbols(blocks)})

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        if hf.get("mtp_block_configs"):
            pattern = _symbols(_blocks(hf, "mtp_block_configs"))
            hf = {**hf, "mtp_hybrid_override_pattern": pattern}
        return super().prediction_layers(hf, names)


_BLOCK_KEYS = {
    "attention": ("sliding_window",),
    "mamba": ("ssm_state_size",),
    "mlp": ("intermediate_size",),
    "moe": (
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
        *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "n_group", "topk_group"),
        "norm_topk_prob",
    ),
}
"""What a layer of each type may have of its own."""


def _blocks(hf: Mapping[str, Any], key: str) -> _Blocks:
    """Return the layers of a list, without what is null: there the model's value goes."""
    blocks = []
    for i, block in enumerate(fields.required(hf, key)):
        given = dict(block) if isinstance(block, Mapping) else {}
        given = {name: value for name, value in given.items() if value is not None}
        known = _BLOCK_KEYS.get(str(given.get("block_type")))
        if known is None or given.keys() - {"block_type", *known}:
            kinds = "; ".join(
                f"{kind!r} with {', '.join(_BLOCK_KEYS[kind])}" for kind in _BLOCK_KEYS
            )
            raise ValueError(
                f"config.json has {key}[{i}]={block!r}; supported are objects of a block_type and "
                f"sizes: {kinds}"
            )
        blocks.append(given)
    return blocks


def _symbols(blocks: _Blocks) -> str:
    types = [block["block_type"] for block in blocks]
    return fields.symbols_of(types, fields.MAMBA2_SYMBOLS, len(types))


def _moe_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    fields.only(hf, mlp_bias=False, norm_topk_prob=True)
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
    shared = hf.get("moe_shared_expert_intermediate_size", 7688)
    return {
        **fields.grouped_experts(hf, **sizes),
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": hf.get("moe_latent_size"),
    }
