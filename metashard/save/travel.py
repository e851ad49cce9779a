"""Rank to rank: what ranks hold that do not see the folder travels to rank 0 in buckets, and is written there.

One sender after the other, two buckets a rank: while one travels, the next is packed, and the last one written. They go
over the control group (gloo, host memory), as they end in a file. A bucket ends with a status word, see
[Note: status word] in `metashard.fill.collective`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from metashard.fill.bytes import as_bytes, as_dtype
from metashard.fill.collective import FAILED, OK, STATUS_BYTES
from metashard.plan import Bucket, fill_buckets
from metashard.save.share import Share
from metashard.save.write import Files, lift


class Lane:
    """What travels from one rank: its shares, in buckets.

    Args:
        src: Global rank that sends.
        shares: What it holds; the same on both ends.
        staging_bytes: Of the two buckets together.
    """

    def __init__(self, src: int, shares: Sequence[Share], staging_bytes: int) -> None:
        self.src, self.shares = src, shares
        sizes = [(share.numel, share.entry.dtype.itemsize) for share in shares]
        self.buckets = fill_buckets(sizes, max(staging_bytes // 2 - STATUS_BYTES, 1 << 12))

    def memory(self) -> list[torch.Tensor]:
        """Two buckets in host memory."""
        nbytes = max((bucket.nbytes for bucket in self.buckets), default=0) + STATUS_BYTES
        return [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]


class Sender:
    """Sends a lane to rank 0.

    Args:
        lane: What travels.
        flats: This rank's part of each share's tensor (1-D).
        dst: Global rank that writes.
        group: Group to talk over.
        timeout: Seconds that a bucket may take.
    """

    def __init__(
        self, lane: Lane, flats: Sequence[torch.Tensor], *, dst: int, group: dist.ProcessGroup, timeout: float
    ) -> None:
        self.lane, self.flats, self.dst, self.group = lane, flats, dst, group
        self.timeout = timedelta(seconds=timeout)
        self.turns = lane.memory()

    def run(self, stop: threading.Event) -> Exception | None:
        """Send all buckets; one that says so, and no more, once `stop` is set. Returns why one could not be packed."""
        travelling: list[dist.Work | None] = [None, None]
        error: Exception | None = None
        for number, bucket in enumerate(self.lane.buckets):
            turn = number % 2
            self._wait(travelling[turn])
            status = FAILED if stop.is_set() else OK
            try:
                if status == OK:
                    self._pack(bucket, self.turns[turn])
            except Exception as raised:  # noqa: BLE001 - returned when rank 0 knows
                error, status = raised, FAILED
            row = self.turns[turn][: bucket.nbytes + STATUS_BYTES]
            row[bucket.nbytes :] = status
            travelling[turn] = dist.isend(row, dst=self.dst, group=self.group)
            if status != OK:
                break
        for work in travelling:
            self._wait(work)
        return error

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self.timeout)

    def _pack(self, bucket: Bucket, row: torch.Tensor) -> None:
        for piece in bucket.pieces:
            share, flat = self.lane.shares[piece.item], self.flats[piece.item]
            source = flat[share.start + piece.start : share.start + piece.stop]
            lift(source, as_dtype(row[piece.at :], share.entry.dtype, piece.numel))


class Receiver:
    """Receives lanes on rank 0, and writes what comes.

    Args:
        lanes: What travels, a sender each.
        files: Where it goes.
        group: Group to talk over.
        timeout: Seconds that a bucket may take.
    """

    def __init__(self, lanes: Sequence[Lane], files: Files, *, group: dist.ProcessGroup, timeout: float) -> None:
        self.lanes, self.files, self.group = lanes, files, group
        self.timeout = timedelta(seconds=timeout)
        most = max(lanes, key=lambda lane: max((b.nbytes for b in lane.buckets), default=0))
        self.turns = most.memory()
        self.received = 0
        self.error: Exception | None = None

    def run(self, stop: threading.Event) -> Exception | None:
        """Receive from each sender to its end, though nothing is written any more once that has failed."""
        for lane in self.lanes:
            coming = self._receive(lane, 0)
            for number, bucket in enumerate(lane.buckets):
                row = self.turns[number % 2]
                if coming is not None:
                    coming.wait(self.timeout)
                if int(row[bucket.nbytes]) != OK:
                    break  # the sender tells why at the end of the phase
                coming = self._receive(lane, number + 1)
                if self.error is None:
                    try:
                        self._write(lane, bucket, row)
                    except Exception as error:  # noqa: BLE001 - returned when nothing is on its way any more
                        self.error = error
                        stop.set()
        return self.error

    def _receive(self, lane: Lane, number: int) -> dist.Work | None:
        if number >= len(lane.buckets):
            return None
        row = self.turns[number % 2][: lane.buckets[number].nbytes + STATUS_BYTES]
        return dist.irecv(row, src=lane.src, group=self.group)

    def _write(self, lane: Lane, bucket: Bucket, row: torch.Tensor) -> None:
        for piece in bucket.pieces:
            share = lane.shares[piece.item]
            raw = as_bytes(as_dtype(row[piece.at :], share.entry.dtype, piece.numel))
            self.files.write(share.entry, share.runs(piece.start, piece.stop), raw)
            self.received += raw.numel()
