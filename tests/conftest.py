"""Set-up of every test run."""

import os

import torch

# Two ranks under torchrun collect it; alone it would wait for the other one.
collect_ignore = [] if os.environ.get("WORLD_SIZE") == "2" else ["functional/test_two_gpus.py"]

# The models are tiny: a second thread costs more in hand-overs than it brings.
torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """Triton's interpreter is chosen for a whole process: on a GPU its tests stay out, and so do
    those that need a browser."""
    if collection_path.name in ("kernels", "page") and config.option.markexpr == "gpu":
        return True
    return None
