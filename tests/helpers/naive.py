"""Ops as they are written: attention as one softmax over all keys, recurrent ones token by token.
The specification of `ops.paged_attention`, and of the ops that carry a state."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_hybrid.ops.activations import silu
from megatron_hybrid.ops.attention.pattern import AttentionPattern


def visibility(query_positions: Tensor, key_positions: Tensor, pattern: AttentionPattern) -> Tensor:
    """Which keys each query sees, bool `[T, S]`."""
    rows, columns = query_positions[:, None], key_positions[None]
    visible = columns <= rows
    if pattern.window is not None:
        visible &= rows - columns < pattern.window
    if pattern.chunk is not None:
        visible &= rows // pattern.chunk == columns // pattern.chunk
    if pattern.skips_first:
        visible &= (columns > 0) | (rows == 0)
    return visible


def attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKP: Tensor, pattern: AttentionPattern, sinks_H: Tensor | None
) -> Tensor:
    """The last T tokens of one sequence over its S keys: outputs `[T, H, P]`."""
    positions = torch.arange(len(k_SKD))
    visible_TS = visibility(positions[len(k_SKD) - len(q_THD) :], positions, pattern)
    repeats = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD, v_SHP = (t.repeat_interleave(repeats, dim=1) for t in (k_SKD, v_SKP))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * pattern.scale
    if pattern.softcap is not None:
        scores_HTS = pattern.softcap * (scores_HTS / pattern.softcap).tanh()
    weights_HTS = scores_HTS.masked_fill(~visible_TS, -torch.inf).exp()
    total_HT1 = weights_HTS.sum(-1, keepdim=True)
    if sinks_H is not None:
        total_HT1 = total_HT1 + sinks_H[:, None, None].exp()
    return torch.einsum("hts,shp->thp", weights_HTS / total_HT1, v_SHP)


def ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    state_HPN: Tensor,
) -> tuple[Tensor, Tensor]:
    """One sequence: outputs, and the state after each token."""
    repeats = x_THP.shape[1] // B_TGN.shape[1]
    outputs, states = [], []
    for x_HP, dt_H, B_GN, C_GN in zip(x_THP, dt_TH, B_TGN, C_TGN):
        B_HN, C_HN = (t.repeat_interleave(repeats, 0) for t in (B_GN, C_GN))
        decay_H11 = (dt_H * A_H).exp()[:, None, None]
        state_HPN = decay_H11 * state_HPN + torch.einsum("h,hp,hn->hpn", dt_H, x_HP, B_HN)
        outputs.append(torch.einsum("hpn,hn->hp", state_HPN, C_HN) + D_H[:, None] * x_HP)
        states.append(state_HPN)
    return torch.stack(outputs), torch.stack(states)


def delta_rule(
    q_THN: Tensor, k_THN: Tensor, v_THP: Tensor, g_TH: Tensor, beta_TH: Tensor, state_HNP: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence: outputs, and the state after each token. The log decays g are `[T, H]`, or
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


def selective_scan(
    x_TC: Tensor,
    dt_TC: Tensor,
    A_CN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    D_C: Tensor,
    state_CN: Tensor,
) -> tuple[Tensor, Tensor]:
    """One sequence: outputs, and the state after each token."""
    outputs, states = [], []
    for x_C, dt_C, B_N, C_N in zip(x_TC, dt_TC, B_TN, C_TN):
        state_CN = (dt_C[:, None] * A_CN).exp() * state_CN + torch.outer(dt_C * x_C, B_N)
        outputs.append(state_CN @ C_N + D_C * x_C)
        states.append(state_CN)
    return torch.stack(outputs), torch.stack(states)


def causal_conv1d(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor,
    tail_Ck: Tensor,
    activation: Callable[[Tensor], Tensor] = silu,
) -> tuple[Tensor, Tensor]:
    """One sequence: outputs, and the last K - 1 inputs after each token."""
    outputs, tails = [], []
    for x_C in x_TC:
        window_CK = torch.cat([tail_Ck, x_C[:, None]], dim=1)
        outputs.append(activation((window_CK * weight_CK).sum(1) + bias_C))
        tail_Ck = window_CK[:, 1:]
        tails.append(tail_Ck)
    return torch.stack(outputs), torch.stack(tails)
