"""The picture of a load: when rank 0 was in which phase, and what each rank held at the end and at its peak.

Drawn by matplotlib (extra `plot`), which is imported when something is drawn and not before.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metashard.report import LoadReport, Span

INK, GRID, FILL = "#24292f", "#d0d7de", "#0969da"  # on white, which reads well on a dark page too
PEAKS = {"host": "#bf8700", "device": "#8250df"}
DPI = 110


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # an entry of sys.modules that is None
        return False


def check_drawable(path: str | Path) -> None:
    """Raise now what `draw` would raise after a load.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: It knows no pictures of this suffix.
        FileNotFoundError: There is no such folder.
    """
    if not can_draw():
        raise ImportError("A picture of a load needs matplotlib, which is not installed: pip install 'metashard[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in known:
        raise ValueError(f"{path}: expected a file name that ends in one of {', '.join(known)}, such as load.png.")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {Path(path).absolute().parent} to write the picture in.")


def draw(report: LoadReport, path: str | Path) -> None:
    """Draw `report` into a file; see `LoadReport.plot`."""
    check_drawable(path)
    names = list(dict.fromkeys(span.name for span in sorted(report.spans, key=lambda span: span.start)))
    canvas = figure(7.2, 3.6 + 0.2 * len(names))
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    read = sum(rank.bytes_read for rank in report.ranks) / 1e9
    canvas.suptitle(
        f"{report.strategy} on {ranks} in {report.seconds:.2f} s, {read:.3g} GB read", fontsize=11, color=INK
    )
    phases, memory = canvas.subplots(2, 1, height_ratios=(1 + 0.2 * len(names), 2))
    _draw_phases(phases, names, report.spans)
    _draw_memory(memory, report)
    canvas.savefig(path)


def _draw_phases(axes: Any, names: list[str], spans: tuple[Span, ...]) -> None:
    whole = max((span.end for span in spans), default=1.0)
    for row, name in enumerate(names):
        ran = [(span.start, span.end - span.start) for span in spans if span.name == name]
        axes.broken_barh(ran, (row - 0.34, 0.68), color=FILL)
        end = max(start + seconds for start, seconds in ran)
        look = dict(xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
        axes.annotate(f"{sum(seconds for _, seconds in ran):.2f} s", (end, row), **look)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, whole * 1.12)
    axes.set_xlabel("seconds since the load began, rank 0", fontsize=8, color=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    style(axes, "Phases")


def _draw_memory(axes: Any, report: LoadReport) -> None:
    series = {"held at the end": (FILL, [rank.bytes_resident for rank in report.ranks])}
    for kind, colour in PEAKS.items():
        peaks = [getattr(rank, f"peak_{kind}_bytes") for rank in report.ranks]
        if any(peaks):
            series[f"peak of {kind} memory"] = (colour, peaks)
    width = 0.8 / len(series)
    for number, (title, (colour, values)) in enumerate(series.items()):
        middle = (number - (len(series) - 1) / 2) * width
        places = [rank + middle for rank in range(len(values))]
        axes.bar(places, [nbytes / 1e9 for nbytes in values], width, color=colour, label=title)
    step = max(1, len(report.ranks) // 16)
    axes.set_xticks(range(0, len(report.ranks), step))
    axes.set_xlabel("rank", fontsize=8, color=INK)
    axes.set_ylabel("GB above the start", fontsize=8, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.legend(fontsize=8, labelcolor=INK, frameon=False, ncols=len(series), loc="lower left", bbox_to_anchor=(0, 1))
    style(axes)


def figure(width: float, height: float) -> Any:
    """An empty figure, in inches; of its own, so that a caller's pyplot never sees it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def style(axes: Any, title: str = "") -> None:
    """The looks of all charts."""
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
