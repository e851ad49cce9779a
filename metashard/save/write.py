"""Memory to files: positioned writes by a few threads, straight from the shard where its dtype and device allow."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from metashard.checkpoint import Entry
from metashard.errors import SaveError
from metashard.fill.bytes import as_bytes, as_dtype
from metashard.fill.threads import in_threads
from metashard.save.share import Share

WRITE_BYTES = 8 << 20  # of one piece: larger gains nothing
PART = ".part"  # after the name of a weight file that is not complete: it has its size and header from the beginning


class Account:
    """Which bytes of each entry have been written: how many, and the sum of their positions.

    Entries are written in pieces by several ranks. A byte that is left out makes the first figure too small; one that
    is written twice in place of another changes the second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.figures: dict[str, tuple[int, int]] = {}
        self.nbytes = 0

    def wrote(self, entry: Entry, runs: Iterable[tuple[int, int]]) -> None:
        """Note runs (first byte of the file, bytes) of an entry."""
        count = places = 0
        for first, n in runs:
            count += n
            places += _sum_of_places(first - entry.offset, n)
        with self._lock:
            had = self.figures.get(entry.key, (0, 0))
            self.figures[entry.key] = (had[0] + count, had[1] + places)
            self.nbytes += count


def check_accounts(accounts: Sequence[Mapping[str, tuple[int, int]]], entries: Iterable[Entry]) -> None:
    """Hold what all ranks have written against what the files have to hold.

    Raises:
        SaveError: Naming the first tensor of which a byte was not written, or more than once.
    """
    for entry in entries:
        figures = [account.get(entry.key, (0, 0)) for account in accounts]
        count, places = (sum(column) for column in zip(*figures, strict=True))
        if (count, places) != (entry.nbytes, _sum_of_places(0, entry.nbytes)):
            raise SaveError(
                f"{entry.key}: {count} bytes were written where the file has {entry.nbytes}, or not each of them once. "
                "This is a defect of metashard, please report it.",
                phase="check",
                file=entry.file,
                key=entry.key,
                expected=entry.nbytes,
                got=count,
            )


def _sum_of_places(first: int, count: int) -> int:
    return count * first + count * (count - 1) // 2


class Files:
    """The weight files of a save, opened for writing; any thread may write.

    Args:
        folder: Where this rank sees them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.account = Account()
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def write(self, entry: Entry, runs: Iterable[tuple[int, int, int]], raw: torch.Tensor) -> None:
        """Write runs (byte of the file, byte of `raw`, bytes) out of the 1-D uint8 CPU tensor `raw`."""
        descriptor = self._descriptor(entry.file)
        view = memoryview(raw.numpy())  # type: ignore[arg-type]
        written = []
        for place, at, count in runs:
            done = 0
            while done < count:
                try:
                    done += os.pwrite(descriptor, view[at + done : at + count], place + done)
                except OSError as error:
                    raise self._failed(entry, error, "written") from error
            written.append((place, count))
        self.account.wrote(entry, written)

    def flush(self) -> None:
        """Have all that this rank has written on the storage."""
        for name, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
            except OSError as error:
                text = f"{name} cannot be flushed: {error.strerror}. Nothing was changed in the folder."
                raise SaveError(text, phase="write", file=str(self.folder / name), got=error.strerror) from error

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._descriptors:
                self._descriptors[name] = os.open(self.folder / (name + PART), os.O_WRONLY | os.O_CLOEXEC)
            return self._descriptors[name]

    def _failed(self, entry: Entry, error: OSError, what: str) -> SaveError:
        return SaveError(
            f"{entry.key}: {entry.file} cannot be {what}: {error.strerror}. Nothing was changed in the folder.",
            phase="write",
            file=str(self.folder / entry.file),
            key=entry.key,
            got=error.strerror,
        )


class Piece(NamedTuple):
    """The elements [start, stop) of a share, and the memory (1-D) that holds them."""

    share: Share
    start: int
    stop: int
    flat: torch.Tensor


def pieces_of(share: Share, flat: torch.Tensor, *, most: int) -> Iterator[Piece]:
    """Cut a share into pieces of at most `most` bytes.

    Args:
        share: What this rank writes.
        flat: This rank's part of the tensor (1-D), of which it is a stretch.
        most: Bytes in the file.
    """
    step = max(1, most // share.entry.dtype.itemsize)
    for start in range(0, share.numel, step):
        stop = min(start + step, share.numel)
        yield Piece(share, start, stop, flat[share.start + start : share.start + stop])


class Writer:
    """A few threads that write; each keeps a staging buffer for what is cast, or lies on an accelerator.

    Args:
        files: The open files.
        threads: How many threads write, the calling one included.
        staging_bytes: Bytes of all staging buffers together; allocated when a piece first needs one.
    """

    def __init__(self, files: Files, *, threads: int, staging_bytes: int) -> None:
        self.files, self.threads, self.staging_bytes = files, threads, staging_bytes
        self._staging: dict[int, torch.Tensor] = {}

    @property
    def most(self) -> int:
        """The most bytes of one piece: a staging buffer has to hold it."""
        return min(WRITE_BYTES, self.staging_bytes // self.threads)

    def run(self, pieces: Iterable[Piece]) -> None:
        """Write all pieces, in their order; raises the first error of any thread."""
        in_threads(pieces, self._write, threads=self.threads, name="metashard-write")

    def _write(self, piece: Piece, number: int) -> None:
        entry = piece.share.entry
        runs = piece.share.runs(piece.start, piece.stop)
        if piece.flat.dtype == entry.dtype and piece.flat.device.type == "cpu":
            self.files.write(entry, runs, as_bytes(piece.flat.contiguous()))  # a plain buffer may have gaps
            return
        if number not in self._staging:
            pin = piece.flat.device.type != "cpu"
            self._staging[number] = torch.empty(self.most, dtype=torch.uint8, pin_memory=pin)
        staged = as_dtype(self._staging[number], entry.dtype, piece.stop - piece.start)
        lift(piece.flat, staged)
        self.files.write(entry, runs, as_bytes(staged))


def lift(source: torch.Tensor, staged: torch.Tensor) -> None:
    """Bring elements to host memory, cast to the dtype there; they are in place when this returns.

    Threads wait for their own copy only, each on a stream of its own: one writes while another's bytes travel.
    """
    if source.device.type == "cpu":
        staged.copy_(source)
        return
    stream = torch.Stream(source.device)
    stream.wait_stream(torch.accelerator.current_stream(source.device))
    with stream:
        cast = source.to(staged.dtype)
        staged.copy_(cast, non_blocking=True)
    stream.synchronize()
