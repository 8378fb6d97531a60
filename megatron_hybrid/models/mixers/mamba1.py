"""Mamba-1, the selective scan (arXiv 2312.00752), with the parameters of the authors' `Mamba`; and
the gated memory unit, which reads its output."""

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StackInputs, StateTensor
from megatron_hybrid.models.mixers.gated_norm import gated
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.models.mixers.time_step import initial_dt_bias, typical_decay
from megatron_hybrid.models.sharding.tensor_sharding import shard
from megatron_hybrid.ops import selective_scan, time_steps
from megatron_hybrid.ops.checks import join
from megatron_hybrid.ops.linear import linear


class Mamba1Mixer(RecurrentMixer):
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t (x) B_t,  y_t = h_t C_t + D x_t, gated.

    Channels are split over the ranks; dt, B and C are sums over the channels of all ranks. With
    `mamba1_num_heads`, whole heads are split over the ranks, and dt, B and C are of a head.
    """

    recompute_name = "mamba"

    takes_stack_inputs = True

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
        self.is_source = place.layer_number in config.pattern.memory_sources.values()
        tp_size, tp_rank = place.pg_collection.tp.size(), place.pg_collection.tp.rank()
        self.state_dim = config.mamba1_state_dim
        self.num_channels, self.num_full_channels = inner // tp_size, inner
        self.split_sizes = [rank, self.state_dim, self.state_dim]

        # Decay and skip stay in fp32 in a bf16 model, as in Mamba-2.
        decay = torch.arange(1.0, self.state_dim + 1.0).log()
        self.A_log = self._own_part(decay.repeat(inner, 1))
        self.D = self._own_part(torch.ones(inner))
        self.out_proj = self._build_output(inner, config.mamba1_proj_bias)
        self.num_heads = max(1, config.mamba1_num_heads // tp_size)
        """Heads of this rank."""
        if config.mamba1_num_heads > 1:
            self._build_heads(config.mamba1_num_heads)
            return

        # dt, B and C are sums over the channels of all ranks, in all rows.
        config = config.with_all_rows()
        width, init_method = sum(self.split_sizes), config.init_method
        self.x_proj = build_output_projection(
            place, config, inner, output_size=width, init_method=init_method
        )
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            self._build_norm(size) for size in self.split_sizes
        )
        self.dt_proj = build_input_projection(
            place.submodules.column,
            config,
            (inner,),
            place.pg_collection,
            bias=True,
            skip_bias_add=True,
            input_size=rank,
            init_method=lambda weight: nn.init.uniform_(weight, -(rank**-0.5), rank**-0.5),
        )
        with torch.no_grad():
            bias = self.dt_proj.bias
            bias.copy_(shard(initial_dt_bias(inner), bias, tp_rank))

    def _build_heads(self, heads: int) -> None:
        """Build the projections to dt, B and C of each head."""
        config, inner, rank = self.config, self.num_full_channels, self.split_sizes[0]
        width, channels = sum(self.split_sizes), inner // heads
        x_weight, dt_weight = torch.empty(heads * width, channels), torch.empty(inner, rank)
        if config.perform_initialization:
            config.init_method(x_weight)
            dt_weight.uniform_(-(rank**-0.5), rank**-0.5)
        dtype = config.params_dtype
        self.x_proj_weight = self._own_part(x_weight.to(dtype))
        self.dt_proj_weight = self._own_part(dt_weight.to(dtype))
        self.dt_proj_bias = self._own_part(initial_dt_bias(inner).to(dtype))

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the state [C, N], for each head."""
        heads = self.num_heads
        has_heads = self.config.mamba1_num_heads > 1
        bias_C = self.dt_proj_bias if has_heads else self.dt_proj.bias
        shape = (self.num_channels // heads, self.state_dim)
        decays = typical_decay(self.A_log, bias_C[:, None]).chunk(heads)
        full_size = self.num_full_channels // heads
        return tuple(
            self._state(name, shape, full_size, decay)
            for name, decay in zip(self._state_names(), decays)
        )

    def _state_names(self) -> list[str]:
        return ["ssm"] if self.num_heads == 1 else [f"ssm{h}" for h in range(self.num_heads)]

    def forward(
        self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        x_TC, z_TC = projected.chunk(2, -1)
        x_TC = self.conv1d(x_TC, context, self.layer_number)
        A_CN = self._decay_rates()
        layout, heads = context.ragged_layout(), self.num_heads
        of_heads = zip(
            x_TC.chunk(heads, -1),
            self._scan_inputs(x_TC),
            A_CN.chunk(heads),
            self.D.float().chunk(heads),
            self._state_names(),
        )
        y_TC = join(
            [
                selective_scan(
                    x,
                    time_steps(dt, bias)[0],
                    A,
                    B,
                    C,
                    D,
                    context.states(self.layer_number, name),
                    layout,
                    self.config.mamba1_chunk_size,
                )
                for x, (dt, bias, B, C), A, D, name in of_heads
            ],
            -1,
        )
        if self.is_source:
            inputs.memories[self.layer_number] = y_TC
        return self.out_proj(gated(y_TC, z_TC))

    def _scan_inputs(self, x_TC: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Compute time steps [T, C], their bias [C], B and C [T, N], of each head."""
        if self.config.mamba1_num_heads > 1:
            heads = self.num_heads
            weights = (self.x_proj_weight, self.dt_proj_weight, self.dt_proj_bias)
            found = []
            for x, x_weight, dt_weight, bias in zip(
                x_TC.chunk(heads, -1), *(weight.chunk(heads) for weight in weights)
            ):
                dt, B_TN, C_TN = linear(x, x_weight).split(self.split_sizes, -1)
                found.append((linear(dt, dt_weight), bias, B_TN, C_TN))
            return found
        parts, _ = self.x_proj(x_TC)
        dt, B_TN, C_TN = parts.split(self.split_sizes, -1)
        dt_TC, dt_bias_C = self.dt_proj(self.dt_layernorm(dt))
        # Every rank uses all of B and C for its own channels: their gradients are summed over
        # ranks.
        B_TN, C_TN = (
            copy_to_tensor_model_parallel_region(norm(part), self.pg_collection.tp)
            for norm, part in ((self.b_layernorm, B_TN), (self.c_layernorm, C_TN))
        )
        return [(dt_TC, dt_bias_C, B_TN, C_TN)]

    def _build_norm(self, size: int) -> nn.Module:
        """Build the norm of dt, B or C: an RMS norm, for any `normalization`, or an identity."""
        config = self.config
        if config.mamba1_norm == "none":
            return nn.Identity()
        return nn.RMSNorm(
            size,
            config.mamba1_norm_epsilon,
            elementwise_affine=config.mamba1_norm == "weighted",
            dtype=config.params_dtype,
        )


class GatedMemoryMixer(RecurrentMixer):
    """The gated memory unit of SambaY (arXiv 2507.06607): out_proj(memory * SiLU(in_proj(x))).

    The memory is what the last Mamba-1 layer before it gave for the same token in the same forward,
    before its gate. Nothing is kept between calls.
    """

    takes_stack_inputs = True

    def __init__(self, config: HybridConfig, place: MixerPlace):
        inner, bias = config.mamba1_inner_size, config.mamba1_proj_bias
        super().__init__(config, place, sections={"z": inner}, bias=bias)
        self.source = config.pattern.memory_sources[place.layer_number]
        self.out_proj = self._build_output(inner, bias)

    def forward(
        self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        z_TC, _ = self.in_proj(hidden_Th)
        return self.out_proj(gated(inputs.memories[self.source], z_TC))
