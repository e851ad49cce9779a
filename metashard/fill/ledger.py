"""Which bytes have been written: the account that the final check of a load is held against.

The movers note every stretch of the module's memory that they have written, as a range of addresses. At the end each
byte of each shard, buffer and plain attribute must be there exactly once. Addresses, not names: what was written into a
copy instead of the memory that the module now holds is missing, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from metashard.errors import LoadError

_SHOWN = 4  # ranges that an error names


class Ledger:
    """Address ranges that have been written, on each device. Any thread may note; neighbours become one entry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[torch.device, list[tuple[int, int]]] = defaultdict(list)

    def wrote(self, view: torch.Tensor) -> None:
        """Note that all of `view` (contiguous memory that the module owns, any dtype) has been written."""
        start, stop = view.data_ptr(), view.data_ptr() + view.nbytes
        if start == stop:
            return
        with self._lock:
            runs = self._runs[view.device]
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))

    def check(self, expected: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hold what was written against what had to be.

        Args:
            expected: Name and memory (1-D) of every tensor that had to be filled on this rank. Two that share memory
                may each have been written.

        Raises:
            LoadError: Naming the first tensor with elements that were never written, or more often than once, and
                which elements of this rank's part they are.
        """
        wrong: list[tuple[str, torch.Tensor, list[tuple[int, int, bool]]]] = []
        for device in {flat.device for _, flat in expected}:
            here = [(name, flat) for name, flat in expected if flat.device == device and flat.numel()]
            faults = _faults(self._runs[device], [_addresses(flat) for _, flat in here])
            for name, flat in here if faults else ():
                start, stop = _addresses(flat)
                if inside := [(max(a, start), min(b, stop), more) for a, b, more in faults if a < stop and start < b]:
                    wrong.append((name, flat, inside))
        if wrong:
            raise _error(wrong)


def _addresses(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes


def _faults(written: Iterable[tuple[int, int]], wanted: Iterable[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Ranges (start, stop, too often) of wanted addresses that were not written as often as they are wanted."""
    steps: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # address -> change in (written, wanted)
    for column, ranges in enumerate((written, wanted)):
        for start, stop in ranges:
            steps[start][column] += 1
            steps[stop][column] -= 1
    found: list[tuple[int, int, bool]] = []
    times = wants = before = 0
    for address in sorted(steps):
        if wants and times != wants:
            more = times > wants
            if found and found[-1][1:] == (before, more):
                found[-1] = (found[-1][0], address, more)
            else:
                found.append((before, address, more))
        times, wants, before = times + steps[address][0], wants + steps[address][1], address
    return found


def _error(wrong: list[tuple[str, torch.Tensor, list[tuple[int, int, bool]]]]) -> LoadError:
    name, flat, faults = min(wrong, key=lambda item: item[0])
    base, size = flat.data_ptr(), flat.element_size()
    never, twice = (
        [((a - base) // size, -(-(b - base) // size)) for a, b, more in faults if more is which]
        for which in (False, True)
    )
    got = "; ".join(
        f"{what}: {', '.join(f'[{a}, {b})' for a, b in ranges[:_SHOWN])}{', ...' if len(ranges) > _SHOWN else ''}"
        for what, ranges in (("never written", never), ("written more than once", twice))
        if ranges
    )
    others = f" {len(wrong) - 1} more tensors are wrong in this way." if len(wrong) > 1 else ""
    return LoadError(
        f"{name}: of the {flat.numel()} elements that this rank holds, {got}.{others} The load would be wrong in "
        "silence; this is a defect of metashard, please report it with the load's report.",
        phase="check",
        key=name,
        expected="every element written once",
        got=got,
    )
