"""Sampling of one step's rows of logits.

Sampling is a pure function of (logits, parameters, seed, sample index, position), without generator
state. So preemption, chunks and batches do not change a request's draws, and all ranks of a
tensor-parallel job draw the same tokens without communication.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_hybrid.inference.sampling_params import Draw, SamplingParams

_MASK64 = (1 << 64) - 1


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


def sample(logits_nV: Tensor, draws: list[Draw]) -> list[int]:
    """Draw one token for each row.

    Args:
        logits_nV: float [n, V], one row for each draw, equal on all tensor-parallel ranks.
        draws: n parameters and stream positions.

    Returns:
        n token ids. Greedy rows take the first maximum; other rows invert the cumulative
        distribution of the truncated, tempered softmax (float64) at `uniform(...)`.
    """
    tokens = logits_nV.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.params.is_greedy:
            continue
        logits_k, ids_k = drawable(logits_nV[row], draw.params)
        cumulative_k = logits_k.softmax(dim=-1).cumsum(dim=-1)
        point = uniform(draw.seed, draw.sample_index, draw.position) * cumulative_k[-1]
        rank = int(torch.searchsorted(cumulative_k, point, right=True))
        tokens[row] = int(ids_k[min(rank, len(ids_k) - 1)])
    return tokens


def drawable(logits_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tempered logits [k], float64, and ids [k] of the tokens that `params` allow to be drawn from
    a row of logits, most likely first."""
    if params.is_greedy:
        best = logits_V.argmax(dim=-1, keepdim=True)
        return logits_V[best].double(), best
    logits_V, ids_V = logits_V.double().sort(descending=True, stable=True)
    # Relative to the largest, so that the division does not overflow at any temperature.
    logits_V = (logits_V - logits_V[0]) / params.temperature
    kept = params.top_k or len(logits_V)
    if params.top_p:
        # Kept: tokens whose predecessors sum to less than top_p, so at least one.
        cumulative_k = logits_V[:kept].softmax(dim=-1).cumsum(dim=-1)
        kept = min(kept, int((cumulative_k < params.top_p).sum()) + 1)
    return logits_V[:kept], ids_V[:kept]


def raw_log_probs(logits_nV: Tensor) -> Tensor:
    """The model's own log-probabilities [n, V]: fp32 log-softmax of the untempered logits."""
    return logits_nV.float().log_softmax(dim=-1)


def processed_log_probs(logits_nV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities [n, V], fp32, with which each row is drawn by its `params`: tempered,
    truncated and renormalised. Those of tokens that cannot be drawn are -inf."""
    log_probs_nV = logits_nV.new_full(logits_nV.shape, -torch.inf, dtype=torch.float32)
    for row, own in enumerate(params):
        logits_k, ids_k = drawable(logits_nV[row], own)
        log_probs_nV[row, ids_k] = logits_k.log_softmax(dim=-1).float()
    return log_probs_nV


def of_tokens(log_probs_nV: Tensor, tokens: Sequence[int]) -> list[float]:
    """The log-probability of one token in each row."""
    index = torch.as_tensor(tokens, dtype=torch.long, device=log_probs_nV.device)
    return log_probs_nV.gather(1, index[:, None])[:, 0].tolist()


def top_n(log_probs_nV: Tensor, n: int) -> list[dict[int, float]]:
    """The n most likely tokens of each row with their log-probabilities, most likely first."""
    values, ids = log_probs_nV.topk(min(n, log_probs_nV.shape[1]))
    return [dict(zip(*row)) for row in zip(ids.tolist(), values.tolist())]
