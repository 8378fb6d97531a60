"""Sessions: hazards of the ends of their prompts and answers, turn by turn.

A chat or an agent makes another request after its k-th with probability s_k (its share), after a
wait whose hazard h_a at age a is the same for all k. Of the sessions of age a the part
s_k G_a / (1 - s_k + s_k G_a) will return, where G_a is the part of the waits that are longer: the
mixture cure model (Boag 1949; Farewell 1982). So all turns share the waits, and each turn adds one
number.

Shape letters: K classes of turns, A ages, J shares; dots stand for groups of sessions, if any.
"""

from __future__ import annotations

import numpy as np

from megatron_hybrid.cache.policy.hazards import (
    AGES,
    LEAST,
    WIDTH_A,
    exp_minus,
    hazards,
    ordered_sum,
    shrink_to_prior,
)

TURN_CLASSES = 20
"""The last one: 64 turns and more."""
_SHARES = np.append(
    [0.001, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9],
    [0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999],
)
"""Grid of s_k; between its values the likelihood is interpolated."""
_MIN_USES = 3
"""Uses from which on turns are distinguished."""
_WAIT_WEIGHT = 6.0
"""Weight, in uses, of the prior of a wait's hazard: the hazard of shorter waits."""
_TURN_WEIGHT = 2.0
"""Weight, in uses, of the prior of a turn's share: the mean of all turns."""
OWN_WEIGHT = 40.0
"""Weight, in uses, of the hazard that follows from waits and shares, as the prior of a turn's own
counts: where long and short waits mix, turns differ in the mix."""


def turn_class(turns: int) -> int:
    """Index of a number of turns, from 1: each up to 7 has its own, then there are four per
    octave."""
    if turns < 8:
        return turns - 1
    octave = turns.bit_length() - 3
    return min(TURN_CLASSES, 4 * octave + (turns >> octave)) - 1


def session_hazards(
    uses_KA: np.ndarray,
    risk_KA: np.ndarray,
    back_KA: np.ndarray,
    mean: float,
    own_weight: float = OWN_WEIGHT,
) -> tuple[np.ndarray, np.ndarray]:
    """Uses per request by turn and age.

    Args:
        uses_KA, risk_KA: counted uses and exposure, [..., K, A]; leading axes: separate groups.
        back_KA: estimated part of the exposure that belongs to sessions that will return; ones at
            first. Each call with the same counts improves it.
        mean: uses per request of all states, the prior until sessions are known.
        own_weight: as `OWN_WEIGHT`.
    Returns:
        The hazards [..., K, A], and the next back_KA.
    """
    uses_A = ordered_sum(uses_KA, -2)
    unknown = (ordered_sum(uses_A, -1) < _MIN_USES)[..., None, None]
    back_KA = np.where(unknown, 1.0, back_KA)
    wait_A = _wait_hazards(uses_A, ordered_sum(risk_KA * back_KA, -2), mean)
    back_JA, longer_A = _returning(_SHARES, wait_A)
    hazard_JA = back_JA * wait_A[..., None, :]
    share = _shares(
        uses_A[..., None, :], ordered_sum(risk_KA, -2)[..., None, :], back_JA, hazard_JA
    )
    # A prior of a few uses at each turn, of sessions of the mean share, until nearly all that
    # return have returned.
    away_A = (1 - share * (1 - longer_A)) * WIDTH_A * (longer_A > 1e-3)
    came_A = away_A * _returning(share, wait_A)[0][..., 0, :] * wait_A
    more = _TURN_WEIGHT / ordered_sum(came_A, -1)[..., None]
    uses_more_KA = uses_KA + (more * came_A)[..., None, :]
    risk_more_KA = risk_KA + (more * away_A)[..., None, :]
    shares_K = _shares(uses_more_KA, risk_more_KA, back_JA, hazard_JA)
    known_KA, _ = _returning(shares_K, wait_A)
    expected_KA = np.maximum(known_KA * wait_A[..., None, :], LEAST)
    hazard_KA = shrink_to_prior(uses_KA, risk_KA, expected_KA, own_weight)
    return (
        np.where(unknown, wait_A[..., None, :], hazard_KA),
        np.where(unknown, back_KA, known_KA),
    )


def _wait_hazards(uses_A: np.ndarray, risk_A: np.ndarray, mean: float) -> np.ndarray:
    """h: the hazard of waits, [..., A]. mean: as in `session_hazards`."""
    own_mean = shrink_to_prior(ordered_sum(uses_A, -1), ordered_sum(risk_A, -1), mean, 1)
    return hazards(uses_A, risk_A, own_mean, _WAIT_WEIGHT)


def _returning(shares_K: np.ndarray, wait_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part of the pending sessions that will return, by age class [..., K, A], and G at the
    start of each age class, [..., A]."""
    shorter_A = 1 - exp_minus(wait_A * WIDTH_A)
    longer_A = np.cumprod(1 - shorter_A, -1)
    longer_A = np.concatenate([np.ones_like(longer_A[..., :1]), longer_A[..., :-1]], -1)
    mean_A = (longer_A * shorter_A / (wait_A * WIDTH_A))[..., None, :]
    s = shares_K[..., None]
    return s * mean_A / (1 - s + s * mean_A), longer_A


def _shares(
    uses_KA: np.ndarray, risk_KA: np.ndarray, back_JA: np.ndarray, hazard_JA: np.ndarray
) -> np.ndarray:
    """The maximum-likelihood shares s, [..., K].

    With hazard_JA = h_a s G_a / (1 - s + s G_a), the derivative of the log-likelihood by s is
    (uses - risk x hazard) / (s (1 - s + s G_a)) summed over ages. Sessions still pending when
    nearly all that return have returned weigh most. If no session is pending, the continuation rate
    is 1. back_JA: s G_a / (1 - s + s G_a).
    """
    score_KJ = np.zeros((*uses_KA.shape[:-1], len(_SHARES)))
    for age in range(AGES):
        weight_J = (1 - back_JA[..., age]) / (1 - _SHARES)
        unexpected_KJ = (
            uses_KA[..., age, None] - risk_KA[..., age, None] * hazard_JA[..., None, :, age]
        )
        score_KJ += weight_J[..., None, :] * unexpected_KJ
    j_K = np.clip((score_KJ > 0).sum(-1), 1, len(_SHARES) - 1)
    low_K, high_K = (
        np.take_along_axis(score_KJ, at_K[..., None], -1)[..., 0] for at_K in (j_K - 1, j_K)
    )
    part_K = np.clip(low_K / np.maximum(low_K - high_K, 1e-12), 0, 1)
    return _SHARES[j_K - 1] + part_K * (_SHARES[j_K] - _SHARES[j_K - 1])
