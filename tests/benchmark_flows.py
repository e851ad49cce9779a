"""Flows that load something else than they should: the benchmarks must say so. In a module that ranks import fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peers
import torch
import torch.distributed as dist


def other_bytes(path: Any, component: Any, mesh: Any, dtype: Any) -> Any:
    """One bit of one element differs, on the last rank."""
    module = peers.all_load(path, component, mesh, dtype)
    if dist.get_rank() == dist.get_world_size() - 1:
        shard = next(parameter.to_local() for parameter in module.parameters() if parameter.to_local().numel())
        shard.detach().view(torch.int16).view(-1)[-1] ^= 1
    return module


def other_adapter(path: Any, component: Any, mesh: Any, dtype: Any, *, adapter: Any) -> Any:
    """The adapter is drawn from another seed."""
    return peers.all_load(path, component, mesh, dtype, adapter=replace(adapter, seed=adapter.seed + 1))


def fails(path: Any, component: Any, mesh: Any, dtype: Any) -> Any:
    """On one rank only, with a text of several lines."""
    if dist.get_rank() == 0 and component != "transformer":
        raise RuntimeError("first line\nsecond line")
    return peers.all_load(path, component, mesh, dtype)
