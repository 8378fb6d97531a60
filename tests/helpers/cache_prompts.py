"""Prompts for tests of the cache."""

import numpy as np


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 50_000, n).astype(np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    """Parts of a prompt, one after the other."""
    return np.concatenate(parts).astype(np.int32)
