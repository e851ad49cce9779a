"""What the two weight benchmarks share as command lines: flags, checks on all ranks, tables, the results file."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from preflight import (
    UsageError,
    WeightFiles,
    check_device_memory,
    check_evictable,
    check_memory,
    check_outputs,
    check_weights,
    on_all_ranks,
    positive,
    size,
)
from summary import machine, markdown_table
from weight_modes import Mode
from weight_runs import ModeResult, disagreements, measure, ranks

ACCOUNTING = (
    "checkpoint GB/s: bytes of the checkpoint's tensors, each once, by the average seconds;\n"
    "rank GB/s: bytes that one rank ended up with (the rank with most) by the average seconds."
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that both have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--model-path", type=Path, required=True, help="folder of a model or pipeline")
    made.add_argument("--subfolder", help="folder in it that holds the safetensors files, such as transformer")
    made.add_argument("--warmup", type=int, default=1, help="runs of each mode that do not count (default: 1)")
    made.add_argument("--repeats", type=int, default=3, help="runs of each mode that do (default: 3)")
    made.add_argument("--cold", action="store_true", help="evict the files from the page cache before every run")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return made


def run(args: argparse.Namespace, modes: Sequence[Mode], *, baselines: Sequence[str] = ()) -> int:
    """The body of a script: checks, runs, prints, and writes the results file.

    Args:
        args: As `parser` reads them.
        modes: What to run.
        baselines: Modes that the others are held against.

    Returns:
        0, or 1 where modes or ranks disagree on what was loaded; the same on every rank.

    Raises:
        UsageError: On every rank, before anything is loaded.
    """
    with ranks() as device:
        weights = _checked(args, device)
        leads = dist.get_rank() == 0
        say: Callable[[str], None] = (lambda line: print(line, flush=True)) if leads else (lambda line: None)
        facts = _facts(args, weights, device)
        say(
            f"{facts['model']}: {size(weights.nbytes)} in {len(weights.checkpoint.entries)} tensors, "
            f"{facts['files']} file(s); {facts['world_size']} rank(s) on {device.type} ({facts['backend']}); "
            f"cache {facts['cache']}"
        )
        results = measure(modes, weights, device, warmup=args.warmup, repeats=args.repeats, cold=args.cold, say=say)
        wrong = disagreements(results)
        say(f"\n{timings_table(results)}\n\n{ACCOUNTING}\n")
        for mode in modes:
            say(f"- {mode.name}: {mode.about}")
        compared = {baseline: speedups(results, baseline) for baseline in baselines}
        for baseline, rows in compared.items():
            say(f"\n{speedup_table(rows, baseline)}")
        say("\n" + ("\n".join(wrong) if wrong else "Checksums agree between all modes and ranks."))
        if leads and args.json is not None:
            document = facts | {
                "modes": [result.to_json() for result in results],
                "speedups": compared,
                "checksums_agree": not wrong,
                "disagreements": wrong,
            }
            args.json.write_text(json.dumps(document, indent=2) + "\n")
        return int(bool(wrong))


def _checked(args: argparse.Namespace, device: torch.device) -> WeightFiles:
    def check() -> WeightFiles:
        positive({"--repeats": args.repeats})
        positive({"--warmup": args.warmup}, least=0)
        if args.json is not None and dist.get_rank() == 0:  # which writes it
            check_outputs({"--json": args.json})
        weights = check_weights(args.model_path, args.subfolder)
        if args.cold:
            check_evictable(weights.paths)
        if device.type == "cpu":
            check_memory(weights.nbytes, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        check_device_memory(device, weights.nbytes)
        return weights

    weights = on_all_ranks(check)
    seen: list[Any] = [None] * dist.get_world_size()  # hosts may have folders of their own
    dist.all_gather_object(seen, weights.checkpoint.sizes)
    if any(sizes != seen[0] for sizes in seen):
        raise UsageError(
            f"ranks see other files, or other sizes, in {weights.folder}: fetch the model again on each host"
        )
    return weights


def _facts(args: argparse.Namespace, weights: WeightFiles, device: torch.device) -> dict[str, Any]:
    return {
        "model": args.model_path.resolve().name + (f"/{args.subfolder}" if args.subfolder else ""),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "device": device.type,
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "cache": "cold" if args.cold else "as the run before left it",
        "warmup": args.warmup,
        "repeats": args.repeats,
        "files": len(weights.checkpoint.sizes),
    }


def speedups(results: Sequence[ModeResult], baseline: str) -> list[dict[str, Any]]:
    """For every other mode how many times faster than the baseline it was and the seconds saved, by averages."""
    base = next(result for result in results if result.mode == baseline)
    return [
        {
            "mode": result.mode,
            "speedup": base.average / result.average,
            "seconds_saved": base.average - result.average,
        }
        for result in results
        if result is not base
    ]


def speedup_table(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """`speedups` as a table."""
    lines = [[row["mode"], f"{row['speedup']:.2f}x", f"{row['seconds_saved']:+.3f}"] for row in rows]
    return markdown_table([f"against {baseline}", "speedup", "seconds saved"], lines)


def timings_table(results: Sequence[ModeResult]) -> str:
    """Average, best, both throughputs, tensors and GB of every mode."""
    headers = ["mode", "average s", "best s", "checkpoint GB/s", "rank GB/s", "tensors", "checkpoint GB", "rank GB"]
    rows = [
        [
            result.mode,
            f"{result.average:.3f}",
            f"{result.best:.3f}",
            f"{result.checkpoint_gbps:.2f}",
            f"{result.rank_gbps:.2f}",
            str(result.tensors),
            f"{result.checkpoint_bytes / 1e9:.3f}",
            f"{max(result.rank_bytes) / 1e9:.3f}",
        ]
        for result in results
    ]
    return markdown_table(headers, rows)
