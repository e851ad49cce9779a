"""The ways to get a folder's safetensors into memory that the two weight benchmarks compare.

A mode is prepared off the clock and then loads: `mode.prepare(setting)` returns a function that returns what this rank
ended up with, by key. A mode is `whole` if that is every tensor, else it is this rank's shard (dim 0) of each.

A flat `nn.Module` with the checkpoint's tensors as parameters, sharded with `fully_shard` on dim 0, stands in for a
model in the modes that load into shards: the bytes are the same, and no model class is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from preflight import WeightFiles
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from metashard import LoadPolicy, ShardPolicy, fill
from metashard.checkpoint import Checkpoint, read_checkpoint
from metashard.fill.bytes import as_bytes
from metashard.fill.target import Job
from metashard.layout import agree_on_layout
from metashard.run import Run
from metashard.shard import shard_module
from metashard.shards import allocate
from metashard.strategy import crew_of

Held = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """What every mode is given.

    Attributes:
        weights: The files.
        device: Where tensors go.
        mesh: All ranks, one axis.
        node: Process group of the ranks of this host.
        leader: Global rank of the first of them, which reads for the others.
    """

    weights: WeightFiles
    device: torch.device
    mesh: DeviceMesh
    node: dist.ProcessGroup
    leader: int

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank()


@dataclass(frozen=True)
class Mode:
    """One way to load.

    Attributes:
        name: As tables have it.
        about: One line.
        whole: Whether every rank ends up with every tensor, rather than with its shards.
        prepare: Called off the clock, on every rank; what it returns is called on the clock.
    """

    name: str
    about: str
    whole: bool
    prepare: Callable[[Setting], Callable[[], Held]]


def node_group() -> tuple[dist.ProcessGroup, int]:
    """(group of the ranks on this host, its first rank); collective."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD, 0
    mine = None
    for host in sorted(set(hosts)):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group, ranks[0]
    assert mine is not None
    return mine


def keys_by_file(weights: WeightFiles) -> Iterator[tuple[Path, list[str]]]:
    """Files in order of their names, each with its keys in the order of their bytes."""
    for path in weights.paths:
        inside = [entry for entry in weights.checkpoint.entries.values() if entry.file == path.name]
        yield path, [entry.key for entry in sorted(inside, key=lambda entry: entry.offset)]


# ---- whole tensors --------------------------------------------------------------------------------------------------


def mapped(setting: Setting) -> Callable[[], Held]:
    """To host memory as safetensors does it, mapped; every byte is touched, as nothing is read before."""

    def load() -> Held:
        held: Held = {}
        for path, keys in keys_by_file(setting.weights):
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for key in keys:
                    held[key] = file.get_tensor(key)
                    touch(held[key])
        return held

    return load


def touch(tensor: torch.Tensor) -> int:
    """Reads every byte of a contiguous tensor: the sum of its 8-byte words and of the bytes around them."""
    flat = as_bytes(tensor)
    start = -flat.storage_offset() % 8  # words lie at multiples of their size
    stop = start + (flat.numel() - start) // 8 * 8
    if stop <= start:
        return int(flat.sum())
    return sum(int(part.sum()) for part in (flat[:start], flat[start:stop].view(torch.int64), flat[stop:]))


def independent(setting: Setting) -> Callable[[], Held]:
    """Every rank reads every tensor to its device."""

    def load() -> Held:
        return dict(_read_to_device(setting))

    return load


def _read_to_device(setting: Setting) -> Iterator[tuple[str, torch.Tensor]]:
    for path, keys in keys_by_file(setting.weights):
        with safe_open(str(path), framework="pt", device=str(setting.device)) as file:
            for key in keys:
                tensor = file.get_tensor(key)
                # On the CPU it is a view of the mapped file: its device is memory of its own.
                yield key, tensor.clone() if setting.device.type == "cpu" else tensor


def broadcast(*, wait: bool) -> Callable[[Setting], Callable[[], Held]]:
    """The first rank of each host reads every tensor to its device and broadcasts it to the host's other ranks.

    Args:
        wait: Until a broadcast is done before the next tensor is read (sync), or for all of them at the end (async).
    """

    def prepare(setting: Setting) -> Callable[[], Held]:
        def load() -> Held:
            held: Held = {}
            works: list[dist.Work | None] = []
            reads = setting.rank == setting.leader
            for key, tensor in _read_to_device(setting) if reads else _empty_on_device(setting):
                held[key] = tensor
                if tensor.numel():  # as bytes: a backend need not know the dtype
                    work = dist.broadcast(as_bytes(tensor), setting.leader, group=setting.node, async_op=not wait)
                    works.append(work)
            for work in works:
                if work is not None:
                    work.wait()
            return held

        return load

    return prepare


def _empty_on_device(setting: Setting) -> Iterator[tuple[str, torch.Tensor]]:
    entries = setting.weights.checkpoint.entries
    for _, keys in keys_by_file(setting.weights):
        for key in keys:
            yield key, torch.empty(entries[key].shape, dtype=entries[key].dtype, device=setting.device)


# ---- shards ---------------------------------------------------------------------------------------------------------


def sharded(strategy: str) -> Callable[[Setting], Callable[[], Held]]:
    """metashard's own reading and sending, into the shards of a flat module (made off the clock, on meta).

    On the clock are the headers (read on one rank and sent), the memory of the shards and all that fills them.

    Args:
        strategy: "stream" or "direct".
    """

    def prepare(setting: Setting) -> Callable[[], Held]:
        shard = ShardPolicy(wrap=())
        module, keys = flat_module(setting.weights.checkpoint)
        run = Run(setting.mesh, shard, LoadPolicy(strategy=strategy, transport="scatter", progress=False))
        slots = agree_on_layout(module, run.agreement)
        replicated = {name for name, parameter in module.named_parameters() if parameter.dim() == 0}
        shard_module(module, [], setting.mesh, shard, replicated)  # `fully_shard` takes no 0-d parameters
        crew = crew_of(run, [True] * setting.mesh.size())
        folder, names = setting.weights.folder, sorted(setting.weights.checkpoint.sizes)
        weight_map = {key: entry.file for key, entry in setting.weights.checkpoint.entries.items()}

        def load() -> Held:
            with run.agreement.told(), run.recorder, run.prefetch:
                headers: Checkpoint = run.on_leader("headers", lambda: read_checkpoint(folder, names, weight_map))
                if run.agreement.leader and run.one_host:
                    run.prefetch.start(folder, headers)
                allocate(module, setting.mesh, shard)
                job = Job(
                    setting.mesh, run.device, run.agreement, run.load, run.recorder, folder, crew, lambda nbytes: None
                )
                sources = {name: headers.entries[key] for name, key in keys.items()}
                fill.fill(module, slots, job, strategy=strategy, sources=sources, headers=headers, real={})
            return {keys[name]: _local(parameter) for name, parameter in module.named_parameters()}

        return load

    return prepare


def flat_module(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, str]]:
    """A module on meta with one parameter an entry, and the key of each by the parameter's name (which has no dots)."""
    module, keys = nn.Module(), {}
    for number, entry in enumerate(checkpoint.entries.values()):
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        keys[f"tensor{number}"] = entry.key
        module.register_parameter(f"tensor{number}", nn.Parameter(tensor, requires_grad=False))
    return module, keys


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


MAPPED = Mode("cpu", "every rank maps the files into host memory and touches every byte; nothing travels", True, mapped)
INDEPENDENT = Mode("independent", "every rank reads every tensor to its device", True, independent)
BROADCAST = Mode(
    "broadcast", "the first rank of each host reads, and broadcasts tensor by tensor (sync)", True, broadcast(wait=True)
)
BROADCAST_ASYNC = Mode(
    "broadcast/async", "the same, reading on while broadcasts are on their way", True, broadcast(wait=False)
)
SCATTER = Mode(
    "scatter", "metashard: the first rank of each host reads and sends each rank its shards", False, sharded("stream")
)
DIRECT = Mode("direct", "metashard: every rank reads the bytes of its own shards", False, sharded("direct"))
