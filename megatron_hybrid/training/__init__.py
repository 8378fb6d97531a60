"""Training on megatron-core's data parallelism, optimizers, schedules and checkpoints."""

import warnings

from megatron_hybrid import compat  # noqa: F401  (explains a broken megatron-core before all else)

with warnings.catch_warnings():
    # megatron-core warns of every missing GPU library; without them it uses torch.
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.optimizer  # noqa: F401
