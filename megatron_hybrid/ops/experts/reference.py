"""MLPs of experts, one matrix product after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

PerExpert = torch.Tensor | Sequence[torch.Tensor]
"""A tensor with a leading dimension of experts, or one tensor an expert."""


def expert_mlps(
    x_mh: torch.Tensor,
    ends_E: torch.Tensor,
    fc1_Egh: PerExpert,
    fc1_bias_Eg: PerExpert | None,
    fc2_Ehf: PerExpert,
    fc2_bias_Eh: PerExpert | None,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """See `ops.expert_mlps`. It waits for the ends, and gives rows of no expert zeros."""
    ends = [0, *ends_E.tolist()]
    layers = list(zip(pairwise(ends), _layers(fc1_Egh, fc1_bias_Eg), _layers(fc2_Ehf, fc2_bias_Eh)))
    # One without rows, if all are: the parameters get a gradient in every backward.
    used = [layer for layer in layers if layer[0][0] < layer[0][1]] or layers[:1]
    outputs = [_mlp(x_mh[first:end], fc1, fc2, activate) for (first, end), fc1, fc2 in used]
    rest = len(x_mh) - ends[-1]
    return torch.cat([*outputs, outputs[0].new_zeros(rest, outputs[0].shape[1])])


def _layers(
    weight_E: PerExpert, bias_E: PerExpert | None
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight [out, in] and bias [out] of each expert."""
    biases = [None] * len(weight_E) if bias_E is None else _experts(bias_E)
    return list(zip(_experts(weight_E), biases))


def _experts(tensor_E: PerExpert) -> Sequence[torch.Tensor]:
    # One unbind: taking experts out one by one costs a gradient of full size each.
    return tensor_E.unbind(0) if isinstance(tensor_E, torch.Tensor) else tensor_E


def _mlp(
    x_mh: torch.Tensor,
    fc1: tuple[torch.Tensor, torch.Tensor | None],
    fc2: tuple[torch.Tensor, torch.Tensor | None],
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """One expert, [m, h] -> [m, h]."""
    return F.linear(activate(F.linear(x_mh, *fc1)), *fc2)
