"""Safetensors files written in a stream: headers from shapes alone, values drawn and written in pieces.

Memory is that of one piece (`PIECE` elements, drawn in fp32 and cast), whatever is written.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PIECE = 1 << 22  # elements drawn at a time: 16 MiB of fp32
STD = 0.02


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to write: what a safetensors header says about it.

    Attributes:
        key: Its name.
        dtype: Of its elements.
        shape: Its shape.
        drawn_as: The name that decides its values; its own where it is None.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    drawn_as: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What was written, and with how much.

    Attributes:
        bytes: Of tensors; headers are left out.
        peak_buffer_bytes: The most bytes of elements that were held at a time.
    """

    bytes: int
    peak_buffer_bytes: int

    def __add__(self, other: Written) -> Written:
        return Written(self.bytes + other.bytes, max(self.peak_buffer_bytes, other.peak_buffer_bytes))


def split(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Files in the order of the state dict, each filled until the next tensor would not fit (as huggingface_hub does).

    Within a file the wider dtypes come first, so that every tensor is aligned to its own element size.
    """
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not files or spec.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(spec)
        room -= spec.nbytes
    return [sorted(file, key=lambda spec: (-spec.dtype.itemsize, spec.key)) for file in files]


def file_names(count: int, variant: str | None) -> list[str]:
    """Names of `count` weight files, as diffusers has them."""
    stem = "diffusion_pytorch_model" + (f".{variant}" if variant else "")
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def index_name(variant: str | None) -> str:
    """Name of the index of several weight files."""
    return "diffusion_pytorch_model.safetensors.index." + (f"{variant}." if variant else "") + "json"


def write_file(
    path: Path, specs: Sequence[TensorSpec], *, seed: int, scope: str, metadata: dict[str, str] | None = None
) -> Written:
    """One safetensors file: 8 bytes of header length, the header as JSON padded to 8 bytes, the tensors gapless.

    Args:
        path: The file; complete or not there at all.
        specs: Its tensors, in the order to write them.
        seed: Of all values.
        scope: Tensors of one name have other values in another scope, such as another component.
        metadata: Further entries of the header's `__metadata__`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for spec in specs:
        header[spec.key] = {
            "dtype": SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(path.name + ".part")
    written = Written(bytes=0, peak_buffer_bytes=0)
    try:
        with open(part, "wb", buffering=0) as file:
            _write_all(file, len(encoded).to_bytes(8, "little") + encoded)
            for spec in specs:
                for piece, buffer_bytes in _values(spec, seed, scope):
                    _write_all(file, memoryview(piece.view(torch.uint8).numpy()))
                    written += Written(piece.nbytes, buffer_bytes)
                    del piece  # before the next tensor has memory of its own
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return written


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _values(spec: TensorSpec, seed: int, scope: str) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensor's elements in order, in pieces, each with the bytes that are held for it.

    Normals around 0, around 1 for the scales of norms; integers are 0.
    """
    if not spec.dtype.is_floating_point:
        for start in range(0, spec.numel, PIECE):
            zeros = torch.zeros(min(PIECE, spec.numel - start), dtype=spec.dtype)
            yield zeros, zeros.nbytes
        return
    digest = hashlib.sha256(f"{seed}/{scope}/{spec.drawn_as or spec.key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    *path, last = spec.key.split(".")
    is_scale = last == "weight" and len(spec.shape) == 1 and any("norm" in part for part in path)
    drawn = torch.empty(min(PIECE, spec.numel))
    cast = drawn if spec.dtype == torch.float32 else torch.empty_like(drawn, dtype=spec.dtype)
    held = drawn.nbytes + (cast.nbytes if cast is not drawn else 0)
    for start in range(0, spec.numel, PIECE):
        count = min(PIECE, spec.numel - start)
        drawn[:count].normal_(1.0 if is_scale else 0.0, STD, generator=generator)
        if cast is not drawn:
            cast[:count].copy_(drawn[:count])
        yield cast[:count], held


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Complete or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
