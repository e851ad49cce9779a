"""The report of init_latency: Markdown with tables and Mermaid charts, and the bars as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
from charts import Bars, can_draw, draw_bars, mermaid_bars, ratio
from comparison import PROMISES, SHARDS, Check, Setup
from summary import Summary, markdown_table

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def heading(facts: dict[str, Any], title: str) -> list[str]:
    """Title, command, model, machine and versions."""
    machine, model = facts["machine"], facts["checkpoint"]
    versions = ", ".join(f"{package} {machine[package]}" for package in PACKAGES if package in machine)
    adapter = f", with a new adapter ({facts['adapter']})" if facts["adapter"] else ""
    what, where = (
        f"{model['model']}, {model['component'] or 'whole folder'}",
        f"{machine['device']} ({machine['backend']})",
    )
    hardware = f"{machine['cores']} cores ({machine.get('cpu', '?')}), {machine.get('memory_gib', '?')} GiB"
    left = facts["left_in_cache"]
    return [
        f"# {title}",
        "",
        f"`{facts['command']}`, {facts['date']}, {facts['minutes']} minutes.",
        f"{what}: {model['gigabytes']} GB in {model['files']} file(s), loaded as {facts['dtype']}{adapter} on {where}.",
        f"{hardware}, {machine['system']}, Python {machine['python']}, {versions}.",
        "The files were evicted from the page cache before every run"
        + (f": at most {left:.2%} of them stayed." if math.isfinite(left) else "; this system cannot verify it."),
    ]


def report(setup: Setup, facts: dict[str, Any], summaries: Sequence[Summary], checks: Sequence[Check]) -> str:
    """The Markdown page; it names the PNG beside it where there is one."""
    lines = heading(facts, f"Initialisation, before and after: {setup.subject.model}")
    lines.append(f"Medians of {facts['repeats']} interleaved run(s) in fresh processes, in brackets the range.")
    if facts.get("png"):
        lines += ["", f"![seconds and peak memory, before and after]({facts['png']})"]
    for nproc in setup.world_sizes:
        mine = [summary for summary in summaries if summary.nproc == nproc]
        lines += ["", f"## {nproc} ranks", "", _table(mine, checks)]
        lines += [f"\n`{s.flow}`: {s.status}: {s.reason}" for s in mine if s.status != "ok"]
        for bars in panels(mine):
            if bars.values:
                lines += ["", mermaid_bars(bars)]
        told = [summary for summary in mine if summary.phases]
        names = list(dict.fromkeys(name for summary in told for name in summary.phases))
        if told:
            rows = [[name, *(_number(s.phases.get(name, math.nan)) for s in told)] for name in names]
            lines += ["", "Seconds by phase:", "", markdown_table(["phase", *(s.flow for s in told)], rows)]
    lines += ["", "## What was loaded", ""]
    promises = list(dict.fromkeys(check.promise for check in checks))
    found = {(check.flow, check.nproc, check.promise): check.ok for check in checks}
    keys = list(dict.fromkeys((check.flow, check.nproc) for check in checks))
    rows = [[f"{f}, {n} ranks", *(_holds(found.get((f, n, promise))) for promise in promises)] for f, n in keys]
    lines += [markdown_table(["flow", *promises], rows), ""]
    lines += [f"- {promise}: {PROMISES[promise]}." for promise in promises]
    lines += ["", "## The flows", ""]
    lines += [f"- `{flow}`: {peers.ABOUT.get(flow, flow)}." for flow in setup.flows]
    lines += [
        "",
        "Seconds: until every rank has its shards. Memory: the highest moment of the highest rank, above what it was",
        "when the clock started. Host memory is what a rank has for itself (anonymous and shared); with mapped files,",
        "it is all that is resident, and the system may take the files' pages back. GB read: as the flow's own report",
        "says, else what the storage delivered; all ranks together. Digests are sha256 over values, names, dtypes,",
        "shapes and placements, compared rank by rank.",
        "",
    ]
    return "\n".join(lines)


def _table(summaries: Sequence[Summary], checks: Sequence[Check]) -> str:
    on_device = any(summary.peak_device_bytes for summary in summaries)
    first = summaries[0]
    equal = {(check.flow, check.nproc): check.ok for check in checks if check.promise == SHARDS}
    headers = ["flow", "seconds", "faster", "GB read", "peak host GB", "less", "with mapped files GB"]
    headers += ["peak device GB", "less"] * on_device + ["digests"]
    rows = []
    for summary in summaries:
        if not summary.seconds:
            rows.append([summary.flow, summary.status, *[""] * (len(headers) - 2)])
            continue
        read = summary.storage_bytes if summary.reported_bytes is None else summary.reported_bytes
        spread = f" [{min(summary.seconds):.2f}-{max(summary.seconds):.2f}]" if len(summary.seconds) > 1 else ""
        row = [summary.flow, f"{summary.median:.2f}{spread}", ratio(first.median, summary.median), f"{read / 1e9:.2f}"]
        row += [f"{summary.peak_host_bytes / 1e9:.3f}", ratio(first.peak_host_bytes, summary.peak_host_bytes)]
        row.append(f"{summary.peak_resident_bytes / 1e9:.3f}")
        if on_device:
            row += [f"{summary.peak_device_bytes / 1e9:.3f}", ratio(first.peak_device_bytes, summary.peak_device_bytes)]
        rows.append([*row, _holds(equal.get((summary.flow, summary.nproc)))])
    return markdown_table(headers, rows)


def panels(summaries: Sequence[Summary]) -> list[Bars]:
    """Seconds, peak host memory and, where there is one, peak device memory, of one number of ranks."""
    ran = [summary for summary in summaries if summary.seconds]
    ranks = f"{summaries[0].nproc} ranks"
    others = frozenset(peers.PEERS)
    made = [
        Bars(
            f"Seconds until every rank has its shards, {ranks}",
            "seconds",
            {summary.flow: summary.median for summary in ran},
            {summary.flow: (min(summary.seconds), max(summary.seconds)) for summary in ran},
            others,
        ),
        Bars(
            f"Peak host memory of the highest rank, {ranks}",
            "GB",
            {summary.flow: summary.peak_host_bytes / 1e9 for summary in ran},
            peers=others,
            beyond={summary.flow: summary.peak_resident_bytes / 1e9 for summary in ran},
            beyond_title="with mapped files",
        ),
    ]
    if any(summary.peak_device_bytes for summary in ran):
        device = {summary.flow: summary.peak_device_bytes / 1e9 for summary in ran}
        made.append(Bars(f"Peak device memory of the highest rank, {ranks}", "GB", device, peers=others))
    return made


def draw(path: Path, setup: Setup, summaries: Sequence[Summary]) -> bool:
    """The PNG; False where it cannot be drawn."""
    by_ranks = [[s for s in summaries if s.nproc == nproc] for nproc in setup.world_sizes]
    rows = [panels(mine) for mine in by_ranks if any(s.seconds for s in mine)]
    if not rows or not can_draw():
        return False
    adapter = " + LoRA" if setup.case.adapter else ""
    draw_bars(path, f"{setup.subject.model}{adapter}: before and after", rows)
    return True


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""


def _holds(ok: bool | None) -> str:
    return "" if ok is None else "equal" if ok else "DIFFERS"
