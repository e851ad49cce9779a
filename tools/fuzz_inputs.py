"""What the fuzzer feeds to the readers: valid files and folders, and ways to spoil them."""

from __future__ import annotations

import json
import math
import os
import random
import re
import struct
from pathlib import Path
from typing import Any

STEM = "diffusion_pytorch_model"
# From the format's description, and not from the package: dtype -> bytes an element.
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
TOKENS = (
    b"NaN", b"-0", b"-1", b"1e999", b"1.0", b"null", b"true", b"Infinity", b'"\\ud800"', b"\\u0000", b"\x00", b"\xff",
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"[" * 70, b"18446744073709551616", b"9223372036854775807", b'"a":',
    b"{}", b"F4", b'"dtype":"F32",', b'"__metadata__":{"a":1},', b"\xef\xbb\xbf", b"version https://git-lfs", b"../",
)  # fmt: skip
# Whole strings and numbers, and what may stand in their place.
_ATOM = re.compile(rb'"[^"]*"|-?\d+')
_STRINGS = (
    b'"\\ud800"', b'"\\udfff\\ud83d"', b'"\\ud83d\\ude00"', b'"a"', b'"\\/"', b'"\\x"', b'"\t"', b'"F64"', b'"dtype"',
)  # fmt: skip
_NUMBERS = (
    b"-0", b"-0.0", b"0.0", b"1e0", b"1e999", b"-1e999", b"NaN", b"-Infinity", b"00", b"+1", b"1" * 5000, b"0x1",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.0, 1e300, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, "", "F32", "f32", "F4", "\ud800",
    "x", [], [0], [0, 0], [1, 2], [2**62, 4, 2], [1] * 65, [-1, -2], [[1]], {}, {"a": 1}, [None], [True],
    math.nan, math.inf,
)  # fmt: skip
NAMES = (
    "a",
    "w",
    "blocks.0.weight",
    "größe",
    "重み",
    "",
    " ",
    "a\x1b",
    "__metadata__",
    "\u202e",
    "😀",
    "x" * 300,
    "a/b",
)


def valid_file(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """A header and the data that it describes."""
    header: dict[str, Any] = {}
    names = rng.sample([name for name in NAMES if name != "__metadata__"], rng.randint(0, 5))
    position = 0
    for name in names:
        dtype = rng.choice(sorted(SIZES))
        shape = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(rng.randint(0, 4))]
        nbytes = SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        if rng.random() < 0.2:  # allowed, and nobody reads it
            header[name]["note"] = rng.choice((0, "x", [1], {"x": 0}))
        position += nbytes
    items = list(header.items())
    rng.shuffle(items)
    if rng.random() < 0.4:
        items.insert(rng.randint(0, len(items)), ("__metadata__", {"format": "pt", "größe": "\x00"}))
    return dict(items), rng.randbytes(position)


def packed(rng: random.Random, header: Any, data: bytes) -> bytes:
    raw = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    raw += b" " * rng.choice((0, 0, 1, 7))
    return struct.pack("<Q", len(raw)) + raw + data


def mutated_object(rng: random.Random, value: Any) -> Any:
    """A JSON value changed in one place: a field replaced, dropped, renamed, moved or wrapped."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    value = json.loads(json.dumps({"": value}))
    walk(value)
    node, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0 and isinstance(node[key], int):
        node[key] += rng.choice((-8, -1, 1, 4, 8, 2**63))
    elif what == 1 and node is not value:
        del node[key]
    elif what == 2 and isinstance(node, dict) and node is not value:
        node[rng.choice((*NAMES, "dtype", "shape", "data_offsets", "\udfff"))] = node.pop(key)
    elif what == 3:
        node[key] = [node[key]] if rng.random() < 0.5 else {"a": node[key]}
    elif what == 4:
        other, name = rng.choice(places)
        node[key] = json.loads(json.dumps(other[name]))
    else:
        node[key] = rng.choice(ODD)
    return value.get("")


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, added, repeated or replaced by what has hurt parsers before."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randint(0, len(out))
        to = min(len(out), at + rng.choice((1, 1, 3, 8, 40)))
        what = rng.randrange(9)
        if what == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[at:to]
        elif what == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 3)))
        elif what == 3:
            out[at:at] = out[at:to]
        elif what == 4:
            out[:8] = struct.pack(
                "<Q", rng.choice((0, 1, 2, len(out), 100_000_001, 2**63, 2**64 - 1, rng.randrange(400)))
            )
        elif what > 6 and (atoms := [*_ATOM.finditer(out)]):
            atom = rng.choice(atoms)
            out[atom.start() : atom.end()] = rng.choice(_STRINGS if atom[0][:1] == b'"' else _NUMBERS)
        else:
            token = rng.choice(TOKENS)
            out[at : at if what == 5 else to] = token
    if rng.random() < 0.5 and len(out) > 8 and data[:8] == out[:8]:  # a length that fits what became of the header
        out[:8] = struct.pack("<Q", max(0, int.from_bytes(data[:8], "little") + len(out) - len(data)))
    return bytes(out)


def write_folder(rng: random.Random, folder: Path) -> tuple[str | None, bool]:
    """A model folder, most often spoilt in one way: (component to ask for, whether it is intact)."""
    component = rng.choice((None, "transformer"))
    place = folder / (component or "")
    place.mkdir(parents=True)
    parts = [f"{STEM}-{number}.safetensors" for number in range(rng.randint(1, 3))]
    weight_map: dict[str, Any] = {}
    for number, name in enumerate(parts):
        header, data = valid_file(rng)
        header = {f"{number}.{key}" if key != "__metadata__" else key: item for key, item in header.items()}
        (place / name).write_bytes(packed(rng, header, data))
        weight_map |= {key: name for key in header if key != "__metadata__"}
    config = {"_class_name": "AutoencoderKL", "sizes": [1, 2], "nested": {"quantization_config": None}}
    objects: dict[Path, Any] = {
        place / f"{STEM}.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": weight_map},
        place / "config.json": config,
    }
    if component is not None:
        listed = {
            "transformer": ["diffusers", "AutoencoderKL"],
            "scheduler": ["diffusers", "DDIMScheduler"],
            "x": [None] * 2,
        }
        objects[folder / "model_index.json"] = {"_class_name": "Pipeline", "_diffusers_version": "0.42", **listed}
    kind = rng.choices(("intact", "object", "bytes", "map", "weights", "no file"), (2, 5, 5, 5, 3, 2))[0]
    spoilt = rng.choice(list(objects))
    if kind == "map" and weight_map:
        outside = folder.parent / "outside.safetensors"
        outside.write_bytes((place / parts[0]).read_bytes())
        names = (str(outside), "../outside.safetensors", "", ".", "gone", "a\0b", "\ud800", "x" * 300, 1, None, *parts)
        weight_map[rng.choice([*weight_map, "new", "\udc80"])] = rng.choice(names)
    for path, value in objects.items():
        value = mutated_object(rng, value) if kind == "object" and path == spoilt else value
        raw = json.dumps(value).encode()
        path.write_bytes(mutated_bytes(rng, raw) if kind == "bytes" and path == spoilt else raw)
    victim = rng.choice([place / name for name in parts] + list(objects))
    if kind == "weights":
        victim = place / rng.choice(parts)
        victim.write_bytes(mutated_bytes(rng, victim.read_bytes()))
    elif kind == "no file":
        victim.rename(folder.parent / "moved")
        make = rng.choice(
            (Path.mkdir, os.mkfifo, lambda path: path.symlink_to(folder.parent / "moved"), lambda path: None)
        )
        make(victim)
    return component, kind == "intact" and bool(weight_map)
