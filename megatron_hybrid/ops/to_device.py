"""to_device: numbers of the host on a device, without a wait for the device."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch


def to_device(
    numbers: Sequence | np.ndarray,
    device: torch.device | str,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Copy numbers to a tensor on a device.

    A copy from pageable memory would first wait for all that the device has to do. So numbers go
    through pinned memory, which torch reuses only after the copy.
    """
    tensor, device = torch.as_tensor(numbers, dtype=dtype), torch.device(device)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def all_to_device(
    lists: Sequence[Sequence | np.ndarray], device: torch.device | str
) -> list[torch.Tensor]:
    """Copy several lists of numbers to int32 tensors on a device, by one copy.

    Each begins at a multiple of 16 bytes, as new tensors do: Triton compiles a kernel anew for
    pointers that do not.
    """
    lengths = [len(numbers) for numbers in lists]
    padded = [-(-length // 4) * 4 for length in lengths]
    together = np.zeros(sum(padded), np.int32)
    starts = [0, *itertools.accumulate(padded)]
    for numbers, start, length in zip(lists, starts, lengths):
        together[start : start + length] = numbers
    tensor = to_device(together, device, torch.int32)
    return [tensor[start : start + length] for start, length in zip(starts, lengths)]
