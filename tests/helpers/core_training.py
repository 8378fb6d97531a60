"""megatron-core's data parallelism and optimizer around a model."""

import pytest
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)

# Core calls torch by older names, and reads the gradients of views.
ignore_warnings_of_core = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:torch.distributed.*", "ignore:The .grad attribute"
)


def set_up_groups(sizes):
    """Core's groups anew. sizes: fields of a model's config; others than sizes are left out."""
    parallel_state.destroy_model_parallel()
    sizes = {name: size for name, size in sizes.items() if name.endswith("_size")}
    parallel_state.initialize_model_parallel(**sizes)


def data_parallel(model, inner=None, finalize=finalize_model_grads, **options):
    """The model, or what is around it, under core's data parallelism.

    Args:
        finalize: what core's schedules sum gradients by.
        options: fields of the DistributedDataParallelConfig.
    """
    model.config.finalize_model_grads_func = finalize
    config = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(model.config, config, model if inner is None else inner)


def adam_of(wrapped, **fields):
    """Core's optimizer. fields: of its OptimizerConfig."""
    config = OptimizerConfig(optimizer="adam", **fields)
    return get_megatron_optimizer(config, [wrapped], get_standard_config_overrides(config))


def mean_loss_step(batches, model):
    """A forward step of core's schedules over (input ids, labels)."""
    inputs, labels = next(batches)

    def loss(losses):
        mean = losses.mean()
        return mean, {"loss": mean.detach().clone()}  # core divides `mean` in place

    return model(inputs, labels=labels), loss
