"""Where each byte of a checkpoint goes: files, headers and offsets, as the library's own writer would have them.

Nothing here touches a weight. `draw_up` runs on one rank, which sends the `Layout` to the others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from metashard import _compat
from metashard.checkpoint import Entry
from metashard.errors import SaveError


@dataclass(frozen=True)
class Layout:
    """The weight files of one save. Plain data, to be sent to the other ranks.

    Attributes:
        headers: File name -> its first bytes: length and JSON, as safetensors writes them.
        sizes: File name -> size in bytes, header included.
        entries: What the files hold, in the order of file and offset.
        sources: Key -> name of the tensor whose bytes go there; without what is converted.
        converted: Name of a tensor in the library's state dict -> keys of what the library makes of it.
    """

    headers: dict[str, bytes]
    sizes: dict[str, int]
    entries: tuple[Entry, ...]
    sources: dict[str, str]
    converted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files together."""
        return sum(self.sizes.values())


def draw_up(
    write: Callable[[Path], None],
    folder: Path,
    sources: Mapping[int, str],
    conversions: Callable[[set[str], set[str]], dict[str, tuple[str, ...]]] = lambda made, others: {},
) -> Layout:
    """Let a library write into `folder`, all but the tensors.

    Args:
        write: Calls the library; its tensors are on meta, or shards that nobody reads.
        folder: Takes configs and the index.
        sources: id of a tensor -> name of what holds its bytes.
        conversions: Given the keys that are none of `sources`, and the names that are saved as they are: which tensors
            the keys are made of.

    Raises:
        SaveError: The library would write a tensor that is none of `sources` and not made of one alone.
    """
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    entries: list[Entry] = []
    named: dict[str, str] = {}
    made: set[str] = set()

    def record(tensors: Mapping[str, torch.Tensor], filename: str, metadata: Mapping[str, str]) -> None:
        for key, tensor in tensors.items():
            if id(tensor) in sources:
                named[key] = sources[id(tensor)]
            else:
                made.add(key)
        name = Path(filename).name
        headers[name], found = header(name, tensors, metadata)
        entries.extend(found)
        sizes[name] = len(headers[name]) + sum(entry.nbytes for entry in found)

    with _compat.recorded_save_file(record):
        write(folder)
    converted = conversions(made, set(named.values())) if made else {}
    for key in sorted(made.difference(*converted.values())):
        raise SaveError(
            f"{key}: the library makes it of several weights when it saves this model, which needs them whole. Gather "
            "them (get_model_state_dict with full_state_dict=True) and call its own save_pretrained.",
            phase="layout",
            key=key,
        )
    seen: dict[str, str] = {}
    for key, source in named.items():
        if source in seen:
            raise SaveError(
                f"{seen[source]} and {key} are tied, and {key} is not declared so: safetensors holds no tensor twice, "
                "and save_pretrained of a single process refuses it, too.",
                phase="layout",
                key=key,
            )
        seen[source] = key
    return Layout(headers, sizes, tuple(entries), named, converted)


def header(name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[Entry]]:
    """The first bytes of a safetensors file, and its entries in the order of their offsets.

    safetensors itself tells order and names of dtypes, by the header that it writes for empty tensors.
    """
    from safetensors.torch import save

    raw = save({key: torch.empty(0, dtype=tensor.dtype) for key, tensor in tensors.items()}, metadata=dict(metadata))
    (length,) = struct.unpack("<Q", raw[:8])
    described = json.loads(raw[8 : 8 + length])
    keys = [key for key in described if key != "__metadata__"]
    start = 0
    for key in keys:
        stop = start + tensors[key].numel() * tensors[key].dtype.itemsize
        described[key].update(shape=list(tensors[key].shape), data_offsets=[start, stop])
        start = stop
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    found = []
    for key in keys:
        begin, end = described[key]["data_offsets"]
        found.append(Entry(key, name, tensors[key].dtype, tuple(tensors[key].shape), len(head) + begin, end - begin))
    return head, found
