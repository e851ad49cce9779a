"""`LoadPolicy(verify="full")`: read the files again and hold every shard against them.

The files are read here by other code than that which filled the shards, and torch, not our plan, says which part of a
tensor a rank holds: a mistake in reading, slicing, sending or casting shows. What no file holds (computed buffers,
adapters) is compared from rank to rank.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from metashard._compat import compute_local_shape_and_global_offset
from metashard.agree import Agreement
from metashard.checkpoint import Entry
from metashard.errors import CheckpointError, LoadError
from metashard.fill.bytes import as_bytes, as_dtype, flat_local
from metashard.layout import named_slots
from metashard.report import Comparison, Mismatch

logger = logging.getLogger(__name__)

_PARTS = 16  # of `staging_bytes` that a piece may have: it is cast, copied to the host and compared element by element
_HASH_BYTES = 1 << 20

Shape = tuple[int, ...]


class Originals:
    """Tensors as the library has loaded them on rank 0, to tell later which of them still are as they are in the files.

    Args:
        module: The module, just loaded. Its tensors are kept alive.
        sources: Name -> entry, as the files' headers tell.
    """

    def __init__(self, module: nn.Module, sources: Mapping[str, Entry]) -> None:
        self._loaded = {
            id(tensor): (tensor, _state(tensor), sources[slot.tie])
            for slot, tensor in named_slots(module, attributes=False)
            if slot.persistent and slot.tie in sources
        }

    def unchanged(self, module: nn.Module) -> dict[str, Entry]:
        """Name -> entry, of what hooks and adapters have left as it was; says in the log what else there was."""
        found: dict[str, Entry] = {}
        kept = set()
        for slot, tensor in named_slots(module, attributes=False):
            if id(tensor) in self._loaded and self._loaded[id(tensor)][1] == _state(tensor):
                found[slot.tie] = self._loaded[id(tensor)][2]
                kept.add(id(tensor))
        if others := sorted(entry.key for known, (_, _, entry) in self._loaded.items() if known not in kept):
            logger.warning(
                "verify: %d tensors were changed on rank 0 after they were loaded, by prepare or adapters, and are not "
                "compared with the files: %s",
                len(others),
                ", ".join(others[:5]),
            )
        return found


def _state(tensor: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """Differs once a tensor has been written in place, or been given other memory."""
    return (0 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.dtype)


def compare_load(
    module: nn.Module,
    names: Iterable[str],
    entries: Mapping[str, Entry],
    *,
    folder: Path,
    agreement: Agreement,
    staging_bytes: int,
) -> Comparison:
    """Compare this load with its files and from rank to rank. Every rank calls it and reads its own shards' bytes.

    Args:
        module: The loaded module.
        names: What the load has filled, ties once.
        entries: Name -> entry of what holds the bytes of its entry, cast.
        folder: This rank's folder of the files.
        agreement: The ranks of the load.
        staging_bytes: Bound of the host memory that this takes.

    Returns:
        What was compared over all ranks, without a mismatch.

    Raises:
        LoadError: On every rank, naming the first tensor that differs, file and byte; `got` is the `Comparison`.
        CheckpointError: A file cannot be read any more.
    """
    tensors = {slot.fqn: tensor.detach() for slot, tensor in named_slots(module)}
    with agreement.phase("verify"):
        here = {name: tensors[name] for name in names}
        found = list(_compare(here, entries, folder, max(staging_bytes // _PARTS, 64), agreement.rank))
        nbytes = sum(flat_local(here[name]).nbytes for name in entries)
        hashes = {name: (_part(tensor), _sha(tensor)) for name, tensor in here.items() if name not in entries}
    everyone = agreement.gather((found, nbytes, hashes))
    mismatches = [mismatch for theirs, _, _ in everyone for mismatch in theirs]
    mismatches += _between_ranks([theirs for _, _, theirs in everyone])
    made = Comparison(len(entries), sum(n for _, n, _ in everyone), len(hashes), tuple(mismatches))
    if mismatches:
        raise _error(made)
    return made


def _error(comparison: Comparison) -> LoadError:
    first = comparison.mismatches[0]
    names = {mismatch.name for mismatch in comparison.mismatches}
    others = f" {len(names) - 1} more tensors differ." if len(names) > 1 else ""
    place = f"{first.file} at byte {first.offset} (key {first.key})" if first.file else "rank 0"
    return LoadError(
        f"{first.name}: {first.elements} elements on rank {first.rank} are not those of {place}: expected "
        f"{first.expected}, got {first.got}.{others} Has something written the file since? If not, this is a defect "
        "of metashard or of the machine; do not train on it.",
        rank=first.rank,
        phase="verify",
        file=first.file,
        key=first.key or first.name,
        expected=first.expected,
        got=comparison,
    )


def _part(tensor: torch.Tensor) -> tuple[Shape, Shape]:
    """Offset and shape of this rank's part of a tensor, as torch tells them."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    held, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(held)


def _compare(
    tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Entry], folder: Path, most: int, rank: int
) -> Iterator[Mismatch]:
    buffer = torch.empty(most, dtype=torch.uint8)
    ordered = sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset))
    for file, group in groupby(ordered, key=lambda item: item[1].file):
        try:
            with open(folder / file, "rb", buffering=0) as source:
                for name, entry in group:
                    mismatch = _compare_one(name, tensors[name], entry, source, buffer, rank)
                    if mismatch is not None:
                        yield mismatch
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be read again to verify the load: {error.strerror}.",
                phase="verify",
                file=str(folder / file),
            ) from error


def _compare_one(
    name: str, tensor: torch.Tensor, entry: Entry, source: BinaryIO, buffer: torch.Tensor, rank: int
) -> Mismatch | None:
    """Compare this rank's part of one tensor; the first mismatch, with the number of all elements that differ."""
    offset, held = _part(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if 0 in held and local.numel() == 0:
        return None
    if tuple(local.shape) != held:
        raise LoadError(
            f"{name}: this rank holds {tuple(local.shape)} of {entry.shape}, torch says {held}.",
            phase="verify",
            key=entry.key,
            expected=held,
            got=tuple(local.shape),
        )
    size = entry.dtype.itemsize
    count, first = 0, None
    for start, index, block, cut in _blocks(entry.shape, offset, held, buffer.numel() // max(size, local.itemsize)):
        raw = buffer[: prod(block) * size]
        _read(source, entry, start * size, raw)
        wanted = as_dtype(raw, entry.dtype, prod(block)).view(block)[cut].to(local.dtype).contiguous()
        got = local[index].cpu().contiguous()
        if torch.equal(as_bytes(wanted), as_bytes(got)):
            continue
        differs = _differing(wanted, got, cast=entry.dtype != local.dtype)
        count += len(differs)
        if first is None and len(differs):
            at = int(differs[0])
            place = torch.unravel_index(torch.tensor(at), wanted.shape) if block else ()
            element = start + sum(
                (int(i) + part.start) * prod(block[dim + 1 :])
                for dim, (i, part) in enumerate(zip(place, cut, strict=True))
            )
            values = [str(flat.reshape(-1)[at].item()) for flat in (wanted, got)]
            first = entry.offset + element * size, *values
    if first is None:
        return None
    return Mismatch(name, rank, count, expected=first[1], got=first[2], file=entry.file, key=entry.key, offset=first[0])


def _blocks(
    full: Shape, offset: Shape, held: Shape, most: int
) -> Iterator[tuple[int, tuple[int | slice, ...], Shape, tuple[slice, ...]]]:
    """Cut the part [offset, offset + held) of a tensor into blocks of at most `most` elements that lie together.

    A block holds whole rows, of which the part may be a cut: what lies between is read with it.

    Yields:
        First element of the full tensor, index into the part, shape of the block, index into the block.
    """
    if not full:
        yield 0, (), (), ()
        return
    row = prod(full[1:])
    if row > most:
        for i in range(held[0]):
            for start, index, block, cut in _blocks(full[1:], offset[1:], held[1:], most):
                yield (offset[0] + i) * row + start, (i, *index), block, cut
        return
    rows = max(1, most // max(1, row))
    for i in range(0, held[0], rows):
        n = min(rows, held[0] - i)
        cut = (slice(0, n), *(slice(o, o + h) for o, h in zip(offset[1:], held[1:], strict=True)))
        yield (offset[0] + i) * row, (slice(i, i + n),), (n, *full[1:]), cut


def _read(source: BinaryIO, entry: Entry, start: int, raw: torch.Tensor) -> None:
    """Fill the 1-D uint8 tensor `raw` from byte `start` of an entry."""
    view = memoryview(raw.numpy())  # type: ignore[arg-type]
    source.seek(entry.offset + start)
    done = 0
    while done < len(view):
        got = source.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise CheckpointError(
                f"{entry.key}: {entry.file} ended at byte {entry.offset + start + done} when it was read again to "
                "verify the load. Has something written it since?",
                phase="verify",
                file=source.name,
                key=entry.key,
                expected=f"{len(view)} bytes from offset {entry.offset + start}",
                got=f"{done} bytes",
            )
        done += got


def _differing(wanted: torch.Tensor, got: torch.Tensor, *, cast: bool) -> torch.Tensor:
    """Elements (flattened) whose bytes differ. A cast may give a NaN other bits, by where it lies in memory."""
    size = wanted.element_size()
    differs = (as_bytes(wanted).view(-1, size) != as_bytes(got).view(-1, size)).any(1)
    if cast and wanted.is_floating_point():
        differs &= ~(wanted.reshape(-1).float().isnan() & got.reshape(-1).float().isnan())
    return differs.nonzero().reshape(-1)


def _sha(tensor: torch.Tensor) -> str:
    sha = hashlib.sha256()
    raw = as_bytes(flat_local(tensor).contiguous())
    for start in range(0, raw.numel(), _HASH_BYTES):
        sha.update(raw[start : start + _HASH_BYTES].cpu().numpy())  # type: ignore[arg-type]
    return sha.hexdigest()


def _between_ranks(ranks: list[dict[str, tuple[tuple[Shape, Shape], str]]]) -> Iterator[Mismatch]:
    """What differs from the first rank that holds the same part."""
    first: dict[tuple[str, tuple[Shape, Shape]], str] = {}
    for rank, hashes in enumerate(ranks):
        for name, (part, sha) in hashes.items():
            expected = first.setdefault((name, part), sha)
            if expected != sha:
                yield Mismatch(name, rank, prod(part[1]), expected=f"sha256 {expected[:12]}", got=f"sha256 {sha[:12]}")
