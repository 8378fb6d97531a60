"""Time steps, log decays and writing strengths of the recurrent mixers, from their projections."""

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.kernels import kernel_backend
from megatron_hybrid.ops.time_steps import reference

time_steps = Op(
    "time_steps",
    reference.time_steps,
    {"x_TC": "T C", "bias_C": "C", "factor_F": "F or None", "beta_TH": "T any or None"},
    {
        "F is None or F and C % F == 0": "factor_F has {F} numbers, which cannot be shared out "
        "evenly to {C} channels of x_TC",
    },
)
time_steps.register(kernel_backend("triton", "megatron_hybrid.ops.time_steps.triton"))
