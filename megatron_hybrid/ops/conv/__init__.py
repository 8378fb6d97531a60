"""Causal depthwise convolution over ragged sequences, with the tail of inputs as its state."""

from megatron_hybrid.ops.conv import reference
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.slot_states import SlotOp

causal_conv1d = SlotOp(
    "causal_conv1d",
    reference.causal_conv1d,
    {"x_TC": "T C", "weight_CK": "C K", "bias_C": "C or None"},
    state="float C K-1",
    conditions={
        "K > 1": "weight_CK has K = {K} columns; a causal convolution needs at least 2",
        "activation in ('silu', None)": "activation is {activation!r}; choose 'silu' or None",
        "x_TC.dtype == torch.float16 or pool_S is None or pool_S.dtype != torch.float16": "pool_S "
        "is float16 but x_TC is {x_TC.dtype}: a tail holds inputs, and float16 rounds and "
        "overflows them",
    },
)
causal_conv1d.register(kernel_backend("triton", "megatron_hybrid.ops.conv.triton"))
