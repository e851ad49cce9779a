"""Who writes which bytes: every element of the checkpoint once, by one of the ranks that hold it. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from metashard.agree import mesh_ranks
from metashard.checkpoint import Entry
from metashard.fill.direct import part_of
from metashard.fill.target import Target
from metashard.plan import Box, whole


@dataclass(frozen=True)
class Share:
    """What one rank writes of one entry: the elements [start, stop) of the part that it holds.

    Args:
        entry: Where they go.
        box: The part of the full tensor that the rank holds.
        start: First element, counted in the part.
        stop: End of the elements.
    """

    entry: Entry
    box: Box
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Byte runs of the share's elements [start, stop): (byte of the file, byte of those elements, bytes)."""
        size = self.entry.dtype.itemsize
        first = self.start + start
        for at, local, count in self.box.runs(first, self.start + stop):
            yield self.entry.offset + at * size, (local - first) * size, count * size


def share_of(number: int, entry: Entry, target: Target, rank: int, ranks: Sequence[int], seeing: set[int]) -> Share:
    """The share of global rank `rank` in entry `number`; an empty one if others write what it holds.

    Ranks that hold the same part (replicas, replicated tensors) take turns, or a piece each of a large one. Those that
    see the folder write; only what none of them holds has to travel.

    Args:
        number: Place of the entry in the layout.
        entry: The entry.
        target: The tensor whose bytes go there.
        rank: The rank in question.
        ranks: All ranks of the save.
        seeing: Those that see the folder.
    """
    if target.mesh is not None and not {rank, ranks[0]} <= set(mesh_ranks(target.mesh)):
        return Share(entry, whole(entry.shape), 0, 0)  # FSDP beside tensor parallel: the leader's group writes
    box = target.box_of(rank)
    holders = _holders(target, rank, ranks)
    writers = [r for r in holders if r in seeing] or holders
    if rank not in writers:
        return Share(entry, box, 0, 0)
    nbytes = box.numel * entry.dtype.itemsize
    start, stop = part_of(number, box.numel, nbytes, writers.index(rank), len(writers))
    return Share(entry, box, start, stop)


def _holders(target: Target, rank: int, ranks: Sequence[int]) -> list[int]:
    """Global ranks that hold the same part as `rank`."""
    if target.mesh is None:
        return list(ranks)
    grid = target.mesh.mesh
    coordinate = (grid == rank).nonzero()[0].tolist()
    cut = {axis for axis, _ in target.sharding.axes}
    index = tuple(coordinate[axis] if axis in cut else slice(None) for axis in range(grid.ndim))
    held: list[int] = grid[index].reshape(-1).tolist()
    return held
