"""The routed experts of a mixture: one MLP each.

Shape suffixes: n tokens, m pairs of a token and one of its experts, E experts, k experts per token,
h hidden, f the width of an expert, g the outputs of its first layer: 2f where it is gated, or f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.experts import reference
from megatron_hybrid.ops.experts.pairs import ExpertPairs as ExpertPairs
from megatron_hybrid.ops.experts.reference import PerExpert

_expert_mlps = Op("expert_mlps", reference.expert_mlps)


def expert_mlps(
    x_mh: torch.Tensor,
    counts: Sequence[int],
    fc1_Egh: PerExpert,
    fc1_bias_Eg: PerExpert | None,
    fc2_Ehf: PerExpert,
    fc2_bias_Eh: PerExpert | None,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The MLP of each row's expert: y_m = fc2_e(activate(fc1_e(x_m))).

    Args:
        x_mh: `[m, h]`, expert by expert; m may be 0.
        counts: the rows of each of the E experts.
        fc1_Egh, fc1_bias_Eg: the first layers, `[E, g, h]` and `[E, g]` or None; stacked in one
            tensor, or one tensor an expert.
        fc2_Ehf, fc2_bias_Eh: the second layers, `[E, h, f]` and `[E, h]` or None; likewise.
        activate: `[m, g]` -> `[m, f]`.

    Returns:
        `[m, h]`. Differentiable. A row's bits do not depend on other rows.
    """
    return _expert_mlps(x_mh, counts, fc1_Egh, fc1_bias_Eg, fc2_Ehf, fc2_bias_Eh, activate)
