"""Mamba-2 (arXiv 2405.21060), with the parameters and the arithmetic of core's MambaMixer."""

import torch
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StateTensor
from megatron_hybrid.models.mixers.gated_norm import GatedGroupNorm, gated
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.models.mixers.time_step import initial_A_log, initial_dt_bias, typical_decay
from megatron_hybrid.ops import ssd_scan, time_steps


class Mamba2Mixer(RecurrentMixer):
    """S_t = exp(dt A) S_{t-1} + dt x_t (x) B_t,  y_t = S_t C_t + D x_t, gated and normed."""

    recompute_name = "mamba"
    chunk_field = "mamba_chunk_size"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        heads, groups = config.mamba_num_heads, config.mamba_num_groups
        inner, group_states = heads * config.mamba_head_dim, groups * config.mamba_state_dim
        tp_size = place.pg_collection.tp.size()
        copies = max(1, tp_size // groups)  # of a group's B and C, on the ranks with its heads
        groups_states = {"B": group_states, "C": group_states}
        super().__init__(
            config,
            place,
            sections={"z": inner, "x": inner, **groups_states, "dt": heads},
            convolved=("x", "B", "C"),
            kernel_size=config.mamba_conv_kernel,
            copies={"B": copies, "C": copies},
            bias=config.mamba_proj_bias,
            conv_bias=config.mamba_conv_bias,
        )
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.chunk_size = config.mamba_chunk_size
        self.num_heads = heads // tp_size
        widths = self.in_proj.weight.cut.local_sections
        self.xBC_sizes = widths[1:4]
        self.split_sizes = [widths[0], sum(self.xBC_sizes), widths[4]]
        multipliers = None
        if config.mamba_section_multipliers is not None:
            factors = torch.tensor(config.mamba_section_multipliers, dtype=config.params_dtype)
            multipliers = torch.cat([f.expand(width) for f, width in zip(factors, widths)])
        self.register_buffer("multipliers", multipliers, persistent=False)
        # Time step, decay and skip stay in fp32 in a bf16 model; in core the last two do.
        self.dt_bias = self._own_part(initial_dt_bias(heads))
        self.A_log = self._own_part(initial_A_log(heads))
        self.D = self._own_part(torch.ones(heads))
        self.norm = None
        if config.mamba_gated_norm != "none":
            self.norm = GatedGroupNorm(
                inner,
                inner // groups,
                place.pg_collection.tp,
                eps=config.mamba_norm_epsilon,
                dtype=config.params_dtype,
                norm_before_gate=config.mamba_gated_norm == "norm_first",
            )
        self.out_proj = self._build_output(inner, config.mamba_proj_bias)

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the state [H, P, N]."""
        shape = (self.num_heads, self.head_dim, self.state_dim)
        decay_HPN = typical_decay(self.A_log, self.dt_bias)[:, None, None]
        return (self._state("ssm", shape, self.config.mamba_num_heads, decay_HPN),)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        z, xBC, dt = projected.split(self.split_sizes, -1)
        xBC = self.conv1d(xBC, context, self.layer_number)
        x, B, C = xBC.split(self.xBC_sizes, -1)
        limits = self.config.mamba_dt_min, self.config.mamba_dt_max
        dt, _ = time_steps(dt, self.dt_bias, limits=limits)
        y_THP = ssd_scan(
            x.unflatten(-1, (-1, self.head_dim)),
            dt,
            self._decay_rates(),
            B.unflatten(-1, (-1, self.state_dim)),
            C.unflatten(-1, (-1, self.state_dim)),
            self.D.float(),
            context.states(self.layer_number, "ssm"),
            context.ragged_layout(),
            self.chunk_size,
        )
        gate = gated if self.norm is None else self.norm
        return self.out_proj(gate(y_THP.flatten(1), z))
