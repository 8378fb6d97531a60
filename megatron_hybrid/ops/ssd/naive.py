"""The state-space scan as it is written, token by token: the specification of `ops.ssd_scan`."""

import torch
from torch import Tensor


def ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    state_HPN: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run one sequence: outputs, and the state after each token."""
    repeats = x_THP.shape[1] // B_TGN.shape[1]
    outputs, states = [], []
    for x_HP, dt_H, B_GN, C_GN in zip(x_THP, dt_TH, B_TGN, C_TGN):
        B_HN, C_HN = (t.repeat_interleave(repeats, 0) for t in (B_GN, C_GN))
        decay_H11 = (dt_H * A_H).exp()[:, None, None]
        state_HPN = decay_H11 * state_HPN + torch.einsum("h,hp,hn->hpn", dt_H, x_HP, B_HN)
        outputs.append(torch.einsum("hpn,hn->hp", state_HPN, C_HN) + D_H[:, None] * x_HP)
        states.append(state_HPN)
    return torch.stack(outputs), torch.stack(states)
