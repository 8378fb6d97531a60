"""to_device: numbers of the host on a device, without a wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(
    numbers: Sequence | np.ndarray,
    device: torch.device | str,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """A tensor of numbers on a device.

    A copy from pageable memory would first wait for all that the device has to do. So numbers go
    through pinned memory, which torch reuses only after the copy.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
