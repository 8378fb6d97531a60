"""Hybrid models on megatron-core."""

from megatron_hybrid import compat  # noqa: F401  (explains a broken megatron-core before all else)
