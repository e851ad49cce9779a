"""Put the bytes in place: one file a strategy, on top of two movers (files to memory, rank to rank)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from metashard.checkpoint import Checkpoint, Entry
from metashard.fill.bytes import flat_local
from metashard.fill.collective import Source, broadcast_in_place, prepare_exchange, scratch_for
from metashard.fill.direct import read_own, share_replicated
from metashard.fill.rank0 import Memory
from metashard.fill.reader import Files, Reader
from metashard.fill.stream import FileSource
from metashard.fill.target import Job, Target, target
from metashard.layout import Slot, named_slots


def fill(
    module: nn.Module,
    slots: Sequence[Slot],
    job: Job,
    *,
    strategy: str,
    sources: Mapping[str, Entry],
    headers: Checkpoint | None,
    real: dict[str, torch.Tensor],
) -> None:
    """Fill every parameter, buffer and plain tensor attribute of a sharded, allocated module.

    Args:
        module: The module; the same on every rank.
        slots: Rank 0's layout before sharding.
        job: Surroundings of the load.
        strategy: "direct", "stream" or "rank0".
        sources: Name -> entry, of what comes from the files.
        headers: The checkpoint's headers; None in `rank0`.
        real: Rank 0's real parameters, by name; emptied as they are sent. {} on other ranks.
    """
    tensors = {slot.fqn: tensor for slot, tensor in named_slots(module)}
    registered = [s for s in slots if s.kind != "attribute" and s.tie == s.fqn]
    from_files = comes_from_files(slots, sources)
    left_alone = {s.fqn for s in registered if s.trait and s.real}  # DTensors that the caller has filled, rank by rank
    from_memory = [s.fqn for s in registered if s.kind == "parameter" and s.fqn not in left_alone | set(from_files)]
    file_targets = [target(fqn, tensors[fqn]) for fqn in from_files]
    memory_targets = [target(fqn, tensors[fqn]) for fqn in from_memory]

    if strategy == "direct":
        assert headers is not None
        with _phase(job, "fill"):
            read_own(file_targets, sources, headers, job)
        with _phase(job, "fill"):
            scratch = scratch_for(job)
        with _phase(job, "fill"):
            job.together(lambda stop: share_replicated(file_targets, job, scratch))
        del scratch
    elif file_targets:
        assert headers is not None
        assert job.folder is not None
        with _phase(job, "fill"), Files(job.folder, headers, same_folder=job.agreement.leader) as files:
            half = job.policy.staging_bytes // 2  # the buckets have the other half
            reader = Reader(files, threads=job.policy.io_threads, staging_bytes=half)
            _send(file_targets, FileSource(reader, sources), job, job.crew)
            job.recorder.add(bytes_read=files.bytes_read)
    with _phase(job, "fill"):
        memory = Memory(real, device=job.device, staging_bytes=job.policy.staging_bytes // 2)
    _send(memory_targets, memory, job, job.shard_ranks)
    with _phase(job, "buffers"):
        computed = _computed_on_rank0(module, slots, set(from_files))
        scratch = scratch_for(job)
    flats = [t.flat for t in file_targets + memory_targets] + computed
    with _phase(job, "buffers"):
        job.together(lambda stop: _from_rank0(computed, job, scratch))
        job.together(lambda stop: _to_replicas(flats, job, scratch))


def comes_from_files(slots: Sequence[Slot], sources: Mapping[str, Entry]) -> list[str]:
    """Names of the parameters and buffers that are filled from their entries.

    A real parameter on rank 0 is newer than the file (a hook has set it); a real buffer is what __init__ computed.
    """
    registered = [s for s in slots if s.kind != "attribute" and s.tie == s.fqn]
    return [s.fqn for s in registered if s.fqn in sources and not (s.kind == "parameter" and s.real)]


def to_fill(module: nn.Module, slots: Sequence[Slot]) -> list[tuple[str, torch.Tensor]]:
    """Name and memory (1-D) of all that `fill` fills on this rank, ties once; the arguments are those of `fill`.

    Without what is this rank's own: DTensors that the caller has filled, plain attributes that rank 0 does not have.
    """
    here = {slot.fqn: tensor for slot, tensor in named_slots(module)}
    found: list[tuple[str, torch.Tensor]] = []
    for slot in slots:
        own = slot.real if slot.trait else slot.kind == "attribute" and not (slot.real and _fits(slot, here))
        if slot.tie == slot.fqn and not own:
            found.append((slot.fqn, flat_local(here[slot.fqn])))
    return found


def _fits(slot: Slot, here: Mapping[str, torch.Tensor]) -> bool:
    """Whether this rank has the plain attribute that rank 0 has."""
    tensor = here.get(slot.fqn)
    return tensor is not None and (tuple(tensor.shape), tensor.dtype) == (slot.shape, slot.dtype)


@contextmanager
def _phase(job: Job, name: str) -> Iterator[None]:
    with job.recorder.phase(name), job.agreement.phase(name):
        yield


def _send(targets: list[Target], source: Source, job: Job, crew: Sequence[int]) -> None:
    """Exchange within a crew of the replica that reads; replicated targets are broadcast, whatever the transport.

    Each exchange has its buffers before it begins and ends by itself: a rank that fails in one leaves nobody waiting in
    the next.
    """
    mine = source if dist.get_rank() == crew[0] else None
    sharded, replicated = [t for t in targets if not t.replicated], [t for t in targets if t.replicated]
    for part, transport in ((sharded, job.policy.transport), (replicated, "broadcast")):
        if part:
            with _phase(job, "fill"):
                ready = prepare_exchange(part, job, crew, transport=transport) if job.reads else None
            with _phase(job, "fill"):
                if ready is not None:
                    job.together(partial(ready.run, mine))


def _computed_on_rank0(module: nn.Module, slots: Sequence[Slot], from_files: set[str]) -> list[torch.Tensor]:
    """1-D views of all buffers and plain attributes that come from rank 0, with memory for those on meta here."""
    here = {slot.fqn: tensor for slot, tensor in named_slots(module)}
    flats: list[torch.Tensor] = []
    for slot in slots:
        if slot.kind == "parameter" or slot.tie != slot.fqn or slot.tie in from_files or not slot.real:
            continue
        tensor = here.get(slot.fqn)
        if slot.kind == "attribute" and not _fits(slot, here):
            # This rank has no such attribute, or another one: take part in the broadcast, keep what is here.
            tensor = torch.empty(slot.shape, dtype=slot.dtype)
        assert tensor is not None
        if tensor.is_meta:
            torch.utils.swap_tensors(tensor, torch.empty(slot.shape, dtype=slot.dtype))
        elif not tensor.is_contiguous():
            tensor.data = tensor.detach().contiguous()
        flats.append(flat_local(tensor))
    return flats


def _from_rank0(flats: list[torch.Tensor], job: Job, scratch: torch.Tensor) -> None:
    if job.reads:
        ranks = job.shard_ranks
        if job.agreement.leader:
            for flat in flats:  # computed here, in place already
                job.ledger.wrote(flat)
        moved = broadcast_in_place(flats, src=ranks[0], group=job.shard_group, scratch=scratch, placed=job.ledger.wrote)
        _count(job, moved, sends=job.agreement.leader, receivers=len(ranks) - 1)


def _to_replicas(flats: list[torch.Tensor], job: Job, scratch: torch.Tensor) -> None:
    """Send what the first replica has along the replicate axis."""
    if job.mesh.ndim == 2:
        group = job.mesh.get_group(0)
        ranks = dist.get_process_group_ranks(group)
        moved = broadcast_in_place(flats, src=ranks[0], group=group, scratch=scratch, placed=job.placed)
        _count(job, moved, sends=job.reads, receivers=len(ranks) - 1)


def _count(job: Job, moved: int, *, sends: bool, receivers: int) -> None:
    if sends:
        job.recorder.add(bytes_sent=moved * receivers)
    else:
        job.recorder.add(bytes_received=moved)
