"""Digests and the final check: what a load promises, told from the module itself."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, zip_longest

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from metashard.errors import LoadError
from metashard.fill.bytes import as_bytes, flat_local
from metashard.layout import Slot, named_slots
from metashard.shards import local_box

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


def check_loaded(module: nn.Module, slots: Sequence[Slot]) -> None:
    """The final check of a load: nothing left on meta, the layout and ties as agreed, every shard in its own memory.

    Args:
        module: The loaded module.
        slots: The layout that all ranks had agreed on, as rank 0 had it before sharding.

    Raises:
        LoadError: Naming the tensors.
    """
    held = named_slots(module)
    leftovers = [slot.fqn for slot, tensor in held if tensor.is_meta or _local_is_meta(tensor)]
    if leftovers:
        raise LoadError(
            f"{len(leftovers)} tensors are still on the meta device: {', '.join(leftovers[:5])}. They are "
            f"neither in the checkpoint nor computed by the module on rank 0.",
            phase="check",
            key=leftovers[0],
            expected="no tensor on the meta device",
            got=f"{len(leftovers)}",
        )
    wanted = [slot for slot in slots if slot.kind != "attribute"]
    registered = [(slot, tensor) for slot, tensor in held if slot.kind != "attribute"]
    for want, got in zip_longest(wanted, (slot for slot, _ in registered)):
        _check_layout(want, got)
    places: dict[torch.device, list[tuple[int, int, str]]] = defaultdict(list)
    for slot, tensor in registered:
        flat = flat_local(tensor)
        if slot.kind == "parameter" and slot.tie == slot.fqn and flat.numel():
            places[flat.device].append((flat.data_ptr(), flat.data_ptr() + flat.nbytes, slot.fqn))
    for (_, stop, fqn), (start, _, other) in chain.from_iterable(pairwise(sorted(p)) for p in places.values()):
        if start < stop:
            raise LoadError(
                f"{fqn} and {other} are in the same memory, but are not tied.",
                phase="check",
                key=other,
                expected="memory of its own",
                got=f"memory of {fqn}",
            )


def _check_layout(want: Slot | None, got: Slot | None) -> None:
    if want is None or got is None or want.fqn != got.fqn:
        expected, came = getattr(want, "fqn", "nothing"), getattr(got, "fqn", "nothing")
        raise LoadError(
            f"The module has {came} where the ranks had agreed on {expected} before it was sharded.",
            phase="check",
            key=expected if want is not None else came,
            expected=expected,
            got=came,
        )
    if want.tie != got.tie:
        raise LoadError(
            f"{got.fqn} should share memory with {want.tie}, but is tied to {got.tie}.",
            phase="check",
            key=got.fqn,
            expected=want.tie,
            got=got.tie,
        )
    for field in ("kind", "shape", "dtype", "requires_grad", "persistent"):
        expected, came = getattr(want, field), getattr(got, field)
        if expected != came:
            raise LoadError(
                f"{got.fqn}: {field} is {came}, the ranks had agreed on {expected} before it was sharded.",
                phase="check",
                key=got.fqn,
                expected=expected,
                got=came,
            )


def _local_is_meta(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.to_local().is_meta
