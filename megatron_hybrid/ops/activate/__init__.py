"""An activation function, and its product with a factor: of MLPs, and of gates without a norm."""

from megatron_hybrid.ops.activate import reference
from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import kernel_backend

activate = Op("activate", reference.activate, {"x": "...", "factor": "... or None"})
activate.register(kernel_backend("triton", "megatron_hybrid.ops.activate.triton"))
