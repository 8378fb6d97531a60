"""Full and sliding-window attention, with the parameters of core's SelfAttention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.mixers.base import KVShape, LayerCache, MixerContext, UncachedContext
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.rotary import RotaryEmbedding
from megatron_hybrid.ops import paged_attention, varlen_attention


@dataclass
class AttentionSubmodules:
    """The projections and the norms of queries and keys (None: not normed)."""

    linear_qkv: ModuleSpec | type
    linear_proj: ModuleSpec | type
    q_layernorm: ModuleSpec | type | None
    k_layernorm: ModuleSpec | type | None


class AttentionMixer(MegatronModule):
    """Causal grouped-query attention.

    Args:
        config: sizes are the heads, `num_query_groups` and `kv_channels`.
        submodules: the projections and norms to build.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; `tp` is used.
        windowed: whether a token sees only the last `config.sliding_window` positions.
    """

    input_projection = "linear_qkv"

    def __init__(
        self,
        config: HybridConfig,
        submodules: AttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        windowed: bool = False,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.window = config.sliding_window if windowed else None
        self.head_dim = config.kv_channels
        self.softmax_scale = config.softmax_scale or self.head_dim**-0.5
        tp_size = pg_collection.tp.size()
        self.num_groups = config.num_query_groups // tp_size
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.rotary = (
            RotaryEmbedding(config.rotary_dim, config.rotary_base)
            if config.position_embedding_type == "rope"
            else None
        )
        queries = config.num_attention_heads * self.head_dim
        gates = queries if config.attention_output_gate else 0
        # Rows go group by group: its queries (and gates), its key, its value; so a plain cut works.
        self.linear_qkv = build_input_projection(
            submodules.linear_qkv,
            config,
            (queries + gates + 2 * config.num_query_groups * self.head_dim,),
            pg_collection,
            comm_buffer="qkv",
            bias=config.add_bias_linear or config.add_qkv_bias,
        )
        self.linear_proj = build_output_projection(
            submodules.linear_proj,
            config,
            queries,
            pg_collection,
            comm_buffer="proj",
            bias=config.add_bias_linear,
        )
        # Each rank norms its own heads alone; core's finalize_model_grads sums these gradients.
        self.q_layernorm = self._build_head_norm(submodules.q_layernorm)
        self.k_layernorm = self._build_head_norm(submodules.k_layernorm)

    def cache_requirements(self) -> LayerCache:
        """Keys and values."""
        return LayerCache(kv=KVShape(self.num_groups, self.head_dim, self.window))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        q, k, v, gate = self._project(hidden_Th)
        layout = context.ragged_layout()
        if self.rotary is not None:
            end = max(map(sum, zip(layout.start_positions, layout.lengths)))
            cos_sin = self.rotary.cos_sin(context.token_positions(), end, q.dtype)
            q, k = self.rotary.rotate(q, cos_sin), self.rotary.rotate(k, cos_sin)
        if isinstance(context, UncachedContext):
            o = varlen_attention(q, k, v, layout, self.softmax_scale, self.window)
        else:
            context.append_key_value_cache(self.layer_number, k.unsqueeze(1), v.unsqueeze(1))
            pages = context.key_value_cache(self.layer_number)
            o = paged_attention(q, *pages, layout, self.softmax_scale, self.window)
        o = o.flatten(1)
        if gate is not None:
            o = (o * gate.float().sigmoid()).to(o.dtype)
        return self.linear_proj(o)

    def _project(self, hidden_Th: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Normed queries [T, H, D] and keys [T, K, D], values [T, K, D], gates [T, H * D]."""
        mixed, _ = self.linear_qkv(hidden_Th)
        queries = self.heads_per_group * self.head_dim
        gates = [queries] if self.config.attention_output_gate else []
        q, *gate, k, v = mixed.unflatten(-1, (self.num_groups, -1)).split(
            [queries, *gates, self.head_dim, self.head_dim], -1
        )
        q = q.reshape(q.shape[0], -1, self.head_dim)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k, v, gate[0].flatten(1) if gate else None

    def _build_head_norm(self, spec: ModuleSpec | type | None):
        if spec is None:
            return None
        return build_module(
            spec,
            config=self.config,
            hidden_size=self.head_dim,
            eps=self.config.layernorm_epsilon,
        )
