"""use_huge_pages: puts memory that each step reads whole into pages of 2 MiB."""

import ctypes
import os
from collections.abc import Iterable

import torch
from torch import Tensor

_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1; older ones refuse it


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Ask Linux to put tensors on the CPU into pages of 2 MiB, as far as these lie in memory of the
    process. A CPU looks up each page's address. For pages of 4 KiB in a virtual machine, this takes
    about as long as reading them. Values stay, and if the system refuses, nothing changes. The call
    takes about as long as a copy."""
    if os.uname().sysname != "Linux":
        return
    ranges: list[list[int]] = []
    for begin, end in sorted(map(_pages_of, tensors)):
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(end, ranges[-1][1])
        else:
            ranges.append([begin, end])
    for begin, end in ranges:
        _advise(begin, end - begin, _COLLAPSE)


def _pages_of(tensor: Tensor) -> tuple[int, int]:
    """Return begin and end of the huge pages that a tensor lies in."""
    if tensor.is_mkldnn:
        begin, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    else:
        begin, size = tensor.data_ptr(), tensor.nbytes
    return begin // _PAGE * _PAGE, -(-(begin + size) // _PAGE) * _PAGE


def _advise(address: int, size: int, advice: int) -> None:
    call = ctypes.CDLL(None).madvise
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    call(address, size, advice)
