"""Where the time of a load goes: stretches that a flow marks while it runs, in the process that it runs in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_marked: list[Stretch] = []


class Stretch(NamedTuple):
    """A phase from `start` to `end`, in seconds of whatever clock its list is kept in."""

    name: str
    start: float
    end: float


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the body, on the clock of `time.perf_counter`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _marked.append(Stretch(name, start, time.perf_counter()))


def take_marked() -> list[Stretch]:
    """What was marked since the last call."""
    taken = list(_marked)
    _marked.clear()
    return taken


def seconds_by_phase(stretches: list[Stretch] | tuple[Stretch, ...]) -> dict[str, float]:
    """Sum of each phase, in the order of their first start."""
    total: dict[str, float] = {}
    for name, start, end in sorted(stretches, key=lambda stretch: stretch.start):
        total[name] = total.get(name, 0.0) + end - start
    return total
