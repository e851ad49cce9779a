"""Let the storage work all the time: while the module is being built, and ahead of the reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from metashard.checkpoint import Checkpoint, Entry

_STEP_BYTES = 8 << 20
_MOST_OF_FREE = 0.5  # of the memory that is available: what is asked for too early would be evicted before it is read


class Prefetch:
    """Asks the kernel for the bytes of files, in the order in which they will be read. A context that ends it.

    Only advice: no byte is copied, an error is ignored (the reads to come will tell it), and where the system takes no
    such advice nothing happens.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._wanted: set[tuple[str, int]] | None = None  # file and number of a step; None for all

    def __enter__(self) -> Prefetch:
        return self

    def start(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Begin, in a thread of its own, with the files of a component in `folder`."""
        if hasattr(os, "posix_fadvise"):
            files = [(folder / name, size) for name, size in sorted(checkpoint.sizes.items())]
            self._thread = threading.Thread(target=self._run, args=(files,), name="metashard-prefetch")
            self._thread.start()

    def narrow(self, entries: Iterable[Entry]) -> None:
        """From here on ask for what these entries need only: the files may hold a larger model."""
        self._wanted = {
            (entry.file, step)
            for entry in entries
            for step in range(entry.offset // _STEP_BYTES, -(-(entry.offset + entry.nbytes) // _STEP_BYTES))
        }

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():  # not if its start was interrupted
            self._thread.join()

    def _run(self, files: list[tuple[Path, int]]) -> None:
        left = int(_available_bytes() * _MOST_OF_FREE)
        for path, size in files:
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError:
                return
            try:
                for start in range(0, size, _STEP_BYTES):
                    if left <= 0 or self._stop.is_set():
                        return
                    if self._wanted is not None and (path.name, start // _STEP_BYTES) not in self._wanted:
                        continue
                    os.posix_fadvise(descriptor, start, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
                    left -= _STEP_BYTES
            except OSError:
                return
            finally:
                os.close(descriptor)


def _available_bytes() -> int:
    """Host memory that the system can give without swapping; 0 where it does not tell."""
    try:
        with open("/proc/meminfo") as meminfo:
            return next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
