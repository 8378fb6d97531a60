"""Gated DeltaNet (arXiv 2412.06464), with the parameters and arithmetic of core's GatedDeltaNet."""

import torch
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StateTensor
from megatron_hybrid.models.mixers.gated_norm import GatedHeadNorm
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.models.mixers.time_step import initial_A_log, typical_decay
from megatron_hybrid.ops import gated_delta_rule, time_steps


class GatedDeltaNetMixer(RecurrentMixer):
    """With P = exp(g) S_{t-1}:  S_t = P + beta k_t (x) (v_t - k_t P),  o_t = q_t S_t."""

    recompute_name = "gated_delta_net"
    chunk_field = "linear_chunk_size"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        keys, values = key_heads * key_dim, value_heads * value_dim
        tp_size = place.pg_collection.tp.size()
        copies = max(1, tp_size // key_heads)  # of a key head, on the ranks with its value heads
        sections = {"query": keys, "key": keys, "value": values, "z": values}
        super().__init__(
            config,
            place,
            sections={**sections, "beta": value_heads, "alpha": value_heads},
            convolved=("query", "key", "value"),
            kernel_size=config.linear_conv_kernel_dim,
            copies={"query": copies, "key": copies},
        )
        self.key_dim, self.value_dim = key_dim, value_dim
        self.num_value_heads = value_heads // tp_size
        self.max_beta = 2.0 if config.linear_allow_neg_eigval else 1.0
        widths = self.in_proj.weight.cut.local_sections
        self.qkv_sizes, self.split_sizes = widths[:3], [sum(widths[:3]), *widths[3:]]
        # Decay and time step stay in fp32 in a bf16 model, as in Mamba-2.
        self.A_log = self._own_part(initial_A_log(value_heads))
        self.dt_bias = self._own_part(torch.ones(value_heads))
        self.out_norm = GatedHeadNorm(config, value_dim, place.pg_collection.tp, "silu")
        self.out_proj = self._build_output(values)

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the state [H, N, P]."""
        shape = (self.num_value_heads, self.key_dim, self.value_dim)
        decay_HNP = typical_decay(self.A_log, self.dt_bias)[:, None, None]
        return (self._state("delta", shape, self.config.linear_num_value_heads, decay_HNP),)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        qkv, gate, beta, alpha = projected.split(self.split_sizes, -1)
        qkv = self.conv1d(qkv, context, self.layer_number)
        q, k, v = qkv.split(self.qkv_sizes, -1)
        A_H = self._decay_rates()
        g_TH, beta_TH = time_steps(alpha, self.dt_bias, A_H, beta_TH=beta, max_beta=self.max_beta)
        o_THP = gated_delta_rule(
            q.unflatten(-1, (-1, self.key_dim)),
            k.unflatten(-1, (-1, self.key_dim)),
            v.unflatten(-1, (-1, self.value_dim)),
            g_TH,
            beta_TH,
            context.states(self.layer_number, "delta"),
            context.ragged_layout(),
            self.config.linear_chunk_size,
        )
        gate_THP = gate.unflatten(-1, (-1, self.value_dim))
        return self.out_proj(self.out_norm(o_THP, gate_THP).flatten(1))
