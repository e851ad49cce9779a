"""The raw floor: the bytes of a load read into fresh memory, and nothing else."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import build_shell, compute_device, weight_files
from runs import NotAvailableError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

MIB = 1 << 20
_libc = ctypes.CDLL(None)
_HUGE = 2 * MIB
_BLOCK = 4096  # what O_DIRECT wants addresses, offsets and lengths to be multiples of


@dataclass
class Floor:
    """Not a load: each of N ranks reads its 1/N of the bytes into fresh memory of the size that a load ends up with.

    Bytes beyond that size (a checkpoint in a wider dtype than the model's) go to a buffer that is used again; memory
    beyond the bytes (replicated tensors) is written with zeros.

    Args:
        threads: Readers a rank.
        chunk: Bytes of a read.
        huge_pages: Ask the system for 2 MiB pages (where it leaves the choice to programs).
        direct_io: Read past the page cache; never a warm run's floor.
    """

    threads: int = 4
    chunk: int = 8 * MIB
    huge_pages: bool = False
    direct_io: bool = False
    _pieces: list[tuple[Path, int, int]] = field(default_factory=list, init=False)
    _memory: int = field(default=0, init=False)

    def __str__(self) -> str:
        traits = [f"{self.threads} threads", f"{self.chunk // MIB} MiB reads"]
        traits += ["2 MiB pages"] * self.huge_pages + ["past the page cache"] * self.direct_io
        return ", ".join(traits)

    def prepare(self, path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        """Off the clock: which bytes, and how much memory."""
        if self.direct_io and not hasattr(os, "O_DIRECT"):
            raise NotAvailableError("this system has no O_DIRECT")
        rank, world = dist.get_rank(), dist.get_world_size()
        files = weight_files(path, component)
        sizes = [file.stat().st_size for file in files]
        starts = [0, *accumulate(sizes)]
        unit = _BLOCK if self.direct_io else 1
        low, high = starts[-1] * rank // world, starts[-1] * (rank + 1) // world
        self._pieces = []
        for file, start, size in zip(files, starts, sizes, strict=False):
            first = max(low - start, 0) // unit * unit
            last = size if high >= start + size else max(high - start, 0) // unit * unit
            self._pieces += [(file, at, min(self.chunk, last - at)) for at in range(first, last, self.chunk)]
        self._memory = _resident_bytes(build_shell(path, component, dtype), rank, world)

    def __call__(self, path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        """Reads; returns nothing."""
        device = compute_device(mesh)
        host = device.type == "cpu"
        size = -(-self._memory // _BLOCK) * _BLOCK
        target = torch.empty(size + _HUGE, dtype=torch.uint8, device=device)
        if host:
            target = target[-target.data_ptr() % _HUGE :][:size]
            if self.huge_pages:
                _libc.madvise(ctypes.c_void_p(target.data_ptr()), ctypes.c_size_t(size // _HUGE * _HUGE), 14)
        flags = os.O_RDONLY | (os.O_DIRECT if self.direct_io else 0)
        descriptors = {file: os.open(file, flags) for file, _, _ in self._pieces}
        places = [0, *accumulate(-(-length // _BLOCK) * _BLOCK for _, _, length in self._pieces)]
        jobs = iter(list(zip(self._pieces, places, strict=False)))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                self._read_pieces(jobs, lock, descriptors, target, host)
            except BaseException as error:  # noqa: BLE001  raised again by the caller
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for descriptor in descriptors.values():
            os.close(descriptor)
        if errors:
            raise errors[0]
        if places[-1] < size:
            target[places[-1] :].zero_()

    def _read_pieces(
        self, jobs: Iterator[Any], lock: threading.Lock, descriptors: dict[Path, int], target: torch.Tensor, host: bool
    ) -> None:
        spare = None
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            (file, at, length), place = job
            room = -(-length // _BLOCK) * _BLOCK if self.direct_io else length
            in_place = host and place + room <= target.numel()
            if not in_place and spare is None:
                spare = torch.empty(self.chunk + 2 * _BLOCK, dtype=torch.uint8, pin_memory=not host)
                spare = spare[-spare.data_ptr() % _BLOCK :]
            into = target[place : place + room] if in_place else spare[:room]  # type: ignore[index]
            view = memoryview(into.numpy())
            done = 0
            while done < length:
                got = os.preadv(descriptors[file], [view[done:]], at + done)
                if not got:
                    raise OSError(f"{file.name}: ends at {at + done}, expected {at + length} bytes")
                done += got
            if not host and place + length <= target.numel():
                target[place : place + length].copy_(into[:length], non_blocking=False)


def _resident_bytes(shell: nn.Module, rank: int, world: int) -> int:
    """What a rank ends up with: its rows of every parameter (as `Shard(0)` cuts them), and all buffers."""
    total = sum(buffer.nbytes for buffer in shell.buffers())
    for parameter in shell.parameters():
        rows = parameter.shape[0] if parameter.dim() else 1
        chunk = -(-rows // world)
        mine = max(0, min(rows, chunk * (rank + 1)) - chunk * rank)
        total += mine * math.prod(parameter.shape[1:]) * parameter.dtype.itemsize
    return total


FLOOR_SETTINGS = [
    Floor(threads=threads, chunk=chunk * MIB, huge_pages=huge)
    for threads, chunk, huge in (
        (1, 8, True),
        (2, 8, False),
        (2, 8, True),
        (2, 32, True),
        (4, 4, True),
        (4, 8, False),
        (4, 8, True),
        (4, 32, True),
    )
]
QUICK_FLOOR_SETTINGS = [Floor(threads=2), Floor(threads=4), Floor(threads=4, huge_pages=True)]
