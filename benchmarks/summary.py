"""Many runs made into a summary a flow, Markdown tables, and the facts of the machine that belong to them."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import RunResult


@dataclass(frozen=True)
class Summary:
    """All runs of one flow at one number of ranks in one state of the cache.

    Attributes:
        flow: Its name.
        cache: "cold" or "warm".
        nproc: Ranks.
        status: "ok", or that of the run that ended it, with `reason`.
        seconds: Of each run.
        storage_bytes: Median over runs of the sum over ranks.
        reported_bytes: As the flow's own report says; None if it makes none.
        peak_host_bytes: Highest over runs and ranks.
        peak_resident_bytes: Highest over runs and ranks, with mapped files.
        peak_device_bytes: Highest over runs and ranks.
        digest_equal: Whether every rank's digest was the reference's in every run; None for flows that load nothing.
        phases: Median seconds by phase, where the flow tells them.
    """

    flow: str
    cache: str
    nproc: int
    status: str
    reason: str = ""
    seconds: tuple[float, ...] = ()
    storage_bytes: int = 0
    reported_bytes: int | None = None
    peak_host_bytes: int = 0
    peak_resident_bytes: int = 0
    peak_device_bytes: int = 0
    digest_equal: bool | None = None
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median seconds; NaN where there is none."""
        return statistics.median(self.seconds) if self.seconds else math.nan


def summarise(results: Iterable[RunResult], *, reference: str | None = None) -> list[Summary]:
    """One summary a flow, number of ranks and state of the cache, in the order they first ran.

    Args:
        results: Any runs.
        reference: Flow whose digests are the right ones; without it, or where it has none, the first that has some.
    """
    grouped: dict[tuple[str, int, str], list[RunResult]] = {}
    for result in results:
        grouped.setdefault((result.flow, result.nproc, result.cache), []).append(result)
    right: dict[int, tuple[str | None, ...]] = {}
    everything = [result for runs in grouped.values() for result in runs if result.ranks and result.digests[0]]
    for result in sorted(everything, key=lambda result: result.flow != reference):
        right.setdefault(result.nproc, result.digests)
    summaries = []
    for (flow, nproc, cache), runs in grouped.items():
        good = [run for run in runs if run.status == "ok"]
        bad = next((run for run in runs if run.status != "ok"), None)
        loads = [run for run in good if run.digests[0]]
        spent = [run.phases for run in good]
        phases = {
            phase: statistics.median(seconds[phase] for seconds in spent if phase in seconds)
            for phase in (spent[0] if spent else {})
        }
        summaries.append(
            Summary(
                flow=flow,
                cache=cache,
                nproc=nproc,
                status=bad.status if bad else "ok",
                reason=bad.reason if bad else "",
                seconds=tuple(run.seconds for run in good),
                storage_bytes=round(statistics.median(run.storage_bytes for run in good)) if good else 0,
                reported_bytes=good[0].reported_bytes if good else None,
                peak_host_bytes=max((run.peak_host_bytes for run in good), default=0),
                peak_resident_bytes=max((run.peak_resident_bytes for run in good), default=0),
                peak_device_bytes=max((run.peak_device_bytes for run in good), default=0),
                digest_equal=all(run.digests == right[nproc] for run in loads) if loads else None,
                phases=phases,
            )
        )
    return summaries


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns padded to be read as plain text too; the first column to the left, others right."""
    rows = [list(headers), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(headers))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join([":" + "-" * (widths[0] + 1), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Facts of this machine and its software that a reader of the numbers needs; nothing that names it."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
    }
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts["cpu"] = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    with contextlib.suppress(OSError):
        facts["huge_pages"] = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    from importlib.metadata import PackageNotFoundError, version

    for package in ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "metashard"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def plain(value: Any) -> Any:
    """For JSON, which has no NaN and no paths."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
