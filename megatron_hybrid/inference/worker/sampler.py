"""Sampling of one step's rows of logits.

A row's draw is the token with the largest sum of logit, divided by the temperature, and Gumbel
noise, which makes it a draw from their softmax. The noise is a hash of (seed, sample index,
position, token id), so a draw is a pure function of (logits, parameters, tokens so far, seed,
sample index, position), without generator state: preemption, chunks and batches do not change a
request's draws, and all ranks of a tensor-parallel job draw the same tokens without communication.
A token's noise does not depend on the others' logits. So a change that leaves out tokens, or rounds
logits, changes a draw only if it rules out the token or brings another one to the top.

All rows are drawn on their device, without waiting for it: a step waits in `HostCopy.wait` alone.
Shape letters: n rows, m of them together, g of those guided, V tokens of the vocabulary, c most
likely, C candidates, B bytes of a bit for each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_hybrid.inference.sampling_params import (
    DRAW_AGAIN,
    NOT_FINITE,
    RULED_OUT,
    Draw,
    SamplingParams,
)
from megatron_hybrid.ops.to_device import to_device

NUM_CANDIDATES = 1024
"""Number of most likely tokens among which `sample` first looks for those that top_p keeps."""

_NUM_LOUDEST = 64
"""Number of tokens whose exact noise is computed. The largest sum is not among them once in 2**64
draws: a token's bound exceeds it with at most its probability times an Exp(1) number."""
_MASS_UNIT = 2.0**-40
"""Probabilities, relative to the largest one, are summed in whole numbers of it: integers have the
same sum in any order, so on any device, next to any rows."""
_TOKENS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements of the rows that are handled at a time. On a CPU they stay in its cache; on a GPU they
take at most some 150 MB."""
_MASK64 = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    """Mix 64 bits. Steele, Lea & Flood (2014), "Fast splittable pseudorandom number generators"."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def noise_keys(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """Hash the three arguments into two int32, the keys of a row in the hash of its tokens."""
    state = 0
    for part in (seed, sample_index, position):
        state = _splitmix64(state ^ (part & _MASK64))
    return (state >> 32) - (1 << 31), (state & 0xFFFFFFFF) - (1 << 31)


def token_hash(ids_mC: Tensor, keys_2m1: Tensor) -> Tensor:
    """Hash each token id in its row into int32 [m, C], uniform in [0, 2**31).

    Integer products wrap around, so the hash has the same bits on every device. The mixing steps
    are those of "lowbias32" (Wellons, 2018, "Prospecting for hash functions").

    Args:
        ids_mC: int32 [m, C] or [1, V].
        keys_2m1: int32 [2, m, 1], from `noise_keys`.
    """
    h_mC = (ids_mC * (0x9E3779B9 - (1 << 32))) ^ keys_2m1[0]
    h_mC ^= (h_mC >> 16).bitwise_and_(0xFFFF)  # a shift of int32 repeats the sign
    h_mC *= 0x7FEB352D
    h_mC ^= keys_2m1[1]
    h_mC ^= (h_mC >> 15).bitwise_and_(0x1FFFF)
    h_mC *= 0x846CA68B - (1 << 32)
    h_mC ^= (h_mC >> 16).bitwise_and_(0xFFFF)
    return h_mC.bitwise_and_(0x7FFFFFFF)


def gumbel_noise(hash_mC: Tensor) -> Tensor:
    """Compute -log(-log(1 - w)), float64, of w in (0, 1) from a `token_hash`."""
    w_mC = (hash_mC.double() + 0.5) * 2.0**-31
    return -(-torch.log1p(-w_mC)).log()


def noise_bound(hash_mV: Tensor) -> Tensor:
    """Return an upper bound of each token's Gumbel noise, fp32. If large, it is within 0.06 of it.

    w <= -log(1 - w) bounds the noise by -log(w); the bits of a float, as an integer, are a
    piecewise linear bound of its logarithm.
    """
    bits_mV = hash_mV.float().view(torch.int32).float()
    log_2 = math.log(2)
    return bits_mV.mul_(-log_2 * 2.0**-23).add_((31 + 127) * log_2)


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
    """Adjust rows of fp32 [m, V], perhaps in place. All draws ask for a change."""
    device = logits_mV.device
    params = [draw.params for draw in draws]

    def places(ids: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the indices of some tokens of each row in the flattened logits, if any."""
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
        # Finite logits stay finite, and what is ruled out stays so.
        most = torch.finfo(torch.float32).max
        known_mV &= logits_mV > -torch.inf
        logits_mV = torch.where(known_mV, penalised_mV.clamp_(-most, most), logits_mV)
        logits_mV = logits_mV - frequency_m1 * counts_mV - presence_m1 * (counts_mV > 0)
    if (banned := places([draw.banned for draw in draws])) is not None:
        logits_mV.view(-1).index_fill_(0, banned, -torch.inf)
    return logits_mV


def sample(
    logits_nV: Tensor, draws: Sequence[Draw], num_candidates: int = NUM_CANDIDATES
) -> Tensor:
    """Draw one token for each row.

    Args:
        logits_nV: float [n, V], one row for each draw, equal on all tensor-parallel ranks; from
            `adjust`.
        draws: n parameters and stream positions.
        num_candidates: most likely tokens among which those that `top_p` keeps are looked for.

    Returns:
        int64 [n]. Greedy rows take the first maximum; other rows the largest sum of tempered logit
        and noise, of all tokens that are kept. A row gets `DRAW_AGAIN` if `top_p` keeps more than
        the candidates, which are fewer than V: draw it again with more of them. Their number
        changes no other token. If the largest logit of a row is not finite, its token means
        nothing: see `mark_failures`.
    """
    params = [draw.params for draw in draws]
    if any(own.is_greedy for own in params):
        tokens_n = logits_nV.argmax(dim=-1)
    else:
        tokens_n = logits_nV.new_empty(len(draws), dtype=torch.int64)
    for rows, truncates in _parts(logits_nV, params, draws):
        ids_1V = _ids(logits_nV)
        logits_mV = logits_nV.index_select(0, rows.numbers_m)
        if truncates:
            kept_mC, ids_mC, is_all_m = _truncated(logits_mV, ids_1V, rows, num_candidates)
            tokens_m = _loudest(kept_mC, ids_mC, rows.keys_2m1)
            if is_all_m is not None:
                tokens_m.masked_fill_(~is_all_m, DRAW_AGAIN)
        else:
            kept_mV = rows.tempered(logits_mV, logits_mV.amax(dim=-1, keepdim=True))
            bounds_mV = noise_bound(token_hash(ids_1V, rows.keys_2m1)).add_(kept_mV)
            ids_mC = bounds_mV.topk(min(_NUM_LOUDEST, bounds_mV.shape[1]), sorted=False).indices
            tokens_m = _loudest(kept_mV.gather(1, ids_mC), ids_mC, rows.keys_2m1)
        tokens_n.index_copy_(0, rows.numbers_m, tokens_m)
    return tokens_n


def mark_failures(tokens_n: Tensor, logits_nV: Tensor, adjusted_nV: Tensor) -> Tensor:
    """Put `NOT_FINITE` or `RULED_OUT` into drawn tokens [n] for rows that no token can come from.

    Args:
        tokens_n: from `sample`.
        logits_nV: the model's own.
        adjusted_nV: from `adjust`.
    """
    if adjusted_nV is not logits_nV:
        tokens_n = tokens_n.masked_fill(adjusted_nV.amax(dim=-1) == -torch.inf, RULED_OUT)
    return torch.where(_is_finite(logits_nV), tokens_n, NOT_FINITE)


def _is_finite(logits_nV: Tensor) -> Tensor:
    """Return whether the largest logits of rows [n] are finite: no NaN, no inf, not all -inf."""
    return logits_nV.amax(dim=-1).isfinite()


def _ids(logits_nV: Tensor) -> Tensor:
    """Return the ids of all tokens, int32 [1, V]."""
    return torch.arange(logits_nV.shape[1], dtype=torch.int32, device=logits_nV.device)[None]


def _loudest(logits_mC: Tensor, ids_mC: Tensor, keys_2m1: Tensor) -> Tensor:
    """Find the id, int64 [m], of the largest sum of logit and noise. It is computed in float64, so
    that devices whose logarithms round differently agree; there are few candidates."""
    noise_mC = gumbel_noise(token_hash(ids_mC.int(), keys_2m1))
    best_m1 = noise_mC.add_(logits_mC).argmax(dim=-1, keepdim=True)
    return ids_mC.gather(1, best_m1).squeeze(1)


class _Rows(NamedTuple):
    """Some rows, and their parameters."""

    numbers_m: Tensor
    temperatures_m1: Tensor
    """fp32."""
    floors_m1: Tensor | None
    """Smallest tempered logit, relative to the largest one, that min_p keeps, fp32; None if no row
    has a min_p."""
    top_k_m1: Tensor
    """int64; V in rows without top_k."""
    top_p_m1: Tensor
    """float64; infinite in rows without top_p."""
    keys_2m1: Tensor
    """int32, from `noise_keys`."""
    largest_top_k: int
    """It is 0 if no row has a top_k."""
    sums_all: bool
    """Whether a row has no top_k, so that its top_p is a part of all tokens."""

    def tempered(self, logits_mC: Tensor, largest_m1: Tensor) -> Tensor:
        """Return tempered logits, fp32 [m, C], relative to the largest; min_p sets some to -inf."""
        # Relative, so that the division does not overflow at any temperature.
        logits_mC = (logits_mC.float() - largest_m1.float()).div_(self.temperatures_m1)
        if self.floors_m1 is not None:
            logits_mC.masked_fill_(logits_mC < self.floors_m1, -torch.inf)
        return logits_mC


def _parts(
    logits_nV: Tensor, params: Sequence[SamplingParams], draws: Sequence[Draw] | None = None
) -> Iterator[tuple[_Rows, bool]]:
    """Yield some rows at a time that are not greedy, and whether top_k or top_p may leave out
    tokens of them. Without `draws` they have no keys."""
    V, device = logits_nV.shape[1], logits_nV.device
    groups: dict[bool, list[int]] = {False: [], True: []}
    for row, own in enumerate(params):
        if not own.is_greedy:
            groups[0 < own.top_k < V or 0 < own.top_p < 1].append(row)
    if not any(groups.values()):
        return
    order = groups[False] + groups[True]
    chosen = [params[row] for row in order]
    keys = [(0, 0)] * len(order)
    if draws is not None:
        points = ((draws[row].seed, draws[row].sample_index, draws[row].position) for row in order)
        keys = [noise_keys(*point) for point in points]
    numbers = (  # all in one copy; int32 is exact in float64
        order,
        [own.temperature for own in chosen],
        [math.log(own.min_p) if own.min_p else -math.inf for own in chosen],
        [min(own.top_k or V, V) for own in chosen],
        [own.top_p if 0 < own.top_p < 1 else math.inf for own in chosen],
        *zip(*keys),
    )
    numbers_7m1 = to_device(numbers, device, torch.float64).unsqueeze(2)
    rows_m1, temperatures_m1, floors_m1, top_k_m1, top_p_m1 = numbers_7m1[:5]
    numbers_m, temperatures_m1 = rows_m1.long().squeeze(1), temperatures_m1.float()
    floors_m1, top_k_m1, keys_2m1 = floors_m1.float(), top_k_m1.long(), numbers_7m1[5:].int()
    step = max(1, _TOKENS_AT_ONCE.get(device.type, _TOKENS_AT_ONCE["cuda"]) // V)
    first = 0
    for truncates, rows in groups.items():
        end = first + len(rows)
        for start in range(first, end, step):
            some = slice(start, min(start + step, end))
            own = chosen[some]
            part = _Rows(
                numbers_m[some],
                temperatures_m1[some],
                floors_m1[some] if any(each.min_p for each in own) else None,
                top_k_m1[some],
                top_p_m1[some],
                keys_2m1[:, some],
                max(each.top_k for each in own),
                any(not each.top_k for each in own),
            )
            yield part, truncates
        first = end


def _truncated(
    logits_mV: Tensor, ids_1V: Tensor, rows: _Rows, num_candidates: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what min_p, then top_k, then top_p keep, most likely first, of equal logits the first
    ones: tempered logits, fp32 [m, C], -inf after the last one; their ids, int64 [m, C]; and
    whether they are all that may be drawn, bool [m], or None if they are in all rows."""
    V = logits_mV.shape[1]
    size = min(max(rows.largest_top_k, num_candidates if rows.sums_all else 0), V)
    ids_mC = _most_likely(logits_mV, ids_1V, size)
    raw_mC = logits_mV.gather(1, ids_mC)
    kept_mC = rows.tempered(raw_mC, raw_mC[:, :1])
    ranks_C = torch.arange(kept_mC.shape[1], device=kept_mC.device)
    kept_mC.masked_fill_(ranks_C >= rows.top_k_m1, -torch.inf)
    masses_mC = _masses(kept_mC)
    sums_mC = masses_mC.cumsum(dim=-1)
    found_m1 = totals_m1 = sums_mC[:, -1:]
    if rows.sums_all:
        all_m1 = _masses(rows.tempered(logits_mV, raw_mC[:, :1])).sum(dim=-1, keepdim=True)
        totals_m1 = torch.where(rows.top_k_m1 < V, totals_m1, all_m1)
    # Kept: tokens whose predecessors sum to less than top_p, so at least one.
    limits_m1 = rows.top_p_m1 * totals_m1
    kept_mC.masked_fill_(sums_mC - masses_mC >= limits_m1, -torch.inf)
    is_all_m = None
    if rows.sums_all and size < V:  # so rows are drawn again until all tokens are candidates
        is_all_m = (found_m1 >= limits_m1.minimum(totals_m1)).squeeze(1)
    return kept_mC, ids_mC, is_all_m


def _masses(logits_mC: Tensor) -> Tensor:
    """Compute exp of logits that are at most 0, as int64 multiples of `_MASS_UNIT`. It uses
    float64, so that devices whose exp rounds differently agree."""
    return logits_mC.double().exp_().mul_(1 / _MASS_UNIT).long()


def _most_likely(logits_mV: Tensor, ids_1V: Tensor, size: int) -> Tensor:
    """Find the ids, int64 [m, size], of the largest logits, largest first, of equal ones the first.

    torch.topk takes any of equal values, and bf16 logits are often equal. So it gets integers in
    the order of (logit, -id).
    """
    bits_mV = (logits_mV.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits_mV = bits_mV ^ (bits_mV >> 31).bitwise_and_(0x7FFFFFFF)
    keys_mV = bits_mV.long().bitwise_left_shift_(32).sub_(ids_1V)
    return keys_mV.topk(size, dim=-1).values.neg_().bitwise_and_(0xFFFFFFFF)


def raw_log_probs(logits_nV: Tensor) -> Tensor:
    """Compute the model's log-probabilities [n, V]: fp32 log-softmax of the untempered logits."""
    return logits_nV.float().log_softmax(dim=-1)


def processed_log_probs(logits_nV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Compute log-probabilities [n, V], fp32, with which each row (from `adjust`) is drawn by its
    `params`: tempered, truncated and renormalised, and -inf for tokens that cannot be drawn."""
    log_probs_nV = logits_nV.new_full(logits_nV.shape, -torch.inf, dtype=torch.float32)
    log_probs_nV.scatter_(1, logits_nV.argmax(dim=-1, keepdim=True), 0.0)
    ids_1V = _ids(logits_nV)
    for rows, truncates in _parts(logits_nV, params):
        logits_mV = logits_nV.index_select(0, rows.numbers_m)
        if truncates:
            kept_mC, ids_mC, _ = _truncated(logits_mV, ids_1V, rows, logits_mV.shape[1])
            own_mV = torch.full_like(logits_mV, -torch.inf, dtype=torch.float32)
            own_mV.scatter_(1, ids_mC, kept_mC.log_softmax(dim=-1))
        else:
            largest_m1 = logits_mV.amax(dim=-1, keepdim=True)
            own_mV = rows.tempered(logits_mV, largest_m1).log_softmax(dim=-1)
        log_probs_nV.index_copy_(0, rows.numbers_m, own_mV)
    return log_probs_nV


class Scores(NamedTuple):
    """Log-probabilities of some rows, fp32."""

    of_tokens_n: Tensor
    """Log-probability of one token in each row."""
    of_top_nc: Tensor
    """Log-probabilities of the most likely tokens, most likely first."""
    top_ids_nc: Tensor
    """Their ids, int64."""


def score(log_probs_nV: Tensor, tokens_n: Tensor, top_n: int, logits_nV: Tensor) -> Scores:
    """Return the log-probability of one token in each row, and of the `top_n` likeliest ones. That
    of a token below 0 means nothing. It is NaN where, and only where, the model's logits are those
    of `NOT_FINITE`."""
    of_tokens_n = log_probs_nV.gather(1, tokens_n.clamp(min=0).unsqueeze(1)).squeeze(1)
    of_tokens_n = torch.where(_is_finite(logits_nV), of_tokens_n, torch.nan)
    return Scores(of_tokens_n, *log_probs_nV.topk(min(top_n, log_probs_nV.shape[1]), dim=-1))


class HostCopy:
    """One copy of int64 and fp32 tensors of one device to the host, which runs while the device
    goes on."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors, self._values, self._event = tensors, tensors[0], None
        if len(tensors) > 1:  # token ids and fp32 are exact in float64
            self._values = torch.cat([tensor.flatten().double() for tensor in tensors])
        if self._values.is_cuda:
            on_host = torch.empty_like(self._values, device="cpu", pin_memory=True)
            self._values = on_host.copy_(self._values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[list]:
        """Wait for the values, the only wait of a step, and return them as nested lists."""
        if self._event is not None:
            self._event.synchronize()
        if len(self._tensors) == 1:
            return [self._values.tolist()]
        parts = self._values.split([tensor.numel() for tensor in self._tensors])
        return [p.to(t.dtype).view(t.shape).tolist() for p, t in zip(parts, self._tensors)]
