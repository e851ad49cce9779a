"""Files to memory: large `preadv` calls by a few threads, straight into the shard where its dtype and device allow."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from metashard.checkpoint import Entry
from metashard.errors import CheckpointError
from metashard.fill.bytes import as_bytes
from metashard.fill.staging import Staging, takes_as_is

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


def reads_for(entry: Entry, runs: Iterable[tuple[int, int, int]], into: torch.Tensor, *, most: int) -> Iterator[Read]:
    """The reads that fill `into` with runs (element of `entry`, element of `into`, count), cut to `most` bytes."""
    step = max(1, most // entry.dtype.itemsize)
    for first, local, count in runs:
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


class Reader:
    """A few threads that read; each keeps its own staging from call to call.

    Args:
        files: The open files.
        threads: How many threads read, the calling one included.
        staging_bytes: Bytes of host staging of all threads together, for each kind of device that bytes are staged for;
            allocated when a read first needs it.
    """

    def __init__(self, files: Files, *, threads: int, staging_bytes: int) -> None:
        self.files, self.threads = files, threads
        self.staging_bytes = staging_bytes
        self.stagings: dict[tuple[int, torch.device], Staging] = {}

    @property
    def most(self) -> int:
        """The most bytes on disk of one read: a staging buffer must hold it, on an accelerator half of one."""
        return min(READ_BYTES, self.staging_bytes // (2 * self.threads))

    def run(self, reads: Sequence[Read], advance: Callable[[int], None] = lambda nbytes: None) -> None:
        """Do all reads, in file order; the bytes are in place when this returns.

        Args:
            reads: What to read, in pieces of at most `most` bytes.
            advance: Called with the bytes that came into place.

        Raises:
            The first error of any thread, once all have stopped.
        """
        ordered = iter(sorted(reads, key=lambda r: (r.entry.file, r.offset)))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                while not errors:
                    with lock:
                        read = next(ordered, None)
                    if read is None:
                        break
                    self._read(read, number)
                    advance(read.into.nbytes)
                for (owner, _), staging in self.stagings.copy().items():
                    if owner == number:
                        staging.finish()
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                errors.append(error)

        count = max(1, min(self.threads, len(reads)))
        workers = [threading.Thread(target=work, args=(n,), name=f"metashard-read-{n}") for n in range(1, count)]
        for worker in workers:
            worker.start()
        work(0)
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]

    def _read(self, read: Read, number: int) -> None:
        if takes_as_is(read.into, read.entry.dtype):
            self.files.read(read, as_bytes(read.into))
            return
        key = (number, read.into.device)  # two kinds under CPU offload: parameters on CPU, buffers on the device
        if key not in self.stagings:
            self.stagings[key] = Staging(read.into.device, self.staging_bytes // self.threads)
        staging = self.stagings[key]
        self.files.read(read, staging.buffer()[: read.nbytes])
        staging.land(read.entry.dtype, read.into)
