"""Mamba-1, the selective scan (arXiv 2312.00752), with the parameters of the authors' `Mamba`."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.derived_weights import from_weights
from megatron_hybrid.models.mixers.base import MixerPlace, StateTensor
from megatron_hybrid.models.mixers.gated_norm import gated
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.models.mixers.time_step import initial_dt_bias, typical_decay
from megatron_hybrid.models.sharding.tensor_sharding import Cut, shard, sharded_parameter
from megatron_hybrid.ops import selective_scan, time_steps


class Mamba1Mixer(RecurrentMixer):
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t (x) B_t,  y_t = h_t C_t + D x_t, gated.

    Channels are split over the ranks; dt, B and C are sums over the channels of all ranks.
    """

    recompute_name = "mamba"
    input_projection = "in_proj"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        inner, rank = config.mamba1_inner_size, config.mamba1_dt_rank
        super().__init__(
            config,
            place,
            sections={"x": inner, "z": inner},
            convolved=("x",),
            kernel_size=config.mamba1_conv_kernel,
            bias=config.mamba1_proj_bias,
            conv_bias=config.mamba1_conv_bias,
        )
        tp_size, tp_rank = place.pg_collection.tp.size(), place.pg_collection.tp.rank()
        self.state_dim = config.mamba1_state_dim
        self.num_channels, self.num_full_channels = inner // tp_size, inner
        self.split_sizes = [rank, self.state_dim, self.state_dim]

        # dt, B and C are sums over the channels of all ranks, in all rows.
        config = config.with_all_rows()
        self.x_proj = build_output_projection(
            place.submodules.row,
            config,
            inner,
            place.pg_collection,
            comm_buffer="fc2",
            output_size=sum(self.split_sizes),
            init_method=config.init_method,
        )
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            self._build_norm(size) for size in self.split_sizes
        )
        self.dt_proj = build_input_projection(
            place.submodules.column,
            config,
            (inner,),
            place.pg_collection,
            comm_buffer="fc1",
            bias=True,
            skip_bias_add=True,
            input_size=rank,
            init_method=lambda weight: nn.init.uniform_(weight, -(rank**-0.5), rank**-0.5),
        )
        with torch.no_grad():
            bias = self.dt_proj.bias
            bias.copy_(shard(initial_dt_bias(inner), bias, tp_rank))
        # Decay and skip stay in fp32 in a bf16 model, as in Mamba-2.
        cut, decay = Cut(0, (inner,), tp_size), torch.arange(1.0, self.state_dim + 1.0).log()
        self.A_log = sharded_parameter(decay.repeat(inner, 1), cut, tp_rank)
        self.D = sharded_parameter(torch.ones(inner), cut, tp_rank)
        self.out_proj = self._build_output(inner, config.mamba1_proj_bias)

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """[C, N]."""
        shape = (self.num_channels, self.state_dim)
        decay_CN = typical_decay(self.A_log, self.dt_proj.bias[:, None])
        return (self._state("ssm", shape, self.num_full_channels, decay_CN),)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        x_TC, z_TC = projected.chunk(2, -1)
        x_TC = self.conv1d(x_TC, context, self.layer_number)
        parts, _ = self.x_proj(x_TC)
        dt, B_TN, C_TN = parts.split(self.split_sizes, -1)
        dt_TC, dt_bias_C = self.dt_proj(self.dt_layernorm(dt))
        # Every rank uses all of B and C for its own channels: their gradients are summed over
        # ranks.
        B_TN, C_TN = (
            copy_to_tensor_model_parallel_region(norm(part), self.pg_collection.tp)
            for norm, part in ((self.b_layernorm, B_TN), (self.c_layernorm, C_TN))
        )
        y_TC = selective_scan(
            x_TC,
            time_steps(dt_TC, dt_bias_C)[0],
            from_weights(self, "A", lambda: -self.A_log.float().exp()),
            B_TN,
            C_TN,
            self.D.float(),
            context.states(self.layer_number, "ssm"),
            context.ragged_layout(),
            self.config.mamba1_chunk_size,
        )
        return self.out_proj(gated(y_TC, z_TC))

    def _build_norm(self, size: int) -> nn.Module:
        """The norm of dt, B or C: an RMS norm, for any `normalization`, or an identity."""
        config = self.config
        if config.mamba1_norm == "none":
            return nn.Identity()
        return nn.RMSNorm(
            size,
            config.mamba1_norm_epsilon,
            elementwise_affine=config.mamba1_norm == "weighted",
            dtype=config.params_dtype,
        )
