"""What a run is given, and what it gives back: plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from adapter import Adapter
from memory import Sample
from phases import Stretch, seconds_by_phase


class NotAvailableError(Exception):
    """This install cannot run the flow at all, such as a library that is not there. Reported as 'not run'."""


@dataclass(frozen=True)
class Case:
    """What every flow of a comparison is given.

    Attributes:
        path: Checkpoint folder.
        components: What to load of it, one after another; None is the folder itself, where it is one model.
        dtype: As `from_pretrained` takes it.
        device: "cpu", "cuda", ...
        backend: Of the process group, as `init_process_group` takes it.
        tiny: A tiny checkpoint folder that the flow loads before the clock starts; None for no such warm-up.
        tiny_component: Component in `tiny`.
        imports: Called with `path` and each component before the clock starts, to import what all flows will need.
        threads: Threads of torch's own operators a rank; 1 is torchrun's default.
        memory_limit: Bytes of private memory a rank may add while the clock runs (RLIMIT_DATA); None for no limit.
        adapter: To add before sharding; None for none.
    """

    path: Path
    components: tuple[str | None, ...]
    dtype: torch.dtype
    device: str = "cpu"
    backend: str = "gloo"
    tiny: Path | None = None
    tiny_component: str | None = "transformer"
    imports: Callable[[Path, str | None], Any] | None = None
    threads: int = 1
    memory_limit: int | None = None
    adapter: Adapter | None = None


# (path, component, mesh, dtype) -> the sharded module, or (module, report), or None where nothing is loaded. Must
# pickle. Where it has a method `prepare` of the same arguments, that is called before the clock starts. Where the case
# has an adapter, it is given as the keyword `adapter`.
Flow = Callable[..., Any]


@dataclass(frozen=True)
class RankResult:
    """One rank's figures of one run.

    Attributes:
        rank: Of the process group.
        seconds: From the barrier before the flow to the barrier after it.
        own_seconds: The same without waiting for the others at the end.
        digest: Of what the rank holds; None where nothing is loaded.
        resident_bytes: Bytes of its shards and buffers.
        storage_bytes: Bytes its reads made the storage deliver (0 from a warm cache).
        called_bytes: Bytes it asked for in read calls; mapped files are not in it.
        peak_host_bytes: Own host memory at its highest, above what it was when the clock started.
        peak_resident_bytes: The same with mapped files.
        peak_device_bytes: The same for the device's allocator; 0 on the CPU.
        reports: The flow's own, one a component, as JSON has them; none if it makes none, and on ranks other than 0.
        stretches: The phases of its load, where the flow marks or reports them, on the clock of `seconds`.
        samples: Memory over time on the same clock.
        base_digest: Where there is an adapter: of all but the adapter, as if there were none.
        adapter_digest: Where there is an adapter: of its full values.
    """

    rank: int
    seconds: float
    own_seconds: float
    digest: str | None
    resident_bytes: int
    storage_bytes: int
    called_bytes: int
    peak_host_bytes: int
    peak_resident_bytes: int
    peak_device_bytes: int
    reports: tuple[dict[str, Any], ...] = ()
    stretches: tuple[Stretch, ...] = ()
    samples: tuple[Sample, ...] = ()
    base_digest: str | None = None
    adapter_digest: str | None = None


@dataclass(frozen=True)
class RunResult:
    """One run of one flow.

    Attributes:
        flow: Its name.
        cache: "cold" or "warm".
        nproc: Ranks.
        repeat: Number of the repetition, from 0.
        status: "ok", "not run", "failed" or "timed out".
        reason: One line for every status but "ok".
        resident_fraction: Fraction of the checkpoint in the page cache when the run began.
        ranks: One a rank; empty unless "ok".
    """

    flow: str
    cache: str
    nproc: int
    repeat: int
    status: str
    reason: str = ""
    resident_fraction: float = math.nan
    ranks: tuple[RankResult, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds until every rank had its shards."""
        return max((rank.seconds for rank in self.ranks), default=math.nan)

    @property
    def digests(self) -> tuple[str | None, ...]:
        """Digest of each rank."""
        return tuple(rank.digest for rank in self.ranks)

    @property
    def peak_host_bytes(self) -> int:
        """Highest of the ranks."""
        return max((rank.peak_host_bytes for rank in self.ranks), default=0)

    @property
    def peak_resident_bytes(self) -> int:
        """Highest of the ranks."""
        return max((rank.peak_resident_bytes for rank in self.ranks), default=0)

    @property
    def peak_device_bytes(self) -> int:
        """Highest of the ranks."""
        return max((rank.peak_device_bytes for rank in self.ranks), default=0)

    @property
    def storage_bytes(self) -> int:
        """Sum over the ranks."""
        return sum(rank.storage_bytes for rank in self.ranks)

    @property
    def reported_bytes(self) -> int | None:
        """Bytes read from files as the flow's own report says, summed over ranks; None if it makes none."""
        reports = [report for rank in self.ranks for report in rank.reports]
        if not reports or not all(report.get("ranks") for report in reports):
            return None
        return sum(entry["bytes_read"] for report in reports for entry in report["ranks"])

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, over all components: as the flow's own reports say, else as marked on rank 0."""
        if not self.ranks or not self.ranks[0].reports:
            return seconds_by_phase(self.ranks[0].stretches) if self.ranks else {}
        total: dict[str, float] = {}
        for report in self.ranks[0].reports:
            for name, seconds in report.get("phases", {}).items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def record(self) -> dict[str, Any]:
        """For a results file: all but memory over time."""
        ranks = [{k: v for k, v in asdict(rank).items() if k not in ("samples", "stretches")} for rank in self.ranks]
        return asdict(replace(self, ranks=())) | {"ranks": ranks, "seconds": self.seconds}
