"""Routed experts, one matrix product after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megatron_hybrid.ops.ragged import ROW_ALIGNMENT

PerExpert = torch.Tensor | Sequence[torch.Tensor]
"""A tensor with a leading dimension of experts, or one tensor an expert."""


def routed_experts(
    hidden_nh: torch.Tensor,
    weights_nE: torch.Tensor,
    chosen_nE: torch.Tensor,
    fc1_Egh: PerExpert,
    fc1_bias_Eg: PerExpert | None,
    fc2_Ehf: PerExpert,
    fc2_bias_Eh: PerExpert | None,
    activate: Callable[[torch.Tensor], torch.Tensor],
    weigh_inputs: bool,
) -> torch.Tensor:
    """See `ops.routed_experts`."""
    expert_m, token_m = chosen_nE.t().nonzero(as_tuple=True)  # expert by expert
    x_mh = hidden_nh[token_m]
    weights_m1 = weights_nE[token_m, expert_m].unsqueeze(-1)
    if weigh_inputs:
        x_mh = (x_mh * weights_m1).to(x_mh.dtype)
    counts = torch.bincount(expert_m, minlength=chosen_nE.shape[1]).tolist()
    layers = zip(x_mh.split(counts), _layers(fc1_Egh, fc1_bias_Eg), _layers(fc2_Ehf, fc2_bias_Eh))
    y_mh = torch.cat([_mlp(*layer, activate) for layer in layers if len(layer[0])]).float()
    if not weigh_inputs:
        y_mh = y_mh * weights_m1
    # Sum over each token's k experts in the order of their numbers, independent of the batch.
    by_token = token_m.argsort(stable=True)
    parts = y_mh[by_token].unflatten(0, (len(hidden_nh), -1)).unbind(1)
    y_nh = parts[0]
    for part in parts[1:]:
        y_nh = y_nh + part
    return y_nh.to(hidden_nh.dtype)


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
    padding = -len(x_mh) % ROW_ALIGNMENT
    x_mg = F.linear(F.pad(x_mh, (0, 0, 0, padding)), *fc1)
    return F.linear(activate(x_mg), *fc2)[: len(x_mh)]
