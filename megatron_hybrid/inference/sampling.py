"""Sampling of one step's rows of logits.

Sampling is a pure function of (logits, parameters, seed, sample index, position), without generator
state. So preemption, chunks and batches do not change a request's draws, and all ranks of a
tensor-parallel job draw the same tokens without communication.
"""

import torch
from torch import Tensor

from megatron_hybrid.inference.sampling_params import Draw

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
        params = draw.params
        if params.is_greedy:
            continue
        logits_V, order_V = logits_nV[row].double().sort(descending=True, stable=True)
        # Relative to the largest, so that the division does not overflow at any temperature.
        logits_V = (logits_V - logits_V[0]) / params.temperature
        if params.top_k:
            logits_V = logits_V[: params.top_k]
        cumulative_V = logits_V.softmax(dim=-1).cumsum(dim=-1)
        if params.top_p:
            # Kept: tokens whose predecessors sum to less than top_p, so at least one.
            kept = int((cumulative_V < params.top_p).sum()) + 1
            cumulative_V = cumulative_V[:kept]
        point = uniform(draw.seed, draw.sample_index, draw.position) * cumulative_V[-1]
        rank = int(torch.searchsorted(cumulative_V, point, right=True))
        tokens[row] = int(order_V[min(rank, len(cumulative_V) - 1)])
    return tokens


def log_probs_of(logits_nV: Tensor, tokens: list[int]) -> list[float]:
    """Log-probability of one token for each row, fp32 log-softmax of the untempered logits."""
    log_probs_nV = logits_nV.float().log_softmax(dim=-1)
    index = torch.as_tensor(tokens, dtype=torch.long, device=logits_nV.device)
    return log_probs_nV.gather(1, index[:, None])[:, 0].tolist()


def top_log_probs(logits_V: Tensor, n: int) -> dict[int, float]:
    """The n most likely tokens of one row with their log-probabilities, most likely first."""
    values, indices = logits_V.float().log_softmax(dim=-1).topk(min(n, logits_V.numel()))
    return dict(zip(indices.tolist(), values.tolist()))
