"""Files to memory: large `preadv` calls by a few threads, straight into the shard where its dtype and device allow."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from metashard.checkpoint import Entry
from metashard.errors import CheckpointError
from metashard.fill.bytes import as_bytes, as_dtype
from metashard.plan import Box

READ_BYTES = 8 << 20  # one preadv; larger gains nothing, smaller leaves more calls


@dataclass(frozen=True)
class Read:
    """One run of neighbouring elements: `count` of them, from `entry`'s element `start`, into the 1-D tensor `into`."""

    entry: Entry
    start: int
    into: torch.Tensor

    @property
    def offset(self) -> int:
        """Byte at which the run starts in the entry's file."""
        return self.entry.offset + self.start * self.entry.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.into.numel() * self.entry.dtype.itemsize


def reads_for(entry: Entry, box: Box, into: torch.Tensor, *, most: int) -> Iterator[Read]:
    """The reads that fill `into`, a rank's 1-D part of `entry`, in pieces of at most `most` bytes on disk."""
    step = max(1, most // entry.dtype.itemsize)
    for first, local, count in box.runs():
        for at in range(0, count, step):
            n = min(step, count - at)
            yield Read(entry, first + at, into[local + at : local + at + n])


class Files:
    """The open files of one component, for positioned reads by many threads.

    Args:
        folder: The component's folder.
        sizes: File name -> size in bytes when the headers were read; another size now is an error.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self.folder = folder
        self.sizes = sizes
        self.bytes_read = 0
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def descriptor(self, name: str) -> int:
        """Descriptor of a file, opened when it is first asked for."""
        with self._lock:
            if name not in self._descriptors:
                descriptor = os.open(self.folder / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                self._descriptors[name] = descriptor
                size = os.fstat(descriptor).st_size
                if size != self.sizes[name]:
                    raise CheckpointError(
                        f"{name} changed while it was loaded: it had {self.sizes[name]} bytes when its header was read "
                        f"and has {size} now. Is something still writing it?",
                        phase="fill",
                        file=str(self.folder / name),
                        expected=self.sizes[name],
                        got=size,
                    )
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._descriptors[name]

    def read(self, read: Read, raw: torch.Tensor) -> None:
        """Read a run's bytes into the 1-D uint8 CPU tensor `raw`."""
        descriptor = self.descriptor(read.entry.file)
        view = memoryview(raw.numpy())  # type: ignore[arg-type]
        done = 0
        while done < read.nbytes:
            got = os.preadv(descriptor, [view[done : read.nbytes]], read.offset + done)
            if got == 0:
                raise CheckpointError(
                    f"{read.entry.file} ended at byte {read.offset + done}, inside {read.entry.key}: expected "
                    f"{read.nbytes - done} more bytes. Did the file shrink while it was loaded?",
                    phase="fill",
                    file=str(self.folder / read.entry.file),
                    key=read.entry.key,
                    expected=read.nbytes,
                    got=done,
                )
            done += got
        with self._lock:
            self.bytes_read += done


def place(files: Files, read: Read, staging: torch.Tensor | None) -> None:
    """Read a run and put it in place, through `staging` (1-D uint8) if it needs a cast or another device."""
    if read.into.device.type == "cpu" and read.into.dtype == read.entry.dtype:
        files.read(read, as_bytes(read.into))
        return
    assert staging is not None
    files.read(read, staging[: read.nbytes])
    read.into.copy_(as_dtype(staging, read.entry.dtype, read.into.numel()))


def read_all(
    files: Files, reads: Sequence[Read], *, threads: int, staging_bytes: int, advance: object = None, pin: bool = False
) -> None:
    """Do all reads, in file order, by `threads` threads that share `staging_bytes` of staging.

    Raises:
        The first error of any thread, once all have stopped.
    """
    ordered = iter(sorted(reads, key=lambda r: (r.entry.file, r.offset)))
    lock = threading.Lock()
    errors: list[BaseException] = []
    needs_staging = any(r.into.device.type != "cpu" or r.into.dtype != r.entry.dtype for r in reads)
    threads = max(1, min(threads, len(reads)))

    def work() -> None:
        try:
            staging = (
                torch.empty(staging_bytes // threads, dtype=torch.uint8, pin_memory=pin) if needs_staging else None
            )
            while not errors:
                with lock:
                    read = next(ordered, None)
                if read is None:
                    return
                place(files, read, staging)
                if callable(advance):
                    advance(read.into.nbytes)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    workers = [threading.Thread(target=work, name=f"metashard-read-{n}", daemon=True) for n in range(1, threads)]
    for worker in workers:
        worker.start()
    work()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
