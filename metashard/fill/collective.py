"""Rank to rank: buckets of bytes from one rank to the others, in fixed memory.

[Note: status word]
A bucket ends with a status word. If the sender fails while it packs, it sends one more bucket that says so and stops;
receivers see it and stop as well. If a receiver fails, it goes on receiving without unpacking. So no rank waits for one
that has left, and the agreement at the end of the phase raises the same error everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from metashard.fill.bytes import as_bytes, as_dtype
from metashard.fill.target import Job, Target
from metashard.plan import Bucket, fill_buckets

_STATUS_BYTES = 16
_OK, _FAILED = 0, 1

Runs = Iterable[tuple[int, int, int]]  # (element of the full tensor, element of `out`, count)


class Source(Protocol):
    """Where the sending rank gets a target's elements from."""

    def pack(self, target: Target, runs: Runs, out: torch.Tensor) -> None:
        """Write the runs of the full tensor to `out` (1-D, the target's dtype, on the collective's device)."""

    def done(self, target: Target) -> None:
        """All of `target` has been packed; its source may be freed."""


def exchange(targets: Sequence[Target], source: Source | None, job: Job, *, transport: str) -> None:
    """Fill `targets` on every rank of the shard group from the group's first rank.

    Memory: two buckets of at most half of `staging_bytes` on the sender; in transport `scatter` a receiver's buckets
    are smaller by the number of ranks.

    Args:
        targets: The same, in the same order, on every rank of the group.
        source: The sender's source; None on the other ranks.
        job: Surroundings of the load.
        transport: "scatter" or "broadcast".
    """
    ranks = job.shard_ranks
    scatter = transport == "scatter"
    slots = len(ranks) if scatter else 1
    bucket_bytes = max(job.policy.staging_bytes // 2 // slots, 1 << 12)
    if scatter:
        sizes = [(max(t.box_of(r).numel for r in ranks), t.dtype.itemsize) for t in targets]
    else:
        sizes = [(torch.Size(t.shape).numel(), t.dtype.itemsize) for t in targets]
    buckets = fill_buckets(sizes, bucket_bytes)
    if not buckets:
        return
    slot_bytes = max(bucket.nbytes for bucket in buckets) + _STATUS_BYTES
    mover = _Mover(targets, source, job, slot_bytes, scatter)
    mover.run(buckets)


class _Mover:
    """Two buckets in turn: while one travels, the sender packs the next."""

    def __init__(
        self, targets: Sequence[Target], source: Source | None, job: Job, slot_bytes: int, scatter: bool
    ) -> None:
        self.targets, self.source, self.job, self.scatter = targets, source, job, scatter
        self.ranks = job.shard_ranks
        self.sends = source is not None
        rows = len(self.ranks) if scatter and self.sends else 1
        self.outgoing = [torch.empty(rows, slot_bytes, dtype=torch.uint8, device=job.device) for _ in range(2)]
        incoming = slot_bytes if scatter else 0
        self.incoming = [torch.empty(incoming, dtype=torch.uint8, device=job.device) for _ in range(2)]
        self.error: Exception | None = None

    def run(self, buckets: Sequence[Bucket]) -> None:
        waiting: tuple[dist.Work | None, Bucket, int] | None = None
        last_bucket = {piece.item: number for number, bucket in enumerate(buckets) for piece in bucket.pieces}
        for number, bucket in enumerate(buckets):
            turn = number % 2
            if self.sends:
                self._pack(bucket, self.outgoing[turn])
            if waiting is not None and not self._arrive(*waiting):
                break
            waiting = (self._send(turn), bucket, turn)
            if self.sends and self.source is not None and self.error is None:
                for piece in bucket.pieces:
                    if last_bucket[piece.item] == number:
                        self.source.done(self.targets[piece.item])
        else:
            if waiting is not None:
                self._arrive(*waiting)
        if self.error is not None:
            raise self.error

    def _pack(self, bucket: Bucket, rows: torch.Tensor) -> None:
        status = _OK
        try:
            assert self.source is not None
            for piece in bucket.pieces:
                target = self.targets[piece.item]
                for row, rank in enumerate(self.ranks if self.scatter else self.ranks[:1]):
                    if self.scatter:
                        box = target.box_of(rank)
                        runs: Runs = [
                            (first, local - piece.start, n) for first, local, n in box.runs(piece.start, piece.stop)
                        ]
                        count = max(0, min(piece.stop, box.numel) - piece.start)
                    else:
                        runs = [(piece.start, 0, piece.stop - piece.start)]
                        count = piece.stop - piece.start
                    if count:
                        out = as_dtype(rows[row, piece.at :], target.dtype, count)
                        self.source.pack(target, runs, out)
        except Exception as error:  # noqa: BLE001 - raised after the others know
            self.error, status = error, _FAILED
        rows[:, -_STATUS_BYTES:] = status

    def _send(self, turn: int) -> dist.Work | None:
        group, rows = self.job.shard_group, self.outgoing[turn]
        if self.scatter:
            parts = list(rows.unbind(0)) if self.sends else None
            return dist.scatter(self.incoming[turn], parts, src=self.ranks[0], group=group, async_op=True)
        return dist.broadcast(rows[0], src=self.ranks[0], group=group, async_op=True)

    def _arrive(self, work: dist.Work | None, bucket: Bucket, turn: int) -> bool:
        """Wait for a bucket and unpack it; False if the sender has failed."""
        if work is not None:
            work.wait()
        buffer = self.incoming[turn] if self.scatter else self.outgoing[turn][0]
        if int(buffer[-_STATUS_BYTES]) != _OK:
            return False
        if self.error is None:
            try:
                self._unpack(bucket, buffer)
            except Exception as error:
                if self.sends:
                    raise
                self.error = error
        return True

    def _unpack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        placed = 0
        for piece in bucket.pieces:
            target = self.targets[piece.item]
            if self.scatter:
                stop = min(piece.stop, target.box.numel)
                runs = [(piece.start, piece.start, stop - piece.start)] if stop > piece.start else []
            else:
                runs = list(target.box.overlap(piece.start, piece.stop))
            view = as_dtype(buffer[piece.at :], target.dtype, piece.stop - piece.start)
            for first, local, count in runs:
                target.flat[local : local + count].copy_(view[first - piece.start :][:count])
                placed += count * target.dtype.itemsize
        others = len(self.ranks) - 1
        if self.sends:
            sent = sum(
                (p.stop - p.start if not self.scatter else max(0, min(p.stop, t.box_of(r).numel) - p.start))
                * t.dtype.itemsize
                for r in self.ranks[1:]
                for p in bucket.pieces
                for t in (self.targets[p.item],)
            )
            self.job.recorder.add(bytes_sent=sent)
        elif others:
            received = (
                placed
                if self.scatter
                else sum((p.stop - p.start) * self.targets[p.item].dtype.itemsize for p in bucket.pieces)
            )
            self.job.recorder.add(bytes_received=received)
        self.job.advance(placed)


def broadcast_in_place(
    flats: Sequence[torch.Tensor], *, src: int, group: dist.ProcessGroup, device: torch.device, bucket_bytes: int
) -> int:
    """Broadcast 1-D tensors from global rank `src` into the same tensors elsewhere.

    Large ones travel in place, piece by piece, without a copy; small ones share a bucket.

    Args:
        flats: Same sizes and dtypes in the same order on every rank of `group`.
        src: Global rank that has the values.
        group: The group.
        device: Device that the group's collectives run on.
        bucket_bytes: Size of the bucket, and of the pieces.

    Returns:
        Bytes that travelled (0 in a group of one).
    """
    if dist.get_world_size(group) == 1:
        return 0
    sends = dist.get_rank() == src
    buckets = fill_buckets([(flat.numel(), flat.dtype.itemsize) for flat in flats], bucket_bytes)
    buffer: torch.Tensor | None = None
    pending: list[dist.Work] = []
    total = 0
    for bucket in buckets:
        only = bucket.pieces[0]
        total += sum((p.stop - p.start) * flats[p.item].dtype.itemsize for p in bucket.pieces)
        if len(bucket.pieces) == 1 and flats[only.item].device == device:
            piece = as_bytes(flats[only.item][only.start : only.stop])
            pending.append(dist.broadcast(piece, src=src, group=group, async_op=True))
            continue
        if buffer is None:
            buffer = torch.empty(bucket_bytes + 16, dtype=torch.uint8, device=device)
        views = [
            (flats[p.item][p.start : p.stop], as_dtype(buffer[p.at :], flats[p.item].dtype, p.stop - p.start))
            for p in bucket.pieces
        ]
        if sends:
            for flat, view in views:
                view.copy_(flat)
        dist.broadcast(buffer[: bucket.nbytes], src=src, group=group)
        if not sends:
            for flat, view in views:
                flat.copy_(view)
    for work in pending:
        work.wait()
    return total
