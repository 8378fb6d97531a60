"""The state-space scan of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs")."""

from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.slot_states import SlotOp
from megatron_hybrid.ops.ssd import reference

ssd_scan = SlotOp(
    "ssd_scan",
    reference.ssd_scan,
    {
        **{"x_THP": "T H P", "dt_TH": "T H", "A_H": "H", "B_TGN": "T G N", "C_TGN": "T G N"},
        "D_H": "H",
    },
    state="state H P N",
    conditions={
        "G and H % G == 0": "{H} heads cannot be shared out evenly to {G} groups of B and C",
        "chunk_size > 0": "chunk_size is {chunk_size}; it must be at least 1",
    },
    has_steps_in_place=True,
)
ssd_scan.register(
    kernel_backend(
        "mcore",
        "megatron_hybrid.ops.ssd.mcore",
        {"megatron.core.ssm.ops.intermediate_extraction": "megatron-core>=0.19"},
    )
)
