"""The routed experts of a mixture: one MLP each.

Shape suffixes: n tokens, E experts, k experts per token, m rows: one for each pair of a token and
one of its experts, and some that belong to none; h hidden, f the width of an expert, g the outputs
of its first layer: 2f where it is gated, or f.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.dispatch import Backend, Op
from megatron_hybrid.ops.experts import grouped_mm, reference
from megatron_hybrid.ops.experts.pairs import ExpertPairs as ExpertPairs
from megatron_hybrid.ops.experts.reference import PerExpert

_expert_mlps = Op(
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
)
_expert_mlps.register(
    Backend(
        "grouped_mm",
        grouped_mm.run,
        grouped_mm.verify,
        priority=10,
        missing=grouped_mm.MISSING,
        # A CPU has no kernel of it: on long prompts the reference is faster there.
        device_type=None if dispatch.forced == "grouped_mm" else "cuda",
    )
)


def expert_mlps(
    x_mh: torch.Tensor,
    ends_E: torch.Tensor,
    fc1_Egh: PerExpert,
    fc1_bias_Eg: PerExpert | None,
    fc2_Ehf: PerExpert,
    fc2_bias_Eh: PerExpert | None,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The MLP of each row's expert: y_m = fc2_e(activate(fc1_e(x_m))).

    Args:
        x_mh: `[m, h]`, expert by expert; m may be 0. See `ExpertPairs`.
        ends_E: the row after those of each of the E experts, int32 on the device of x, ascending.
            Rows from the last one on are of no expert.
        fc1_Egh, fc1_bias_Eg: the first layers, `[E, g, h]` and `[E, g]` or None; stacked in one
            tensor, or one tensor an expert.
        fc2_Ehf, fc2_bias_Eh: the second layers, `[E, h, f]` and `[E, h]` or None; likewise.
        activate: `[m, g]` -> `[m, f]`, row by row.

    Returns:
        `[m, h]`. Differentiable. Rows of no expert, and their gradients, may hold anything. The
        bits of the others do not depend on other rows, if all ends are multiples of
        `ROW_ALIGNMENT`.
    """
    return _expert_mlps(x_mh, ends_E, fc1_Egh, fc1_bias_Eg, fc2_Ehf, fc2_bias_Eh, activate)
