"""Rank to rank: buckets of bytes from one rank of a crew to the others, in fixed memory.

[Note: status word]
A bucket ends with a status word. If the sender fails while it packs, it sends one more bucket that says so and stops;
receivers see it and stop as well. If a receiver fails, it goes on receiving without unpacking and tells the others
(see `metashard.watched`), so that the sender stops in the same way. So no rank waits for one that has left, and the
agreement at the end of the phase raises the same error everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from metashard.fill.bytes import as_bytes, as_dtype
from metashard.fill.target import Job, Target
from metashard.plan import Bucket, Piece, fill_buckets

STATUS_BYTES = 16
OK, FAILED = 0, 1

Runs = Iterable[tuple[int, int, int]]  # (element of the full tensor, element of `out`, count)


class Parcel(NamedTuple):
    """`runs` of a target's full tensor that go to `out` (1-D, the target's dtype, any device)."""

    target: Target
    runs: Runs
    out: torch.Tensor


class Source(Protocol):
    """Where the sending rank gets elements from."""

    def pack(self, parcels: Sequence[Parcel]) -> None:
        """Bring every parcel's elements in place; they are there when it returns."""

    def done(self, target: Target) -> None:
        """All of `target` has been packed; its source may be freed."""


def prepare_exchange(targets: Sequence[Target], job: Job, crew: Sequence[int], *, transport: str) -> Exchange:
    """Get ready to fill `targets` on every rank of a crew from the crew's first rank: plan and memory.

    In transport "scatter" a rank is sent its own shard, in "broadcast" everything, of which it keeps its shard. The
    sender's own shards never travel. Two buckets take turns: while one travels, the sender packs the next (with
    `overlap=False` there is one, and nothing happens while it travels).

    Memory: half of `staging_bytes` on the sender; in "scatter" a receiver's buckets are smaller by the number of ranks.

    Args:
        targets: The same, in the same order, on every rank of the crew.
        job: Surroundings of the load.
        crew: Global ranks out of the shard group, this one among them; the first sends.
        transport: "scatter" or "broadcast".

    Returns:
        The exchange; run it once all ranks have theirs.
    """
    scatter = transport == "scatter"
    rows = max(1, len(crew) - 1) if scatter else 1
    bucket_bytes = max(job.policy.staging_bytes // 4 // rows, 1 << 12)
    if scatter:
        sizes = [(max(t.box_of(r).numel for r in crew), t.dtype.itemsize) for t in targets]
    else:
        sizes = [(torch.Size(t.shape).numel(), t.dtype.itemsize) for t in targets]
    buckets = fill_buckets(sizes, bucket_bytes)
    sends, others = crew[0] == dist.get_rank(), len(crew) - 1
    slot = max((bucket.nbytes for bucket in buckets), default=0) + STATUS_BYTES
    lanes = (others if scatter else min(1, others)) if sends else 1
    turns = [torch.empty(lanes, slot, dtype=torch.uint8, device=job.device) for _ in range(1 + job.policy.overlap)]
    return Exchange(targets, job, tuple(crew), buckets, turns, scatter)


class Exchange(NamedTuple):
    """One exchange, with all that it needs."""

    targets: Sequence[Target]
    job: Job
    crew: tuple[int, ...]
    buckets: Sequence[Bucket]
    turns: list[torch.Tensor]
    scatter: bool

    def run(self, source: Source | None, stop: threading.Event) -> Exception | None:
        """Send from `source`, or receive where it is None; ends early on all ranks once `stop` is set on any.

        Returns:
            Why this rank could not pack or unpack; the ranks are in step all the same.
        """
        if not self.buckets:
            return None
        if source is not None:
            return _Sender(self, source, stop).run(self.buckets, self.turns)
        return _Receiver(self, stop).run(self.buckets, [turn[0] for turn in self.turns])


class _Sender:
    def __init__(self, exchange: Exchange, source: Source, stop: threading.Event) -> None:
        self.targets, self.source, self.job, self.stop = exchange.targets, source, exchange.job, stop
        self.scatter, self.all = exchange.scatter, len(exchange.crew) == len(exchange.job.shard_ranks)
        self.others = exchange.crew[1:]
        self.boxes = [{r: target.box_of(r) for r in self.others} for target in self.targets] if self.scatter else []
        self.error: Exception | None = None

    def run(self, buckets: Sequence[Bucket], turns: list[torch.Tensor]) -> Exception | None:
        last = {piece.item: number for number, bucket in enumerate(buckets) for piece in bucket.pieces}
        travelling: list[list[dist.Work]] = [[] for _ in turns]
        for number, bucket in enumerate(buckets):
            turn = number % len(turns)
            self.job.wait(travelling[turn])
            status = FAILED if self.stop.is_set() else OK
            try:
                if status == OK:
                    self._pack(bucket, turns[turn])
                    for item in {piece.item for piece in bucket.pieces if last[piece.item] == number}:
                        self.source.done(self.targets[item])
            except Exception as error:  # noqa: BLE001 - returned when the others know
                self.error, status = error, FAILED
            travelling[turn] = self._send(turns[turn][:, : bucket.nbytes + STATUS_BYTES], status)
            if status != OK:
                break
        self.job.wait(chain.from_iterable(travelling))
        return self.error

    def _pack(self, bucket: Bucket, rows: torch.Tensor) -> None:
        parcels: list[Parcel] = []
        own: list[torch.Tensor] = []
        sent = 0
        for piece in bucket.pieces:
            target = self.targets[piece.item]
            if self.scatter or not self.others:  # each rank's own elements; this rank's straight into its shard
                outs = [(target.box, target.flat[piece.start :])]
                outs += [
                    (self.boxes[piece.item][rank], as_dtype(rows[row, piece.at :], target.dtype, piece.numel))
                    for row, rank in enumerate(self.others)
                ]
                for box, out in outs:
                    if n := _clip(piece, box.numel):
                        runs = [(first, at - piece.start, m) for first, at, m in box.runs(piece.start, piece.stop)]
                        parcels.append(Parcel(target, runs, out[:n]))
                        if box is target.box:
                            own.append(out[:n])
                        else:
                            sent += n * target.dtype.itemsize
            else:
                out = as_dtype(rows[0, piece.at :], target.dtype, piece.numel)
                parcels.append(Parcel(target, [(piece.start, 0, piece.numel)], out))
                sent += piece.numel * target.dtype.itemsize * len(self.others)
        self.source.pack(parcels)
        if not self.scatter and self.others:
            own = list(_keep(bucket, self.targets, rows[0]))
        self.job.recorder.add(bytes_sent=sent)
        for view in own:
            self.job.placed(view)

    def _send(self, rows: torch.Tensor, status: int) -> list[dist.Work]:
        group = self.job.shard_group
        rows[:, -STATUS_BYTES:] = status
        if not self.scatter and self.all:
            broadcasts = [dist.broadcast(row, src=dist.get_rank(), group=group, async_op=True) for row in rows]
            return [work for work in broadcasts if work is not None]
        each = rows if self.scatter else rows.expand(len(self.others), -1)
        sends = [dist.isend(row, dst=rank, group=group) for row, rank in zip(each, self.others, strict=True)]
        return [work for work in sends if work is not None]


class _Receiver:
    def __init__(self, exchange: Exchange, stop: threading.Event) -> None:
        self.targets, self.job, self.scatter, self.stop = exchange.targets, exchange.job, exchange.scatter, stop
        self.src, self.all = exchange.crew[0], len(exchange.crew) == len(exchange.job.shard_ranks)
        self.error: Exception | None = None

    def run(self, buckets: Sequence[Bucket], turns: list[torch.Tensor]) -> Exception | None:
        coming = self._receive(turns[0], buckets[0])
        for number, bucket in enumerate(buckets):
            row = turns[number % len(turns)]
            if coming is not None:
                self.job.wait([coming])
            if int(row[bucket.nbytes]) != OK:
                break  # the sender tells why at the end of the phase
            ahead = number + 1 < len(buckets) and len(turns) > 1
            if ahead:
                coming = self._receive(turns[(number + 1) % len(turns)], buckets[number + 1])
            if self.error is None:
                try:
                    self._unpack(bucket, row)
                except Exception as error:  # noqa: BLE001 - returned when nothing is on its way any more
                    self.error = error
                    self.stop.set()
            if number + 1 < len(buckets) and not ahead:
                coming = self._receive(row, buckets[number + 1])
        return self.error

    def _receive(self, row: torch.Tensor, bucket: Bucket) -> dist.Work | None:
        row = row[: bucket.nbytes + STATUS_BYTES]
        group = self.job.shard_group
        if self.scatter or not self.all:
            return dist.irecv(row, src=self.src, group=group)
        return dist.broadcast(row, src=self.src, group=group, async_op=True)

    def _unpack(self, bucket: Bucket, row: torch.Tensor) -> None:
        received = 0
        for view in self._scattered(bucket, row) if self.scatter else _keep(bucket, self.targets, row):
            received += view.nbytes
            self.job.placed(view)
        if not self.scatter:  # everything came, whatever was kept of it
            received = sum(p.numel * self.targets[p.item].dtype.itemsize for p in bucket.pieces)
        self.job.recorder.add(bytes_received=received)

    def _scattered(self, bucket: Bucket, row: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in bucket.pieces:
            target = self.targets[piece.item]
            n = _clip(piece, target.box.numel)
            yield target.flat[piece.start :][:n].copy_(as_dtype(row[piece.at :], target.dtype, n))


def _clip(piece: Piece, numel: int) -> int:
    """How many elements of a piece a shard of `numel` elements has."""
    return max(0, min(piece.stop, numel) - piece.start)


def _keep(bucket: Bucket, targets: Sequence[Target], row: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copy what is this rank's out of a bucket of whole tensors; the parts of targets that were written."""
    for piece in bucket.pieces:
        target = targets[piece.item]
        view = as_dtype(row[piece.at :], target.dtype, piece.numel)
        for first, local, n in target.box.overlap(piece.start, piece.stop):
            yield target.flat[local : local + n].copy_(view[first - piece.start :][:n])


def scratch_for(job: Job) -> torch.Tensor:
    """A bucket for `broadcast_in_place`, to be had before anyone waits for it. Pages that are not used cost nothing."""
    return torch.empty(job.policy.staging_bytes + STATUS_BYTES, dtype=torch.uint8, device=job.device)


def broadcast_in_place(
    flats: Sequence[torch.Tensor],
    *,
    src: int,
    group: dist.ProcessGroup,
    scratch: torch.Tensor,
    placed: Callable[[torch.Tensor], None],
) -> int:
    """Broadcast 1-D tensors from global rank `src` into the same tensors elsewhere.

    Large ones travel in place, piece by piece, without a copy; small ones share a bucket.

    Args:
        flats: Same sizes and dtypes in the same order on every rank of `group`.
        src: Global rank that has the values.
        group: The group.
        scratch: The bucket, from `scratch_for`, on the device that the group's collectives run on.
        placed: Called with what has been received, piece by piece.

    Returns:
        Bytes that travelled (0 in a group of one).
    """
    if dist.get_world_size(group) == 1:
        return 0
    sends = dist.get_rank() == src
    buckets = fill_buckets([(flat.numel(), flat.dtype.itemsize) for flat in flats], scratch.numel() - STATUS_BYTES)
    pending: list[tuple[torch.Tensor, dist.Work | None]] = []
    total = 0
    for bucket in buckets:
        only = bucket.pieces[0]
        total += sum((p.stop - p.start) * flats[p.item].dtype.itemsize for p in bucket.pieces)
        if len(bucket.pieces) == 1 and flats[only.item].device == scratch.device:
            piece = as_bytes(flats[only.item][only.start : only.stop])
            pending.append((piece, dist.broadcast(piece, src=src, group=group, async_op=True)))
            continue
        views = [
            (flats[p.item][p.start : p.stop], as_dtype(scratch[p.at :], flats[p.item].dtype, p.stop - p.start))
            for p in bucket.pieces
        ]
        if sends:
            for flat, view in views:
                view.copy_(flat)
        dist.broadcast(scratch[: bucket.nbytes], src=src, group=group)
        if not sends:
            for flat, view in views:
                placed(flat.copy_(view))
    for piece, work in pending:
        if work is not None:
            work.wait()
        if not sends:
            placed(piece)
    return total
