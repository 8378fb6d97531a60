"""Hazards: uses per request at risk, by age, and the rate of uses that follows from them.

Ranks decide alike because they compute alike: sums are taken in one order and exponentials by
products here, since numpy's own differ in the last bit from CPU to CPU.

Shape letters: C classes, A ages.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

AGES = 34
BOUNDS = [float(age) for age in range(4)]
BOUNDS += [float(round(2 ** (age / 2))) for age in range(4, AGES + 1)]
"""Requests where each age class starts: 0 to 3, then two per octave. Whole numbers, as ages are:
every class has its share of them. The last class has no end, and is reckoned with as if it had."""
WIDTH_A = np.diff(BOUNDS)
"""Requests that each class lasts."""
_CLASS_OF = [bisect_right(BOUNDS, age, 0, AGES) - 1 for age in range(1024)]
"""The usual ones, to be looked up."""
_HORIZON = 16
"""Age classes that the search for the best moment looks ahead."""
_FADE = 0.8
"""What the hazard is multiplied with from age class to age class where nobody has been yet."""
LEAST = 1e-9
"""The least hazard that is reckoned with."""


def age_class(age: float) -> int:
    """Index of an age in requests, >= 0."""
    return _CLASS_OF[int(age)] if age < len(_CLASS_OF) else bisect_right(BOUNDS, age, 0, AGES) - 1


def count_by_age(class_N: np.ndarray, age_N: np.ndarray, num_classes: int) -> np.ndarray:
    """How many there are of each class and age class, [C, A]."""
    return _summed(class_N, _age_classes(age_N), None, num_classes)


def exposure_beyond(class_N: np.ndarray, age_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Requests that lie beyond these ages, summed by class and age class, [C, A]."""
    at_N = _age_classes(age_N)
    whole_CA = np.cumsum(_summed(class_N, at_N, None, num_classes), 1) * WIDTH_A
    return whole_CA - _summed(class_N, at_N, age_N - np.take(BOUNDS, at_N), num_classes)


def _age_classes(age_N: np.ndarray) -> np.ndarray:
    """`age_class` of each."""
    return np.searchsorted(BOUNDS[:AGES], age_N, "right") - 1


def _summed(
    class_N: np.ndarray, at_N: np.ndarray, weight_N: np.ndarray | None, num_classes: int
) -> np.ndarray:
    cells = np.bincount(class_N * AGES + at_N, weight_N, num_classes * AGES)
    return cells.reshape(num_classes, AGES)


def shrink_to_prior(uses, risk, prior, weight: float):
    """Uses / time at risk (numbers or arrays), smoothed: a Gamma prior of `weight` uses at the rate
    of the prior."""
    return (uses + weight) / (risk + weight / prior)


def hazards(
    uses_CA: np.ndarray, risk_CA: np.ndarray, mean_C: np.ndarray, weight: float
) -> np.ndarray:
    """Uses / time at risk by class and age, [..., A], where few observations lean on what is known
    of younger ones of the class, and these on a mean. weight: uses that speak for the younger."""
    younger_C = mean_C
    hazard_CA = np.empty_like(uses_CA)
    for age in range(AGES):
        risk_C = risk_CA[..., age]
        hazard_C = shrink_to_prior(uses_CA[..., age], risk_C, np.maximum(younger_C, LEAST), weight)
        hazard_CA[..., age] = hazard_C
        younger_C = np.where(risk_C < 1, hazard_C * _FADE, hazard_C)
    return hazard_CA


def best_rates(hazard_CA: np.ndarray) -> np.ndarray:
    """Per class and age, the largest rate of uses per request over all moments of giving up:
    max over k of P(used within the next k age classes) / E[time until then], [C, A]."""
    hazard_AC = np.ascontiguousarray(hazard_CA.T)
    used_AC = 1 - exp_minus(hazard_AC * WIDTH_A[:, None])
    time_AC = used_AC / hazard_AC
    best, uses, time = (np.zeros_like(hazard_AC) for _ in range(3))
    alive, term = np.ones_like(hazard_AC), np.empty_like(hazard_AC)
    for k in range(_HORIZON):
        n = AGES - k
        uses[:n] += np.multiply(alive[:n], used_AC[k:], out=term[:n])
        time[:n] += np.multiply(alive[:n], time_AC[k:], out=term[:n])
        alive[:n] *= np.subtract(1, used_AC[k:], out=term[:n])
        np.maximum(best[:n], np.divide(uses[:n], time[:n], out=term[:n]), out=best[:n])
    return best.T


def exp_minus(x: np.ndarray) -> np.ndarray:
    """exp(-x) as (1 - x / 2^14)^(2^14), x >= 0."""
    power = np.maximum(0.0, 1 - x / 2**14)
    for _ in range(14):
        power *= power
    return power


def ordered_sum(rows: np.ndarray, axis: int = 0) -> np.ndarray:
    """The sum over an axis, from first to last."""
    return np.take(np.cumsum(rows, axis), -1, axis)
