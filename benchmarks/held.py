"""What a rank holds after a load: digests of it, and its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def digest(module: nn.Module) -> str:
    """sha256 over what this rank holds of a module: local shards, buffers and plain tensor attributes, in FQN order.

    Names, dtypes, shapes and placements go in as well. Tied tensors count under each of their names, so a load that
    breaks a tie differs only if the values do.
    """
    return _digest(_held(module))


def base_digest(module: nn.Module) -> str:
    """`digest` of a module with adapters, adapters left out and the rest under the names that it has without them."""
    return _digest({_plain_name(name): item for name, item in _held(module).items() if not _is_adapter(name)})


def adapter_digest(module: nn.Module) -> str:
    """sha256 over the full values of all adapters in FQN order, with dtypes, shapes and whether they are trained.

    A collective where they are sharded; the same value in any number of ranks, and in a process without any.
    """
    total = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if _is_adapter(name):
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            total.update(f"{name} {value.dtype} {tuple(value.shape)} {parameter.requires_grad}\n".encode())
            total.update(_bytes_of(value))
    return total.hexdigest()


def together(digests: Sequence[str]) -> str | None:
    """One digest of several; None of none."""
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def resident_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of this rank's shards and buffers, tied tensors once."""
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())


def _is_adapter(name: str) -> bool:
    return "lora_" in name  # peft's prefix of all that a LoRA adds


def _plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _held(module: nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    held: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        held[name] = ("parameter", tensor.detach())
    for name, tensor in module.named_buffers(remove_duplicate=False):
        held[name] = ("buffer", tensor.detach())
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for attribute, value in vars(sub).items():
            if isinstance(value, torch.Tensor):
                held[f"{prefix}.{attribute}".lstrip(".")] = ("attribute", value.detach())
    return held


def _digest(held: dict[str, tuple[str, torch.Tensor]]) -> str:
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
