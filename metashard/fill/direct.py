"""Strategy `direct`: every rank reads its own shards' byte runs; a replicated tensor is read once by the group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from metashard.checkpoint import Checkpoint, Entry
from metashard.fill.collective import broadcast_in_place
from metashard.fill.reader import Files, Read, Reader, reads_for
from metashard.fill.target import Job, Target
from metashard.plan import chunk

_SPLIT_BYTES = 1 << 20  # replicated tensors from this size on are read in parts, one a rank


def read_own(targets: Sequence[Target], entries: Mapping[str, Entry], checkpoint: Checkpoint, job: Job) -> None:
    """Read this rank's shards, and its part of every replicated tensor. Takes part in no collective.

    Peak memory: `staging_bytes` where bytes need a cast or another device, else nothing above the shards.

    Args:
        targets: What to fill, in the same order on every rank.
        entries: Target name -> its entry.
        checkpoint: The files as their headers told.
        job: Surroundings of the load.
    """
    if not job.reads:
        return
    ranks = job.shard_ranks
    me = ranks.index(dist.get_rank())
    assert job.folder is not None
    with Files(job.folder, checkpoint, same_folder=job.agreement.leader) as files:
        reader = Reader(files, threads=job.policy.io_threads, staging_bytes=job.policy.staging_bytes)
        reads: list[Read] = []
        for number, target in enumerate(targets):
            runs: Iterable[tuple[int, int, int]] = target.box.runs()
            if target.replicated:
                start, stop = part_of(number, target.flat.numel(), target.flat.nbytes, me, len(ranks))
                runs = [(start, start, stop - start)]
            reads += reads_for(entries[target.fqn], runs, target.flat, most=reader.most)
        try:
            reader.run(reads, job.placed)
        finally:
            job.recorder.add(bytes_read=files.bytes_read)


def share_replicated(targets: Sequence[Target], job: Job, scratch: torch.Tensor) -> None:
    """Send the parts of replicated tensors that `read_own` has read from the rank that read them to the others."""
    if not job.reads:
        return
    ranks = job.shard_ranks
    for owner, src in enumerate(ranks):
        flats = []
        for number, target in enumerate(targets):
            if target.replicated:
                start, stop = part_of(number, target.flat.numel(), target.flat.nbytes, owner, len(ranks))
                flats.append(target.flat[start:stop])
        moved = broadcast_in_place(flats, src=src, group=job.shard_group, scratch=scratch, placed=job.placed)
        if src == dist.get_rank():
            job.recorder.add(bytes_sent=moved * (len(ranks) - 1))
        else:
            job.recorder.add(bytes_received=moved)


def part_of(number: int, numel: int, nbytes: int, owner: int, owners: int) -> tuple[int, int]:
    """Elements of replicated target `number` that `owner` reads: a part of a large one, all or none of a small one."""
    if nbytes >= _SPLIT_BYTES:
        return chunk(numel, owner, owners)
    return (0, numel) if number % owners == owner else (0, 0)
