"""Memory and I/O of this process."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

SAMPLE_SECONDS = 0.01


class HostMemory:
    """Peak of this process's own host memory, sampled by a thread; `with HostMemory() as memory: ...; memory.peak`.

    Own memory is anonymous plus shared memory (RssAnon and RssShmem of /proc/self/status): staging in /dev/shm counts,
    mapped files do not. Elsewhere than on Linux it is the peak of all resident memory since the process began.

    Attributes:
        start: Bytes when sampling began.
        peak: Highest bytes seen.
    """

    def __enter__(self) -> HostMemory:
        self._fd = os.open("/proc/self/status", os.O_RDONLY) if sys.platform == "linux" else -1
        self.start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="host-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())
        if self._fd >= 0:
            os.close(self._fd)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        if self._fd < 0:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        text = os.pread(self._fd, 8192, 0)
        return sum(kib_after(text, name) for name in (b"RssAnon:", b"RssShmem:")) * 1024


def kib_after(text: bytes, name: bytes) -> int:
    """The number behind a name of /proc/self/status; 0 where it has no such line."""
    at = text.find(name)
    return int(text[at + len(name) :].split(None, 1)[0]) if at >= 0 else 0


def io_counters() -> tuple[int, int]:
    """(bytes this process made the storage read, bytes it asked for with read calls) so far.

    Reads through mapped files are in the first only. Both are 0 where /proc/self/io cannot be read.
    """
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0, 0
    return int(lines["read_bytes"]), int(lines["rchar"])
