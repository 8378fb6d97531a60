"""MLPs of experts, one matrix product after the other."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_hybrid.ops.dispatch import numbers_of
from megatron_hybrid.ops.linear import linear

PerExpert = torch.Tensor | Sequence[torch.Tensor]
"""A tensor with a leading dimension of experts, or one tensor an expert, which may be made when it
is taken: of packed weights, with `parts` as `ops.packed_linear` takes them."""


def expert_mlps(
    x_mh: torch.Tensor,
    ends_E: torch.Tensor,
    fc1_Egh: PerExpert,
    fc1_bias_Eg: PerExpert | None,
    fc2_Ehf: PerExpert,
    fc2_bias_Eh: PerExpert | None,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run the MLP of each row's expert: y_m = fc2_e(activate(fc1_e(x_m))).

    This function waits for the ends, and gives rows of no expert zeros.

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
        `row_alignment`.
    """
    evenly = [len(x_mh) * (e + 1) // len(ends_E) for e in range(len(ends_E))]
    spans = list(pairwise([0, *numbers_of(ends_E, evenly)]))
    if spans[-1][1] > len(x_mh):
        raise ValueError(
            f"x_mh of expert_mlps has {len(x_mh)} rows, and ends_E says {spans[-1][1]}"
        )
    layers = (fc1_Egh, fc1_bias_Eg, fc2_Ehf, fc2_bias_Eh)
    fc1_E, fc1_bias_E, fc2_E, fc2_bias_E = (_experts(layer, len(spans)) for layer in layers)
    # One without rows, if all are: the parameters get a gradient in every backward.
    used = [e for e, (first, end) in enumerate(spans) if first < end] or [0]
    outputs = []
    for e in used:
        x_mg, fc2_hf = linear(x_mh[slice(*spans[e])], fc1_E[e], fc1_bias_E[e]), fc2_E[e]
        outputs.append(linear(activated(activate, x_mg, fc2_hf), fc2_hf, fc2_bias_E[e]))
    rest = len(x_mh) - spans[-1][1]
    return torch.cat([*outputs, outputs[0].new_zeros(rest, outputs[0].shape[1])])


def _experts(tensor_E: PerExpert | None, num_experts: int) -> Sequence[Any]:
    if tensor_E is None:
        return [None] * num_experts
    # One unbind: taking experts out one by one costs a gradient of full size each.
    return tensor_E.unbind(0) if isinstance(tensor_E, torch.Tensor) else tensor_E


def activated(
    activate: Callable[[torch.Tensor], torch.Tensor], x_mg: torch.Tensor, fc2_Ehf: torch.Tensor
) -> torch.Tensor:
    """Compute activate(x), `[m, f]`.

    Raises:
        ValueError: it is of another width than the second layer takes.
    """
    x_mf = activate(x_mg)
    if x_mf.shape[1] != fc2_Ehf.shape[-1]:
        raise ValueError(
            f"fc2_Ehf of expert_mlps has shape {list(fc2_Ehf.shape)}, and activate gives rows of "
            f"{x_mf.shape[1]} numbers: its last size must be that"
        )
    return x_mf
