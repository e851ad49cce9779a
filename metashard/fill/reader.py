"""Files to memory: large `preadv` calls by a few threads, straight into the shard where its dtype and device allow."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metashard.checkpoint import Checkpoint, Entry
from metashard.errors import CheckpointError
from metashard.fill.bytes import as_bytes
from metashard.fill.pages import STEP_BYTES, populate
from metashard.fill.staging import Staging
from metashard.fill.threads import in_threads

READ_BYTES = 8 << 20  # one preadv; larger gains nothing, smaller leaves more calls


_DENSE_BYTES = 16 << 10  # shorter runs are read with what lies between them: a call a run would cost more


@dataclass(frozen=True)
class Read:
    """One stretch of a file, of which `into` takes all, or equally long runs at equal distances.

    Args:
        entry: What is read from.
        start: Element of the entry at which the stretch starts.
        into: Where the elements go (1-D, contiguous).
        run: Elements of each run.
        stride: Elements from the start of one run to the next.
    """

    entry: Entry
    start: int
    into: torch.Tensor
    run: int
    stride: int

    @property
    def offset(self) -> int:
        """Byte at which the stretch starts in the entry's file."""
        return self.entry.offset + self.start * self.entry.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch, those between the runs included."""
        return ((self.into.numel() // self.run - 1) * self.stride + self.run) * self.entry.dtype.itemsize

    @property
    def takes_as_is(self) -> bool:
        """Whether the bytes can be read straight into `into`."""
        return self.run == self.into.numel() and self.into.device.type == "cpu" and self.into.dtype == self.entry.dtype


def reads_for(entry: Entry, runs: Iterable[tuple[int, int, int]], into: torch.Tensor, *, most: int) -> Iterator[Read]:
    """The reads that fill `into` with runs (element of `entry`, element of `into`, count), of at most `most` bytes.

    A shard on another dim than 0 is many short runs: neighbours at equal distances are read in one stretch.
    """
    size = entry.dtype.itemsize
    step = max(1, most // size)
    first = local = count = stride = repeats = 0  # the stretch that is being put together

    def stretch() -> Read:
        return Read(entry, first, into[local : local + repeats * count], count, stride)

    for start, at, n in runs:
        if n == 0:
            continue
        last = first + (repeats - 1) * stride
        joins = n == count and n * size < _DENSE_BYTES and at == local + repeats * count
        fits = (start + n - first) * size <= most
        if repeats and joins and fits and (repeats == 1 or start - last == stride):
            stride = start - last
            repeats += 1
            continue
        if repeats:
            yield stretch()
        for done in range(0, n - step, step):  # all but the last piece of a run that is longer than one read
            yield Read(entry, start + done, into[at + done : at + done + step], step, step)
        done = max(0, n - 1) // step * step
        first, local, count, stride, repeats = start + done, at + done, n - done, n - done, 1
    if repeats and count:
        yield stretch()


class Files:
    """The open files of one component, for positioned reads by many threads.

    Args:
        folder: The component's folder on this rank.
        checkpoint: The files as they were when their headers were read; a file that is another one now is an error.
        same_folder: Whether the headers were read from this very folder, so that times of change can be compared.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, *, same_folder: bool) -> None:
        self.folder = folder
        self.checkpoint = checkpoint
        self.same_folder = same_folder
        self.bytes_read = 0
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                for name, descriptor in self._descriptors.items():
                    self._check_unchanged(name, descriptor)
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._descriptors:
                # A FIFO that has come in the file's place would be waited for; O_NONBLOCK means nothing to a file.
                flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
                descriptor = os.open(self.folder / name, flags)
                self._descriptors[name] = descriptor
                self._check_unchanged(name, descriptor)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._descriptors[name]

    def _check_unchanged(self, name: str, descriptor: int) -> None:
        now = os.fstat(descriptor)
        expected: Any = self.checkpoint.sizes[name]
        got: Any = now.st_size
        if expected == got and self.same_folder:
            expected, got = self.checkpoint.modified.get(name, now.st_mtime_ns), now.st_mtime_ns
        if expected != got:
            what = "bytes" if now.st_size != self.checkpoint.sizes[name] else "as time of the last change (ns)"
            raise CheckpointError(
                f"{name} changed while it was loaded: it had {expected} {what} when its header was read and has {got} "
                "now. Is something still writing it?",
                phase="fill",
                file=str(self.folder / name),
                expected=expected,
                got=got,
            )

    def read(self, read: Read, raw: torch.Tensor) -> None:
        """Read a stretch into the 1-D uint8 CPU tensor `raw`.

        Raises:
            CheckpointError: The file ends too early, or the system cannot read it; names file, key and offset.
        """
        descriptor = self._descriptor(read.entry.file)
        view = memoryview(raw.numpy())  # type: ignore[arg-type]
        done = 0
        while done < read.nbytes:
            step = min(STEP_BYTES, read.nbytes - done)
            populate(raw.data_ptr() + done, step)
            try:
                got = os.preadv(descriptor, [view[done : done + step]], read.offset + done)
            except OSError as error:
                raise self._failed(read, done, f"cannot be read: {error.strerror}") from error
            if got == 0:
                raise self._failed(read, done, "ended early. Did the file shrink while it was loaded?")
            done += got
        with self._lock:
            self.bytes_read += done

    def _failed(self, read: Read, done: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{read.entry.key}: {read.entry.file} at byte {read.offset + done} {what}",
            phase="fill",
            file=str(self.folder / read.entry.file),
            key=read.entry.key,
            expected=f"{read.nbytes} bytes from offset {read.offset}",
            got=f"{done} bytes",
        )


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

    def run(self, reads: Sequence[Read], placed: Callable[[torch.Tensor], None] = lambda into: None) -> None:
        """Do all reads, in file order; the bytes are in place when this returns.

        Args:
            reads: What to read, in pieces of at most `most` bytes.
            placed: Called with the memory of each read, once its elements are (or on an accelerator will be) there.

        Raises:
            The first error of any thread, once all have stopped.
        """
        ordered = sorted(reads, key=lambda r: (r.entry.file, r.offset))

        def work(read: Read, number: int) -> None:
            self._read(read, number)
            placed(read.into)

        threads = max(1, min(self.threads, len(reads)))
        in_threads(ordered, work, threads=threads, last=self._finish, name="metashard-read")

    def _finish(self, number: int) -> None:
        """Wait for what is still on its way from a thread's staging."""
        for (owner, _), staging in self.stagings.copy().items():
            if owner == number:
                staging.finish()

    def _read(self, read: Read, number: int) -> None:
        if read.takes_as_is:
            self.files.read(read, as_bytes(read.into))
            return
        key = (number, read.into.device)  # two kinds under CPU offload: parameters on CPU, buffers on the device
        if key not in self.stagings:
            self.stagings[key] = Staging(read.into.device, self.staging_bytes // self.threads)
        staging = self.stagings[key]
        self.files.read(read, staging.buffer()[: read.nbytes])
        staging.land(read.entry.dtype, read.into, run=read.run, stride=read.stride)
