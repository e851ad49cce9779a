"""Adapters merged into what is saved: by peft's own code, a layer at a time, the module left as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from metashard.layout import named_slots
from metashard.save.twin import hollow_copy


def write_merged(
    layers: Mapping[str, nn.Module], write: Callable[[str, torch.Tensor], None], stop: threading.Event
) -> Exception | None:
    """Merge layer after layer and hand out the base tensors that come of it; every rank calls it. Collective.

    Each layer's tensors are gathered on every rank and merged there as peft merges them in one process: bitwise the
    same on the same kind of device, as the same code runs on the same shapes.

    Memory: the largest layer in full, and what peft needs to merge it.

    Args:
        layers: Name of an adapted module -> peft's layer there; the same on every rank.
        write: Called with the name (of the module below the adapter) and value of each of its tensors.
        stop: Set once some rank has failed: from then on layers are only gathered, so that all ranks stay in step.

    Returns:
        Why this rank could not merge or write.
    """
    failure: Exception | None = None
    for name, layer in layers.items():
        whole = {id(tensor): _whole(tensor) for _, tensor in named_slots(layer, attributes=False)}
        if failure is not None or stop.is_set():
            continue
        try:
            merged = _copy(layer, whole)
            merged.merge()  # type: ignore[operator]
            base = merged.get_base_layer()  # type: ignore[operator]
            for slot, tensor in named_slots(base, attributes=False):
                if slot.persistent:
                    write(f"{name}.{slot.fqn}", tensor.detach())
        except Exception as error:  # noqa: BLE001 - returned when nobody waits for this rank any more
            failure = error
            stop.set()
    return failure


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A gathered copy, which merging may change."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    on_device: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]  # it may be offloaded
    return on_device.full_tensor()


def _copy(module: nn.Module, whole: Mapping[int, torch.Tensor]) -> nn.Module:
    def of(tensor: torch.Tensor) -> torch.Tensor:
        value = whole[id(tensor)]
        return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value

    made = hollow_copy(module, of)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _copy(child, whole)
    return made
