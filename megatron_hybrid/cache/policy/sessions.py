"""Do sessions go on, and when? Hazards of the ends of their prompts and answers, turn by turn.

A chat or an agent makes another request after its k-th with probability s_k, and then after a wait
whose hazard h_a at age a is the same for all k. Of those that have been away for as long as that,
the part s_k G_a / (1 - s_k + s_k G_a) will be back, where G_a is the part of the waits that is
longer: the mixture cure model (Boag 1949; Farewell 1982). So what one turn teaches about waits
serves all of them, and of each turn there is one number to learn.

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
"""Values of s_k that are compared; between them it is interpolated."""
_MIN_USES = 3
"""Uses from which on turns are told apart."""
_WAIT_WEIGHT = 6.0
"""Uses that speak for the hazard of shorter waits in that of longer ones."""
_TURN_WEIGHT = 2.0
"""Uses that speak for the mean of all turns in the share of one."""
OWN_WEIGHT = 40.0
"""Uses that speak for the hazard that follows from waits and shares, beside those of a turn itself:
where long waits and short ones mix, some turns have more of the one than others."""


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
    """Uses per request at risk by turn and age.

    Args:
        uses_KA, risk_KA: uses and time at risk, as counted, [..., K, A]: sessions of any number of
            groups, which share nothing.
        back_KA: which part of that time was that of sessions that will be back, as estimated
            before; ones at first. Each call with the same counts brings it closer.
        mean: uses per request at risk of all states, which stands in until sessions are known.
        own_weight: as `OWN_WEIGHT`.
    Returns:
        The hazards, and back_KA anew.
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
    # As if a few uses more had been seen at each turn, of sessions of the mean share, until nearly
    # all who come back had come.
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
    """The part of those away that will be back, over each age class [..., K, A], and G at the start
    of each, [..., A]."""
    shorter_A = 1 - exp_minus(wait_A * WIDTH_A)
    longer_A = np.cumprod(1 - shorter_A, -1)
    longer_A = np.concatenate([np.ones_like(longer_A[..., :1]), longer_A[..., :-1]], -1)
    mean_A = (longer_A * shorter_A / (wait_A * WIDTH_A))[..., None, :]
    s = shares_K[..., None]
    return s * mean_A / (1 - s + s * mean_A), longer_A


def _shares(
    uses_KA: np.ndarray, risk_KA: np.ndarray, back_JA: np.ndarray, hazard_JA: np.ndarray
) -> np.ndarray:
    """The most likely shares s, [..., K].

    With hazard_JA = h_a s G_a / (1 - s + s G_a), the derivative of the logarithm of the likelihood
    by s is that of (uses - risk x hazard) / (s (1 - s + s G_a)) summed over ages. Who is still away
    when nearly all who come back have come says most, and that nobody is says as much, however long
    it took. back_JA: s G_a / (1 - s + s G_a).
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
