"""`metashard verify FOLDER --against OTHER`: two checkpoints, tensor by tensor, neither of them loaded whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from metashard.checkpoint import Checkpoint, Entry, read_checkpoint
from metashard.component import resolve_component
from metashard.errors import ComponentError
from metashard.fill.bytes import as_bytes, as_dtype
from metashard.fill.reader import Files, Read
from metashard.fill.threads import in_threads
from metashard.report import size_text
from metashard.weight_files import read_index

_PIECE_BYTES = 8 << 20
_THREADS = 4


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both checkpoints.

    Args:
        key: Its name.
        what: "only here", "only there", "dtype", "shape" or "values".
        here: What the first checkpoint has: a dtype, a shape, or the first value that differs.
        there: What the second one has.
        elements: How many elements differ, of "values".
    """

    key: str
    what: str
    here: str = ""
    there: str = ""
    elements: int = 0


@dataclass(frozen=True)
class FilesComparison:
    """What a comparison of two checkpoints has found.

    Args:
        tensors: Tensors whose bytes were compared.
        nbytes: Their bytes in one of the checkpoints.
        differences: In order of the names.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...]

    def to_json(self) -> str:
        """The comparison as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [
            f"{d.key}: {d.what}" + (f": {d.here} here, {d.there} there" if d.here else "") + _count(d.elements)
            for d in self.differences
        ]
        lines.append(f"{self.tensors} tensors, {size_text(self.nbytes)}: {len(self.differences)} differences")
        return "\n".join(lines)


def compare_checkpoints(
    folder: str | Path, other: str | Path, component: str | None = None, *, variant: str | None = None
) -> FilesComparison:
    """Compare all tensors of two checkpoints: names, dtypes, shapes and bytes. How they are cut into files is not.

    Args:
        folder: A pipeline folder, a folder that is one model, or one without a config, all whose safetensors files are
            read (an adapter).
        other: The folder to compare with.
        component: Name of the component in pipeline folders.
        variant: Weight variant.

    Memory:
        128 MiB of buffers. Bytes read: both checkpoints once.

    Raises:
        LoadError: One of them cannot be read.
    """
    for root in (folder, other):
        _check_folder(str(root))
    places = [_read(Path(root), component, variant) for root in (folder, other)]
    here, there = (checkpoint.entries for _, checkpoint in places)
    found = [Difference(key, "only here" if key in here else "only there") for key in here.keys() ^ there.keys()]
    pairs = []
    for key in sorted(here.keys() & there.keys()):
        one, two = here[key], there[key]
        if one.dtype != two.dtype:
            found.append(Difference(key, "dtype", str(one.dtype), str(two.dtype)))
        elif one.shape != two.shape:
            found.append(Difference(key, "shape", str(one.shape), str(two.shape)))
        else:
            pairs.append((one, two))
    buffers: dict[int, list[torch.Tensor]] = {}
    (folder_a, checkpoint_a), (folder_b, checkpoint_b) = places
    with Files(folder_a, checkpoint_a, same_folder=True) as a, Files(folder_b, checkpoint_b, same_folder=True) as b:

        def compare(pair: tuple[Entry, Entry], number: int) -> None:
            if number not in buffers:
                buffers[number] = [torch.empty(_PIECE_BYTES, dtype=torch.uint8) for _ in range(2)]
            found.extend(_compare((a, b), pair, buffers[number]))

        in_threads(pairs, compare, threads=_THREADS, name="metashard-compare")
    found.sort(key=lambda difference: difference.key)
    return FilesComparison(len(pairs), sum(one.nbytes for one, _ in pairs), tuple(found))


def _check_folder(root: str) -> None:
    what = "is a file" if os.path.exists(root) else "does not exist"
    if not os.path.isdir(root):
        raise ComponentError(
            f"{root or 'An empty path'} {what}. Two folders on disk are compared: give their paths.",
            phase="resolve",
            file=root or None,
            expected="a folder",
            got=what,
        )


def _read(root: Path, component: str | None, variant: str | None) -> tuple[Path, Checkpoint]:
    """Folder and headers of a checkpoint."""
    plain = (
        component is None
        and variant is None
        and not any((root / name).exists() for name in ("config.json", "model_index.json"))
    )
    if not plain:
        found = resolve_component(root, component, variant=variant)
        return found.folder, read_checkpoint(found.folder, found.files, found.weight_map)
    names = sorted(path.name for path in root.glob("*.safetensors"))
    if not names:
        raise ComponentError(f"{root} has no safetensors files to compare.", phase="resolve", file=str(root))
    indices = sorted(root.glob("*.safetensors.index.json"))
    return root, read_checkpoint(root, names, read_index(indices[0]) if len(indices) == 1 else None)


def _compare(
    files: tuple[Files, Files], pair: tuple[Entry, Entry], buffers: list[torch.Tensor]
) -> Iterator[Difference]:
    """The difference of two entries of one dtype and shape, if there is one."""
    dtype, count, first = pair[0].dtype, 0, ("", "")
    total = pair[0].nbytes // dtype.itemsize
    step = _PIECE_BYTES // dtype.itemsize
    for start in range(0, total, step):
        n = min(step, total - start)
        pieces = [as_dtype(buffer, dtype, n) for buffer in buffers]
        for source, entry, piece in zip(files, pair, pieces, strict=True):
            source.read(Read(entry, start, piece, n, n), as_bytes(piece))
        one, two = (as_bytes(piece).view(n, -1) for piece in pieces)
        if torch.equal(one, two):
            continue
        differs = (one != two).any(1).nonzero()[:, 0]
        if not count:
            first = (str(pieces[0][differs[0]].item()), str(pieces[1][differs[0]].item()))
        count += len(differs)
    if count:
        yield Difference(pair[0].key, "values", *first, count)


def _count(elements: int) -> str:
    return f" ({elements} elements differ)" if elements else ""
