"""Each row times the matrix of its slot: products of low-rank adapters (Chen et al. 2023, Punica:
arXiv:2310.18547; Sheng et al. 2023, S-LoRA: arXiv:2311.03285)."""

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.slot_linear import reference

slot_linear = Op(
    "slot_linear",
    reference.slot_linear,
    {"x": "T C", "weights": "any any C", "slots": "int T"},
)
slot_linear.register(kernel_backend("triton", "megatron_hybrid.ops.slot_linear.triton"))
