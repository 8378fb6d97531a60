"""The tensors that many architectures have in common: ours on the left, theirs on the right."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_hybrid.checkpoints.huggingface.layouts import (
    SAME,
    Layout,
    TensorMap,
    chained,
    grouped,
    grouped_with_gates,
    joined,
    same,
    stacked,
)
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import LAYER_KINDS


def model(
    config: HybridConfig,
    embedding: str = "model.embed_tokens.weight",
    final_norm: str = "model.norm.weight",
) -> Iterator[TensorMap]:
    """Map embedding, final norm and output layer."""
    yield same("embedding.word_embeddings.weight", embedding)
    yield from norm(config, "decoder.final_norm", final_norm.removesuffix(".weight"))
    if not config.share_embeddings_and_output_weights:
        yield same("output_layer.weight", "lm_head.weight")


def norm(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map a norm of hidden states: its weight, and its bias if it has one."""
    yield same(f"{ours}.weight", f"{theirs}.weight")
    if config.normalization == "LayerNorm" and config.layernorm_bias:
        yield same(f"{ours}.bias", f"{theirs}.bias")


Parts = Mapping[str, tuple[str, Callable[[HybridConfig, str, str], Iterable[TensorMap]]]]
"""For each layer symbol, what they call its mixer or MLP within a layer ("": it has the names of
the layer), and its tensors, by the config of the layer, our prefix and theirs."""


@dataclass(frozen=True)
class TensorNames:
    """What an architecture calls its tensors."""

    parts: Parts
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm")
    """The norms before the layers of ours that make up one of theirs, in order."""
    post_norms: Sequence[str] = ()
    """The norms after them, if `norm_placement` has such."""
    layers: str = "model.layers"
    """Prefix of the layers."""
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        """Map all tensors but those of an MTP head."""
        yield from model(config, self.embedding, self.final_norm)
        for i, symbol in enumerate(config.pattern.symbols):
            own = config.for_layer(i + 1)
            yield from self._layer(own, symbol, f"decoder.layers.{i}", self.layers, i)

    def prediction(
        self,
        config: HybridConfig,
        around: Sequence[str],
        layers: str = "mtp.layers",
        first: int = 0,
    ) -> Iterator[TensorMap]:
        """Map the MTP head, if the config has one.

        Args:
            around: what they call the norms of the embedding and of the hidden state, the
                projection of both, in this order, and the last norm.
            layers: prefix of its layers.
            first: how many layers of ours lie before it under this prefix.
        """
        for symbols in config.pattern.predictions:
            for own, theirs in zip(("enorm", "hnorm", "eh_proj", "final_layernorm"), around):
                yield same(f"mtp.layers.0.{own}.weight", f"{theirs}.weight")
            for i, symbol in enumerate(symbols):
                ours = f"mtp.layers.0.mtp_model_layer.layers.{i}"
                own = config.for_prediction(symbol)
                yield from self._layer(own, symbol, ours, layers, first + i)

    def _layer(
        self, config: HybridConfig, symbol: str, ours: str, layers: str, index: int
    ) -> Iterator[TensorMap]:
        number, place = divmod(index, len(self.norms))
        kind, theirs = LAYER_KINDS[symbol], f"{layers}.{number}"
        if config.norm_placement != "post":
            yield from norm(config, f"{ours}.{kind.norm_name}", f"{theirs}.{self.norms[place]}")
        if config.norm_placement in ("post", "sandwich"):
            after = f"{theirs}.{self.post_norms[place]}"
            yield from norm(config, f"{ours}.post_layernorm", after)
        if symbol not in self.parts:
            raise CheckpointError(f"the model has layers {symbol!r}, this architecture has none")
        name, tensors = self.parts[symbol]
        inner = f"{theirs}.{name}" if name else theirs
        yield from tensors(config, f"{ours}.{kind.mixer_name}", inner)


def weights(ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[TensorMap]:
    """Map the weights of modules, by their names here and there."""
    for own, name in names.items():
        yield same(f"{ours}.{own}.weight", f"{theirs}.{name}.weight")


def modules(**names: str) -> Callable[[HybridConfig, str, str], Iterator[TensorMap]]:
    """Return `Parts` of modules that have a weight alone, by their names here and there."""
    return lambda config, ours, theirs: weights(ours, theirs, names)


def has_tensor(names: Collection[str], prefix: str) -> bool:
    """Return whether the name of a tensor begins so."""
    return any(name.startswith(prefix) for name in names)


def attention(
    config: HybridConfig,
    ours: str,
    theirs: str,
    *,
    joined_qkv: str | None = None,
    output: str = "o_proj",
    norms: Sequence[str] = ("q_norm", "k_norm"),
    sinks: str = "sinks",
) -> Iterator[TensorMap]:
    """Map q_proj, k_proj, v_proj and o_proj, q_norm, k_norm and sinks: those that the config has.

    Args:
        config: that of the layer (`HybridConfig.for_layer`).
        ours: prefix, such as "decoder.layers.0.self_attention".
        theirs: prefix, such as "model.layers.0.self_attn".
        joined_qkv: what they call the projection that is q_proj, k_proj and v_proj in one; None:
            these are apart.
        output: what they call o_proj.
        norms: what they call q_norm and k_norm.
        sinks: what they call those of a learnt softmax.
    """
    names = "qkv"[: 1 + config.num_kv_projections]
    gate = "g" if config.attention_head_gate else ""
    groups, head_dim = config.num_query_groups, config.kv_channels
    heads_per_group = config.num_attention_heads // groups
    if config.attention_output_gate and not gate:
        layout = grouped_with_gates(heads_per_group, head_dim, groups)
    else:
        widths = (head_dim, config.value_channels or head_dim)[: config.num_kv_projections]
        gates = [heads_per_group] * len(gate)
        rows = [heads_per_group * head_dim, *gates, *widths]
        layout = grouped(rows, groups)
        if joined_qkv is not None:
            layout = chained(joined([groups * size for size in rows]).inverse, layout)
    has_bias = config.add_bias_linear or config.add_qkv_bias
    for kind in ("weight", "bias") if has_bias else ("weight",):
        apart = (f"{name}_proj" for name in f"q{gate}{names[1:]}")
        inputs = apart if joined_qkv is None else (joined_qkv,)
        projections = tuple(f"{theirs}.{name}.{kind}" for name in inputs)
        yield TensorMap((f"{ours}.linear_qkv.{kind}",), projections, layout)
    yield same(f"{ours}.linear_proj.weight", f"{theirs}.{output}.weight")
    if config.has_attention_output_bias:
        yield same(f"{ours}.linear_proj.bias", f"{theirs}.{output}.bias")
    if config.qk_layernorm:
        for name, norm in zip(names[:2], norms):
            yield same(f"{ours}.{name}_layernorm.weight", f"{theirs}.{norm}.weight")
    if config.softmax_type == "learnable":
        yield same(f"{ours}.core_attention.softmax_offset", f"{theirs}.{sinks}")


def latent_attention(
    config: HybridConfig, ours: str, theirs: str, output: str = "o_proj"
) -> Iterator[TensorMap]:
    """Map multi-head latent attention in DeepSeek's names (arguments: see `attention`)."""
    names = {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": output,
    }
    if config.latent_output_gate:
        names["linear_gate"] = "g_proj"
    if config.q_lora_rank is None:
        names["linear_q_proj"] = "q_proj"
    else:
        names["linear_q_down_proj"] = "q_a_proj"
        names["q_layernorm"] = "q_a_layernorm"
        names["linear_q_up_proj"] = "q_b_proj"
    yield from weights(ours, theirs, names)


def mlp(
    config: HybridConfig,
    ours: str,
    theirs: str,
    width: int | None = None,
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TensorMap]:
    """Map gate_proj, up_proj and down_proj of a gated MLP, or up_proj and down_proj of a plain one.

    Args:
        width: `config.ffn_hidden_size` by default.
        projections: what they call gate_proj, up_proj and down_proj.
    """
    gate, up, down = projections
    width = width or config.ffn_hidden_size
    for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
        if config.gated_linear_unit:
            gate_and_up = (f"{theirs}.{gate}.{kind}", f"{theirs}.{up}.{kind}")
            yield TensorMap((f"{ours}.linear_fc1.{kind}",), gate_and_up, joined((width, width)))
        else:
            yield same(f"{ours}.linear_fc1.{kind}", f"{theirs}.{up}.{kind}")
        yield same(f"{ours}.linear_fc2.{kind}", f"{theirs}.{down}.{kind}")


joined_mlp = modules(linear_fc1="gate_up_proj", linear_fc2="down_proj")
"""A gated MLP whose gate_proj and up_proj are one on both sides."""


def delta_rule(
    config: HybridConfig,
    ours: str,
    theirs: str,
    inputs: str,
    widths: Sequence[int],
    convolved: Sequence[int],
    *,
    output: str = "o_proj",
    decays: Layout = SAME,
) -> Iterator[TensorMap]:
    """Map a delta rule with projections and convolutions one by one (arguments: see `attention`).

    Args:
        inputs: letters of the projections into it, as in "q_proj".
        widths: rows of each.
        convolved: channels of queries, keys and values.
        decays: how `A_log` lies.
    """
    names = tuple(f"{theirs}.{name}_proj.weight" for name in inputs)
    yield TensorMap((f"{ours}.in_proj.weight",), names, joined(widths))
    names = tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv")
    yield TensorMap((f"{ours}.conv1d.weight",), names, joined(convolved))
    yield same(f"{ours}.A_log", f"{theirs}.A_log", decays)
    yield same(f"{ours}.dt_bias", f"{theirs}.dt_bias")
    yield from weights(ours, theirs, {"out_norm": "o_norm", "out_proj": output})


def mamba2(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map a Mamba-2 mixer, whose parameters have the same names and layouts on both sides."""
    names = ["in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "out_proj.weight"]
    if config.mamba_conv_bias:
        names.append("conv1d.bias")
    if config.mamba_proj_bias:
        names += ["in_proj.bias", "out_proj.bias"]
    if config.mamba_gated_norm != "none":
        names.append("norm.weight")
    for name in names:
        yield same(f"{ours}.{name}", f"{theirs}.{name}")


def mamba1(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map a Mamba-1 mixer, whose parameters have the same names and layouts on both sides."""
    names = ["in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight", "dt_proj.bias"]
    names += ["A_log", "D", "out_proj.weight"]
    if config.mamba1_conv_bias:
        names.append("conv1d.bias")
    if config.mamba1_proj_bias:
        names += ["in_proj.bias", "out_proj.bias"]
    if config.mamba1_norm == "weighted":
        names += [f"{part}_layernorm.weight" for part in ("dt", "b", "c")]
    for name in names:
        yield same(f"{ours}.{name}", f"{theirs}.{name}")


def experts_one_by_one(tensor_map: TensorMap, config: HybridConfig) -> TensorMap:
    """Map experts in one tensor, `experts.gate_up_proj` or `experts.down_proj`, or their biases, as
    `experts.0.gate_proj.weight` and so on; other maps stay as they are."""
    (ours,) = tensor_map.ours
    _, found, projection = ours.rpartition(".experts.linear_")
    if not found:
        return tensor_map
    own, kind = projection.split(".")
    names = ("gate_proj", "up_proj") if own == "fc1" else ("down_proj",)
    experts = tensor_map.theirs[0].rpartition(".experts.")[0]
    theirs = _of_experts(config, experts, [f"{name}.{kind}" for name in names])
    return TensorMap((ours,), theirs, stacked(len(names)))


def _of_experts(config: HybridConfig, theirs: str, names: Sequence[str]) -> tuple[str, ...]:
    """Name these tensors of each expert, one expert after the other."""
    numbers = range(config.num_moe_experts)
    return tuple(f"{theirs}.experts.{i}.{name}" for i in numbers for name in names)


def experts_in_one(
    tensor_map: TensorMap, config: HybridConfig, layout: Layout = SAME
) -> Iterator[TensorMap]:
    """Invert `experts_one_by_one`; nothing for a map of other tensors. layout: of each of both."""
    experts, found, _ = tensor_map.theirs[0].partition(".experts.0.")
    if found:
        is_fc1 = len(tensor_map.theirs) > config.num_moe_experts
        name = "gate_up_proj" if is_fc1 else "down_proj"
        yield same(tensor_map.ours[0], f"{experts}.experts.{name}", layout)


def moe(
    config: HybridConfig,
    ours: str,
    theirs: str,
    *,
    router: str = "gate",
    expert_bias: str = "gate.e_score_correction_bias",
    projections: Sequence[str] | None = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
) -> Iterator[TensorMap]:
    """Map a mixture of experts: router, selection bias, experts one by one, latent projections,
    shared expert; of these what the config has.

    Args:
        config: that of the layer (`HybridConfig.for_layer`).
        ours: prefix, such as "decoder.layers.1.mlp".
        theirs: prefix, such as "model.layers.0.mlp".
        router: what they call the router.
        expert_bias: what they call the bias that only selects.
        projections: what they call those of an expert, `experts.0.<name>.weight`, as many as a
            gated or plain MLP has. With None they lie otherwise, and the caller maps our
            `experts.linear_fc1.weight` [E, gate and up, in] and `experts.linear_fc2.weight`
            [E, out, in].
        shared: what they call the shared expert; its gate is `shared_expert_gate`.
    """
    yield same(f"{ours}.router.weight", f"{theirs}.{router}.weight")
    if config.add_bias_linear:
        yield same(f"{ours}.router.bias", f"{theirs}.{router}.bias")
    if config.moe_router_enable_expert_bias:
        yield same(f"{ours}.router.expert_bias", f"{theirs}.{expert_bias}")
    if projections is not None:
        *fc1, fc2 = projections
        for own, names in (("linear_fc1", fc1), ("linear_fc2", [fc2])):
            experts = _of_experts(config, theirs, [f"{name}.weight" for name in names])
            yield TensorMap((f"{ours}.experts.{own}.weight",), experts, stacked(len(names)))
    if config.moe_latent_size is not None:
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            yield same(f"{ours}.{name}.weight", f"{theirs}.{name}.weight")
    if (width := config.moe_shared_expert_intermediate_size) is not None:
        yield from mlp(config, f"{ours}.shared_experts", f"{theirs}.{shared}", width)
        if config.moe_shared_expert_gate:
            gate = f"{ours}.shared_experts.gate_weight"
            yield same(gate, f"{theirs}.shared_expert_gate.weight")


def moe_by_projection(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map experts of StepFun's models: of a layer's gates, values and outputs, one tensor each."""
    names = {"router": "moe.gate", "expert_bias": "moe.router_bias", "shared": "share_expert"}
    yield from moe(config, ours, theirs, projections=None, **names)
    width, fc1 = config.moe_ffn_hidden_size, f"{ours}.experts.linear_fc1.weight"
    gate_and_up = f"{theirs}.moe.gate_proj.weight", f"{theirs}.moe.up_proj.weight"
    yield TensorMap((fc1,), gate_and_up, joined((width, width), 1))
    yield same(f"{ours}.experts.linear_fc2.weight", f"{theirs}.moe.down_proj.weight")


TRANSFORMER: Parts = {
    **dict.fromkeys("*W", ("self_attn", attention)),
    "-": ("mlp", mlp),
    "E": ("mlp", moe),
}
"""What most Transformers call their attention, and their MLPs or experts."""
