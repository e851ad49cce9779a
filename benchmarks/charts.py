"""Charts: bars of before and after, memory over time; as PNG by matplotlib, where it is installed, and as Mermaid."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phases import Stretch, seconds_by_phase

from metashard import plot
from metashard.plot import GRID, INK, figure, style

BEFORE, AFTER, PEER = "#8c959f", "#0969da", "#bf8700"
SHADES = ("#ddf4ff", "#fff8c5", "#dafbe1", "#fbe0ff", "#ffdcd7", "#dde1e6", "#ffd8b5", "#b6dcff", "#b7e4c7", "#e6ddc4")
LINES = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#bf3989", "#57606a", "#0a3069")

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars:
    """One figure of several flows.

    Attributes:
        title: What it is a figure of.
        unit: Of the values.
        values: By flow, the one before first.
        ranges: Lowest and highest, by flow; a flow without one has no whisker.
        peers: Flows that are of others, drawn in another colour.
        beyond: What comes with it to how much, by flow; drawn paler behind the bar.
        beyond_title: What that is.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    peers: frozenset[str] = frozenset()
    beyond: Mapping[str, float] = field(default_factory=dict)
    beyond_title: str = ""


@dataclass(frozen=True)
class Timeline:
    """Memory over time of one load.

    Attributes:
        title: Which load.
        ranks: (seconds, bytes) of each rank.
        stretches: Phases to shade.
        resident: Bytes that a rank holds at the end (the highest of the ranks) in this memory.
        mapped: The same as `ranks` with the files that a rank has mapped; empty where there is no such thing.
    """

    title: str
    ranks: Sequence[Curve]
    stretches: Sequence[Stretch]
    resident: int
    mapped: Sequence[Curve] = ()


def can_draw() -> bool:
    """Whether PNGs can be drawn; says in one line that they are not."""
    found = plot.can_draw()
    if not found:
        print("no PNG is drawn: matplotlib is not installed (pip install 'metashard[bench]')", flush=True)
    return found


def ratio(before: float, after: float) -> str:
    """How many times less; empty where that cannot be told."""
    return f"{before / after:.1f}x" if after > 0 and math.isfinite(before) and math.isfinite(after) else ""


def draw_bars(path: Path, title: str, rows: Sequence[Sequence[Bars]]) -> None:
    """A grid of panels of horizontal bars, each with its value and how many times less or more than the first."""
    tall = max(len(panel.values) for row in rows for panel in row)
    canvas = figure(4.6 * len(rows[0]), (0.9 + 0.34 * tall) * len(rows) + 0.6)
    canvas.suptitle(title, fontsize=11, color=INK)
    grid = canvas.subplots(len(rows), len(rows[0]), squeeze=False)
    for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        names, values = list(panel.values), list(panel.values.values())
        colours = [BEFORE if i == 0 else PEER if name in panel.peers else AFTER for i, name in enumerate(names)]
        if panel.beyond:
            axes.barh(names, [panel.beyond[name] for name in names], color=colours, height=0.68, alpha=0.3)
        axes.barh(names, values, color=colours, height=0.68)
        axes.invert_yaxis()
        highest = max([*values, *(high for _, high in panel.ranges.values()), *panel.beyond.values(), 1e-9])
        axes.set_xlim(0, highest * 1.32)
        for at, (name, value) in enumerate(panel.values.items()):
            low, high = panel.ranges.get(name, (value, value))
            end = max(value, high, panel.beyond.get(name, 0.0))
            if high > low:
                axes.plot([low, high], [at, at], color=INK, linewidth=1)
            less = f"  ({ratio(values[0], value)} less)" if at and value < 0.95 * values[0] else ""
            more = f"  ({ratio(value, values[0])} more)" if at and value > 1.05 * values[0] else ""
            paler = panel.beyond.get(name, value)
            shown = f"{value:.3g}" if paler < 1.05 * value else f"{value:.3g} / {paler:.3g}"
            look = dict(xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
            axes.annotate(f"{shown}{less}{more}", (end, at), **look)
        style(axes, panel.title)
        axes.set_xlabel(panel.unit, fontsize=8, color=INK)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
    kinds = {"before": BEFORE, "metashard": AFTER}
    if any(name in panel.peers for row in rows for panel in row for name in list(panel.values)[1:]):
        kinds["other public flows"] = PEER
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    beyond = {panel.beyond_title for row in rows for panel in row if panel.beyond}
    patches += [Patch(color=BEFORE, alpha=0.3, label=f"paler: {title}") for title in sorted(beyond)]
    canvas.legend(handles=patches, ncols=4, fontsize=8, labelcolor=INK, loc="outside lower center", frameon=False)
    _save(canvas, path)


def draw_timelines(path: Path, title: str, rows: Sequence[Sequence[Timeline]]) -> None:
    """A grid of panels, a line a rank, phases shaded; panels of a row share their axes, so they can be compared."""
    canvas = figure(5.2 * len(rows[0]), 2.8 * len(rows) + 1.2)
    canvas.suptitle(title, fontsize=11, color=INK)
    grid = canvas.subplots(len(rows), len(rows[0]), squeeze=False, sharex="row", sharey="row")
    shades = _shades([panel for row in rows for panel in row])
    keys: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        for name, start, end in panel.stretches:
            if name in shades:
                keys[name] = axes.axvspan(start, end, color=shades[name], linewidth=0, zorder=0)
        for rank, curve in enumerate(panel.ranks):
            look = dict(color=LINES[rank % len(LINES)], linewidth=1.3)
            (keys[f"rank {rank}"],) = axes.plot(*_gigabytes(curve), **look)
            if panel.mapped:
                look |= dict(linestyle=":", linewidth=1.0)
                (keys[f"rank {rank} with mapped files"],) = axes.plot(*_gigabytes(panel.mapped[rank]), **look)
        if panel.resident:
            keys["held at the end"] = axes.axhline(panel.resident / 1e9, color=INK, linewidth=0.9, linestyle="--")
        style(axes, panel.title)
        axes.set_xlabel("seconds", fontsize=8, color=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
    for row in grid:
        row[0].set_ylabel("GB above the start", fontsize=8, color=INK)
        row[0].set_ylim(bottom=0)
        row[0].set_xlim(left=0)
    keys = dict(sorted(keys.items(), key=lambda item: item[0] in shades))  # lines first
    look = dict(fontsize=7, labelcolor=INK, loc="outside lower center", frameon=False)
    canvas.legend(keys.values(), keys.keys(), ncols=4 * len(rows[0]), **look)
    _save(canvas, path)


def _gigabytes(curve: Curve) -> tuple[list[float], list[float]]:
    kept = thinned(curve)
    return [seconds for seconds, _ in kept], [nbytes / 1e9 for _, nbytes in kept]


def _shades(panels: Sequence[Timeline]) -> dict[str, str]:
    """A colour for each phase that takes a fiftieth of a panel's time or more; shorter ones could not be seen."""
    shown: dict[str, None] = {}
    for panel in panels:
        whole = max((curve[-1][0] for curve in panel.ranks if curve), default=0.0)
        spent = seconds_by_phase(list(panel.stretches))
        shown |= dict.fromkeys(name for name, seconds in spent.items() if seconds >= 0.02 * whole)
    return {name: SHADES[at % len(SHADES)] for at, name in enumerate(shown)}


def thinned(curve: Curve, most: int = 400) -> Curve:
    """At most `most` points: of each stretch of time its lowest and its highest, so that no peak is lost."""
    if len(curve) <= most:
        return curve
    kept: list[tuple[float, float]] = []
    step = 2 * len(curve) / most
    for at in range(most // 2):
        part = curve[round(at * step) : round((at + 1) * step)]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def mermaid_bars(bars: Bars) -> str:
    """The bars as a Mermaid chart, which GitHub draws inside of Markdown."""
    names = ", ".join(f'"{name}"' for name in bars.values)
    values = ", ".join(f"{value:.3f}" for value in bars.values.values())
    top = max(bars.values.values()) * 1.1
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta horizontal",
            f'    title "{bars.title}"',
            f"    x-axis [{names}]",
            f'    y-axis "{bars.unit}" 0 --> {top:.3f}',
            f"    bar [{values}]",
            "```",
        ]
    )


def _save(figure: Any, path: Path) -> None:
    """In 64 colours, which are enough, at a third of the size."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
