"""Lightning attention (MiniMax-01, arXiv 2501.08313): linear attention with a fixed decay."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StateTensor
from megatron_hybrid.models.mixers.gated_norm import GatedGroupNorm
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.models.mixers.rotary import build_rotary
from megatron_hybrid.models.norms import HeadNorm
from megatron_hybrid.ops import activate, ssd_scan


class LightningAttentionMixer(RecurrentMixer):
    """S_t = d S_{t-1} + v_t (x) k_t,  o_t = S_t q_t,  normed over all heads, then gated.

    Head h of H decays by d = exp(-f 2^(-8 h / H)), h from 1; f is `lightning_decay_factor`. This is
    Mamba-2's scan with time steps of 1, and keys and queries of each head. With `lightning_rope`
    queries and keys are those of attention: normed, turned and scaled.
    """

    recompute_name = "lightning_attention"
    chunk_field = "linear_chunk_size"

    def __init__(self, config: HybridConfig, place: MixerPlace):
        heads, tp = config.linear_num_key_heads, place.pg_collection.tp
        keys, values = heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
        sections = {"z": values, "query": keys, "key": keys, "value": values}
        super().__init__(config, place, sections=sections)
        self.split_sizes = self.in_proj.weight.cut.local_sections
        self.num_heads = heads // tp.size()
        first = tp.rank() * self.num_heads + 1
        decays = [2.0 ** (-8 * h / heads) for h in range(first, first + self.num_heads)]
        A_H = torch.tensor(decays) * -config.lightning_decay_factor
        self.register_buffer("A_H", A_H, persistent=False)
        self.norm = GatedGroupNorm(
            values,
            values // config.lightning_norm_groups,
            tp,
            eps=config.linear_norm_epsilon or config.layernorm_epsilon,
            dtype=config.params_dtype,
            norm_before_gate=True,
            activation="sigmoid",
        )
        self.out_proj = self._build_output(values)
        self.rotary = None
        if config.lightning_rope:
            key_dim = config.linear_key_head_dim
            self.rotary = build_rotary(config, int(key_dim * config.rotary_percent))
            self.q_norm, self.k_norm = (
                HeadNorm(config, key_dim, config.layernorm_epsilon, tp) for _ in range(2)
            )

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the state [H, P, N]."""
        config = self.config
        shape = self.num_heads, config.linear_value_head_dim, config.linear_key_head_dim
        decay_HPN = self.A_H.exp()[:, None, None]
        return (self._state("lightning", shape, config.linear_num_key_heads, decay_HPN),)

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        z, qkv = projected.split([self.split_sizes[0], sum(self.split_sizes[1:])], -1)
        if not self.config.lightning_rope:
            qkv = activate(qkv, F.silu)
        q_THN, k_THN, v_THP = (
            part.unflatten(-1, (self.num_heads, -1)) for part in qkv.split(self.split_sizes[1:], -1)
        )
        if self.config.lightning_rope:
            q_THN, k_THN = self.q_norm(q_THN), self.k_norm(k_THN)
            if self.rotary is not None:
                positions_T, layout = context.token_positions(), context.ragged_layout()
                cos_sin = self.rotary.cos_sin_of_batch(layout, positions_T, q_THN.dtype)
                q_THN, k_THN = (self.rotary.rotate(x, cos_sin) for x in (q_THN, k_THN))
            q_THN = q_THN * q_THN.shape[-1] ** -0.5
        o_THP = ssd_scan(
            v_THP,
            self.A_H.new_ones(v_THP.shape[:2]),
            self.A_H,
            k_THN,
            q_THN,
            torch.zeros_like(self.A_H),
            context.states(self.layer_number, "lightning"),
            context.ragged_layout(),
            self.config.linear_chunk_size,
        )
        return self.out_proj(self.norm(o_THP.flatten(1), z))
