"""What is saved but held by no shard as it is: weights with adapters merged in, and what a library converts on save.

Both need a tensor whole. They are made one after the other, by the library's own code, and the module stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from metashard.layout import named_slots
from metashard.save.twin import hollow_copy

Whole = Mapping[int, torch.Tensor]  # id of a tensor -> its gathered copy, which may be changed


@dataclass(frozen=True)
class Recipe:
    """How to make some tensors of a checkpoint.

    Args:
        needs: The tensors that it takes, sharded or not.
        make: Gives (name, value), out of them.
    """

    needs: tuple[torch.Tensor, ...]
    make: Callable[[Whole], Iterable[tuple[str, torch.Tensor]]]


def write_made(
    recipes: Iterable[Recipe], write: Callable[[str, torch.Tensor], None], stop: threading.Event
) -> Exception | None:
    """Gather, make and hand out one recipe after the other; every rank calls it. Collective.

    Memory: what the largest recipe needs, in full, and what making takes.

    Args:
        recipes: The same on every rank.
        write: Called with the name and value of each tensor that is made.
        stop: Set once some rank has failed: from then on tensors are only gathered, so that all ranks stay in step.

    Returns:
        Why this rank could not make or write.
    """
    failure: Exception | None = None
    for recipe in recipes:
        whole = {id(tensor): _whole(tensor) for tensor in recipe.needs}
        if failure is not None or stop.is_set():
            continue
        try:
            for name, value in recipe.make(whole):
                write(name, value)
        except Exception as error:  # noqa: BLE001 - returned when nobody waits for this rank any more
            failure = error
            stop.set()
    return failure


def merging(name: str, layer: nn.Module) -> Recipe:
    """The base tensors of one of peft's layers with its active adapters merged in.

    As peft merges them in one process: bitwise the same on the same kind of device, as the same code runs on the same
    shapes.

    Args:
        name: Name of the module below the adapter.
        layer: peft's layer in its place.
    """

    def make(whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
        merged = _copy(layer, whole)
        merged.merge()  # type: ignore[operator]
        for slot, tensor in named_slots(merged.get_base_layer(), attributes=False):  # type: ignore[operator]
            if slot.persistent:
                yield f"{name}.{slot.fqn}", tensor.detach()

    return Recipe(tuple(tensor for _, tensor in named_slots(layer, attributes=False)), make)


def converting(
    tensor: torch.Tensor, keys: Iterable[str], convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
) -> Recipe:
    """What a library makes of one tensor when it saves.

    Args:
        tensor: The tensor, sharded or not.
        keys: The names in the checkpoint of what comes of it, in order.
        convert: The library's conversion.
    """

    def make(whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in zip(keys, convert(whole[id(tensor)]).values(), strict=True):
            yield key, value.detach().contiguous()

    return Recipe((tensor,), make)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A gathered copy, which may be changed."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    on_device: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]  # it may be offloaded
    full = on_device.full_tensor()
    # Where an axis has one rank, or the tensor is replicated, that is the shard itself and no copy of it.
    shared = full.untyped_storage().data_ptr() == on_device.to_local().untyped_storage().data_ptr()
    return full.clone() if shared else full


def _copy(module: nn.Module, whole: Whole) -> nn.Module:
    def of(tensor: torch.Tensor) -> torch.Tensor:
        value = whole[id(tensor)]
        return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value

    made = hollow_copy(module, of)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _copy(child, whole)
    return made
