#!/usr/bin/env python3
"""Memory over time on every rank while a model is loaded into FSDP2 shards: before and after, side by side.

    python benchmarks/peak_memory.py --quick                                      a small checkpoint, under a minute
    python benchmarks/peak_memory.py --family sd3.5-medium --nproc 2 --out DIR    its real size, 5.4 GB
    python benchmarks/peak_memory.py --model-path MODEL --component transformer --flows direct rank0_broadcast

Before: every rank calls from_pretrained, moves all of the model to its device, then shards it. After: metashard's
`direct`, or the flows that are asked for. Every run is N fresh processes on an evicted page cache, which is verified.
Each rank samples, every 10 ms: its own host memory (anonymous and shared), the same with the files that it has mapped
(which the system may take back), and what its device's allocator has handed out; all above what they were when the
clock started.

Writes into --out, for each number of ranks: a chart (PNG, by matplotlib where it is installed) with a line a rank and
the phases of rank 0 shaded; the samples (CSV: flow, rank, seconds, host_bytes, resident_bytes, device_bytes, phase; the
phase is rank 0's); and the peaks (JSON). Exit code: 0; 1 if one of our flows failed or its shards differ from the first
flow's; 2 for a wrong call or too little memory or disk.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tools")]

from charts import Timeline, can_draw, draw_timelines  # noqa: E402  found by the line above
from comparison import PROMISES, Setup, add_arguments, compare_shards, run_all, set_up, show, verdict  # noqa: E402
from phases import Stretch, seconds_by_phase  # noqa: E402
from preflight import as_script, command_line  # noqa: E402

FLOWS = ("direct",)
COLUMNS = ("flow", "rank", "seconds", "host_bytes", "resident_bytes", "device_bytes", "phase")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = _parse(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def body() -> int:
        with contextlib.ExitStack() as stack:
            return _run(args, stack)

    return command_line("peak_memory", body)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser, FLOWS)
    parser.add_argument("--nproc", type=int, nargs="+", help="numbers of ranks (default: 2 4; with --quick, 2)")
    parser.add_argument("--out", type=Path, default=Path("peak_memory"), metavar="DIR", help="default: peak_memory")
    return parser.parse_args(argv, argparse.Namespace(repeats=1))


def _run(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    started = time.monotonic()
    setup = set_up(args, stack, "peak_memory", FLOWS)
    from summary import markdown_table, plain

    args.out.mkdir(parents=True, exist_ok=True)
    results = run_all(setup, show)
    checks = compare_shards(setup, results)
    facts = setup.facts | {"minutes": round((time.monotonic() - started) / 60, 1)}
    drawing = can_draw()
    for nproc in setup.world_sizes:
        runs = [run for run in results if run.nproc == nproc and run.status == "ok"]
        stem = args.out / f"peak_memory-{setup.stem}-{nproc}ranks"
        write_samples(stem.with_name(stem.name + ".csv"), runs)
        document = facts | {
            "nproc": nproc,
            "flows": {run.flow: figures_of(run) for run in runs},
            "checks": [asdict(check) for check in checks if check.nproc == nproc],
        }
        stem.with_name(stem.name + ".json").write_text(json.dumps(plain(document), indent=2))
        if drawing and runs:
            draw(stem.with_name(stem.name + ".png"), setup, runs)
        headers = ["flow", "peak host GB", "with mapped files GB", "peak device GB", "held at the end GB", "seconds"]
        rows = [
            [
                run.flow,
                f"{run.peak_host_bytes / 1e9:.3f}",
                f"{run.peak_resident_bytes / 1e9:.3f}",
                f"{run.peak_device_bytes / 1e9:.3f}",
                f"{max(rank.resident_bytes for rank in run.ranks) / 1e9:.3f}",
                f"{run.seconds:.2f}",
            ]
            for run in runs
        ]
        print(f"\n{setup.subject.model}, {nproc} ranks, the highest rank:\n\n{markdown_table(headers, rows)}\n")
    for check in checks:
        if not check.ok:
            print(f"DIFFERS: {check.flow}, {check.nproc} ranks: not true: {PROMISES[check.promise]}")
    print(f"written to {args.out}")
    return verdict(results, checks)


def figures_of(run: Any) -> dict[str, Any]:
    """Of one run, a list entry a rank where they differ."""
    return {
        "seconds": run.seconds,
        "peak_host_bytes": [rank.peak_host_bytes for rank in run.ranks],
        "peak_resident_bytes": [rank.peak_resident_bytes for rank in run.ranks],
        "peak_device_bytes": [rank.peak_device_bytes for rank in run.ranks],
        "resident_bytes": [rank.resident_bytes for rank in run.ranks],
        "digests": list(run.digests),
        "phases": seconds_by_phase(run.ranks[0].stretches),
        "stretches": [stretch._asdict() for stretch in run.ranks[0].stretches],
    }


def write_samples(path: Path, runs: Sequence[Any]) -> None:
    """Every sample of every rank, with the phase that rank 0 was in (empty between phases)."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for run in runs:
            for rank in run.ranks:
                for seconds, *figures in rank.samples:
                    phase = phase_at(run.ranks[0].stretches, seconds)
                    writer.writerow([run.flow, rank.rank, f"{seconds:.4f}", *figures, phase])


def phase_at(stretches: Sequence[Stretch], seconds: float) -> str:
    """The innermost phase at a moment: of those that last then, the one that began last."""
    running = [stretch for stretch in stretches if stretch.start <= seconds < stretch.end]
    return max(running, key=lambda stretch: stretch.start).name if running else ""


def curves(run: Any, kind: str) -> list[list[tuple[float, float]]]:
    """One kind of memory over time, for each rank."""
    return [[(sample.seconds, getattr(sample, kind)) for sample in rank.samples] for rank in run.ranks]


def draw(path: Path, setup: Setup, runs: Sequence[Any]) -> None:
    """A column a flow; a row for host memory and, on an accelerator, one for the device's."""
    kinds = ["host"] if setup.case.device == "cpu" else ["host", "device"]
    rows = []
    for kind in kinds:
        panels = []
        for run in runs:
            resident = max(rank.resident_bytes for rank in run.ranks)
            panels.append(
                Timeline(
                    title=f"{run.flow}: {kind} memory",
                    ranks=curves(run, kind),
                    stretches=run.ranks[0].stretches,
                    resident=resident if kind == kinds[-1] else 0,
                    mapped=curves(run, "resident") if kind == "host" else (),
                )
            )
        rows.append(panels)
    adapter = " + LoRA" if setup.case.adapter else ""
    draw_timelines(path, f"{setup.subject.model}{adapter}, {runs[0].nproc} ranks: memory while it is loaded", rows)


if __name__ == "__main__":
    as_script(main)
