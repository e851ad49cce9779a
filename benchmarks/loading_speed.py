#!/usr/bin/env python3
"""Loading a model into FSDP2 shards: ours, the public flows and the raw floor, on the same checkpoint and ranks.

    python benchmarks/loading_speed.py --quick                                  a small checkpoint, under 2 minutes
    python benchmarks/loading_speed.py --nproc 2 4 --repeats 3                  SD3.5-medium's real shape, 5.4 GB
    python benchmarks/loading_speed.py --model-path MODEL --component transformer --flows direct dcp
    python benchmarks/loading_speed.py --memory-limit                           what fits under a limit on each rank

Every run is N fresh processes in a fresh process group; imports and a tiny warm-up load come before the clock. Flows
are interleaved. "cold" runs start with the weight files evicted from the page cache, which is verified; "warm" runs
with all of them in it. Digests of every rank's shards, buffers and tensor attributes are compared with those of the
first of these flows that ran: every rank loads all, any other public flow, ours.

With --memory-limit the model is loaded in fp32, so that no flow can keep it in mapped pages of a bf16 file, and every
rank may add private memory of three quarters of the model (RLIMIT_DATA): enough for a shard, too little for all of it.
That limit counts a file that is mapped privately as memory, as safetensors' reader for torch maps it.

Exit code: 0; 1 if one of our flows failed or differs; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tools")]

from preflight import EVICTED, UsageError, as_script, check_outputs, positive  # noqa: E402  found by the line above
from setting import (  # noqa: E402
    DTYPES,
    add_subject_arguments,
    count_elements,
    device_and_backend,
    find_subject,
    tiny_checkpoint,
)

FLOOR, FLOOR_DIRECT = "floor", "floor/direct_io"
FLOWS = {
    FLOOR: "quick",
    FLOOR_DIRECT: "full",
    "all_load": "quick",
    "rank0_broadcast": "quick",
    "dcp": "quick",
    "dcp/threads": "full",
    "accelerate": "quick",
    "direct": "quick",
    "stream/scatter": "quick",
    "stream/broadcast": "quick",
    "rank0/scatter": "quick",
    "rank0/broadcast": "quick",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = _parse(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with contextlib.ExitStack() as stack:
            return _run(args, stack)
    except (UsageError, OSError) as error:
        print(f"loading_speed: {error}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_subject_arguments(parser)
    parser.add_argument("--component", help="to load (default: transformer; with --model-path, the folder itself)")
    parser.add_argument("--nproc", type=int, nargs="+", help="numbers of ranks (default: 2 4; with --quick, 2)")
    parser.add_argument("--repeats", type=int, help="runs of each flow (default: 3; with --quick, 1)")
    parser.add_argument("--cold", action="store_true", help="cold page cache (default: cold and warm)")
    parser.add_argument("--warm", action="store_true", help="warm page cache")
    parser.add_argument("--quick", action="store_true", help="small checkpoint, 2 ranks, 1 run, fewer floor settings")
    parser.add_argument("--flows", nargs="+", metavar="FLOW", help=f"of {', '.join(FLOWS)} (default: all)")
    parser.add_argument("--memory-limit", action="store_true", help="what fits under a limit: once, cold, 2 ranks")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a run may take (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    started = time.monotonic()
    names = _flow_names(args)
    caches = [cache for cache in ("cold", "warm") if getattr(args, cache)] or ["cold", "warm"]
    once = args.quick or args.memory_limit
    world_sizes = args.nproc or ([2] if once else [2, 4])
    repeats = args.repeats if args.repeats is not None else (1 if once else 3)
    if args.memory_limit:
        args.dtype, caches = "fp32", ["cold"]
        names = [name for name in names if not name.startswith("floor")]
    positive({"--nproc": world_sizes, "--repeats": repeats, "--layers": args.layers})
    positive({"--limit": args.limit}, least=0.001)
    check_outputs({"--json": args.json, "--markdown": args.markdown})

    import harness

    harness.fork_server()  # it imports what the ranks need while this process does the same
    import floor
    import models
    import peers
    import torch
    from runs import Case
    from summary import machine, plain, summarise

    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loading-speed-")))
    component = args.component or (None if args.model_path else "transformer")
    subject = find_subject(args, scratch, [component] if component else None)
    about, files = subject.facts, subject.files
    device, backend = device_and_backend(args)
    case = Case(
        path=subject.path,
        components=subject.components,
        dtype=getattr(torch, DTYPES[args.dtype]),
        device=device,
        backend=backend,
        tiny=tiny_checkpoint(scratch),
        imports=models.component_class,
    )
    if args.memory_limit:
        case = replace(case, memory_limit=count_elements(files) * 4 * 3 // 4)
        about["memory limit a rank, GB"] = round(case.memory_limit / 1e9, 2)
    print(f"{about}, {args.dtype}, {device}, ranks {world_sizes}, {repeats} run(s) a flow, {' and '.join(caches)}")

    results: list[Any] = []
    floors: dict[str, str] = {}
    everything = {**peers.PEERS, **peers.OURS}
    for nproc in world_sizes:
        for cache in caches:
            flows: dict[str, Any] = {}
            for name in names:
                if name == FLOOR:
                    flows[name] = _best_floor(args, case, nproc, cache, files)
                    floors[f"{nproc} ranks, {cache}"] = str(flows[name])
                elif name == FLOOR_DIRECT:
                    if cache == "cold":
                        flows[name] = floor.Floor(direct_io=True, huge_pages=True)
                else:
                    flows[name] = everything[name]
            results += harness.run_interleaved(
                flows, case, nproc=nproc, cache=cache, files=files, repeats=repeats, limit=args.limit, on_result=_show
            )

    reference = next((name for name in (*peers.PEERS, *peers.OURS) if any(_loaded(r, name) for r in results)), None)
    summaries = summarise(results, reference=reference)
    facts = {
        "command": " ".join(["python", "benchmarks/loading_speed.py", *(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "machine": machine() | {"device": device, "backend": backend},
        "checkpoint": about,
        "dtype": args.dtype,
        "reference": reference,
        "floor_settings": floors,
        "repeats": repeats,
    }
    text = report(facts, summaries, results)
    print("\n" + text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        document = facts | {
            "summaries": [asdict(summary) | {"median": summary.median} for summary in summaries],
            "runs": [result.record() for result in results],
        }
        args.json.write_text(json.dumps(plain(document), indent=2))
    # Under the limit rank 0 cannot hold the model: that `rank0` fails is what is to be shown.
    ours = [s for s in summaries if s.flow in peers.OURS and not (args.memory_limit and s.flow.startswith("rank0"))]
    return int(any(s.status in ("failed", "timed out") or s.digest_equal is False for s in ours))


def _flow_names(args: argparse.Namespace) -> list[str]:
    if not args.flows:
        return [name for name, extent in FLOWS.items() if extent == "quick" or not args.quick]
    unknown = [name for name in args.flows if name not in FLOWS]
    if unknown:
        raise UsageError(f"no flow {unknown[0]!r}: expected some of {', '.join(FLOWS)}")
    return list(dict.fromkeys(args.flows))


def _best_floor(args: argparse.Namespace, case: Any, nproc: int, cache: str, files: Sequence[Path]) -> Any:
    """The fastest of several settings, each tried once; of the three best the slower of two tries counts."""
    import floor
    import harness

    def seconds(setting: Any) -> float:
        run = harness.run_flow(setting, case, name=FLOOR, nproc=nproc, cache=cache, files=files, limit=args.limit)
        return run.seconds if run.status == "ok" else math.inf

    settings = floor.QUICK_FLOOR_SETTINGS if args.quick else floor.FLOOR_SETTINGS
    tried = sorted(((seconds(setting), setting) for setting in settings), key=lambda item: item[0])
    best = min(tried[:3], key=lambda item: max(item[0], seconds(item[1])))[1]  # a lucky try is no floor
    print(f"{nproc} ranks, {cache}: floor settings tried, best: {best}", flush=True)
    return replace(best)


def _loaded(result: Any, name: str) -> bool:
    return result.flow == name and result.status == "ok" and result.digests[0] is not None


def _show(result: Any) -> None:
    what = f"{result.seconds:6.2f} s" if result.status == "ok" else f"{result.status}: {result.reason}"
    print(f"{result.nproc} ranks, {result.cache}, run {result.repeat + 1}, {result.flow}: {what}", flush=True)


# ---- the report -----------------------------------------------------------------------------------------------------


def report(facts: dict[str, Any], summaries: Sequence[Any], results: Sequence[Any]) -> str:
    """The Markdown page of one comparison: facts, then for each number of ranks the flows, ratios and our phases."""
    import peers
    from summary import markdown_table

    machine, model = facts["machine"], facts["checkpoint"]
    packages = ("torch", "diffusers", "transformers", "accelerate")
    versions = ", ".join(f"{package} {machine[package]}" for package in packages if package in machine)
    what = (
        f"{model['model']}, {model['component'] or 'whole folder'}: {model['gigabytes']} GB in {model['files']} file(s)"
    )
    hardware = f"{machine['cores']} cores ({machine.get('cpu', '?')}), {machine.get('memory_gib', '?')} GiB"
    lines = [
        "# Loading speed",
        "",
        f"`{facts['command']}`, {facts['date']}, {facts['minutes']} minutes.",
        f"{what}, loaded as {facts['dtype']} on {machine['device']} ({machine['backend']}).",
        f"{hardware}, {machine['system']}, Python {machine['python']}, {versions}.",
        f"Medians of {facts['repeats']} interleaved run(s), in brackets the range.",
        f"Digests against `{facts['reference']}`.",
    ]
    left = max((run.resident_fraction for run in results if run.cache == "cold"), default=0.0)
    lines.append(
        f"Cold runs began with at most {left:.2%} of the checkpoint in the page cache."
        + (" **That is not cold.**" if left > EVICTED else "")
        if not math.isnan(left)
        else "Whether cold runs were cold could not be verified on this system."
    )
    for nproc in dict.fromkeys(summary.nproc for summary in summaries):
        mine = [summary for summary in summaries if summary.nproc == nproc]
        at = {(summary.flow, summary.cache): summary for summary in mine}
        flows = list(dict.fromkeys(summary.flow for summary in mine))
        caches = [cache for cache in ("cold", "warm") if any(summary.cache == cache for summary in mine)]
        lines += ["", f"## {nproc} ranks", ""]
        lines.append(_main_table(flows, caches, at))
        floors = [f"{k.split(', ')[1]}: {v}" for k, v in facts["floor_settings"].items() if k.startswith(f"{nproc} ")]
        if floors:
            lines += ["", f"Floor, best of the settings tried: {'; '.join(floors)}."]
        ran = {summary.flow for summary in mine if summary.seconds}
        ours = [flow for flow in flows if flow in peers.OURS and flow in ran]
        others = [flow for flow in flows if flow in peers.PEERS]
        for cache in caches:
            against = [peer for peer in others if (peer, cache) in at and at[peer, cache].seconds]
            if not (ours and against):
                continue
            rows = [
                [flow, *(_times(at[peer, cache].median / at[flow, cache].median) for peer in against)]
                for flow in ours
                if (flow, cache) in at
            ]
            lines += ["", f"Times faster than the public flows, {cache}:", "", markdown_table([cache, *against], rows)]
        for cache in caches:
            told = [flow for flow in ours if (flow, cache) in at and at[flow, cache].phases]
            if told:
                phases = list(dict.fromkeys(phase for flow in told for phase in at[flow, cache].phases))
                spent = {flow: at[flow, cache].phases for flow in told}
                rows = [[flow, *(_seconds(spent[flow].get(phase, math.nan)) for phase in phases)] for flow in told]
                lines += ["", f"Seconds by phase, {cache}:", "", markdown_table([cache, *phases], rows)]
    lines += ["", "Flows:", ""]
    lines += [f"- `{flow}`: {peers.ABOUT[flow]}." for flow in dict.fromkeys(summary.flow for summary in summaries)]
    lines += [
        "",
        "GB read: as the flow's own report says, else what the storage delivered in the cold runs; all ranks together.",
        "Host memory: anonymous and shared (mapped files are not in it), above what it was when the clock started; the",
        "highest moment of the highest rank.",
        "",
    ]
    return "\n".join(lines)


def _main_table(flows: Sequence[str], caches: Sequence[str], at: dict[tuple[str, str], Any]) -> str:
    from summary import markdown_table

    on_device = any(summary.peak_device_bytes for summary in at.values())
    headers = ["flow"]
    for cache in caches:
        headers += [f"{cache} s", "x floor"]
    headers += ["GB read", "peak host MB", *(["peak device MB"] if on_device else []), "digest"]
    rows = []
    for flow in flows:
        mine = [at[flow, cache] for cache in caches if (flow, cache) in at]
        row = [flow]
        for cache in caches:
            summary, floor = at.get((flow, cache)), at.get((FLOOR, cache))
            if summary is None:
                row += ["", ""]
            elif summary.status != "ok":
                row += [summary.status, ""]
            else:
                row.append(_seconds(summary.median) + _spread(summary.seconds))
                row.append(f"{summary.median / floor.median:.2f}" if floor and floor.seconds else "")
        good = [summary for summary in mine if summary.seconds]
        reported = next((summary.reported_bytes for summary in good if summary.reported_bytes is not None), None)
        delivered = next((summary.storage_bytes for summary in good if summary.cache == "cold"), None)
        read = reported if reported is not None else delivered
        row.append(f"{read / 1e9:.2f}" if read is not None else "")
        row.append(f"{max(s.peak_host_bytes for s in good) / 1e6:.0f}" if good else "")
        if on_device:
            row.append(f"{max(s.peak_device_bytes for s in good) / 1e6:.0f}" if good else "")
        equal = [summary.digest_equal for summary in good if summary.digest_equal is not None]
        row.append("" if not equal else "equal" if all(equal) else "DIFFERS")
        rows.append(row)
    table = markdown_table(headers, rows)
    notes = [f"- `{s.flow}`, {s.cache}: {s.status}: {s.reason}" for s in at.values() if s.status != "ok"]
    return table + ("\n\n" + "\n".join(notes) if notes else "")


def _seconds(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""


def _times(value: float) -> str:
    return f"{value:.1f}x"


def _spread(seconds: Sequence[float]) -> str:
    return f" [{min(seconds):.2f}-{max(seconds):.2f}]" if len(seconds) > 1 else ""


if __name__ == "__main__":
    as_script(main)
