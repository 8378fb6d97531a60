"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the delta rule with a decay per channel."""

import torch
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.mixers.base import MixerPlace, StateTensor
from megatron_hybrid.models.mixers.gated_norm import GatedHeadNorm
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import ReplicatedLinear, build_input_projection
from megatron_hybrid.models.mixers.recurrent import RecurrentMixer
from megatron_hybrid.models.mixers.time_step import initial_A_log, initial_dt_bias, typical_decay
from megatron_hybrid.ops import kimi_delta_attention, time_steps


class KimiDeltaAttentionMixer(RecurrentMixer):
    """With P = Diag(exp(g)) S_{t-1}:  S_t = P + beta k_t (x) (v_t - k_t P),  o_t = q_t S_t.

    g = -exp(A) softplus(f(x) + dt_bias) has a value for each channel of the keys, or a bound
    (`kda_decay_bound`). f and the output gate are projections whose rank is the width of a value
    head, or full (`kda_low_rank_gates`).
    """

    recompute_name = "kimi_delta_attention"
    input_projection = None  # the gates read the input, too

    def __init__(self, config: HybridConfig, place: MixerPlace):
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        heads = config.linear_num_key_heads
        keys, values = heads * key_dim, heads * value_dim
        # Heads are split over the ranks; the inner dimension of the low-rank gates is replicated.
        super().__init__(
            config,
            place.with_input_projection(place.submodules.column),
            sections={"query": keys, "key": keys, "value": values, "beta": heads},
            convolved=("query", "key", "value"),
            kernel_size=config.linear_conv_kernel_dim,
            conv_dtype=torch.promote_types(config.params_dtype, torch.float32)
            if config.kda_fp32_conv
            else None,
        )
        tp_size = place.pg_collection.tp.size()
        self.key_dim, self.value_dim, self.num_heads = key_dim, value_dim, heads // tp_size
        self.qkv_sizes = self.in_proj.weight.cut.local_sections[:3]
        self.max_beta = 2.0 if config.linear_allow_neg_eigval else 1.0
        low_rank = config.kda_low_rank_gates
        if low_rank:
            self.f_a_proj, self.g_a_proj = (
                ReplicatedLinear(config, config.hidden_size, self.value_dim) for _ in range(2)
            )
        for gate, width in (("f", keys), ("g", values)):
            up = build_input_projection(
                place.submodules.column,
                config,
                (width,),
                place.pg_collection,
                input_size=self.value_dim if low_rank else None,
            )
            self.add_module(f"{gate}_b_proj" if low_rank else f"{gate}_proj", up)
        # Decay and time step stay in fp32 in a bf16 model, as in Mamba-2.
        self.A_log = self._own_part(initial_A_log(heads))
        self.dt_bias = self._own_part(initial_dt_bias(keys))
        self.out_norm = GatedHeadNorm(config, self.value_dim, place.pg_collection.tp, "sigmoid")
        self.out_proj = self._build_output(values)

    def recurrent_states(self) -> tuple[StateTensor, ...]:
        """Describe the state [H, N, P]."""
        shape = (self.num_heads, self.key_dim, self.value_dim)
        dt_bias_HN = self.dt_bias.view(self.num_heads, self.key_dim)
        bound = self.config.kda_decay_bound
        decay_HNP = typical_decay(self.A_log[:, None], dt_bias_HN, bound)[:, :, None]
        return (self._state("delta", shape, self.config.linear_num_key_heads, decay_HNP),)

    def _gate(self, name: str, hidden_Th: Tensor) -> Tensor:
        """Compute the projection "f" or "g" of the hidden state, [T, C]."""
        if not self.config.kda_low_rank_gates:
            return self._modules[f"{name}_proj"](hidden_Th)[0]
        return self._modules[f"{name}_b_proj"](self._modules[f"{name}_a_proj"](hidden_Th))[0]

    def training_reasons(self) -> tuple[str, ...]:
        """Say that gradients on a CPU are computed by chunks."""
        size = self.config.linear_chunk_size
        return (f"linear_chunk_size is {size}: a trainer takes chunks",) if size > 1 else ()

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        projected, _ = self.in_proj(hidden_Th)
        qkv, beta_TH = projected.split([sum(self.qkv_sizes), self.num_heads], -1)
        qkv = self.conv1d(qkv, context, self.layer_number)
        q_THN, k_THN, v_THP = (
            x.unflatten(-1, (self.num_heads, -1)) for x in qkv.split(self.qkv_sizes, -1)
        )
        g_TC, beta_TH = time_steps(
            self._gate("f", hidden_Th),
            self.dt_bias,
            self._decay_rates(),
            beta_TH=beta_TH,
            max_beta=self.max_beta,
            bound=self.config.kda_decay_bound,
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
        gate_THP = self._gate("g", hidden_Th).unflatten(-1, (self.num_heads, self.value_dim))
        return self.out_proj(self.out_norm(o_THP, gate_THP).flatten(1))
