"""Safetensors headers to entries, validated before anything else happens.

A checkpoint is the weight files of one component. `read_checkpoint` reads each file's header (8 bytes of little-endian
length, then JSON) and nothing more: no weight byte is touched and nothing is allocated for a tensor. Whatever it
returns has passed every check, so what follows may trust offsets and sizes. It needs no process group: one rank calls
it and sends the `Checkpoint` to the others.

The format is that of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from metashard.errors import CheckpointError, LoadError
from metashard.files import (
    AGAIN,
    LFS_HEAD,
    check_file_name,
    file_error,
    is_text,
    lfs_pointer,
    parse_json,
    printable,
    regular_file_size,
    short,
)

logger = logging.getLogger(__name__)

# The same bound as safetensors' own reader: a header is read into memory whole.
MAX_HEADER_BYTES = 100_000_000
# torch counts elements and bytes in int64 and takes at most 64 dims.
MAX_COUNT = 2**63 - 1
MAX_DIMS = 64

_ZIP_HEAD = b"PK\x03\x04"

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

# Known to the format, but less than a byte an element: a row of such a tensor need not start at a byte.
_SUB_BYTE = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True)
class Entry:
    """One tensor in a checkpoint.

    Attributes:
        key: Name of the tensor in the file.
        file: Name of the file, relative to the component's folder (posix).
        dtype: Element type on disk.
        shape: Shape on disk; `()` for a 0-d tensor.
        offset: First byte of the tensor, counted from the start of the file (header included).
        nbytes: Its size in bytes: product of `shape` times the element size. 0 for an empty tensor.
    """

    key: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """All entries of one component's weight files. Plain data: picklable, to be sent to the other ranks.

    Attributes:
        sizes: File name to size in bytes, header included.
        entries: Key to entry, in sorted key order.
        modified: File name to time of the last change (ns) before its header was read, on the rank that read it.
    """

    sizes: dict[str, int]
    entries: dict[str, Entry]
    modified: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries together, headers not counted."""
        return sum(entry.nbytes for entry in self.entries.values())


def read_checkpoint(folder: Path, files: Sequence[str], weight_map: Mapping[str, str] | None) -> Checkpoint:
    """Read and validate the headers of a component's safetensors files.

    With an index the index is the authority: only files its map names are opened, keys that it does not assign to the
    file they are in are left out (with a warning in the log), and a key it promises must be there.

    Args:
        folder: The component's folder.
        files: Names of the files, plain names inside `folder`.
        weight_map: The index's map from key to file name; None where there is no index.

    Returns:
        The checkpoint. Bytes read: the headers only, one read a file.

    Raises:
        CheckpointError: A file is missing, not a regular file, not safetensors, or not what its header or the index
            says. Carries `file`, `key`, `expected` and `got` where they apply.
    """
    folder = Path(folder)
    names = set(files) if weight_map is None else set(weight_map.values())
    for name in sorted(set(files) - names):
        logger.warning("%s: not named by the index, so it is not read", printable(str(folder / name)))
    sizes: dict[str, int] = {}
    modified: dict[str, int] = {}
    entries: dict[str, Entry] = {}
    for name in sorted(names):
        check_file_name(name, source=str(folder))
        path = folder / name
        if path.exists():
            modified[name] = path.stat().st_mtime_ns
        sizes[name], found = read_header(path, name=name)
        if weight_map is not None:
            found = _assigned(found, weight_map, path)
        for key, entry in found.items():
            if key in entries:
                both = (entries[key].file, name)
                text = (
                    f"{printable(key)}: stored twice, in {both[0]} and in {both[1]}, and no index says which one "
                    "counts. Remove the stale file, or add the index file that save_pretrained wrote."
                )
                raise file_error(text, path, key=printable(key), expected="one file a key", got=both)
            entries[key] = entry
    lacking = sorted(set(weight_map or ()) - set(entries))
    if weight_map is not None and lacking:
        shown, name = printable(lacking[0]), weight_map[lacking[0]]
        more = f" ({len(lacking)} such keys)" if len(lacking) > 1 else ""
        text = (
            f"{shown}: the index says it is in {name}, but that file does not hold it{more}. "
            "Index and files are from different saves; fetch the folder again."
        )
        raise file_error(text, folder / name, key=shown, expected=f"{shown} in {name}", got="not there")
    return Checkpoint(sizes=sizes, entries={key: entries[key] for key in sorted(entries)}, modified=modified)


def _assigned(found: dict[str, Entry], weight_map: Mapping[str, str], path: Path) -> dict[str, Entry]:
    """The entries of one file that the index assigns to it; a warning names the others."""
    stale = sorted(key for key in found if weight_map.get(key) != path.name)
    if stale:
        shown = ", ".join(map(printable, stale[:3])) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
        logger.warning("%s: the index does not assign %s to this file; what it holds there is ignored", path, shown)
    return {key: entry for key, entry in found.items() if weight_map.get(key) == path.name}


def read_header(path: Path, *, name: str) -> tuple[int, dict[str, Entry]]:
    """Read and validate the header of one safetensors file.

    Args:
        path: The file. Symlinks are followed.
        name: What `Entry.file` shall say.

    Returns:
        The file's size in bytes, and its entries in the order of their offsets.

    Raises:
        CheckpointError: See `read_checkpoint`.
    """

    size = regular_file_size(path, phase="headers", error=CheckpointError)
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            if head == LFS_HEAD[:8] and head + file.read(len(LFS_HEAD) - 8) == LFS_HEAD:
                raise lfs_pointer(path, "weights", phase="headers", error=CheckpointError)
            if len(head) < 8:
                text = f"{name}: has {size} bytes; a safetensors file starts with 8 bytes of header length. {AGAIN}"
                raise file_error(text, path, expected=">= 8 bytes", got=size)
            (length,) = struct.unpack("<Q", head)
            limit = max(0, min(MAX_HEADER_BYTES, size - 8))
            if length > limit:
                zipped = " It looks like a torch pickle (zip) under another name." if head[:4] == _ZIP_HEAD else ""
                text = (
                    f"{name}: claims a header of {length} bytes, of which a file of {size} bytes can have {limit}: "
                    f"truncated, or not a safetensors file.{zipped} {AGAIN}"
                )
                raise file_error(text, path, expected=f"<= {limit}", got=length)
            raw = file.read(length)
    except OSError as error:
        text = f"{name}: cannot be read: {error.strerror or error}"
        raise file_error(text, path, got=type(error).__name__) from error
    if len(raw) != length:
        raise file_error(f"{name}: got shorter while it was read", path, expected=length, got=len(raw))
    header = parse_json(raw, path=path, what="safetensors header", phase="headers", unique=True, strict=True)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        text = f"{name}: `__metadata__` is not a map of strings"
        raise file_error(text, path, expected="map of strings", got=short(metadata))
    start = 8 + length
    entries = [_parse_entry(key, value, name=name, path=path, start=start) for key, value in header.items()]
    # Bytes that decode as UTF-8 hold whole characters; escapes can spell half a one, in what no entry shows, too.
    if b"\\u" in raw and not is_text(json.dumps([header, metadata], ensure_ascii=False)):
        raise file_error(f"{name}: the header holds text that is not valid UTF-8", path, expected="UTF-8", got="escape")
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_ranges(entries, start=start, size=size, path=path)
    return size, {entry.key: entry for entry in entries}


def _parse_entry(key: str, value: Any, *, name: str, path: Path, start: int) -> Entry:
    """One header item to an `Entry` whose own numbers agree with each other."""
    shown = printable(key)

    def wrong(message: str, expected: Any, got: Any) -> LoadError:
        return file_error(f"{shown}: {message}", path, key=shown, expected=expected, got=got)

    if not is_text(key):
        raise wrong("the name is not valid UTF-8 text", "UTF-8", "lone surrogate")
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise wrong(f"the header item is {short(value)}", "an object with dtype, shape, data_offsets", short(value))
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        known = isinstance(dtype_name, str) and dtype_name in _SUB_BYTE
        why = (
            "(less than a byte an element) is not supported. Load this component with its own library, or use the "
            "unquantised checkpoint."
            if known
            else "is unknown. The file is damaged, or of a newer format than this version knows."
        )
        raise wrong(f"dtype {short(dtype_name)} {why}", sorted(_DTYPES), short(dtype_name))
    if not _are_counts(shape):
        raise wrong(f"shape {short(shape)} is not a list of sizes", "integers >= 0", short(shape))
    # An empty tensor may still have dims that torch cannot hold, so the check looks at the dims other than 0.
    if len(shape) > MAX_DIMS or math.prod(max(dim, 1) for dim in shape) > MAX_COUNT:
        limits = f"<= {MAX_DIMS} dims, <= {MAX_COUNT} elements"
        raise wrong(f"shape {short(shape)} is too large for any tensor ({limits})", limits, short(shape))
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets {short(offsets)} are not a byte range", "[begin, end]", short(offsets))
    dtype = _DTYPES[dtype_name]
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        text = f"shape {shape} of {dtype_name} takes {nbytes} bytes, but data_offsets give it {end - begin}"
        raise wrong(text, nbytes, end - begin)
    return Entry(key=key, file=name, dtype=dtype, shape=tuple(shape), offset=start + begin, nbytes=nbytes)


def _check_ranges(entries: Sequence[Entry], *, start: int, size: int, path: Path) -> None:
    """Entries (sorted by offset) must cover the bytes from `start` to `size` exactly: no hole, no overlap, no rest."""
    position = start
    for entry in entries:
        if entry.offset != position:
            kind = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            text = f"{printable(entry.key)}: its byte range {kind} (starts at byte {entry.offset}, expected {position})"
            raise file_error(text, path, key=printable(entry.key), expected=position, got=entry.offset)
        position += entry.nbytes
    if position != size:
        kind = "truncated" if size < position else "followed by bytes that belong to no tensor"
        text = f"{path.name}: {kind}: the header describes {position} bytes, the file has {size}. {AGAIN}"
        raise file_error(text, path, expected=position, got=size)


def _are_counts(value: Any) -> bool:
    """Whether this is a list of integers >= 0 that fit int64; JSON's true is not one."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_COUNT for item in value)
