"""What a rank holds after a load: its digest and its bytes."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def digest(module: nn.Module) -> str:
    """sha256 over what this rank holds of a module: local shards, buffers and plain tensor attributes, in FQN order.

    Names, dtypes, shapes and placements go in as well. Tied tensors count under each of their names, so a load that
    breaks a tie differs only if the values do.
    """
    held: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        held[name] = ("parameter", tensor.detach())
    for name, tensor in module.named_buffers(remove_duplicate=False):
        held[name] = ("buffer", tensor.detach())
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for attribute, value in vars(sub).items():
            if isinstance(value, torch.Tensor):
                held[f"{prefix}.{attribute}".lstrip(".")] = ("attribute", value.detach())
    total = hashlib.sha256()
    for name in sorted(held):
        kind, tensor = held[name]
        placements = tuple(map(str, tensor.placements)) if isinstance(tensor, DTensor) else ()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            raise RuntimeError(f"{name}: still on meta after the load")
        total.update(f"{name} {kind} {tensor.dtype} {tuple(tensor.shape)} {tuple(local.shape)} {placements}\n".encode())
        total.update(_bytes_of(local))
    return total.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def resident_bytes(module: nn.Module) -> int:
    """Bytes of this rank's shards and buffers, tied tensors once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())
