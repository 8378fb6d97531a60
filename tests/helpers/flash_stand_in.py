"""A stand-in for torch's FlashAttention 2, which runs on GPUs alone: its arguments and results, by
the equations that it computes by, in the dtype of its inputs."""

from itertools import pairwise

import torch

_LENGTHS = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
_NAMED = ["scale", "window_size_left", "window_size_right"]
_TENSORS = ["query", "key", "value"]
ARGUMENTS = (
    [*_TENSORS, *_LENGTHS, "return_debug_mask", *_NAMED],
    ["grad_out", *_TENSORS, "out", "logsumexp", *_LENGTHS, "rng_state", "unused", *_NAMED],
)
"""Names of the arguments of both functions."""


def _sequences(q, k, cu_q, cu_k, max_q, max_k, dropout, is_causal, scale, left, right):
    """Of each sequence: its rows, its keys, and its scores [H, q, k], -inf where hidden."""
    assert dropout == 0.0 and right == 0 and is_causal == (left == -1)
    assert cu_q.dtype == cu_k.dtype == torch.int32
    repeats = q.shape[1] // k.shape[1]
    for (first, end), (low, high) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist())):
        rows, keys = slice(first, end), slice(low, high)
        assert end - first <= max_q and high - low <= max_k
        wide = k[keys].repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows], wide) * scale
        # The last query sees the last key.
        place = torch.arange(end - first)[:, None] + (high - low) - (end - first)
        column = torch.arange(high - low)
        hidden = column > place
        if left >= 0:
            hidden |= column < place - left
        yield rows, keys, scores.masked_fill(hidden, -torch.inf)


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    """The outputs, log-sum-exps [H, q], and what a dropout would need."""
    form = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
    windows = (scale, window_size_left, window_size_right)
    out, sums = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
    repeats = query.shape[1] // key.shape[1]
    for rows, keys, scores in _sequences(query, key, *form, *windows):
        wide = value[keys].repeat_interleave(repeats, 1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide)
        sums[:, rows] = scores.logsumexp(-1)
    random = torch.zeros(2, dtype=torch.uint64)
    return out, sums, random, torch.empty(0), torch.empty(0)


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    """Gradients of query, key and value, from the outputs and log-sum-exps that are given."""
    form = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
    windows = (scale, window_size_left, window_size_right)
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    repeats = query.shape[1] // key.shape[1]
    for rows, keys, scores in _sequences(query, key, *form, *windows):
        wide_k, wide_v = (each[keys].repeat_interleave(repeats, 1) for each in (key, value))
        weights = torch.exp(scores - logsumexp[:, rows, None])
        moved = (grad_out[rows] * out[rows]).sum(-1).t().unsqueeze(-1)
        of_scores = weights * (torch.einsum("qhd,khd->hqk", grad_out[rows], wide_v) - moved) * scale
        grads[0][rows] = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
        of_k = torch.einsum("hqk,qhd->khd", of_scores, query[rows])
        of_v = torch.einsum("hqk,qhd->khd", weights, grad_out[rows])
        grads[1][keys] += of_k.unflatten(1, (-1, repeats)).sum(2)
        grads[2][keys] += of_v.unflatten(1, (-1, repeats)).sum(2)
    return grads


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    *, softmax_scale, causal, window_size, softcap,
):  # fmt: skip
    """flash-attn 2.6's, with soft caps; differentiable."""
    form = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, window_size[0] == -1)
    outs, repeats = [], q.shape[1] // k.shape[1]
    assert causal
    for _, keys, scores in _sequences(q, k, *form, softmax_scale, *window_size):
        weights = (softcap * torch.tanh(scores / softcap)).masked_fill(
            scores == -torch.inf, -torch.inf
        )
        wide = v[keys].repeat_interleave(repeats, 1)
        outs.append(torch.einsum("hqk,khd->qhd", weights.softmax(-1), wide))
    return torch.cat(outs)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale,
    causal, window_size, attention_chunk, num_splits, return_softmax_lse,
):  # fmt: skip
    """FlashAttention 3's over pages: outputs and log-sum-exps [H, q]. The names are those of
    tokenspeed-fa3 3.0.0.post20260810."""
    assert causal and num_splits == 1 and return_softmax_lse
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    out, sums = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    repeats = q.shape[1] // k_cache.shape[2]
    for r, (first, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length = int(cache_seqlens[r])
        assert end - first <= max_seqlen_q
        keys, values = (
            pages[page_table[r].long()].flatten(0, 1)[:length].repeat_interleave(repeats, 1)
            for pages in (k_cache, v_cache)
        )
        place, column = torch.arange(length - end + first, length)[:, None], torch.arange(length)
        hidden = column > place
        if window_size[0] >= 0:
            hidden |= column < place - window_size[0]
        if attention_chunk:
            hidden |= column < place // attention_chunk * attention_chunk
        scores = torch.einsum("qhd,khd->hqk", q[first:end], keys) * softmax_scale
        scores = scores.masked_fill(hidden, -torch.inf)
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, first:end] = scores.logsumexp(-1)
    return out, sums
