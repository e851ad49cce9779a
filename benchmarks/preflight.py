"""What all benchmarks check before they begin, and how they say that they cannot: one line and exit code 2.

A check raises `UsageError`. Under torchrun `on_all_ranks` makes a failure of any rank the same error on every rank, so
that none of them waits in a collective for one that has left; `command_line` turns it into the line and the exit code.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from metashard.checkpoint import Checkpoint, read_checkpoint
from metashard.errors import MetaShardError
from metashard.weight_files import read_index

T = TypeVar("T")

BAD_INPUT = 2  # exit code
EVICTED = 0.01  # at most this fraction of the files may be left in the page cache before a cold run
DISK_MARGIN = 64 << 20  # bytes left over for configs and what the file system itself needs


class UsageError(ValueError):
    """What the caller asked for cannot be done here; one line says why and what to do."""


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of one folder, their headers read and found to be well-formed.

    Attributes:
        folder: Where they are.
        checkpoint: What their headers say.
    """

    folder: Path
    checkpoint: Checkpoint

    @property
    def paths(self) -> list[Path]:
        """The files, in order of their names."""
        return [self.folder / name for name in sorted(self.checkpoint.sizes)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers left out."""
        return self.checkpoint.nbytes


def check_weights(model_path: str | os.PathLike[str], subfolder: str | None = None) -> WeightFiles:
    """The safetensors files of a folder: those that its index names, else all in it.

    Bytes read: index and headers.

    Raises:
        UsageError: No such folder or subfolder, no safetensors in it, a file that is missing, truncated, damaged or
            may not be read.
    """
    root = Path(model_path)
    if not root.is_dir():
        raise UsageError(f"{root}: {'is a file' if root.exists() else 'no such folder'}; pass the folder of a model")
    folder = root / subfolder if subfolder else root
    if not folder.is_dir():
        raise UsageError(f"{root} has no subfolder {subfolder!r}; {_where_weights_are(root)}")
    indices = sorted(folder.glob("*.safetensors.index.json"))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names and not indices:
        raise UsageError(f"{folder} has no safetensors files; {_where_weights_are(root)}")
    try:
        weight_map = read_index(indices[0]) if indices else None
        checkpoint = read_checkpoint(folder, names, weight_map)
    except (MetaShardError, OSError) as error:
        raise UsageError(one_line(error)) from error
    if not checkpoint.nbytes:
        raise UsageError(f"{folder}: its safetensors files hold no bytes")
    return WeightFiles(folder, checkpoint)


def _where_weights_are(root: Path) -> str:
    there = sorted({path.parent.name for path in root.glob("*/*.safetensors")})
    return f"there are weights in: {', '.join(there)}" if there else "none of its subfolders has safetensors either"


def check_evictable(files: Iterable[Path]) -> None:
    """Whether the page cache can be made to forget these files, and be seen to have; nothing is evicted.

    Raises:
        UsageError: A file may not be opened; or its pages in the cache may not be counted, which Linux allows only to
            who owns the file or may write it, so that nobody could tell a cold run from a warm one.
    """
    if not hasattr(os, "posix_fadvise"):
        raise UsageError("this system has no posix_fadvise, so the page cache cannot be evicted; run warm only")
    for path in files:
        if not os.access(path, os.R_OK):
            raise UsageError(f"no permission to read {path}")
        mine = os.geteuid() in (0, path.stat().st_uid)
        if not mine and not os.access(path, os.W_OK):
            raise UsageError(
                f"no permission to evict {path} from the page cache and to verify it: "
                "be its owner, have write permission, or copy the model"
            )


def check_evicted(fraction: float, files: Iterable[Path]) -> None:
    """Raises UsageError where more than `EVICTED` of the files stayed in the page cache (NaN: nobody can tell)."""
    if not math.isnan(fraction) and fraction > EVICTED:
        first = next(iter(files)).parent
        raise UsageError(
            f"{fraction:.0%} of the files in {first} stay in the page cache: they are in use by another process, or on "
            "a file system that is all memory (tmpfs)"
        )


def check_disk(folder: str | os.PathLike[str], wanted: int) -> None:
    """Whether `wanted` bytes can be written below a folder, which need not exist yet.

    Raises:
        UsageError: No permission, or less than that free.
    """
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file: expected a folder, or a path where none is yet")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"no permission to write in {existing}")
    free = shutil.disk_usage(existing).free
    if wanted + DISK_MARGIN > free:
        raise UsageError(
            f"too little disk: {size(wanted)} to write and {existing} has {size(free)} free; "
            "ask for fewer layers or a smaller dtype, or pass another folder"
        )


def check_outputs(files: dict[str, Path | None], out: Path | None = None) -> None:
    """Whether these files, by their flags, and the folder `out` can be written when all is done.

    Raises:
        UsageError: One of them cannot.
    """
    for flag, path in files.items():
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: expected the name of a file in a folder that exists")
        check_disk(path.absolute().parent, 0)
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"no permission to write {path}")
    if out is not None:
        check_disk(out, 0)


def available_memory() -> int | None:
    """Bytes of host memory that processes may still take (the system's and the cgroup's limit); None if unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    cgroup = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # the other version of cgroups; "max" is no number and no limit
            stat = dict(line.split() for line in (cgroup / used).with_name("memory.stat").read_text().splitlines())
            cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # given up when memory is short
            found.append(int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + cache)
    return min(found, default=None)


def check_memory(each: int, ranks: int, *, what: str = "every rank loading all of it") -> None:
    """Whether `ranks` processes of this host can take `each` bytes of host memory at the same time.

    Raises:
        UsageError: They cannot.
    """
    available = available_memory()
    if available is not None and each * ranks > available:
        raise UsageError(
            f"too little memory: {what} takes {ranks} x {size(each)} and {size(available)} are available; "
            "use fewer ranks, fewer layers or a smaller model"
        )


def check_device_memory(device: torch.device, wanted: int, *, what: str = "all of the model") -> None:
    """Whether a device has `wanted` bytes free; the CPU's are `check_memory`'s.

    Raises:
        UsageError: It has not.
    """
    if device.type == "cpu":
        return
    free, _ = torch.accelerator.get_memory_info(device)
    if wanted > free:
        raise UsageError(f"too little memory on {device}: {what} takes {size(wanted)} and {size(free)} are free")


def size(nbytes: int) -> str:
    """Bytes for a person, in decimal units."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


# ---- ranks ----------------------------------------------------------------------------------------------------------


def on_all_ranks(check: Callable[[], T]) -> T:
    """Runs a check on every rank of the process group (or in this process alone, without one) and returns its value.

    Raises:
        UsageError: On every rank, if the check raised UsageError or OSError on any: the first rank's that failed.
    """
    value, problem = None, None
    try:
        value = check()
    except (UsageError, OSError) as error:
        problem = one_line(error)
    if dist.is_initialized():
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        same = len(set(problems)) == 1
        problem = problems[first] if first is not None else None
        if problem is not None and not same:
            problem += f" (rank {first})"
    if problem is not None:
        if dist.is_initialized() and dist.is_torchelastic_launched():
            _outlive_torchrun()
            dist.barrier()  # nobody leaves before all are safe from being ended without having said why
        raise UsageError(problem)
    return value  # type: ignore[return-value]


def as_script(main: Callable[[], int]) -> NoReturn:
    """Runs a script's `main` and leaves with its exit code; temporary files go where it is interrupted, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def command_line(name: str, run: Callable[[], int]) -> int:
    """Runs a script's body; exit code 2 and one line on stderr where the input was bad.

    Every rank prints the line: each may have a log of its own.
    """
    try:
        return run()
    except UsageError as error:
        if dist.is_torchelastic_launched():
            _outlive_torchrun()
        sys.stderr.write(f"{name}: {one_line(error)}\n")  # in one piece: other ranks write to the same terminal
        sys.stderr.flush()
        return BAD_INPUT


def _outlive_torchrun() -> None:
    """Ignores the SIGTERM that torchrun sends once a rank has left: each leaves with its own exit code."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def positive(values: dict[str, float | Sequence[float] | None], *, least: float = 1) -> None:
    """Raises UsageError naming the first flag whose value (or one of them) is below `least`; None is not given."""
    for flag, given in values.items():
        for value in given if isinstance(given, Sequence) else [given]:
            if value is not None and not value >= least:  # NaN, too
                raise UsageError(f"{flag} must be at least {least:g}, got {value:g}")
