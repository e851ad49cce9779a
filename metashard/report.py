"""What one load did: phases, bytes, peaks, dtypes, strategy and why."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class RankReport:
    """What one rank did in one load; all figures in bytes.

    Args:
        bytes_read: Read from weight files by metashard. What the library reads by itself (rank 0 in strategy `rank0`)
            counts as the weight bytes of its files.
        bytes_sent: Sent to other ranks, counted once a receiver.
        bytes_received: Received from other ranks, padding aside.
        bytes_resident: Shards, replicated parameters and buffers that this rank holds at the end.
        peak_host_bytes: Highest anonymous host memory above its value at the start of the load, sampled.
        peak_device_bytes: Highest allocated accelerator memory above its value at the start; 0 on CPU.
    """

    bytes_read: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_resident: int = 0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """A stretch of time that a phase took.

    Args:
        name: The phase.
        start: Seconds since the load began.
        end: The same.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Mismatch:
    """One tensor that is not on a rank what it should be.

    Args:
        name: Its name in the module.
        rank: The rank that holds it.
        elements: How many elements differ (all of the part, where only digests were compared).
        expected: The first of them, as it should be.
        got: As it is.
        file: File that it was compared with; None for another rank.
        key: Its name in the file.
        offset: Byte of the file at which the first element that differs is.
    """

    name: str
    rank: int
    elements: int
    expected: str
    got: str
    file: str | None = None
    key: str | None = None
    offset: int | None = None


@dataclass(frozen=True)
class Comparison:
    """What `LoadPolicy(verify="full")` has compared.

    Args:
        tensors: Tensors compared with their entries in the files, every rank its part.
        nbytes: Their bytes in memory, over all ranks.
        between_ranks: Tensors that no file holds, compared from rank to rank instead.
        mismatches: What differs.
    """

    tensors: int
    nbytes: int
    between_ranks: int
    mismatches: tuple[Mismatch, ...] = ()

    def __str__(self) -> str:
        others = f", {self.between_ranks} from rank to rank" if self.between_ranks else ""
        size = size_text(self.nbytes)
        return f"{self.tensors} tensors, {size} with the files{others}: {len(self.mismatches)} mismatches"


@dataclass(frozen=True)
class LoadReport:
    """What one load did, the same on every rank. `str()` prints a table.

    Args:
        strategy: The strategy that was used.
        reason: Why this one.
        world_size: Number of ranks.
        phases: Seconds of each phase, the slowest rank's.
        ranks: One entry a rank.
        dtype_counts: Parameters and buffers by dtype.
        missing: Names that the checkpoint did not hold.
        unexpected: Keys of the checkpoint that nothing took.
        transport: How tensors left rank 0.
        verified: What `verify="full"` has compared; None for "basic".
        spans: When each phase ran on rank 0, in order of their ends; a phase may have several, and one may lie in
            another's.
    """

    strategy: str
    reason: str
    world_size: int
    phases: dict[str, float]
    ranks: tuple[RankReport, ...]
    dtype_counts: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    transport: str = "scatter"
    verified: Comparison | None = None
    spans: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        """Sum of the phases."""
        return sum(self.phases.values())

    @property
    def gbps(self) -> dict[str, float]:
        """GB/s (1e9 bytes) over all ranks in the phases that move weights: what was read from files, or sent."""
        read = sum(rank.bytes_read for rank in self.ranks)
        sent = sum(rank.bytes_sent for rank in self.ranks)
        moved = {"build": read, "fill": sent} if self.strategy == "rank0" else {"fill": read}
        return {name: n / self.phases[name] / 1e9 for name, n in moved.items() if n and self.phases.get(name)}

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def plot(self, path: str | Path) -> None:
        """Draw rank 0's phases over time, and what every rank held at the end and at its peak.

        Every rank has the same report: call it on one of them.

        Args:
            path: File to write; its suffix says the format (.png, .svg, .pdf, ...).

        Raises:
            ImportError: matplotlib is not installed (extra `plot`).
            ValueError: matplotlib knows no pictures of this suffix.
            FileNotFoundError: The folder does not exist.
        """
        from metashard.plot import draw

        draw(self, path)

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        lines = [f"metashard: {self.strategy} on {ranks} in {self.seconds:.2f} s: {self.reason}"]
        lines.append("  phase       seconds")
        rates = {name: f"  {rate:.2f} GB/s" for name, rate in self.gbps.items()}
        lines += [f"  {name:<11} {seconds:7.3f}{rates.get(name, '')}" for name, seconds in self.phases.items()]
        lines.append("  rank       read       sent   received   resident  peak host  peak device")
        for rank, entry in enumerate(self.ranks):
            figures = (getattr(entry, name) for name in RankReport.__dataclass_fields__)
            lines.append(f"  {rank:<4} " + " ".join(f"{size_text(value):>10}" for value in figures))
        lines.append("  dtypes      " + ", ".join(f"{count} {name}" for name, count in self.dtype_counts.items()))
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                lines.append(f"  {title:<11} {len(names)}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
        if self.verified is not None:
            lines.append(f"  verified    {self.verified}")
        return "\n".join(lines)


def size_text(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def anonymous_host_bytes() -> int:
    """Anonymous resident memory of this process (0 where /proc does not tell)."""
    try:
        with open("/proc/self/statm") as statm:
            _, resident, shared = (int(word) for word in statm.read().split()[:3])
    except OSError:
        return 0
    return (resident - shared) * _PAGE


class Recorder:
    """Collects one rank's figures while a load runs. Use it as a context: it samples memory until it is left."""

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, float] = {}
        self.spans: list[Span] = []
        self._began = time.perf_counter()
        self._running: set[str] = set()
        self.counts = RankReport()
        self._device = device
        self._start_host = self._peak_host = 0
        self._start_device = 0
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> Recorder:
        self._start_host = self._peak_host = anonymous_host_bytes()
        if self._device.type != "cpu":
            memory = torch.get_device_module(self._device.type)
            memory.reset_peak_memory_stats()
            self._start_device = memory.memory_allocated()
        self._sampler = threading.Thread(target=self._sample, name="metashard-memory", daemon=True)
        try:
            self._sampler.start()
        except BaseException:
            self._stop.set()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._sampler is not None:
            self._sampler.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak_host = max(self._peak_host, anonymous_host_bytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as phase `name`; bodies of one name add up, one inside of another counts once."""
        if name in self._running:
            yield
            return
        self._running.add(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._running.remove(name)
            self.phases[name] = self.phases.get(name, 0.0) + end - start
            self.spans.append(Span(name, start - self._began, end - self._began))

    def add(self, **counts: int) -> None:
        """Add to the figures of this rank, by the names of `RankReport`."""
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in counts.items()})

    def finish(self, bytes_resident: int) -> RankReport:
        """This rank's figures up to now."""
        peak_host = max(self._peak_host, anonymous_host_bytes()) - self._start_host
        peak_device = 0
        if self._device.type != "cpu":
            memory: Any = torch.get_device_module(self._device.type)
            peak_device = memory.max_memory_allocated() - self._start_device
        return replace(
            self.counts, bytes_resident=bytes_resident, peak_host_bytes=max(0, peak_host), peak_device_bytes=peak_device
        )
