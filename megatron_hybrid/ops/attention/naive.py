"""Attention as it is written, one softmax over all keys: the specification of `ops.attention`."""

import torch
from torch import Tensor

from megatron_hybrid.ops.attention.pattern import AttentionPattern


def visibility(query_positions: Tensor, key_positions: Tensor, pattern: AttentionPattern) -> Tensor:
    """Return which keys each query sees, bool `[T, S]`."""
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
    """Attend from the last T tokens of one sequence to its S keys: outputs `[T, H, P]`."""
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
