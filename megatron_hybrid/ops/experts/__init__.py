"""The routed experts of a mixture: one MLP each.

Shape suffixes: n tokens, m pairs of a token and one of its experts, E experts, k experts per token,
h hidden, f the width of an expert, g the outputs of its first layer: 2f where it is gated, or f.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.experts import reference
from megatron_hybrid.ops.experts.reference import PerExpert

_routed_experts = Op("routed_experts", reference.routed_experts)


def routed_experts(
    hidden_nh: torch.Tensor,
    weights_nE: torch.Tensor,
    chosen_nE: torch.Tensor,
    fc1_Egh: PerExpert,
    fc1_bias_Eg: PerExpert | None,
    fc2_Ehf: PerExpert,
    fc2_bias_Eh: PerExpert | None,
    activate: Callable[[torch.Tensor], torch.Tensor],
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """Every token's weighted sum of its experts: y_n = sum_e w_ne fc2_e(activate(fc1_e(x_n))).

    Args:
        hidden_nh: tokens `[n, h]`, at least one.
        weights_nE: of each expert, fp32 `[n, E]`.
        chosen_nE: which experts, bool `[n, E]`, the same number k for each token.
        fc1_Egh, fc1_bias_Eg: the first layers, `[E, g, h]` and `[E, g]` or None; stacked in one
            tensor, or one tensor an expert.
        fc2_Ehf, fc2_bias_Eh: the second layers, `[E, h, f]` and `[E, h]` or None; likewise.
        activate: `[m, g]` -> `[m, f]`.
        weigh_inputs: w_ne is a factor of the expert's input, not of its output.

    Returns:
        `[n, h]` in the dtype of hidden. Differentiable. A row's bits do not depend on other rows.
    """
    return _routed_experts(
        hidden_nh,
        weights_nE,
        chosen_nE,
        fc1_Egh,
        fc1_bias_Eg,
        fc2_Ehf,
        fc2_bias_Eh,
        activate,
        weigh_inputs,
    )
