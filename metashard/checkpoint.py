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
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from metashard.errors import CheckpointError, LoadError

logger = logging.getLogger(__name__)

# The same bound as safetensors' own reader: a header is read into memory whole.
MAX_HEADER_BYTES = 100_000_000
# Index and config files are read whole too; the largest known index (many hundred thousand keys) is below 100 MB.
MAX_JSON_BYTES = 200_000_000
# torch counts elements and bytes in int64 and takes at most 64 dims.
MAX_COUNT = 2**63 - 1
MAX_DIMS = 64

_AGAIN = "Fetch it again."
_LFS_HEAD = b"version https://git-lfs"
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
        logger.warning("%s: not named by the index, so it is not read", folder / name)
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
                    f"{key}: stored twice, in {both[0]} and in {both[1]}, and no index says which one counts. "
                    "Remove the stale file, or add the index file that save_pretrained wrote."
                )
                raise _wrong(text, path, key=key, expected="one file a key", got=both)
            entries[key] = entry
    lacking = sorted(set(weight_map or ()) - set(entries))
    if weight_map is not None and lacking:
        key, name = lacking[0], weight_map[lacking[0]]
        more = f" ({len(lacking)} such keys)" if len(lacking) > 1 else ""
        text = (
            f"{key}: the index says it is in {name}, but that file does not hold it{more}. "
            "Index and files are from different saves; fetch the folder again."
        )
        raise _wrong(text, folder / name, key=key, expected=f"{key} in {name}", got="not there")
    return Checkpoint(sizes=sizes, entries={key: entries[key] for key in sorted(entries)}, modified=modified)


def _assigned(found: dict[str, Entry], weight_map: Mapping[str, str], path: Path) -> dict[str, Entry]:
    """The entries of one file that the index assigns to it; a warning names the others."""
    stale = sorted(key for key in found if weight_map.get(key) != path.name)
    if stale:
        shown = ", ".join(stale[:3]) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
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
            if head == _LFS_HEAD[:8] and head + file.read(len(_LFS_HEAD) - 8) == _LFS_HEAD:
                raise _lfs_pointer(path, "weights", phase="headers", error=CheckpointError)
            if len(head) < 8:
                text = f"{name}: has {size} bytes; a safetensors file starts with 8 bytes of header length. {_AGAIN}"
                raise _wrong(text, path, expected=">= 8 bytes", got=size)
            (length,) = struct.unpack("<Q", head)
            limit = max(0, min(MAX_HEADER_BYTES, size - 8))
            if length > limit:
                zipped = " It looks like a torch pickle (zip) under another name." if head[:4] == _ZIP_HEAD else ""
                text = (
                    f"{name}: claims a header of {length} bytes, of which a file of {size} bytes can have {limit}: "
                    f"truncated, or not a safetensors file.{zipped} {_AGAIN}"
                )
                raise _wrong(text, path, expected=f"<= {limit}", got=length)
            raw = file.read(length)
    except OSError as error:
        raise _wrong(f"{name}: cannot be read: {error.strerror or error}", path, got=type(error).__name__) from error
    if len(raw) != length:
        raise _wrong(f"{name}: got shorter while it was read", path, expected=length, got=len(raw))
    header = parse_json(raw, path=path, what="safetensors header", phase="headers", unique=True)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        text = f"{name}: `__metadata__` is not a map of strings"
        raise _wrong(text, path, expected="map of strings", got=_short(metadata))
    start = 8 + length
    entries = [_parse_entry(key, value, name=name, path=path, start=start) for key, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_ranges(entries, start=start, size=size, path=path)
    return size, {entry.key: entry for entry in entries}


def _parse_entry(key: str, value: Any, *, name: str, path: Path, start: int) -> Entry:
    """One header item to an `Entry` whose own numbers agree with each other."""
    shown = _printable(key)

    def wrong(message: str, expected: Any, got: Any) -> LoadError:
        return _wrong(f"{shown}: {message}", path, key=shown, expected=expected, got=got)

    if shown != key:
        raise wrong("the name is not valid UTF-8 text", "UTF-8", "lone surrogate")
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise wrong(f"the header item is {_short(value)}", "an object with dtype, shape, data_offsets", _short(value))
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        known = isinstance(dtype_name, str) and dtype_name in _SUB_BYTE
        why = (
            "(less than a byte an element) is not supported. Load this component with its own library, or use the "
            "unquantised checkpoint."
            if known
            else "is unknown. The file is damaged, or of a newer format than this version knows."
        )
        raise wrong(f"dtype {_short(dtype_name)} {why}", sorted(_DTYPES), _short(dtype_name))
    if not _are_counts(shape):
        raise wrong(f"shape {_short(shape)} is not a list of sizes", "integers >= 0", _short(shape))
    # An empty tensor may still have dims that torch cannot hold, so the check looks at the dims other than 0.
    if len(shape) > MAX_DIMS or math.prod(max(dim, 1) for dim in shape) > MAX_COUNT:
        limits = f"<= {MAX_DIMS} dims, <= {MAX_COUNT} elements"
        raise wrong(f"shape {_short(shape)} is too large for any tensor ({limits})", limits, _short(shape))
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets {_short(offsets)} are not a byte range", "[begin, end]", _short(offsets))
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
            text = f"{entry.key}: its byte range {kind} (starts at byte {entry.offset}, expected {position})"
            raise _wrong(text, path, key=entry.key, expected=position, got=entry.offset)
        position += entry.nbytes
    if position != size:
        kind = "truncated" if size < position else "followed by bytes that belong to no tensor"
        text = f"{path.name}: {kind}: the header describes {position} bytes, the file has {size}. {_AGAIN}"
        raise _wrong(text, path, expected=position, got=size)


def check_file_name(name: str, *, source: str, phase: str = "headers") -> None:
    """Refuse a weight file name that is anything but a plain name inside the folder.

    Raises:
        CheckpointError: The name is empty, absolute, holds a separator (of any system), a NUL, or is `.` or `..`.
    """
    if not name or name in {".", ".."} or any(char in name for char in "/\\\0") or name[1:2] == ":":
        text = (
            f"{name!r} is not a plain file name. Weight files lie in the component's own folder; this index points "
            "elsewhere and is not followed."
        )
        raise _wrong(text, source, expected="plain file name", got=name, phase=phase)


def regular_file_size(path: Path, *, phase: str, error: type[LoadError]) -> int:
    """Size in bytes of a regular file (links followed), looked up before it is opened: opening a FIFO would block.

    Raises:
        LoadError: Of type `error`: the path is missing, or a directory, socket, FIFO or device.
    """
    try:
        info = os.stat(path)
    except OSError as cause:
        gone = "a link to a file that is not there" if os.path.islink(path) else "not there"
        reason = gone if isinstance(cause, FileNotFoundError) else f"not accessible: {cause.strerror}"
        text = f"{path.name}: {reason}. {_AGAIN}"
        raise _wrong(text, path, expected="a file", got=reason, phase=phase, error=error) from cause
    if not stat.S_ISREG(info.st_mode):
        kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISSOCK, "socket"), (stat.S_ISFIFO, "FIFO"))
        kind = next((word for test, word in kinds if test(info.st_mode)), "device")
        raise _wrong(f"{path.name}: a {kind}, not a file", path, expected="file", got=kind, phase=phase, error=error)
    return info.st_size


def read_json(path: Path, *, what: str, phase: str, error: type[LoadError], unique: bool = False) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Args:
        path: The file, at most `MAX_JSON_BYTES`.
        what: What the file is, for the message.
        phase: Phase for the error.
        error: Error type to raise.
        unique: Whether a name given twice in one object is an error.

    Raises:
        LoadError: Of type `error`: not a regular file, too large, a git-lfs pointer, or not a JSON object.
    """
    size = regular_file_size(path, phase=phase, error=error)
    if size > MAX_JSON_BYTES:
        text = f"{path.name}: {size} bytes are too many for a {what}"
        raise _wrong(text, path, expected=f"<= {MAX_JSON_BYTES}", got=size, phase=phase, error=error)
    try:
        raw = path.read_bytes()
    except OSError as cause:
        raise _wrong(f"{path.name}: cannot be read: {cause.strerror}", path, phase=phase, error=error) from cause
    if raw.startswith(_LFS_HEAD):
        raise _lfs_pointer(path, what, phase=phase, error=error)
    return parse_json(raw, path=path, what=what, phase=phase, error=error, unique=unique)


def parse_json(
    raw: bytes, *, path: Path, what: str, phase: str, error: type[LoadError] = CheckpointError, unique: bool = False
) -> dict[str, Any]:
    """Parse bytes that must be a JSON object in UTF-8; see `read_json` for arguments and errors."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if unique and len(result) != len(items):
            seen: set[str] = set()
            twice = _printable(next(key for key, _ in items if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
            text = f"{twice}: given twice in the {what} of {path.name}"
            raise _wrong(text, path, key=twice, expected="one item a key", got="two", phase=phase, error=error)
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except LoadError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as cause:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "nested too deeply" if isinstance(cause, RecursionError) else _short(str(cause))
        text = f"{path.name}: the {what} is not JSON in UTF-8: {reason}. {_AGAIN}"
        raise _wrong(text, path, expected="JSON object", got=reason, phase=phase, error=error) from cause
    if not isinstance(value, dict):
        text = f"{path.name}: the {what} is not a JSON object but {_short(value)}"
        raise _wrong(text, path, expected="JSON object", got=_short(value), phase=phase, error=error)
    return value


def _wrong(
    message: str,
    path: Path | str,
    *,
    key: str | None = None,
    expected: Any = None,
    got: Any = None,
    phase: str = "headers",
    error: type[LoadError] = CheckpointError,
) -> LoadError:
    return error(message, file=str(path), key=key, expected=expected, got=got, phase=phase)


def _lfs_pointer(path: Path, what: str, *, phase: str, error: type[LoadError]) -> LoadError:
    text = f"{path.name}: a git-lfs pointer, not the {what}. Run `git lfs pull` in the folder, or fetch it again."
    return _wrong(text, path, expected=what, got="git-lfs pointer", phase=phase, error=error)


def _printable(key: str) -> str:
    """A key in a form that can be printed: lone surrogates (possible through JSON escapes) written out."""
    return key.encode("utf-8", "backslashreplace").decode()


def _are_counts(value: Any) -> bool:
    """Whether this is a list of integers >= 0 that fit int64; JSON's true is not one."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_COUNT for item in value)


def _short(value: Any) -> str:
    """A value for a message: as text, at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
