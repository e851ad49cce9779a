"""The judge of a load: `from_pretrained` in a single process.

Every parameter, buffer and plain tensor attribute, in bytes and dtype, and ties; then one forward. On every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import metashard
from metashard.fill.bytes import as_bytes
from metashard.layout import named_slots
from tests import zoo

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def cpu_mesh(*shape: int) -> DeviceMesh:
    """A CPU mesh over all ranks, made once: (shard,), or (replicate, shard) by two sizes."""
    shape = shape or (dist.get_world_size(),)
    if shape not in _meshes:
        names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


def reference(case: zoo.Case, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The case's model as its library loads it in one process."""
    name = "torch_dtype" if case.library == "diffusers" else "dtype"
    return case.cls.from_pretrained(str(folder), **{name: dtype})


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The gathered value of a parameter or buffer."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.full_tensor()


def differences(loaded: nn.Module, expected: nn.Module) -> list[str]:
    """What is not as the reference has it, as text; empty if all is equal. Of transformers, more than tensors.

    A shard is compared with its part of the reference, cut by torch and not by us: no rank waits for another here.
    """
    want = {slot.fqn: (slot, tensor) for slot, tensor in named_slots(expected)}
    got = {slot.fqn: (slot, tensor) for slot, tensor in named_slots(loaded)}
    found = [f"missing {name}" for name in sorted(want.keys() - got.keys())]
    found += [f"extra {name}" for name in sorted(got.keys() - want.keys())]
    for name in sorted(want.keys() & got.keys()):
        (slot, tensor), (other, value) = want[name], got[name]
        if isinstance(value, DTensor):
            tensor = distribute_tensor(
                tensor.detach(), value.device_mesh, value.placements, src_data_rank=None
            ).to_local()
            value = value.detach().to_local()
        for field in ("kind", "shape", "dtype", "requires_grad", "persistent", "tie"):
            if getattr(slot, field) != getattr(other, field):
                found.append(f"{name}: {field} {getattr(other, field)}, expected {getattr(slot, field)}")
        if tensor.is_meta or value.is_meta:
            found.append(f"{name}: on meta")
        elif slot.shape == other.shape and slot.dtype == other.dtype:
            a, b = as_bytes(value.contiguous()), as_bytes(tensor.detach().contiguous())
            if not torch.equal(a, b):
                found.append(f"{name}: bytes differ")
    for name in ("generation_config", "tp_plan"):
        got_of, want_of = (getattr(module, name, None) for module in (loaded, expected))
        if got_of != want_of:
            found.append(f"{name}: {got_of}, expected {want_of}")
    return found


def storage_faults(loaded: nn.Module) -> list[str]:
    """Shards that keep more memory alive than they hold (HAZARDS 10); FSDP pads an uneven shard to the largest one."""
    found = []
    for slot, tensor in named_slots(loaded):
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            size = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
            most = max(1, -(-tensor.shape[0] // size)) * max(1, tensor.numel() // max(1, tensor.shape[0]))
            if local.untyped_storage().nbytes() > most * tensor.dtype.itemsize:
                found.append(f"{slot.fqn}: storage of {local.untyped_storage().nbytes()} bytes")
    return found


def check_case(
    name: str, folder: str, dtype: torch.dtype, loads: list[dict[str, Any]], mesh_shape: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """Load a zoo case on every rank in several ways and compare each with the reference; runs on the ranks.

    Returns:
        For each of `loads` (keywords of `LoadPolicy`): {"found": differences, "report": LoadReport}.
    """
    case = zoo.CASES[name]
    mesh = cpu_mesh(*mesh_shape)
    expected = reference(case, Path(folder), dtype)
    runs_forward = case.inputs is not None and dtype in case.dtypes
    results = []
    outputs = []
    for load in loads:
        loaded, report = load_case(case, folder, dtype, load, mesh)
        found = differences(loaded, expected) + storage_faults(loaded)
        # The way that tensors travelled leaves no trace in a module whose bytes and ties are equal.
        if runs_forward and load.get("transport") != "broadcast":
            outputs.append((found, zoo.run_forward(case, loaded, dtype)))
        results.append({"found": found, "report": report})
    wanted = zoo.run_forward(case, expected, dtype) if runs_forward else []  # last: a forward may change buffers
    for found, got in outputs:
        if len(got) != len(wanted):
            found.append(f"forward gives {len(got)} tensors, expected {len(wanted)}")
        found += [
            f"forward: output {i} differs by {(a.float() - b.float()).abs().max().item()}"
            for i, (a, b) in enumerate(zip(got, wanted, strict=False))
            if not torch.equal(a, b)
        ]
    return results


def load_case(
    case: zoo.Case, folder: str, dtype: torch.dtype, load: dict[str, Any], mesh: DeviceMesh
) -> tuple[nn.Module, metashard.LoadReport]:
    """`load_component`; a model with no repeated blocks is wrapped as one group, as the error asks for."""
    kwargs: dict[str, Any] = {"mesh": mesh, "dtype": dtype, "output_loading_info": True}
    kwargs["load"] = metashard.LoadPolicy(**{"timeout": 60, **load})
    try:
        return metashard.load_component(folder, **kwargs)
    except metashard.ShardError as error:
        if "no repeated blocks" not in str(error):
            raise
        return metashard.load_component(folder, shard=metashard.ShardPolicy(wrap=()), **kwargs)
