"""Digests and the final check: what a load promises, told from the module itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from metashard.errors import LoadError
from metashard.fill.bytes import as_bytes, flat_local
from metashard.layout import Slot, named_slots
from metashard.shard import local_box

_HASH_BYTES = 32 << 20


def digest_shards(module: nn.Module) -> str:
    """SHA-256 over this rank's shards, buffers and plain tensor attributes, in FQN order.

    Each contributes its name, dtype, full shape and the bytes that this rank holds. Ties count under each of their
    names.

    Parameters that FSDP has gathered for a forward are put back into shards first.

    Returns:
        The hex digest. Equal digests on the same rank of two loads mean equal bytes.
    """
    for sub in module.modules():
        if isinstance(sub, FSDPModule):
            sub.reshard()  # the root's group stays gathered after a forward without a backward
    return _digest(named_slots(module), {slot.fqn: _local(tensor) for slot, tensor in named_slots(module)})


def reference_digest(reference: nn.Module, sharded: nn.Module) -> str:
    """What `digest_shards(sharded)` should be on this rank, given a full module of its class with the right values."""
    held = {slot.fqn: tensor for slot, tensor in named_slots(sharded)}
    slots = [(slot, tensor) for slot, tensor in named_slots(reference)]
    parts: dict[str, torch.Tensor] = {}
    for slot, tensor in slots:
        flat = tensor.detach().contiguous().reshape(-1)
        if slot.fqn in held and isinstance(held[slot.fqn], DTensor):
            runs = [flat[first : first + count] for first, _, count in local_box(held[slot.fqn]).runs()]
            flat = torch.cat(runs) if len(runs) > 1 else runs[0] if runs else flat[:0]
        parts[slot.fqn] = flat
    return _digest(slots, parts)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return flat_local(tensor if isinstance(tensor, DTensor) else tensor.detach().contiguous())


def _digest(slots: list[tuple[Slot, torch.Tensor]], parts: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for fqn, slot in sorted((slot.fqn, slot) for slot, _ in slots):
        sha.update(f"{fqn} {slot.dtype} {list(slot.shape)}\n".encode())
        for piece in _pieces(as_bytes(parts[fqn].contiguous())):
            sha.update(piece.cpu().numpy())  # type: ignore[arg-type]
    return sha.hexdigest()


def _pieces(raw: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, raw.numel(), _HASH_BYTES):
        yield raw[start : start + _HASH_BYTES]


def check_loaded(module: nn.Module, ties: dict[str, str]) -> None:
    """The final check of a load: nothing left on meta, every shard in memory of its own, ties as agreed.

    Args:
        module: The loaded module.
        ties: FQN -> FQN of its tie group, as rank 0 had them.

    Raises:
        LoadError: Naming the tensors.
    """
    slots = named_slots(module)
    leftovers = [slot.fqn for slot, tensor in slots if tensor.is_meta or _local_is_meta(tensor)]
    if leftovers:
        raise LoadError(
            f"{len(leftovers)} tensors are still on the meta device: {', '.join(leftovers[:5])}. They are "
            f"neither in the checkpoint nor computed by the module on rank 0.",
            phase="check",
            key=leftovers[0],
            expected="no tensor on the meta device",
            got=f"{len(leftovers)}",
        )
    for slot, _ in slots:
        if slot.kind != "attribute" and ties.get(slot.fqn, slot.tie) != slot.tie:
            raise LoadError(
                f"{slot.fqn} should share memory with {ties[slot.fqn]}, but is tied to {slot.tie}.",
                phase="check",
                key=slot.fqn,
                expected=ties[slot.fqn],
                got=slot.tie,
            )


def _local_is_meta(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.to_local().is_meta
