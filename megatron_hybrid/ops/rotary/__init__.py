"""Rotary position embedding of queries and keys (arXiv 2104.09864), after their norms."""

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.rotary import reference

rotate_heads = Op(
    "rotate_heads",
    reference.rotate_heads,
    {
        **{"q_TKGD": "T K any D", "k_TKD": "T K D", "cos_T1d": "T 1 d", "sin_T1d": "T 1 d"},
        **{"q_weight_D": "D or None", "k_weight_D": "D or None"},
    },
    {"2 * d <= D": "cos_T1d has angles of {d} pairs, and heads have {D} numbers: a pair takes two"},
)
rotate_heads.register(kernel_backend("triton", "megatron_hybrid.ops.rotary.triton"))
