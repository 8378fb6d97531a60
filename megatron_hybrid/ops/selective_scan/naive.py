"""The selective scan as it is written, token by token: the specification of
`ops.selective_scan`."""

import torch
from torch import Tensor


def selective_scan(
    x_TC: Tensor,
    dt_TC: Tensor,
    A_CN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    D_C: Tensor,
    state_CN: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run one sequence: outputs, and the state after each token."""
    outputs, states = [], []
    for x_C, dt_C, B_N, C_N in zip(x_TC, dt_TC, B_TN, C_TN):
        state_CN = (dt_C[:, None] * A_CN).exp() * state_CN + torch.outer(dt_C * x_C, B_N)
        outputs.append(state_CN @ C_N + D_C * x_C)
        states.append(state_CN)
    return torch.stack(outputs), torch.stack(states)
