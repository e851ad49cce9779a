#!/usr/bin/env python3
"""The whole way from files to FSDP2 shards, before and after: seconds, peak memory a rank, and what was loaded.

    python benchmarks/init_latency.py --quick                                     a small checkpoint, about a minute
    python benchmarks/init_latency.py --family sd3.5-medium --nproc 2 4           its real size, 5.4 GB
    python benchmarks/init_latency.py --family wan2.2-a14b --layers 2             two experts, real width, fewer blocks
    python benchmarks/init_latency.py --family qwen-image --scale 0.1 --lora      with a new adapter, rank 64
    python benchmarks/init_latency.py --model-path MODEL --component transformer  your own
    ... --flows direct rank0_broadcast dcp accelerate                             against the public flows, too

Before: every rank calls from_pretrained, moves all of the model to its device, then shards it. After: metashard, once
with each strategy. Every run is N fresh processes in a fresh process group, on an evicted page cache, which is
verified; imports and a tiny warm-up load come before the clock; flows are interleaved. Several components are loaded
one after another and kept.

Each rank's shards, buffers and tensor attributes are digested and compared with the first flow's. With --lora, the base
is also compared with a load without an adapter, and the adapter with that of get_peft_model in one process under the
same seed; the ranks of our flows are seeded differently, as only rank 0's seed may count.

With --out DIR: results (JSON), a report (Markdown, with Mermaid charts) and a chart (PNG, by matplotlib where it is
installed). Exit code: 0; 1 if one of our flows failed or anything differs; 2 for a wrong call or too little memory or
disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tools")]

from comparison import (  # noqa: E402  found by the line above
    add_arguments,
    compare_adapter,
    compare_shards,
    run_all,
    set_up,
    show,
    verdict,
)
from preflight import as_script, command_line  # noqa: E402
from runs import RunResult  # noqa: E402

FLOWS = ("direct", "stream/scatter", "stream/broadcast", "rank0/scatter", "rank0/broadcast")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = _parse(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def body() -> int:
        with contextlib.ExitStack() as stack:
            return _run(args, stack)

    return command_line("init_latency", body)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser, FLOWS)
    parser.add_argument("--nproc", type=int, nargs="+", help="numbers of ranks (default: 2 4; with --quick, 2)")
    parser.add_argument("--repeats", type=int, help="runs of each flow (default: 3; with --quick, 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results, report and chart into this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    started = time.monotonic()
    setup = set_up(args, stack, "init_latency", FLOWS)
    from init_report import draw, report
    from summary import plain, summarise

    print(f"{setup.facts['checkpoint']}, {args.dtype}, {setup.case.device}, {', '.join(setup.flows)}", flush=True)
    results = run_all(setup, show)
    checks = compare_shards(setup, results) + compare_adapter(setup, results, show)
    summaries = summarise(results, reference=next(iter(setup.flows)))
    facts = setup.facts | {
        "minutes": round((time.monotonic() - started) / 60, 1),
        "left_in_cache": max(run.resident_fraction for run in results),
    }
    stem = f"init_latency-{setup.stem}"
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        facts["png"] = f"{stem}.png" if draw(args.out / f"{stem}.png", setup, summaries) else None
    text = report(setup, facts, summaries, checks)
    document = facts | {
        "summaries": [asdict(summary) | {"median": summary.median} for summary in summaries],
        "checks": [asdict(check) for check in checks],
        "digests": digests_by_flow(results),  # what tools/compare_digests.py reads
        "runs": [run.record() for run in results],
    }
    print("\n" + text)
    for path in filter(None, (args.markdown, args.out and args.out / f"{stem}.md")):
        path.write_text(text)
    for path in filter(None, (args.json, args.out and args.out / f"{stem}.json")):
        path.write_text(json.dumps(plain(document), indent=2))
    if args.out:
        print(f"written to {args.out}")
    return verdict(results, checks)


def digests_by_flow(results: Sequence[RunResult]) -> dict[str, dict[str, list[str | None]]]:
    """Flow -> number of ranks -> each rank's digest, of the first run that loaded."""
    found: dict[str, dict[str, list[str | None]]] = {}
    for run in results:
        if run.status == "ok":
            found.setdefault(run.flow, {}).setdefault(str(run.nproc), list(run.digests))
    return found


if __name__ == "__main__":
    as_script(main)
