"""Memory over time and I/O of this process."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

SAMPLE_SECONDS = 0.01


class Sample(NamedTuple):
    """Memory at one moment.

    Attributes:
        seconds: Since sampling began.
        host: Bytes of own host memory, above what it was then.
        resident: The same with what the process has mapped of files, which the system may take back.
        device: Bytes the device's allocator had handed out, above what it was then; 0 on the CPU.
    """

    seconds: float
    host: int
    resident: int
    device: int


class Memory:
    """This process's own memory, sampled by a thread; `with Memory() as memory: ...; memory.samples`.

    Own host memory is anonymous plus shared memory (RssAnon and RssShmem of /proc/self/status): staging in /dev/shm
    counts, mapped files (RssFile) do not. Elsewhere than on Linux both figures are the peak of all resident memory
    since the process began.

    Args:
        accelerator: torch's module of the device (such as `torch.cuda`); None on the CPU.

    Attributes:
        samples: One every `SAMPLE_SECONDS`, the first at the beginning and the last at the end.
        peak_host: Highest host bytes sampled.
        peak_resident: Highest bytes sampled with mapped files.
        peak_device: Highest device bytes, as the allocator has counted them.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.samples: list[Sample] = []

    def __enter__(self) -> Memory:
        self._status = os.open("/proc/self/status", os.O_RDONLY) if sys.platform == "linux" else -1
        if self._accelerator is not None:
            self._accelerator.reset_peak_memory_stats()
        self._device_start = self._device()
        self._host_start, self._resident_start = self._host()
        self.began = time.perf_counter()
        self.samples.append(Sample(0.0, 0, 0, 0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self.peak_host = max(sample.host for sample in self.samples)
        self.peak_resident = max(sample.resident for sample in self.samples)
        self.peak_device = 0
        if self._accelerator is not None:
            self.peak_device = self._accelerator.max_memory_allocated() - self._device_start
        if self._status >= 0:
            os.close(self._status)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        host, resident = self._host()
        above = (host - self._host_start, resident - self._resident_start, self._device() - self._device_start)
        self.samples.append(Sample(time.perf_counter() - self.began, *above))

    def _device(self) -> int:
        return self._accelerator.memory_allocated() if self._accelerator is not None else 0

    def _host(self) -> tuple[int, int]:
        if self._status < 0:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            return peak, peak
        text = os.pread(self._status, 8192, 0)
        own = sum(kib_after(text, name) for name in (b"RssAnon:", b"RssShmem:")) * 1024
        return own, own + kib_after(text, b"RssFile:") * 1024


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
