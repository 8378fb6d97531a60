"""The routed experts of a mixture: one MLP each.

Shape suffixes: n tokens, E experts, k experts per token, m rows: one for each pair of a token and
one of its experts, and some that belong to none; h hidden, f the width of an expert, g the outputs
of its first layer: 2f where it is gated, or f.
"""

from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.dispatch import Backend, Op
from megatron_hybrid.ops.experts import grouped_mm, reference
from megatron_hybrid.ops.experts.pairs import ExpertPairs as ExpertPairs

expert_mlps = Op(
    "expert_mlps",
    reference.expert_mlps,
    {
        "x_mh": "any h",
        "ends_E": "int E",
        "fc1_Egh": "stack E g h",
        "fc1_bias_Eg": "stack E g or None",
        "fc2_Ehf": "stack E h any",
        "fc2_bias_Eh": "stack E h or None",
    },
    reads_host=True,
)
expert_mlps.register(
    Backend(
        "grouped_mm",
        grouped_mm.run,
        grouped_mm.verify,
        missing=grouped_mm.MISSING,
        # A CPU has no kernel of it: on long prompts the reference is faster there.
        device_type=None if dispatch.forced == "grouped_mm" else "cuda",
    )
)
