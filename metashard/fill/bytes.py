"""Tensors as the bytes they are made of."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D uint8 view of a contiguous tensor's memory, whatever its dtype; gloo and NCCL both send it."""
    assert tensor.is_contiguous()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.element_size(),))  # type: ignore[call-overload]


def as_dtype(flat: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """The first `numel` elements of `dtype` in a 1-D uint8 tensor, as a 1-D view."""
    view = torch.empty(0, dtype=dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), flat.storage_offset() // dtype.itemsize, (numel,))  # type: ignore[call-overload]


def flat_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or buffer, detached, as a 1-D view of its memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1) if local.numel() else local.detach().new_empty(0)
