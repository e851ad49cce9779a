"""Fresh host memory, made cheaper to write for the first time."""

from __future__ import annotations

import ctypes
import sys

import torch

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def advise_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask the kernel for 2 MiB pages under a CPU tensor that has not been written yet, where that is possible.

    A shard is written once, from a file or a bucket; on 4 KiB pages every one of them costs a fault, and the faults
    cost more than the copy. Advice only: nothing changes where the system has huge pages off, or is not Linux.

    Returns:
        The tensor.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return tensor
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.untyped_storage().nbytes()) // _HUGE_PAGE * _HUGE_PAGE
    if end > start:
        ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor
