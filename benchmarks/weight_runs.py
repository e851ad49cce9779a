"""Runs of weight modes on the ranks of torchrun (or in one process): clock, accounting, checksums.

One run:

    (cold: the files leave the page cache, which is verified)
    -> the mode is prepared -> barrier, clock starts -> it loads -> device synchronised, barrier, clock stops

A run's time is that of the slowest rank. Modes are interleaved (A B C A B C), and the warm-up runs are not counted. In
the last run of each mode every rank hashes what it ended up with.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from page import evict
from preflight import WeightFiles, check_evicted, on_all_ranks
from torch.distributed.device_mesh import init_device_mesh
from weight_modes import Held, Mode, Setting, node_group

from metashard.cli import process_group
from metashard.fill.bytes import as_bytes
from metashard.plan import chunk


@dataclass(frozen=True)
class ModeResult:
    """All runs of one mode; the same on every rank.

    Attributes:
        mode: Its name.
        whole: Whether every rank ended up with every tensor.
        seconds: Of each run, the slowest rank's.
        tensors: Entries in the checkpoint.
        checkpoint_bytes: Bytes of the checkpoint's tensors, each counted once.
        rank_bytes: Bytes that each rank ended up with.
        digests: For each rank the sha256 of the parts that it ended up with: of all parts, or of its own (see `parts`).
    """

    mode: str
    whole: bool
    seconds: tuple[float, ...]
    tensors: int
    checkpoint_bytes: int
    rank_bytes: tuple[int, ...]
    digests: tuple[dict[int, str], ...]

    @property
    def average(self) -> float:
        """Mean seconds of a run."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def best(self) -> float:
        """Seconds of the fastest run."""
        return min(self.seconds)

    @property
    def checkpoint_gbps(self) -> float:
        """GB/s (1e9) of unique checkpoint bytes, in the average run."""
        return self.checkpoint_bytes / self.average / 1e9

    @property
    def rank_gbps(self) -> float:
        """GB/s of what one rank ended up with (the rank with most), in the average run."""
        return max(self.rank_bytes) / self.average / 1e9

    def to_json(self) -> dict[str, Any]:
        """The figures, with those that follow from others."""
        return {
            "mode": self.mode,
            "whole": self.whole,
            "seconds": list(self.seconds),
            "average_seconds": self.average,
            "best_seconds": self.best,
            "tensors": self.tensors,
            "checkpoint_bytes": self.checkpoint_bytes,
            "rank_bytes": list(self.rank_bytes),
            "checkpoint_gbps": self.checkpoint_gbps,
            "rank_gbps": self.rank_gbps,
            "digests": [{str(part): digest for part, digest in mine.items()} for mine in self.digests],
        }


@contextmanager
def ranks() -> Iterator[torch.device]:
    """This rank's device; the group of torchrun, of one process, or the one that is there already."""
    if dist.is_initialized():
        # A group that talks over the CPU only is one for the CPU.
        backend = dist.get_backend()
        yield torch.device("cpu") if backend == "gloo" else _accelerator()
        return
    with process_group() as device_type:
        yield torch.device("cpu") if device_type == "cpu" else _accelerator()


def _accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def measure(
    modes: Sequence[Mode],
    weights: WeightFiles,
    device: torch.device,
    *,
    warmup: int,
    repeats: int,
    cold: bool,
    say: Callable[[str], None] = lambda line: None,
) -> list[ModeResult]:
    """Runs all modes, then all of them again; `warmup` rounds that do not count, then `repeats` that do. Collective.

    Raises:
        UsageError: With `cold`, files that stay in the page cache; on every rank.
    """
    node, leader = node_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    setting = Setting(weights, device, mesh, node, leader)
    seconds: dict[str, list[float]] = {mode.name: [] for mode in modes}
    results: dict[str, ModeResult] = {}
    for number in range(warmup + repeats):
        for mode in modes:
            gc.collect()  # modules and the groups that they hold go in cycles
            if cold:
                dist.barrier()  # until no rank has pages mapped any more
                on_all_ranks(lambda: _evict(setting))
            elapsed, held = _run(mode, setting)
            if number >= warmup:
                seconds[mode.name].append(elapsed)
                say(f"run {number - warmup + 1}, {mode.name}: {elapsed:.3f} s")
            if number == warmup + repeats - 1:
                mine = (sum(tensor.nbytes for tensor in held.values()), digests(held, weights, whole=mode.whole))
                everyone: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, mine)
                results[mode.name] = ModeResult(
                    mode=mode.name,
                    whole=mode.whole,
                    seconds=tuple(seconds[mode.name]),
                    tensors=len(weights.checkpoint.entries),
                    checkpoint_bytes=weights.nbytes,
                    rank_bytes=tuple(nbytes for nbytes, _ in everyone),
                    digests=tuple(told for _, told in everyone),
                )
            del held
    return [results[mode.name] for mode in modes]


def _evict(setting: Setting) -> None:
    if setting.rank == setting.leader:
        check_evicted(evict(setting.weights.paths), setting.weights.paths)


def _run(mode: Mode, setting: Setting) -> tuple[float, Held]:
    """(seconds of the slowest rank, what this rank ended up with)."""
    load = mode.prepare(setting)
    dist.barrier()
    start = time.perf_counter()
    held = load()
    if setting.device.type != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()
    took: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(took, time.perf_counter() - start)
    return max(took), held


# ---- checksums ------------------------------------------------------------------------------------------------------


def digests(held: Held, weights: WeightFiles, *, whole: bool) -> dict[int, str]:
    """sha256 by part: part `r` is what rank `r` has of every tensor when all are cut on dim 0, as FSDP cuts them.

    So a rank that has every tensor has all parts, and a rank that has its shards has one: its own. Keys, dtypes and
    shapes on disk go in as well. 0-d tensors are not cut.
    """
    world = dist.get_world_size()
    found = {part: hashlib.sha256() for part in (range(world) if whole else [dist.get_rank()])}
    for key, entry in weights.checkpoint.entries.items():
        tensor = held[key].cpu()
        for part, total in found.items():
            mine = tensor
            if whole and tensor.dim():
                start, stop = chunk(tensor.shape[0], part, world)
                mine = tensor[start:stop]
            total.update(f"{key} {tensor.dtype} {entry.shape}\n".encode())
            total.update(memoryview(as_bytes(mine.contiguous()).numpy()))  # type: ignore[arg-type]
    return {part: total.hexdigest() for part, total in found.items()}


def disagreements(results: Sequence[ModeResult]) -> list[str]:
    """One line for every part of what a rank ended up with that is not what the first mode's rank 0 has of it."""
    lines = []
    expected: dict[int, tuple[str, str]] = {}
    for result in sorted(results, key=lambda result: not result.whole):
        for rank, told in enumerate(result.digests):
            for part, digest in told.items():
                source, right = expected.setdefault(part, (f"{result.mode} on rank {rank}", digest))
                if digest != right:
                    lines.append(f"{result.mode} on rank {rank}: part {part} differs from that of {source}")
    return lines
