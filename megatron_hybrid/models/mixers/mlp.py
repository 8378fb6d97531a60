"""megatron-core's MLP as a mixer; it uses no context."""

from __future__ import annotations

from statistics import NormalDist

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import Mixer, MixerPlace
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.sharding.collectives import sum_over_ranks
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel
from megatron_hybrid.ops import activate
from megatron_hybrid.ops.checks import compute_dtype


def activated(
    config: HybridConfig, x_Tg: Tensor, tp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Apply activation and gate of an MLP: [T, 2f] -> [T, f] if it is gated, else [T, f] -> [T, f].
    `activation_sparsity` needs the ranks of all channels, the tp_group."""
    if not config.gated_linear_unit:
        return activate(x_Tg, config.activation_func)
    gate_Tf, x_Tf = x_Tg.chunk(2, -1)
    if config.mlp_gate_multiplier != 1.0:
        gate_Tf = gate_Tf * config.mlp_gate_multiplier
    if config.activation_sparsity:
        gate_Tf = _sparse(config, gate_Tf, tp_group)
    limit, after = config.activation_func_clamp_value, config.activation_clamp_after
    if limit is not None:
        x_Tf = x_Tf.clamp(-limit, limit)
        gate_Tf = gate_Tf if after else gate_Tf.clamp(max=limit)
    if config.glu_linear_offset:
        x_Tf = x_Tf + config.glu_linear_offset
    if limit is not None and after:
        return activate(gate_Tf, config.activation_func).clamp(max=limit) * x_Tf
    return activate(gate_Tf, config.activation_func, x_Tf)


def _sparse(config: HybridConfig, gate_Tf: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Lower this rank's channels of a gate by the `activation_sparsity` quantile, and clip at 0."""

    def mean(x_Tf: Tensor) -> Tensor:
        return sum_over_ranks(x_Tf.sum(-1, keepdim=True) / config.ffn_hidden_size, tp_group)

    wide_Tf = gate_Tf.to(compute_dtype(gate_Tf))
    wide_Tf = wide_Tf - mean(wide_Tf)
    # Rows of padding may be 0, where a square root has no gradient.
    deviation_T1 = mean(wide_Tf.square()).clamp(min=1e-30).sqrt()
    quantile = NormalDist().inv_cdf(config.activation_sparsity)
    return F.relu(wide_Tf - deviation_T1 * quantile).to(gate_Tf.dtype)


class MLPMixer(MLP, Mixer):
    """Two projections with an activation in between, gated or not."""

    recompute_name = "mlp"

    splits_rows = True
    input_projection = "linear_fc1"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__(
            config,
            MLPSubmodules(
                linear_fc1=place.submodules.input_projection, linear_fc2=place.submodules.row
            ),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=place.pg_collection.tp,
        )
        self.ranks = place.pg_collection.tp
        # A rank holds its piece of the gate and its piece of the value, one after the other.
        sections = (config.ffn_hidden_size,) * (2 if config.gated_linear_unit else 1)
        cut = Cut(0, sections, place.pg_collection.tp.size())
        mark_tensor_parallel(self.linear_fc1.weight, cut)
        if config.add_bias_linear:
            mark_tensor_parallel(self.linear_fc1.bias, cut)
        cut = Cut(1, (config.ffn_hidden_size,), place.pg_collection.tp.size())
        mark_tensor_parallel(self.linear_fc2.weight, cut)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        if self.config.bias_activation_fusion:
            output_Th, bias = super().forward(hidden_Th)
        else:
            x_Tg, bias = self.linear_fc1(hidden_Th)
            x_Tg = x_Tg if bias is None else x_Tg + bias
            output_Th, bias = self.linear_fc2(activated(self.config, x_Tg, self.ranks))
        factor = self.config.mlp_output_multiplier
        if factor != 1.0:
            output_Th, bias = output_Th * factor, None if bias is None else bias * factor
        return output_Th, bias
