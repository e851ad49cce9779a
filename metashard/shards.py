"""Local shards: the memory of each, given once, and which part of its full tensor it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from metashard import _compat
from metashard.errors import ShardError
from metashard.fill.bytes import flat_local
from metashard.layout import named_slots, set_tensor
from metashard.plan import Box, Sharding, whole
from metashard.policy import ShardPolicy
from metashard.shard import mesh_device


def allocate(module: nn.Module, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    """Give every shard, replicated parameter and meta buffer memory of its own size; ties and real buffers stay.

    Shards go to the mesh's device, or to (pinned, if so asked) host memory under `CPUOffloadPolicy`. Contents are
    undefined until filled.
    """
    device = mesh_device(mesh)
    offload = policy.offload_policy
    shard_kwargs: dict[str, Any] = {"device": device}
    if isinstance(offload, CPUOffloadPolicy):
        shard_kwargs = {"device": "cpu", "pin_memory": offload.pin_memory and device.type != "cpu"}

    def materialise(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_meta and isinstance(tensor, DTensor)):
            return tensor
        local = torch.empty_like(tensor.to_local(), **shard_kwargs)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    _compat.apply_to_tensors(module, materialise)
    plain: dict[str, torch.Tensor] = {}
    for slot, tensor in named_slots(module, attributes=False):
        if not tensor.is_meta:
            continue
        if slot.tie not in plain:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            plain[slot.tie] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if slot.kind == "parameter" else empty
            )
        set_tensor(module, slot.fqn, plain[slot.tie])


def release(module: nn.Module) -> None:
    """Put every parameter and registered buffer on meta: a load has failed, and what is in them is worth nothing."""

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device="meta")
        local = torch.empty_like(tensor.to_local(), device="meta")
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    _compat.apply_to_tensors(module, emptied)


def sharding_of(tensor: torch.Tensor) -> tuple[Sharding, DeviceMesh | None]:
    """How a parameter is laid over its mesh, as pure data; (replicated, None) for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return Sharding(), None
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _compat._StridedShard):  # cut after the axes to its right
            strided.append((axis, placement.dim))
        elif isinstance(placement, Shard):
            plain.append((axis, placement.dim))
        elif not placement.is_replicate():
            raise ShardError(f"Unsupported placement {placement}; expected Shard or Replicate.", phase="plan")
    return Sharding((*plain, *strided)), tensor.device_mesh


def local_box(tensor: torch.Tensor) -> Box:
    """The part of the full tensor that this rank holds, checked against the memory it has."""
    sharding, mesh = sharding_of(tensor)
    if mesh is None:
        return whole(tensor.shape)
    box = sharding.box(tensor.shape, mesh.shape, mesh.get_coordinate() or ())
    held = tuple(tensor.to_local().shape)  # type: ignore[attr-defined]
    if box.numel != torch.Size(held).numel():
        raise ShardError(f"FSDP holds {held} of {tuple(tensor.shape)}, the plan says {box.shape}.", phase="plan")
    return box


def resident_bytes(module: nn.Module) -> int:
    """Bytes of this rank's shards and buffers, ties once."""
    unique = {slot.tie: tensor for slot, tensor in named_slots(module, attributes=False)}
    return sum(flat_local(tensor).nbytes for tensor in unique.values())
