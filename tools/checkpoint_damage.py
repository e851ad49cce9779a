"""Ways to break a checkpoint that is whole: each is one that has come up in practice, and each has to be refused."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from preflight import UsageError

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
Header = dict[str, Any]


def damage(folder: Path, kind: str) -> Path:
    """Breaks the weights (or the config) of one component; returns the file that is broken.

    Args:
        folder: The component's folder.
        kind: A key of `DAMAGE`.

    Raises:
        UsageError: No such kind, or nothing there that could be broken in this way.
    """
    if kind not in DAMAGE:
        raise UsageError(f"unknown damage {kind!r}: expected one of {', '.join(DAMAGE)}")
    return DAMAGE[kind][1](folder)


def _last_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no safetensors files to damage")
    return files[-1]


def _index(folder: Path) -> tuple[Path, dict[str, Any]]:
    found = sorted(folder.glob("*.safetensors.index*.json"))
    if not found:
        raise UsageError(f"{folder} is one file without an index: pass a smaller --max-shard-size to damage the index")
    return found[0], json.loads(found[0].read_text())


# ---- whole files ----------------------------------------------------------------------------------------------------


def _truncated(folder: Path) -> Path:
    path = _last_file(folder)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 3)
    return path


def _appended(folder: Path) -> Path:
    path = _last_file(folder)
    with open(path, "ab") as file:
        file.write(b"\0\0\0")
    return path


def _empty(folder: Path) -> Path:
    path = _last_file(folder)
    path.write_bytes(b"")
    return path


def _missing(folder: Path) -> Path:
    path = _last_file(folder)
    path.unlink()
    return path


def _lfs_pointer(folder: Path) -> Path:
    path = _last_file(folder)
    path.write_text(LFS_POINTER.format("0" * 64, path.stat().st_size))
    return path


def _pickle(folder: Path) -> Path:
    path = _last_file(folder)
    with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes one; nothing in it is ever read
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    return path


def _config(folder: Path) -> Path:
    path = folder / "config.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    return path


# ---- headers --------------------------------------------------------------------------------------------------------


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Changes a header in place; the tensors stay where they are, so it may become shorter but not longer."""
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        changed = change(file.read(length))
        assert len(changed) <= length
        file.seek(8)
        file.write(changed.ljust(length))
    return path


def _on_header(change: Callable[[Header, list[str]], None]) -> Callable[[Path], Path]:
    """A damage that changes the parsed header, given its keys in the order of their bytes."""

    def apply(folder: Path) -> Path:
        def rewrite(raw: bytes) -> bytes:
            header = json.loads(raw)
            change(header, sorted(header.keys() - {"__metadata__"}, key=lambda key: header[key]["data_offsets"]))
            return json.dumps(header, separators=(",", ":")).encode()

        return _rewrite(_last_file(folder), rewrite)

    return apply


def _header_length(folder: Path) -> Path:
    path = _last_file(folder)
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 1 << 62))
    return path


def _header_json(folder: Path) -> Path:
    return _rewrite(_last_file(folder), lambda raw: b"[" + raw[1:])


def _duplicate_key(folder: Path) -> Path:
    def rewrite(raw: bytes) -> bytes:
        keys = [key for key in json.loads(raw) if key != "__metadata__"]
        twin = next(((a, b) for a in keys for b in keys if a < b and len(a) == len(b)), None)
        if twin is None:
            raise UsageError(f"{folder}: no two keys of equal length in one file; pass a larger --max-shard-size")
        return raw.replace(f'"{twin[1]}"'.encode(), f'"{twin[0]}"'.encode())

    return _rewrite(_last_file(folder), rewrite)


def _flatten(header: Header, keys: list[str]) -> None:
    matrices = [key for key in keys if len(header[key]["shape"]) > 1 and min(header[key]["shape"]) > 1]
    if not matrices:
        raise UsageError("no matrix in the last weight file: pass a larger --max-shard-size")
    header[matrices[0]]["shape"] = [math.prod(header[matrices[0]]["shape"])]


def _unknown_dtype(header: Header, keys: list[str]) -> None:
    header[keys[0]]["dtype"] = header[keys[0]]["dtype"][:-1] + "7"


def _overlap(header: Header, keys: list[str]) -> None:
    start, stop = header[keys[-1]]["data_offsets"]
    header[keys[-1]]["data_offsets"] = [start - 2, stop - 2]


def _renamed(folder: Path) -> Path:
    """The same in the index, where there is one: the files agree with each other, but not with the model."""
    old = new = ""

    def rename(header: Header, keys: list[str]) -> None:
        nonlocal old, new
        old = keys[0]
        new = old[:-1] + "_"
        header[new] = header.pop(old)

    path = _on_header(rename)(folder)
    if list(folder.glob("*.safetensors.index*.json")):
        index_path, index = _index(folder)
        index["weight_map"][new] = index["weight_map"].pop(old)
        index_path.write_text(json.dumps(index))
    return path


# ---- the index ------------------------------------------------------------------------------------------------------


def _on_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], Path]:
    def apply(folder: Path) -> Path:
        path, index = _index(folder)
        change(index)
        path.write_text(json.dumps(index))
        return path

    return apply


def _wrong_file(index: dict[str, Any]) -> None:
    weight_map = index["weight_map"]
    key = min(weight_map)
    weight_map[key] = next(name for name in sorted(set(weight_map.values())) if name != weight_map[key])


def _extra_key(index: dict[str, Any]) -> None:
    index["weight_map"]["blocks.999.weight"] = next(iter(index["weight_map"].values()))


def _outside(index: dict[str, Any]) -> None:
    key = min(index["weight_map"])
    index["weight_map"][key] = "../" + index["weight_map"][key]


def _no_map(index: dict[str, Any]) -> None:
    del index["weight_map"]


# kind -> (what it is, how it is done)
DAMAGE: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "truncated": ("the last weight file lacks its last 3 bytes", _truncated),
    "appended": ("3 bytes after the last tensor", _appended),
    "empty": ("a weight file of 0 bytes", _empty),
    "missing-file": ("a weight file is not there", _missing),
    "lfs-pointer": ("a git-lfs pointer in place of a weight file", _lfs_pointer),
    "pickle": ("a torch pickle under a safetensors name", _pickle),
    "config": ("config.json ends in the middle", _config),
    "header-length": ("a header length of 2**62", _header_length),
    "header-json": ("a header that is not JSON", _header_json),
    "duplicate-key": ("a key twice in one header", _duplicate_key),
    "wrong-shape": ("a matrix that the header calls a vector of as many elements", _on_header(_flatten)),
    "wrong-dtype": ("a dtype that does not exist", _on_header(_unknown_dtype)),
    "overlap": ("two tensors in the same bytes", _on_header(_overlap)),
    "renamed-key": ("a tensor under a name that the model does not know, and one that it lacks", _renamed),
    "wrong-index": ("the index gives a key to the wrong file", _on_index(_wrong_file)),
    "index-extra-key": ("the index promises a key that no file holds", _on_index(_extra_key)),
    "index-outside": ("the index names a file outside of the folder", _on_index(_outside)),
    "index-no-map": ("an index without weight_map", _on_index(_no_map)),
}
