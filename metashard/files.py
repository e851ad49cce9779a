"""Files that others wrote: told apart from what is no file, and JSON read within limits.

Nothing here trusts a name, a size or a nesting before it has looked at it, and every refusal is a typed error with the
path, what was expected and what came.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from metashard.errors import CheckpointError, ComponentError, LoadError

# Index and config files are read whole; the largest known index (many hundred thousand keys) is below 100 MB.
MAX_JSON_BYTES = 200_000_000
# Headers are 3 deep and configs below 10. Python's own limit is the caller's to raise (trainers do), and then deep
# nesting ends the process in the C scanner instead of with an exception.
MAX_JSON_DEPTH = 64
# What Linux file systems take; a longer name cannot be that of a file.
MAX_NAME_BYTES = 255

AGAIN = "Fetch it again."
LFS_HEAD = b"version https://git-lfs"

# A string, also one that the text ends in; possessive, so that no input makes it try twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")  # huggingface_hub names them by their content
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_file_name(name: str, *, source: str, phase: str = "headers") -> None:
    """Refuse a weight file name that is anything but a plain name inside the folder.

    Raises:
        CheckpointError: The name is empty, absolute, holds a separator (of any system), a NUL or half a character, is
            `.` or `..`, or is longer than a file's name can be.
    """
    size = len(name.encode("utf-8", "surrogatepass"))
    odd = any(char in name for char in "/\\\0") or name[1:2] == ":" or not is_text(name)
    if name in {"", ".", ".."} or odd or size > MAX_NAME_BYTES:
        text = (
            f"{short(name)} is not a plain file name. Weight files lie in the component's own folder; this index "
            "points elsewhere and is not followed."
        )
        raise file_error(text, source, expected="plain file name", got=short(name), phase=phase)


def check_inside(path: Path, *, root: Path) -> None:
    """Refuse a link that leads out of `root`, but for those of the hub cache it lies in.

    A snapshot of the hub cache (`models--org--name/snapshots/COMMIT`) links to `blobs` of the same repository, which
    may link on to the store that all repositories of the cache share (`blobs/ab/ab12...`, huggingface_hub 2).

    Raises:
        CheckpointError: The file that the links end at is elsewhere.
    """
    base = Path(os.path.realpath(root))
    target = Path(os.path.realpath(path))
    allowed = [base]
    for parent in (base, *base.parents):
        repository = parent.parent.parent
        if parent.parent.name == "snapshots" and repository.name.startswith("models--"):
            shared = Path(os.path.realpath(repository.parent / "blobs"))
            allowed += [parent, Path(os.path.realpath(repository / "blobs"))]
            if _SHARED_BLOB.fullmatch(target.name) and target.parent == shared / target.name[:2]:
                allowed.append(target)
    if not any(target.is_relative_to(place) for place in allowed):
        text = (
            f"{path.name}: a link that leads out of the folder, to {target}. A checkpoint is read from its own folder "
            "(or the hub cache it lies in) only: put the file itself there, or give the folder the link leads to."
        )
        raise file_error(text, path, expected=f"a file inside {root}", got=str(target), phase="resolve")


def regular_file_size(path: Path, *, phase: str, error: type[LoadError]) -> int:
    """Size in bytes of a regular file (links followed), looked up before it is opened: opening a FIFO would block.

    Raises:
        LoadError: Of type `error`: the path is missing, or a directory, socket, FIFO or device.
    """
    try:
        info = os.stat(path)
    except (OSError, ValueError) as cause:  # ValueError: a NUL or half a character in the path
        gone = "a link to a file that is not there" if os.path.islink(path) else "not there"
        why = cause.strerror if isinstance(cause, OSError) else str(cause)
        reason = gone if isinstance(cause, FileNotFoundError) else f"not accessible: {why}"
        text = f"{path.name}: {reason}. {AGAIN}"
        raise file_error(text, path, expected="a file", got=reason, phase=phase, error=error) from cause
    if not stat.S_ISREG(info.st_mode):
        kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISSOCK, "socket"), (stat.S_ISFIFO, "FIFO"))
        kind = next((word for test, word in kinds if test(info.st_mode)), "device")
        text = f"{path.name}: a {kind}, not a file"
        raise file_error(text, path, expected="file", got=kind, phase=phase, error=error)
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
        LoadError: Of type `error`: not a regular file, too large, a git-lfs pointer, nested deeper than
            `MAX_JSON_DEPTH`, or not a JSON object.
    """
    size = regular_file_size(path, phase=phase, error=error)
    if size > MAX_JSON_BYTES:
        text = f"{path.name}: {size} bytes are too many for a {what}"
        raise file_error(text, path, expected=f"<= {MAX_JSON_BYTES}", got=size, phase=phase, error=error)
    try:
        raw = path.read_bytes()
    except OSError as cause:
        raise file_error(f"{path.name}: cannot be read: {cause.strerror}", path, phase=phase, error=error) from cause
    if raw.startswith(LFS_HEAD):
        raise lfs_pointer(path, what, phase=phase, error=error)
    return parse_json(raw, path=path, what=what, phase=phase, error=error, unique=unique)


def parse_json(
    raw: bytes,
    *,
    path: Path,
    what: str,
    phase: str,
    error: type[LoadError] = CheckpointError,
    unique: bool = False,
    strict: bool = False,
) -> dict[str, Any]:
    """Parse bytes that must be a JSON object in UTF-8; see `read_json` for arguments and errors.

    Args:
        strict: Refuse also the numbers that Python takes and safetensors' own parser does not: NaN, infinities, what
            overflows a double, and -0 (no integer there).
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if unique and len(result) != len(items):
            seen: set[str] = set()
            twice = printable(next(key for key, _ in items if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
            text = f"{twice}: given twice in the {what} of {path.name}"
            raise file_error(text, path, key=twice, expected="one item a key", got="two", phase=phase, error=error)
        return result

    if max(accumulate(map(_STEPS.__getitem__, _STRING.sub(b"", raw).translate(None, _NO_BRACKETS))), default=0) > (
        MAX_JSON_DEPTH
    ):
        text = f"{path.name}: the {what} is nested too deeply (more than {MAX_JSON_DEPTH} levels). {AGAIN}"
        raise file_error(text, path, expected=f"<= {MAX_JSON_DEPTH} levels", got="more", phase=phase, error=error)
    numbers: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _finite, "parse_int": _count}
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, **(numbers if strict else {}))
    except LoadError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as cause:  # UnicodeError and JSONDecodeError are ValueErrors
        reason = "nested too deeply" if isinstance(cause, RecursionError) else short(str(cause))
        text = f"{path.name}: the {what} is not JSON in UTF-8: {reason}. {AGAIN}"
        raise file_error(text, path, expected="JSON object", got=reason, phase=phase, error=error) from cause
    if not isinstance(value, dict):
        text = f"{path.name}: the {what} is not a JSON object but {short(value)}"
        raise file_error(text, path, expected="JSON object", got=short(value), phase=phase, error=error)
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(short(text))


def _count(text: str) -> int:
    return int(text) if text != "-0" else _no_number(text)


def file_error(
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


def resolve_error(
    message: str, *, file: Path | str | None = None, key: str | None = None, expected: Any = None, got: Any = None
) -> ComponentError:
    """The error for a component that cannot be found, or is not what it has to be."""
    name = None if file is None else str(file)
    return ComponentError(message, file=name, key=key, expected=expected, got=got, phase="resolve")


def lfs_pointer(path: Path, what: str, *, phase: str, error: type[LoadError]) -> LoadError:
    text = f"{path.name}: a git-lfs pointer, not the {what}. Run `git lfs pull` in the folder, or fetch it again."
    return file_error(text, path, expected=what, got="git-lfs pointer", phase=phase, error=error)


def is_text(name: str) -> bool:
    """Whether this can be written as UTF-8: JSON escapes can spell half a character (a lone surrogate)."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def printable(name: str) -> str:
    """A name in a form that can be shown: control characters and halves of characters written out as escapes."""
    if name.isprintable():
        return name
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in name)
    return "".join(shown)


def short(value: Any) -> str:
    """A value for a message: as text, at most 100 characters."""
    if isinstance(value, str):
        value = value[:200]  # the text of a huge value is not made first
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def shown_names(names: Collection[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(printable(name[:100]) for name in islice(names, 20)) if names else "none"
