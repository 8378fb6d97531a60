"""Mamba-2 (arXiv 2405.21060), with the parameters and the arithmetic of core's MambaMixer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.mixers.base import LayerCache, MixerContext, StateTensor
from megatron_hybrid.models.mixers.gated_norm import GatedGroupNorm
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.short_conv import ShortConv
from megatron_hybrid.models.tensor_sharding import mark_tensor_parallel
from megatron_hybrid.ops import ssd_scan

_NORM_EPS = 1e-5  # core's, whatever layernorm_epsilon says
_A_RANGE = (1.0, 16.0)
_DT_RANGE = (1e-3, 1e-1)
_DT_FLOOR = 1e-4


@dataclass
class Mamba2Submodules:
    """The projections of a Mamba-2 mixer."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class Mamba2Mixer(MegatronModule):
    """S_t = exp(dt A) S_{t-1} + dt x_t (x) B_t,  y_t = S_t C_t + D x_t, gated and normed.

    Args:
        config: sizes are its `mamba_*` fields.
        submodules: the projections to build.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; `tp` is used.
    """

    input_projection = "in_proj"

    def __init__(
        self,
        config: HybridConfig,
        submodules: Mamba2Submodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.head_dim = config.mamba_head_dim
        self.state_dim = config.mamba_state_dim
        heads, groups = config.mamba_num_heads, config.mamba_num_groups
        inner = heads * self.head_dim
        group_states = groups * self.state_dim
        tp_size = pg_collection.tp.size()
        self.num_heads = heads // tp_size
        self.num_groups = groups // tp_size

        self.in_proj = build_input_projection(
            submodules.in_proj,
            config,
            (inner, inner, group_states, group_states, heads),
            pg_collection,
            comm_buffer="fc1",
            section_names=("z", "x", "B", "C", "dt"),
        )
        self.split_sizes = [
            inner // tp_size,
            (inner + 2 * group_states) // tp_size,
            self.num_heads,
        ]
        self.conv1d = ShortConv(
            (inner, group_states, group_states),
            ("x", "B", "C"),
            config.mamba_conv_kernel,
            bias=True,
            tp_size=tp_size,
            dtype=config.params_dtype,
        )
        self.dt_bias = nn.Parameter(_initial_dt_bias(self.num_heads).to(config.params_dtype))
        # Decay and skip stay in fp32 in a bf16 model, as in core.
        self.A_log = nn.Parameter(torch.empty(self.num_heads).uniform_(*_A_RANGE).log())
        self.D = nn.Parameter(torch.ones(self.num_heads))
        for parameter in (self.dt_bias, self.A_log, self.D):
            mark_tensor_parallel(parameter, 0)
        self.norm = GatedGroupNorm(
            inner // tp_size, inner // groups, eps=_NORM_EPS, dtype=config.params_dtype
        )
        self.out_proj = build_output_projection(
            submodules.out_proj, config, inner, pg_collection, comm_buffer="fc2"
        )

    def cache_requirements(self) -> LayerCache:
        """A convolution tail and the state, [H, P, N]."""
        shape = (self.num_heads, self.head_dim, self.state_dim)
        state = StateTensor("ssm", shape, self.config.recurrent_state_dtype)
        return LayerCache(states=(self.conv1d.state(), state))

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """[T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        z, xBC, dt = projected.split(self.split_sizes, -1)
        xBC = self.conv1d(xBC, context, self.layer_number)
        x, B, C = xBC.split(
            [
                self.num_heads * self.head_dim,
                self.num_groups * self.state_dim,
                self.num_groups * self.state_dim,
            ],
            -1,
        )
        y_THP, final, captured = ssd_scan(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            F.softplus(dt.float() + self.dt_bias.float()),
            -self.A_log.float().exp(),
            B.unflatten(-1, (self.num_groups, self.state_dim)),
            C.unflatten(-1, (self.num_groups, self.state_dim)),
            self.D.float(),
            context.read_state(self.layer_number, "ssm"),
            context.ragged_layout(),
            self.config.mamba_chunk_size,
        )
        context.write_state(self.layer_number, "ssm", final, captured)
        return self.out_proj(self.norm(y_THP.flatten(1), z))


def _initial_dt_bias(num_heads: int) -> Tensor:
    """dt_bias such that softplus(dt_bias) is log-uniform over the usual range of time steps."""
    low, high = (math.log(limit) for limit in _DT_RANGE)
    dt = torch.empty(num_heads).uniform_(low, high).exp().clamp(min=_DT_FLOOR)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
