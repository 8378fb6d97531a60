"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the delta rule with a decay per channel."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.derived_weights import from_weights
from megatron_hybrid.models.mixers.base import (
    LayerCache,
    Mixer,
    MixerSubmodules,
    StateTensor,
)
from megatron_hybrid.models.mixers.gated_norm import GatedHeadNorm
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    ReplicatedLinear,
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.short_conv import ShortConv
from megatron_hybrid.models.mixers.time_step import initial_dt_bias, typical_decay
from megatron_hybrid.models.sharding.tensor_sharding import Cut, sharded_parameter
from megatron_hybrid.ops import kimi_delta_attention, time_steps

_A_RANGE = (1.0, 16.0)


class KimiDeltaAttentionMixer(Mixer):
    """With P = Diag(exp(g)) S_{t-1}:  S_t = P + beta k_t (x) (v_t - k_t P),  o_t = q_t S_t.

    g = -exp(A) softplus(f(x) + dt_bias) has a value for each channel of the keys. f and the output
    gate are projections whose rank is the width of a value head.

    Args:
        config: sizes are its `linear_*` fields; there are `linear_num_key_heads` heads.
        submodules: classes of the projections.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; `tp` is used.
    """

    recompute_name = "kimi_delta_attention"

    splits_rows = True

    def __init__(
        self,
        config: HybridConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        heads = config.linear_num_key_heads
        keys, values = heads * self.key_dim, heads * self.value_dim
        tp_size = pg_collection.tp.size()
        self.num_heads = heads // tp_size
        self.max_beta = 2.0 if config.linear_allow_neg_eigval else 1.0

        # Heads are split over the ranks; the inner dimension of the low-rank gates is replicated.
        self.in_proj = build_input_projection(
            submodules.column,
            config,
            (keys, keys, values, heads),
            pg_collection,
            comm_buffer="fc1",
            section_names=("query", "key", "value", "beta"),
        )
        self.conv1d = ShortConv(
            (keys, keys, values),
            ("query", "key", "value"),
            config.linear_conv_kernel_dim,
            bias=False,
            tp_group=pg_collection.tp,
            dtype=config.params_dtype,
        )
        self.f_a_proj, self.g_a_proj = (
            ReplicatedLinear(config, config.hidden_size, self.value_dim) for _ in range(2)
        )
        self.f_b_proj, self.g_b_proj = (
            build_input_projection(
                submodules.column,
                config,
                (width,),
                pg_collection,
                comm_buffer="fc1",
                input_size=self.value_dim,
            )
            for width in (keys, values)
        )
        # Decay and time step stay in fp32 in a bf16 model, as in Mamba-2.
        rank = pg_collection.tp.rank()
        A_log = torch.empty(heads).uniform_(*_A_RANGE).log()
        self.A_log = sharded_parameter(A_log, Cut(0, (heads,), tp_size), rank)
        self.dt_bias = sharded_parameter(initial_dt_bias(keys), Cut(0, (keys,), tp_size), rank)
        self.out_norm = GatedHeadNorm(config, self.value_dim, pg_collection.tp, "sigmoid")
        self.out_proj = build_output_projection(
            submodules.row, config, values, pg_collection, comm_buffer="fc2"
        )

    def cache_requirements(self) -> LayerCache:
        """A convolution tail and the state, [H, N, P]."""
        shape = (self.num_heads, self.key_dim, self.value_dim)
        dt_bias_HN = self.dt_bias.view(self.num_heads, self.key_dim)
        decay_HN = typical_decay(self.A_log[:, None], dt_bias_HN)
        state = StateTensor(
            "delta",
            shape,
            self.config.recurrent_state_dtype,
            decay_HN[:, :, None],
            self.config.linear_num_key_heads,
        )
        return LayerCache(states=(self.conv1d.state(), state))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        qkv, beta_TH = projected.split([projected.shape[-1] - self.num_heads, self.num_heads], -1)
        qkv = self.conv1d(qkv, context, self.layer_number)
        q_THN, k_THN, v_THP = (
            x.unflatten(-1, (self.num_heads, -1))
            for x in qkv.split(
                [self.num_heads * dim for dim in (self.key_dim, self.key_dim, self.value_dim)], -1
            )
        )
        decay, _ = self.f_b_proj(self.f_a_proj(hidden_Th))
        g_TC, beta_TH = time_steps(
            decay,
            self.dt_bias,
            from_weights(self, "A", lambda: -self.A_log.float().exp()),
            beta_TH=beta_TH,
            max_beta=self.max_beta,
        )
        o_THP = kimi_delta_attention(
            q_THN,
            k_THN,
            v_THP,
            g_TC.unflatten(-1, (self.num_heads, self.key_dim)),
            beta_TH,
            context.states(self.layer_number, "delta"),
            context.ragged_layout(),
            self.config.linear_chunk_size,
        )
        gate, _ = self.g_b_proj(self.g_a_proj(hidden_Th))
        return self.out_proj(
            self.out_norm(o_THP, gate.unflatten(-1, (self.num_heads, self.value_dim))).flatten(1)
        )
