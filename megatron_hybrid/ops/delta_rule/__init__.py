"""The gated delta rule (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692)."""

from megatron_hybrid.ops.delta_rule import reference
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.slot_states import SlotOp

_CHUNKS = {"chunk_size > 0": "chunk_size is {chunk_size}; it must be at least 1"}
gated_delta_rule = SlotOp(
    "gated_delta_rule",
    reference.delta_rule,
    {
        **{"q_THN": "T H_qk N", "k_THN": "T H_qk N", "v_THP": "T H P"},
        **{"g": "T H", "beta_TH": "T H"},
    },
    state="state H N P",
    conditions={
        "H_qk and H % H_qk == 0": "{H} heads of v cannot be shared out evenly to {H_qk} of q and k",
        **_CHUNKS,
    },
    has_steps_in_place=True,
)
kimi_delta_attention = SlotOp(
    "kimi_delta_attention",
    reference.delta_rule,
    {
        **{"q_THN": "T H N", "k_THN": "T H N", "v_THP": "T H P"},
        **{"g": "T H N", "beta_TH": "T H"},
    },
    state="state H N P",
    conditions=_CHUNKS,
    has_steps_in_place=True,
)
for _op in (gated_delta_rule, kimi_delta_attention):
    _op.register(
        kernel_backend("fla", "megatron_hybrid.ops.delta_rule.fla", {"fla.ops.kda": "fla-core"})
    )
