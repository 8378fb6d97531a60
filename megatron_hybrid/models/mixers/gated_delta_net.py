"""Gated DeltaNet (arXiv 2412.06464), with the parameters and arithmetic of core's GatedDeltaNet."""

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
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.short_conv import ShortConv
from megatron_hybrid.models.mixers.time_step import typical_decay
from megatron_hybrid.models.sharding.tensor_sharding import Cut, sharded_parameter
from megatron_hybrid.ops import gated_delta_rule, time_steps

_A_RANGE = (1.0, 16.0)


class GatedDeltaNetMixer(Mixer):
    """With P = exp(g) S_{t-1}:  S_t = P + beta k_t (x) (v_t - k_t P),  o_t = q_t S_t.

    Args:
        config: sizes are its `linear_*` fields.
        submodules: classes of the projections.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; `tp` is used.
    """

    recompute_name = "gated_delta_net"

    splits_rows = True
    input_projection = "in_proj"

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
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        keys, values = key_heads * self.key_dim, value_heads * self.value_dim
        tp_size = pg_collection.tp.size()
        self.num_key_heads = max(1, key_heads // tp_size)
        copies = max(1, tp_size // key_heads)  # of a key head, on the ranks with its value heads
        self.num_value_heads = value_heads // tp_size
        self.max_beta = 2.0 if config.linear_allow_neg_eigval else 1.0

        self.in_proj = build_input_projection(
            submodules.input_projection,
            config,
            (keys, keys, values, values, value_heads, value_heads),
            pg_collection,
            comm_buffer="fc1",
            section_names=("query", "key", "value", "z", "beta", "alpha"),
            copies=(copies, copies, 1, 1, 1, 1),
        )
        widths = self.in_proj.weight.cut.local_sections
        self.split_sizes = [sum(widths[:3]), *widths[3:]]
        self.conv1d = ShortConv(
            (keys, keys, values),
            ("query", "key", "value"),
            config.linear_conv_kernel_dim,
            bias=False,
            tp_group=pg_collection.tp,
            dtype=config.params_dtype,
            copies=(copies, copies, 1),
        )
        # Decay and time step stay in fp32 in a bf16 model, as in Mamba-2.
        cut, rank = Cut(0, (value_heads,), tp_size), pg_collection.tp.rank()
        A_log = torch.empty(value_heads).uniform_(*_A_RANGE).log()
        self.A_log = sharded_parameter(A_log, cut, rank)
        self.dt_bias = sharded_parameter(torch.ones(value_heads), cut, rank)
        self.out_norm = GatedHeadNorm(config, self.value_dim, pg_collection.tp, "silu")
        self.out_proj = build_output_projection(
            submodules.row, config, values, pg_collection, comm_buffer="fc2"
        )

    def cache_requirements(self) -> LayerCache:
        """A convolution tail and the state, [H, N, P]."""
        shape = (self.num_value_heads, self.key_dim, self.value_dim)
        decay_H = typical_decay(self.A_log, self.dt_bias)
        state = StateTensor(
            "delta",
            shape,
            self.config.recurrent_state_dtype,
            decay_H[:, None, None],
            self.config.linear_num_value_heads,
        )
        return LayerCache(states=(self.conv1d.state(), state))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        qkv, gate, beta, alpha = projected.split(self.split_sizes, -1)
        qkv = self.conv1d(qkv, context, self.layer_number)
        q, k, v = qkv.split(
            [
                self.num_key_heads * self.key_dim,
                self.num_key_heads * self.key_dim,
                self.num_value_heads * self.value_dim,
            ],
            -1,
        )
        A_H = from_weights(self, "A", lambda: -self.A_log.float().exp())
        g_TH, beta_TH = time_steps(alpha, self.dt_bias, A_H, beta_TH=beta, max_beta=self.max_beta)
        o_THP = gated_delta_rule(
            q.unflatten(-1, (self.num_key_heads, self.key_dim)),
            k.unflatten(-1, (self.num_key_heads, self.key_dim)),
            v.unflatten(-1, (self.num_value_heads, self.value_dim)),
            g_TH,
            beta_TH,
            context.states(self.layer_number, "delta"),
            context.ragged_layout(),
            self.config.linear_chunk_size,
        )
        gate_THP = gate.unflatten(-1, (self.num_value_heads, self.value_dim))
        return self.out_proj(self.out_norm(o_THP, gate_THP).flatten(1))
