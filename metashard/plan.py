"""Slices and byte runs, as pure data: which part of a tensor a rank holds, and where those bytes lie in a file.

Nothing here touches a process group, a file or a weight; a plan for any world size can be made on a laptop.

[Note: boxes and runs]
A shard is a *box* of the full tensor: an offset and a size for every dim. In row-major order a box is a sequence of
equally long *runs* of neighbouring elements. Sharding dim 0 gives one run; sharding dim d gives one run for every index
of the dims before d. The k-th run starts at local element ``k * run_length``, so any range of the local shard, and any
range of the full tensor, is found by arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The part of a tensor of shape `full` that one rank holds.

    Args:
        full: Shape of the full tensor.
        offset: First index held, a dim each.
        shape: Number of indices held, a dim each. Any of them may be 0.
    """

    full: Shape
    offset: Shape
    shape: Shape

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def run_length(self) -> int:
        """Number of elements of each run (0 for an empty box)."""
        if self.numel == 0:
            return 0
        length = 1
        for held, size in zip(reversed(self.shape), reversed(self.full), strict=True):
            length *= held
            if held != size:
                break
        return length

    def run_start(self, k: int) -> int:
        """Element of the full tensor, flattened, at which run `k` starts."""
        start, stride, rest = 0, 1, k * self.run_length
        for held, size, first in zip(reversed(self.shape), reversed(self.full), reversed(self.offset), strict=True):
            rest, index = divmod(rest, held)
            start += (first + index) * stride
            stride *= size
        return start

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Runs of the local elements [start, stop) as (element of the full tensor, local element, count)."""
        stop = self.numel if stop is None else min(stop, self.numel)
        while start < stop:
            k, within = divmod(start, self.run_length)
            count = min(self.run_length - within, stop - start)
            yield self.run_start(k) + within, start, count
            start += count

    def overlap(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Runs of this box inside the elements [start, stop) of the flattened full tensor, as `runs` gives them."""
        if self.numel == 0 or start >= stop:
            return
        count = self.numel // self.run_length
        low, high = 0, count  # the first run that ends after `start`: run starts grow with k
        while low < high:
            middle = (low + high) // 2
            if self.run_start(middle) + self.run_length <= start:
                low = middle + 1
            else:
                high = middle
        for k in range(low, count):
            first = self.run_start(k)
            if first >= stop:
                return
            a, b = max(first, start), min(first + self.run_length, stop)
            yield a, k * self.run_length + (a - first), b - a


def whole(shape: Sequence[int]) -> Box:
    """The box of a replicated tensor."""
    return Box(tuple(shape), (0,) * len(shape), tuple(shape))


def flat_part(shape: Sequence[int], index: int, parts: int) -> tuple[int, int]:
    """Elements [start, stop) of part `index` of a flattened tensor of `shape` that is cut into `parts` parts."""
    return chunk(math.prod(shape), index, parts)


def chunk(size: int, index: int, parts: int) -> tuple[int, int]:
    """Start and stop of chunk `index` as `torch.chunk` cuts `size`: ceil-sized, the last ones may be empty."""
    step = -(-size // parts)
    return min(size, index * step), min(size, (index + 1) * step)


@dataclass(frozen=True)
class Sharding:
    """How a tensor is laid over a mesh.

    Args:
        axes: Pairs (mesh axis, tensor dim) in the order in which the cuts are made. Mesh axes that are not named
            hold replicas. FSDP on a 1-D mesh is ``((0, 0),)``; HSDP ``((1, 0),)``; FSDP over tensor parallel on
            (dp, tp) is ``((1, d), (0, 0))``, as tensor parallel cuts first.
    """

    axes: tuple[tuple[int, int], ...] = ()

    def box(self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """The box of the rank at `coordinate` of a mesh of `mesh_shape`."""
        offset, held = [0] * len(shape), list(shape)
        for axis, dim in self.axes:
            start, stop = chunk(held[dim], coordinate[axis], mesh_shape[axis])
            offset[dim] += start
            held[dim] = stop - start
        return Box(tuple(shape), tuple(offset), tuple(held))


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of tensor number `item`, at byte `at` of a bucket (of a rank's slot in scatter)."""

    item: int
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel together. `nbytes` is the size of one slot."""

    pieces: tuple[Piece, ...]
    nbytes: int


_ALIGN = 16  # every dtype can be viewed at such an offset


def fill_buckets(sizes: Sequence[tuple[int, int]], bucket_bytes: int) -> list[Bucket]:
    """Cut tensors into pieces and pack the pieces, in order, into buckets of at most `bucket_bytes`.

    Small tensors share a bucket, a large one spans several.

    Args:
        sizes: (elements, bytes an element) of each tensor; in scatter the elements of the largest shard.
        bucket_bytes: Upper bound of a bucket; at least one element of each tensor fits.
    """
    bucket_bytes -= bucket_bytes % _ALIGN
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    at = 0
    for item, (numel, itemsize) in enumerate(sizes):
        start = 0
        while start < numel:
            room = (bucket_bytes - at) // itemsize
            if room <= 0 or (pieces and room * itemsize < min(_ALIGN, bucket_bytes)):
                buckets.append(Bucket(tuple(pieces), at))
                pieces, at = [], 0
                room = max(1, bucket_bytes // itemsize)
            stop = min(numel, start + room)
            pieces.append(Piece(item, start, stop, at))
            at += -(-(stop - start) * itemsize // _ALIGN) * _ALIGN
            start = stop
    if pieces:
        buckets.append(Bucket(tuple(pieces), at))
    return buckets
