"""Sampling of one step's rows of logits.

Sampling is a pure function of (logits, parameters, tokens so far, seed, sample index, position),
without generator state. So preemption, chunks and batches do not change a request's draws, and all
ranks of a tensor-parallel job draw the same tokens without communication.

All rows are drawn on their device, without waiting for it: `to_host` is the one wait of a step.
Shape letters: n rows, m of them together, g of those guided, V tokens of the vocabulary, c most
likely, B bytes of a bit for each token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_hybrid.inference.sampling_params import Draw, SamplingParams
from megatron_hybrid.ops.to_device import to_device

_MASK64 = (1 << 64) - 1
_ROWS_AT_ONCE = 16
"""Rows that are sorted together: each takes some 40 bytes a token."""


def _splitmix64(x: int) -> int:
    """Steele, Lea & Flood (2014), "Fast splittable pseudorandom number generators"."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1), a hash of the three arguments (53 random bits)."""
    state = 0
    for part in (seed, sample_index, position):
        state = _splitmix64(state ^ (part & _MASK64))
    return (state >> 11) * 2.0**-53


def adjust(logits_nV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Change logits [n, V] by the guides, biases, penalties and bans of their draws.

    Returns:
        fp32 [n, V]; the given tensor itself, unchanged in any case, if no draw asks for a change.
    """
    rows = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if not rows:
        return logits_nV
    rows_m = to_device(rows, logits_nV.device)
    logits_mV = _adjusted(logits_nV.index_select(0, rows_m).float(), [draws[row] for row in rows])
    return logits_nV.float().index_copy(0, rows_m, logits_mV)


def _adjusted(logits_mV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Rows of fp32 [m, V], of draws that ask for it. May change them in place."""
    device = logits_mV.device
    params = [draw.params for draw in draws]

    def places(ids: Sequence[Sequence[int]]) -> Tensor | None:
        """Indices of some tokens of each row in the flattened logits; None: there are none."""
        parts = [np.asarray(own, np.int64) + row * V for row, own in enumerate(ids)]
        flat = np.concatenate(parts)
        return to_device(flat, device) if len(flat) else None

    m, V = logits_mV.shape
    if guided := [row for row, draw in enumerate(draws) if draw.allowed is not None]:
        words = np.stack([draws[row].allowed for row in guided]).astype("<i4", copy=False)
        bytes_gB1 = to_device(words.view(np.uint8), device, torch.uint8).unsqueeze(2)
        shifts_8 = torch.arange(8, dtype=torch.uint8, device=device)
        bits = ((bytes_gB1 >> shifts_8) & 1).flatten(1)
        ruled_out_gV = pad(bits, (0, V - bits.shape[1])) == 0
        guided_g = to_device(guided, device)
        guided_gV = logits_mV.index_select(0, guided_g).masked_fill_(ruled_out_gV, -torch.inf)
        logits_mV.index_copy_(0, guided_g, guided_gV)
    if (biased := places([list(own.logit_bias) for own in params])) is not None:
        biases = [bias for own in params for bias in own.logit_bias.values()]
        logits_mV.view(-1).index_add_(0, biased, to_device(biases, device, torch.float32))
    answered = places([() if d.answer_tokens is None else d.answer_tokens for d in draws])
    prompted = places([() if d.prompt_tokens is None else d.prompt_tokens for d in draws])
    if answered is not None or prompted is not None:
        factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        repetition_m1, frequency_m1, presence_m1 = to_device(
            list(zip(*factors)), device, torch.float32
        ).unsqueeze(2)
        counts_mV = logits_mV.new_zeros(m, V)
        if answered is not None:  # sums of ones are exact in every order
            counts_mV.view(-1).index_add_(0, answered, counts_mV.new_ones(len(answered)))
        known_mV = counts_mV > 0
        if prompted is not None:
            known_mV = known_mV.view(-1).index_fill_(0, prompted, True).view(m, V)
        penalised_mV = torch.where(
            logits_mV > 0, logits_mV / repetition_m1, logits_mV * repetition_m1
        )
        logits_mV = torch.where(known_mV, penalised_mV, logits_mV)
        logits_mV = logits_mV - frequency_m1 * counts_mV - presence_m1 * (counts_mV > 0)
    if (banned := places([draw.banned for draw in draws])) is not None:
        logits_mV.view(-1).index_fill_(0, banned, -torch.inf)
    return logits_mV


def sample(logits_nV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token for each row.

    Args:
        logits_nV: float [n, V], one row for each draw, equal on all tensor-parallel ranks; from
            `adjust`.
        draws: n parameters and stream positions.

    Returns:
        int64 [n]. Greedy rows take the first maximum; other rows invert the cumulative
        distribution of the truncated, tempered softmax (float64) at `uniform(...)`.
    """
    tokens_n = logits_nV.argmax(dim=-1)
    points = {
        row: uniform(draw.seed, draw.sample_index, draw.position)
        for row, draw in enumerate(draws)
        if not draw.params.is_greedy
    }
    params = [draw.params for draw in draws]
    for rows_m, allowed, points_m in _some_at_a_time(logits_nV, params, points):
        cumulative_mV = allowed.logits_mV.softmax(dim=-1).cumsum(dim=-1)
        points_m1 = points_m.unsqueeze(1) * cumulative_mV[:, -1:]
        ranks_m1 = torch.searchsorted(cumulative_mV, points_m1, right=True)
        ranks_m1 = torch.minimum(ranks_m1, allowed.counts_m1 - 1)
        tokens_n.index_copy_(0, rows_m, allowed.ids_mV.gather(1, ranks_m1).squeeze(1))
    return tokens_n


class _Allowed(NamedTuple):
    """The tokens that may be drawn, most likely first."""

    logits_mV: Tensor
    """Tempered, float64; -inf behind the last one."""
    ids_mV: Tensor
    """int64."""
    counts_m1: Tensor
    """int64."""


def _some_at_a_time(
    logits_nV: Tensor, params: Sequence[SamplingParams], points: Mapping[int, float]
) -> Iterator[tuple[Tensor, _Allowed, Tensor]]:
    """Yields (numbers int64 [m], tokens that may be drawn, points float64 [m]) of the rows in
    `points`."""
    rows, V = list(points), logits_nV.shape[1]
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        own = [params[row] for row in part]
        numbers = (  # all in one copy; without a top_p, its sum is never reached
            part,
            [each.temperature for each in own],
            [min(each.top_k or V, V) for each in own],
            [each.top_p or torch.inf for each in own],
            [each.min_p for each in own],
            [points[row] for row in part],
        )
        numbers_6m = to_device(numbers, logits_nV.device, torch.float64)
        rows_m, temperatures_m, top_k_m, top_p_m, min_p_m, points_m = numbers_6m
        rows_m = rows_m.long()
        allowed = _allowed(
            logits_nV.index_select(0, rows_m),
            temperatures_m.unsqueeze(1),
            top_k_m.long().unsqueeze(1),
            top_p_m.unsqueeze(1) if any(each.top_p for each in own) else None,
            min_p_m.unsqueeze(1) if any(each.min_p for each in own) else None,
        )
        yield rows_m, allowed, points_m


def _allowed(
    logits_mV: Tensor,
    temperatures_m1: Tensor,
    top_k_m1: Tensor,
    top_p_m1: Tensor | None,
    min_p_m1: Tensor | None,
) -> _Allowed:
    """The tokens that the parameters of each row allow to be drawn."""
    logits_mV, ids_mV = logits_mV.double().sort(dim=-1, descending=True, stable=True)
    # Relative to the largest, so that the division does not overflow at any temperature.
    logits_mV = (logits_mV - logits_mV[:, :1]).div_(temperatures_m1)
    if min_p_m1 is not None:
        counts_m1 = (logits_mV.exp() >= min_p_m1).sum(dim=-1, keepdim=True)
        top_k_m1 = torch.minimum(top_k_m1, counts_m1)
    ranks_V = torch.arange(logits_mV.shape[1], device=logits_mV.device)
    logits_mV.masked_fill_(ranks_V >= top_k_m1, -torch.inf)
    if top_p_m1 is None:
        return _Allowed(logits_mV, ids_mV, top_k_m1)
    # Kept: tokens whose predecessors sum to less than top_p, so at least one.
    cumulative_mV = logits_mV.softmax(dim=-1).cumsum(dim=-1)
    counts_m1 = (cumulative_mV < top_p_m1).sum(dim=-1, keepdim=True) + 1
    counts_m1 = torch.minimum(counts_m1, top_k_m1)
    return _Allowed(logits_mV.masked_fill_(ranks_V >= counts_m1, -torch.inf), ids_mV, counts_m1)


def raw_log_probs(logits_nV: Tensor) -> Tensor:
    """The model's own log-probabilities [n, V]: fp32 log-softmax of the untempered logits."""
    return logits_nV.float().log_softmax(dim=-1)


def processed_log_probs(logits_nV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities [n, V], fp32, with which each row (from `adjust`) is drawn by its `params`:
    tempered, truncated and renormalised. Those of tokens that cannot be drawn are -inf."""
    log_probs_nV = logits_nV.new_full(logits_nV.shape, -torch.inf, dtype=torch.float32)
    log_probs_nV.scatter_(1, logits_nV.argmax(dim=-1, keepdim=True), 0.0)
    rows = (row for row, own in enumerate(params) if not own.is_greedy)
    for rows_m, allowed, _ in _some_at_a_time(logits_nV, params, dict.fromkeys(rows, 0.0)):
        sorted_mV = allowed.logits_mV.log_softmax(dim=-1).float()
        log_probs_nV.index_copy_(
            0, rows_m, torch.empty_like(sorted_mV).scatter_(1, allowed.ids_mV, sorted_mV)
        )
    return log_probs_nV


class Scores(NamedTuple):
    """Log-probabilities of some rows, fp32."""

    of_tokens_n: Tensor
    """Of one token in each."""
    of_top_nc: Tensor
    """Of the most likely ones, most likely first."""
    top_ids_nc: Tensor
    """Their ids, int64."""


def score(log_probs_nV: Tensor, tokens_n: Tensor, top_n: int) -> Scores:
    """The log-probability of one token in each row, and of the `top_n` most likely ones."""
    of_tokens_n1 = log_probs_nV.gather(1, tokens_n.unsqueeze(1))
    return Scores(
        of_tokens_n1.squeeze(1), *log_probs_nV.topk(min(top_n, log_probs_nV.shape[1]), dim=-1)
    )


def to_host(tensors: Sequence[Tensor]) -> list[list]:
    """The values of int64 and fp32 tensors on one device, as nested lists. Copies all of them at
    once, and waits for that."""
    if len(tensors) == 1:
        return [tensors[0].tolist()]
    # Token ids and fp32 are exact in float64.
    values = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = values.split([tensor.numel() for tensor in tensors])
    return [part.to(t.dtype).view(t.shape).tolist() for part, t in zip(parts, tensors)]
