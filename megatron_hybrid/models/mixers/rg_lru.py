"""The recurrent block of Griffin, with its real-gated linear recurrent unit (arXiv 2402.19427)."""

import torch
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StateTensor
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.ops import activate, selective_scan
from megatron_hybrid.ops.activations import sigmoid, softplus
from megatron_hybrid.ops.linear import full_rows

_DECAYS = (0.9, 0.999)
"""Range of the decays of initial weights, where the gate is open."""
_RATE = 8.0
_SMALLEST_STEP = 1e-20
"""Step below which a decay is 1, and the step's input 0."""


class RGLRUMixer(RecurrentMixer):
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t,  o_t = h_t act(y_t),  for each channel.

    a_t = exp(-8 r_t softplus(recurrent_param)). r and i are sigmoids of projections of x, whose
    channels are in blocks that do not mix. The first token of a sequence has the factor 1 in place
    of the square root. This is Mamba-1's scan with one state a channel and time steps of -log a_t.
    """

    recompute_name = "rg_lru"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        width, blocks = config.lru_width, config.lru_num_blocks
        super().__init__(
            config,
            place,
            sections={"y": width, "x": width},
            convolved=("x",),
            kernel_size=config.lru_conv_kernel,
            bias=True,
            conv_bias=True,
            activation=None,
        )
        dtype, tp_size = config.params_dtype, place.pg_collection.tp.size()
        self.num_blocks, self.full_width = blocks // tp_size, width
        for gate in ("input", "recurrent"):
            weight = torch.empty(width, width // blocks)
            if config.perform_initialization:
                config.init_method(weight)
            self.register_parameter(f"{gate}_gate_weight", self._own_part(weight.to(dtype)))
            bias = self._own_part(torch.zeros(width, dtype=dtype))
            self.register_parameter(f"{gate}_gate_bias", bias)
        rates = -torch.empty(width).uniform_(*_DECAYS).log() / _RATE
        recurrent_param = rates.expm1().log()  # the inverse of softplus
        self.recurrent_param = self._own_part(recurrent_param.to(dtype))
        self.out_proj = self._build_output(width, bias=True)

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the state [C, 1], so small that nothing is gained by rounding it."""
        shape = (len(self.recurrent_param), 1)
        dtype = self.config.recurrent_state_dtype
        return (StateTensor("lru", shape, dtype, full_size=self.full_width),)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        y_TC, x_TC = projected.chunk(2, -1)
        x_TC = self.conv1d(x_TC, context, self.layer_number)
        input_TC, recurrent_TC = (self._gate(name, x_TC) for name in ("input", "recurrent"))
        steps_TC = (_RATE * recurrent_TC * softplus(self.recurrent_param.float())).clamp(
            min=_SMALLEST_STEP
        )
        is_first_T1 = (context.token_positions() == 0)[:, None]
        squares_TC = torch.where(is_first_T1, 1.0, -torch.expm1(-2.0 * steps_TC))
        inputs_TC = input_TC * x_TC.float() * squares_TC.sqrt()
        ones_T1, ones_C = steps_TC.new_ones(len(x_TC), 1), torch.ones_like(steps_TC[0])
        h_TC = selective_scan(
            inputs_TC / steps_TC,  # the scan multiplies by the steps
            steps_TC,
            -ones_C[:, None],
            ones_T1,
            ones_T1,
            torch.zeros_like(ones_C),
            context.states(self.layer_number, "lru"),
            context.ragged_layout(),
        )
        y_TC = activate(y_TC, self.config.activation_func)
        return self.out_proj(h_TC.to(y_TC.dtype) * y_TC)

    def _gate(self, name: str, x_TC: Tensor) -> Tensor:
        """Compute the gate "input" or "recurrent": sigmoids of block projections, fp32 [T, C]."""
        weight_CB, bias_C = (self._parameters[f"{name}_gate_{part}"] for part in ("weight", "bias"))
        weight_HBB = weight_CB.unflatten(0, (self.num_blocks, -1))
        x_HTB = full_rows(x_TC).unflatten(1, (self.num_blocks, -1)).transpose(0, 1)
        gate_TC = (x_HTB @ weight_HBB).transpose(0, 1).flatten(1)[: len(x_TC)] + bias_C
        return sigmoid(gate_TC.float())
