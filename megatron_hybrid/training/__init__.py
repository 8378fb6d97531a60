"""Training on megatron-core's data parallelism, optimizers, schedules and checkpoints."""

from megatron_hybrid import compat  # noqa: F401  (explains a broken megatron-core before all else)
