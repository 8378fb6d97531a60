"""The selective scan of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752, equation 2)."""

from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.selective_scan import reference
from megatron_hybrid.ops.slot_states import SlotOp

selective_scan = SlotOp(
    "selective_scan",
    reference.selective_scan,
    {
        **{"x_TC": "T C", "dt_TC": "T C", "A_CN": "C N", "B_TN": "T N", "C_TN": "T N"},
        "D_C": "C",
    },
    state="state C N",
    conditions={"chunk_size > 0": "chunk_size is {chunk_size}; it must be at least 1"},
)
selective_scan.register(kernel_backend("triton", "megatron_hybrid.ops.selective_scan.triton"))
