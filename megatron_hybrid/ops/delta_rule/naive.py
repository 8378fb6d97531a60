"""The delta rules as they are written, token by token: the specification of `ops.gated_delta_rule`
and of `ops.kimi_delta_attention`."""

import torch
from torch import Tensor


def delta_rule(
    q_THN: Tensor, k_THN: Tensor, v_THP: Tensor, g_TH: Tensor, beta_TH: Tensor, state_HNP: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one sequence: outputs, and the state after each token. The log decays g are `[T, H]`, or
    `[T, H, N]` for Kimi Delta Attention."""
    repeats = v_THP.shape[1] // k_THN.shape[1]
    q_THN, k_THN = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q_THN, k_THN))
    q_THN, k_THN = (t.repeat_interleave(repeats, 1) for t in (q_THN, k_THN))
    outputs, states = [], []
    for q_HN, k_HN, v_HP, g_H, beta_H in zip(q_THN, k_THN, v_THP, g_TH, beta_TH):
        state_HNP = g_H.exp().view(len(g_H), -1, 1) * state_HNP
        read_HP = torch.einsum("hn,hnp->hp", k_HN, state_HNP)
        delta_HP = beta_H[:, None] * (v_HP - read_HP)
        state_HNP = state_HNP + torch.einsum("hn,hp->hnp", k_HN, delta_HP)
        outputs.append(torch.einsum("hn,hnp->hp", q_HN, state_HNP) * q_HN.shape[-1] ** -0.5)
        states.append(state_HNP)
    return torch.stack(outputs), torch.stack(states)
