"""Hazards: uses per request of exposure, by age, and the rate of uses that follows from them.

All ranks must get the same bits. numpy's sums and exponentials differ in the last bit between CPUs,
so here sums are taken in a fixed order and exponentials are products.

Shape letters: C classes, A ages.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

AGES = 34
BOUNDS = [float(age) for age in range(4)]
BOUNDS += [float(round(2 ** (age / 2))) for age in range(4, AGES + 1)]
"""Requests at which each age class starts: 0 to 3, then two per octave; whole numbers, as ages are.
The last class is open, but has a width as if it ended."""
WIDTH_A = np.diff(BOUNDS)
"""Requests from the start of each age class to its end."""
_CLASS_OF = [bisect_right(BOUNDS, age, 0, AGES) - 1 for age in range(1024)]
"""Age classes of small ages, as a table."""
_HORIZON = 16
"""Age classes that the search for the best moment to give up looks ahead."""
_FADE = 0.8
"""Factor of the hazard from one age class to the next where nothing was observed."""
LEAST = 1e-9
"""Lower bound of a hazard."""


def age_class(age: float) -> int:
    """Index of an age in requests, >= 0."""
    return _CLASS_OF[int(age)] if age < len(_CLASS_OF) else bisect_right(BOUNDS, age, 0, AGES) - 1


def count_by_age(class_N: np.ndarray, age_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Number of items by class and age class, [C, A]."""
    return _summed(class_N, _age_classes(age_N), None, num_classes)


def exposure_beyond(class_N: np.ndarray, age_N: np.ndarray, num_classes: int) -> np.ndarray:
    """Requests beyond these ages, summed by class and age class, [C, A]."""
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
    """Uses / exposure (numbers or arrays), smoothed by a Gamma prior of `weight` uses at the rate
    `prior`."""
    return (uses + weight) / (risk + weight / prior)


def hazards(
    uses_CA: np.ndarray, risk_CA: np.ndarray, mean_C: np.ndarray, weight: float
) -> np.ndarray:
    """Uses / exposure by class and age, [..., A]. The prior of each age is the hazard of the next
    younger one, that of the first age a mean. weight: of the prior, in uses."""
    younger_C = mean_C
    hazard_CA = np.empty_like(uses_CA)
    for age in range(AGES):
        risk_C = risk_CA[..., age]
        hazard_C = shrink_to_prior(uses_CA[..., age], risk_C, np.maximum(younger_C, LEAST), weight)
        hazard_CA[..., age] = hazard_C
        younger_C = np.where(risk_C < 1, hazard_C * _FADE, hazard_C)
    return hazard_CA


def best_rates(hazard_CA: np.ndarray) -> np.ndarray:
    """Per class and age, the largest rate of uses per request over all moments to give up:
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
