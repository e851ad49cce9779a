"""`metashard plan`: the tables of a `LoadPlan`."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table

from metashard.load_plan import LoadPlan
from metashard.report import size_text
from metashard.strategy import ASKED_FOR

_FIGURES = {
    "bytes_read": "read",
    "bytes_sent": "sent",
    "bytes_received": "received",
    "bytes_resident": "resident",
    "peak_host_bytes": "peak host",
    "peak_device_bytes": "peak device",
}


def print_plan(plan: LoadPlan, *, storage_gbps: float | None, network_gbps: float | None) -> None:
    """Print a plan to stdout.

    Args:
        plan: The plan.
        storage_gbps: GB/s of the storage, all ranks together; with `network_gbps`, adds estimated seconds.
        network_gbps: GB/s of the network, each rank.
    """
    strategies = _strategies(plan, storage_gbps, network_gbps)  # first: it may refuse the speeds
    console = Console(highlight=False)
    files = f"{size_text(plan.checkpoint_bytes)} in {plan.files} file{'s' if plan.files > 1 else ''}"
    console.print(f"{plan.class_name}: {files}; {', '.join(f'{n} {dtype}' for dtype, n in plan.dtype_counts.items())}")
    console.print(f"mesh {'x'.join(map(str, plan.mesh_shape))} of {plan.device_type}, transport {plan.transport}")
    who = "strategy" if plan.reason == ASKED_FOR else "auto takes"
    console.print(f"{who} {plan.strategy}: {plan.reason}")
    console.print(strategies)
    console.print(_groups(plan))
    for text in plan.warnings:
        console.print(f"warning: {text}", style="yellow")


def _strategies(plan: LoadPlan, storage_gbps: float | None, network_gbps: float | None) -> Table:
    """Figures down, strategies across: the most of any rank, but for the first line."""
    table = Table(box=box.SIMPLE)
    table.add_column("a rank, at most")
    for strategy in plan.ranks:
        table.add_column(strategy, justify="right")
    every = plan.ranks.values()
    table.add_row("read by all ranks", *(size_text(sum(rank.bytes_read for rank in ranks)) for ranks in every))
    for name, title in _FIGURES.items():
        table.add_row(title, *(size_text(max(getattr(rank, name) for rank in ranks)) for ranks in every))
    calls = [max(rank.reads for rank in ranks) for ranks in every]
    table.add_row("read calls", *(str(n) if n else "the library's" for n in calls))
    if storage_gbps is not None and network_gbps is not None:
        seconds = plan.seconds(storage_gbps=storage_gbps, network_gbps=network_gbps)
        table.add_row("seconds to move", *(f"{seconds[strategy]:.2f}" for strategy in plan.ranks))
    return table


def _groups(plan: LoadPlan) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("FSDP groups", "params", "all-gather", "for example"):
        table.add_column(column, justify="left" if column == "for example" else "right", no_wrap=True)
    kinds = Counter((group.parameters, group.all_gather_bytes) for group in plan.groups)
    for (parameters, nbytes), count in sorted(kinds.items(), key=lambda item: -item[0][1]):
        name = next(g.name for g in plan.groups if (g.parameters, g.all_gather_bytes) == (parameters, nbytes))
        table.add_row(str(count), str(parameters), size_text(nbytes), name or "(root)")
    return table
