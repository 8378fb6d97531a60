"""The gated delta rule (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692)."""

from __future__ import annotations

import torch

from megatron_hybrid.ops.delta_rule import reference
from megatron_hybrid.ops.kernels import TRITON, kernel_backend
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotOp, SlotStates

_CHUNKS = {"chunk_size > 0": "chunk_size is {chunk_size}; it must be at least 1"}
_gated_delta_rule = SlotOp(
    "gated_delta_rule",
    reference.gated_delta_rule,
    {
        **{"q_THN": "T H_qk N", "k_THN": "T H_qk N", "v_THP": "T H P"},
        **{"g_TH": "T H", "beta_TH": "T H"},
    },
    state="state H N P",
    conditions={
        "H_qk and H % H_qk == 0": "{H} heads of v cannot be shared out evenly to {H_qk} of q and k",
        **_CHUNKS,
    },
    has_steps_in_place=True,
)
_kimi_delta_attention = SlotOp(
    "kimi_delta_attention",
    reference.kimi_delta_attention,
    {
        **{"q_THN": "T H N", "k_THN": "T H N", "v_THP": "T H P"},
        **{"g_THN": "T H N", "beta_TH": "T H"},
    },
    state="state H N P",
    conditions=_CHUNKS,
    has_steps_in_place=True,
)
for _op in (_gated_delta_rule, _kimi_delta_attention):
    _op.register(
        kernel_backend(
            "fla",
            "megatron_hybrid.ops.delta_rule.fla",
            TRITON | {"fla.ops.kda": "fla-core"},
            priority=10,
        )
    )


def gated_delta_rule(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    states: SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> torch.Tensor:
    """S' = exp(g_t) S_{t-1};  S_t = S' + k_t (x) beta_t (v_t - k_t S');  o_t = scale q_t S_t.

    Args:
        q_THN, k_THN: `[T, H_qk, N]`; H_qk divides the heads H of v, and each head of q and k serves
            H / H_qk consecutive heads of v.
        v_THP: values `[T, H, P]`.
        g_TH: log decays `[T, H]`, at most 0.
        beta_TH: writing strengths `[T, H]`, from 0 to 1, or to 2 for negative eigenvalues.
        states: fp32 or bf16 `[H, N, P]` per slot; None: start from zeros and keep nothing.
        layout: lengths, positions and captures of the sequences.
        chunk_size: rows of a chunk; the result does not depend on it but for rounding.
        scale: factor of q, N ** -0.5 by default.
        use_qk_l2norm: divide each row of q and k by its length first.

    Returns:
        o `[T, H, P]` in the dtype of v, zeros in padding rows. All arithmetic is fp32, whatever the
        inputs are (float64 for float64 inputs). Captures change neither o nor the states
        in any bit.

    Raises:
        TypeError: fp16 states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other.
    """
    return _gated_delta_rule(
        q_THN, k_THN, v_THP, g_TH, beta_TH, states, layout, chunk_size, scale, use_qk_l2norm
    )


def kimi_delta_attention(
    q_THN: torch.Tensor,
    k_THN: torch.Tensor,
    v_THP: torch.Tensor,
    g_THN: torch.Tensor,
    beta_TH: torch.Tensor,
    states: SlotStates | None,
    layout: RaggedLayout,
    chunk_size: int = 64,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> torch.Tensor:
    """S' = Diag(exp(g_t)) S_{t-1};  S_t = S' + k_t (x) beta_t (v_t - k_t S');  o_t = scale q_t S_t.

    The gated delta rule with a decay of its own for each key channel. Arguments, result and errors
    are those of `gated_delta_rule`, but:

    Args:
        q_THN, k_THN: `[T, H, N]`.
        g_THN: log decays `[T, H, N]`, at most 0; best in fp32.
    """
    return _kimi_delta_attention(
        q_THN, k_THN, v_THP, g_THN, beta_TH, states, layout, chunk_size, scale, use_qk_l2norm
    )
