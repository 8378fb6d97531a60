"""Full, sliding-window and chunked attention, with the parameters of core's SelfAttention."""

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import (
    KVShape,
    LayerCache,
    Mixer,
    MixerPlace,
    rank_generator,
)
from megatron_hybrid.models.mixers.differential_maps import DifferentialMaps
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    ReplicatedLinear,
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.rotary import build_rotary
from megatron_hybrid.models.norms import SplitNorm, is_plain
from megatron_hybrid.models.recompute import is_selected, recompute_if
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel
from megatron_hybrid.ops import AttentionPattern, activate, rotate_heads


class AttentionMixer(Mixer):
    """Causal grouped-query attention.

    Args:
        locality: with None a token sees all positions; "window": the last `sliding_window`;
            "chunk": those of its own chunk of `config.attention_chunk_size`.
        input_size: width of the input; None means hidden_size.
    """

    recompute_name = "attention"
    training_fields = ("attention_dropout",)
    recompute_parts = ("core_attn",)

    splits_rows = True
    input_projection = "linear_qkv"

    def __init__(
        self,
        config: HybridConfig,
        place: MixerPlace,
        locality: Literal["window", "chunk"] | None = None,
        input_size: int | None = None,
    ):
        super().__init__(config)
        self.layer_number = place.layer_number
        self.kv_layer = config.kv_source_layer or place.layer_number
        """Number of the layer whose keys and values are read: this or an earlier one."""
        self.head_dim = config.kv_channels
        self.value_dim = config.value_channels or self.head_dim
        self.pattern = AttentionPattern(
            config.softmax_scale or (self.head_dim // config.softmaxes_per_head) ** -0.5,
            window=config.sliding_window if locality == "window" else None,
            chunk=config.attention_chunk_size if locality == "chunk" else None,
            softcap=config.attention_logit_softcap,
        )
        self.training_pattern = replace(self.pattern, dropout=config.attention_dropout)
        self.recomputes_attention = is_selected(config, "core_attn")
        self.tp_group = place.pg_collection.tp
        tp_size, groups = self.tp_group.size(), config.num_query_groups
        self.num_groups = max(1, groups // tp_size)
        self.heads_per_group = config.num_attention_heads // tp_size // self.num_groups
        self.rotary = build_rotary(config, config.rotary_dim)
        queries, outputs = (
            config.num_attention_heads * width for width in (self.head_dim, self.value_dim)
        )
        # Rows are ordered by group: its queries (and gates), key and value. Ranks have whole
        # groups, or several share one's queries and gates, with copies of its key and value.
        copies, repeats = max(1, tp_size // groups), min(tp_size, groups)
        blocks = [(queries // groups, 1)] if config.query_rank is None else []
        self.gate_dim = 1 if config.attention_head_gate else self.value_dim
        if config.attention_output_gate:
            blocks.append((config.num_attention_heads // groups * self.gate_dim, 1))
        widths = (self.head_dim, self.value_dim)[: config.num_kv_projections]
        blocks += [(width, copies) for width in widths]
        sections, block_copies = zip(*blocks)
        rows_of_group = sections
        if copies == 1:
            sections, block_copies = (sum(sections) * groups // repeats,), None
        self.linear_qkv = build_input_projection(
            place.submodules.input_projection,
            config,
            sections,
            place.pg_collection,
            copies=block_copies,
            repeats=repeats,
            bias=config.add_bias_linear or config.add_qkv_bias,
            input_size=input_size,
        )
        self.linear_qkv.weight.group_rows = rows_of_group  # for optimizers that take matrices apart
        self.linear_proj = build_output_projection(
            place, config, outputs, bias=config.has_attention_output_bias
        )
        if (rank := config.query_rank) is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, rank)
            self.latent_norm = build_norm(config, rank)
            self.linear_q_up_proj = build_input_projection(
                place.submodules.column, config, (queries,), place.pg_collection, input_size=rank
            )
        # Each rank norms its own heads alone; core's finalize_model_grads sums these gradients.
        self.q_layernorm = self._build_norm(config.num_attention_heads)
        self.k_layernorm = (
            self._build_norm(groups, copies) if self.kv_layer == place.layer_number else None
        )
        self.differential = (
            None
            if config.differential_lambda is None
            else DifferentialMaps(config, self.value_dim, self.tp_group)
        )
        if config.softmax_type == "learnable":
            self.core_attention = nn.Module()  # where megatron-core keeps the parameter
            heads = config.num_attention_heads
            sinks = torch.zeros(heads // tp_size, dtype=config.params_dtype)
            self.core_attention.softmax_offset = nn.Parameter(sinks)
            mark_tensor_parallel(self.core_attention.softmax_offset, Cut(0, (heads,), tp_size))

    def cache_requirements(self) -> LayerCache:
        """Describe the keys and values, unless the layer reads those of another one."""
        if self.kv_layer != self.layer_number:
            return LayerCache()
        pattern = self.pattern
        groups = self.num_groups, self.config.num_query_groups
        return LayerCache(
            kv=KVShape(
                *(groups[0], self.head_dim, pattern.window, pattern.chunk),
                value_dim=self.value_dim,
                full_heads=groups[1],
            )
        )

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        mixed, _ = self.linear_qkv(hidden_Th)
        if self.config.query_rank is not None:  # there is one group, which begins with its queries
            q, _ = self.linear_q_up_proj(self.latent_norm(self.linear_q_down_proj(hidden_Th)))
            mixed = torch.cat((q, mixed), -1)
        return self.attend(mixed, context, self.layer_number)

    def attend(
        self, mixed: Tensor, context: MixerContext, layer_number: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` after the input projection, as the layer `layer_number`."""
        kv_layer = self.config.kv_source_layer or layer_number
        q_TKGD, kv, gate = self._heads(mixed)
        k, v = kv or (None, None)
        weights = None if k is None else self._weights_of_norms(q_TKGD.dtype)
        q = q_TKGD
        if self.rotary is None or k is None or (weights is None and self.config.qk_layernorm):
            q = q_TKGD.flatten(1, 2)
        if weights is None and not self.config.qk_layernorm_after_rope:
            q, k = self._normed(q, k)
        if self.rotary is not None:
            positions_T = context.token_positions()
            cos_sin = self.rotary.cos_sin_of_batch(context.ragged_layout(), positions_T, q.dtype)
            if k is None:
                q = self.rotary.rotate(q, cos_sin)
            else:
                if q.dim() == 3:
                    q = q.unflatten(1, (self.num_groups, -1))
                form = *(weights or (None, None)), self.config.layernorm_epsilon
                q, k = rotate_heads(q, k, *cos_sin, self.rotary.interleaved, *form)
        if self.config.qk_layernorm_after_rope:
            q, k = self._normed(q, k)
        if self.config.qk_l2_norm:
            q, k = (None if x is None else self._l2_norm(x) for x in (q, k))
        if self.config.attention_temperature_scale is not None:
            q = q * self._temperature(context.token_positions()).to(q.dtype)
        if self.differential is not None:
            q = self.differential.split(q)
        pattern = self.training_pattern if self.training else self.pattern
        args = kv_layer, q, k, v, pattern, self._sinks()
        with rank_generator(pattern.dropout > 0):
            o = recompute_if(self.recomputes_attention, self, context.attend, *args)
        o = (o if self.differential is None else self.differential.subtract(o)).flatten(1)
        if gate is not None:
            if self.config.attention_head_gate:
                gate = gate.repeat_interleave(self.value_dim, -1)
            o_TGC = o.unflatten(1, (self.num_groups, -1))
            o = activate(gate, torch.sigmoid, o_TGC, in_fp32=True).flatten(1)
        return self.linear_proj(o)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Project to queries [T, K, G, D]; keys and values, [T, K, D] each, or none if the layer
        reads those of another one; gates of each key/value head's heads, [T, K, G * D or G]."""
        config = self.config
        widths = self.head_dim, self.value_dim
        queries, outputs = (
            self.heads_per_group * width for width in (self.head_dim, self.gate_dim)
        )
        gates = [outputs] if config.attention_output_gate else []
        q, *parts = mixed.view(*mixed.shape[:-1], self.num_groups, -1).split(
            [queries, *gates, *widths[: config.num_kv_projections]], -1
        )
        gate = parts.pop(0) if gates else None
        q = q.unflatten(-1, (-1, self.head_dim))
        if not parts:
            return q, (), gate
        k, v = parts[0], parts[-1]
        if config.value_l2_norm:
            v = self._l2_norm(v)
        if config.value_multiplier != 1.0:
            v = v * config.value_multiplier
        return q, (k, v), gate

    def _weights_of_norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the weights of the norms of q and k, where one launch may norm and rotate both."""
        norms = self.q_layernorm, self.k_layernorm
        config = self.config
        fits = config.qk_layernorm_scope == "head" and not config.qk_layernorm_after_rope
        fits = fits and self.rotary is not None
        if not (fits and all(map(is_plain, norms))) or torch.is_grad_enabled():
            return None
        dtype = torch.promote_types(dtype, torch.float32)
        return norms[0].factor(dtype), norms[1].factor(dtype)

    def _normed(self, q_THD: Tensor, k_TKD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        pairs = (self.q_layernorm, q_THD), (self.k_layernorm, k_TKD)
        q, k = (x if norm is None else self._norm(norm, x) for norm, x in pairs)
        return q, k

    def _norm(self, norm: nn.Module, x_THD: Tensor) -> Tensor:
        if self.config.qk_layernorm_scope == "head":
            return norm(x_THD)
        return norm(x_THD.flatten(1)).view_as(x_THD)

    def _l2_norm(self, x_THD: Tensor) -> Tensor:
        """Scale each head to a mean square of 1."""
        return F.rms_norm(x_THD.float(), x_THD.shape[-1:], eps=self.config.layernorm_epsilon).to(
            x_THD.dtype
        )

    def _temperature(self, positions_T: Tensor) -> Tensor:
        """Compute the factor of the queries, [T, 1, 1] fp32: it rises with the position, so that
        the softmax stays sharp over long contexts."""
        config = self.config
        positions_T = positions_T + config.attention_temperature_offset
        steps = (positions_T // config.attention_temperature_floor).float()
        return (1.0 + config.attention_temperature_scale * steps.log1p())[:, None, None]

    def _sinks(self) -> Tensor | None:
        """Return the logit of each head that carries no value, [H]."""
        kind = self.config.softmax_type
        if kind == "learnable":
            return self.core_attention.softmax_offset
        if kind == "off-by-one":
            return self.linear_qkv.weight.new_zeros(self.num_groups * self.heads_per_group)
        return None

    def _build_norm(self, num_heads: int, copies: int = 1) -> nn.Module | None:
        config, size = self.config, self.head_dim
        if not config.qk_layernorm:
            return None
        if config.qk_layernorm_scope == "all_heads":
            size *= num_heads
            if self.tp_group.size() > 1:
                eps = config.layernorm_epsilon
                return SplitNorm(config, size, eps, self.tp_group, copies)
        return build_norm(config, size)
