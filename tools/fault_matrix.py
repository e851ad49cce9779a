#!/usr/bin/env python3
"""Every phase of a load fails on the first and the last rank, in every way, and all ranks must fail alike.

    python tools/fault_matrix.py                       the whole matrix; one line at the end says how it went
    python tools/fault_matrix.py --only killed         cells whose name holds a text
    python tools/fault_matrix.py --list                the names of the cells

Runs real loads of a small transformer with an adapter and a hook on gloo ranks. Faults are put in from outside, by
replacing functions of the package in the worker that is to fail. A cell is one load in which

* `exception`: one rank raises. Every rank must raise the same `LoadError` that names rank and phase, within 10 s; the
  rank where it happened chains the original; threads, file descriptors and library patches are as before.
* `wrong`: one rank gets wrong data. As above, with the typed error that names what is wrong.
* `slow`: one rank sleeps for longer than the timeout of the group that carries data. The load must give the right
  bytes on every rank.
* `killed`: one rank is gone. Every other rank must raise the same `LoadError` that names it, within 10 s.

Exit code 0 when every cell ended so, 1 when any did not or hung.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

import metashard  # noqa: E402
from tests.ranks import RankDiedError, Ranks, RanksTimeoutError  # noqa: E402
from tools.fault_points import BUILD_WRONG_PHASE, KINDS, POINTS, WAYS, WORLD, Cell, all_cells  # noqa: E402

DATA_TIMEOUT = 3.0  # seconds: of the mesh's process group, which has to be made within it, too
SLOW_SECONDS = 4.0  # longer than that
LOAD_TIMEOUT = 30.0
ALLOWED_SECONDS = 10.0  # from the fault to the error on the last rank
HARD_LIMIT = 45.0  # a cell that takes longer hangs
INJECTED = "injected fault"


# --- in the workers


@dataclass(frozen=True)
class Outcome:
    """How a cell ended on one rank."""

    rank: int
    at: float  # by the clock that all processes share
    error: dict[str, Any] | None = None
    cause: str = ""
    digest: str = ""
    left: tuple[str, ...] = ()  # what should have been put back


_meshes: list[DeviceMesh] = []


def data_mesh() -> DeviceMesh:
    """A mesh over all ranks whose group has the short timeout; made once a process."""
    if not _meshes:
        group = None
        made = [False]
        while not all(made):  # on a busy machine it may take longer than the timeout to connect
            dist.barrier()
            with suppress(RuntimeError):
                group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=DATA_TIMEOUT))
            made = [False] * dist.get_world_size()
            dist.all_gather_object(made, group is not None)
            group = group if all(made) else None
        _meshes.append(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))
    return _meshes[0]


def fault(cell: Cell, stamp: Path) -> Callable[..., Any]:
    """What takes the place of a function: the fault at the first call, then the function itself."""
    lock, fired = threading.Lock(), []

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            first = not fired
            fired.append(True)
        if first:
            stamp.write_text(str(time.monotonic()))
            if cell.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if cell.kind == "exception":
                raise RuntimeError(INJECTED)
            if cell.kind == "slow":
                time.sleep(SLOW_SECONDS)
        wrong = POINTS[cell.point].wrong
        if cell.kind == "wrong" and wrong is not None:
            return wrong(original, *args, **kwargs)
        return original(*args, **kwargs)

    return call


def put_in(call: Callable[..., Any], target: str) -> Any:
    """A patch that makes the function at `target` go through `call`."""
    module, _, path = target.partition(":")
    owner: Any = sys.modules[module]
    *inner, name = path.split(".")
    for part in inner:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    if isinstance(original, property):
        return mock.patch.object(owner, name, property(lambda self: call(original.fget, self)))
    return mock.patch.object(owner, name, lambda *args, **kwargs: call(original, *args, **kwargs))


def state_of_process() -> dict[str, Any]:
    """What a load changes for a time."""
    from diffusers import ModelMixin, SD3Transformer2DModel
    from transformers import PreTrainedModel

    files = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            files.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    return {
        "files": {name for name in files if name.endswith(".safetensors")},
        "threads": {t.name for t in threading.enumerate() if t.name.startswith("metashard")},
        "collections": gc.isenabled(),
        "dtype": torch.get_default_dtype(),
        "pins": getattr(SD3Transformer2DModel, "_keep_in_fp32_modules", None),
        "from_pretrained": [vars(base)["from_pretrained"] for base in (ModelMixin, PreTrainedModel)],
        "SIGINT": signal.getsignal(signal.SIGINT),
    }


def add_buffer(module: Any) -> None:
    """The caller's hook: what it registers is real, and travels from rank 0."""
    module.register_buffer("of_the_hook", torch.arange(5.0), persistent=False)


def load(folder: str, way: str, hook: Callable[[Any], Any] = add_buffer) -> Any:
    """The load of every cell: several buckets, an adapter, a hook."""
    from peft import LoraConfig

    torch.manual_seed(0)  # the adapter's
    return metashard.load_component(
        folder,
        mesh=data_mesh(),
        dtype=torch.bfloat16,
        lora=LoraConfig(r=2, target_modules=["to_q", "to_k"]),
        prepare=hook,
        load=metashard.LoadPolicy(**WAYS[way], staging_bytes=1 << 16, timeout=LOAD_TIMEOUT, progress=False),
    )


def run_cell(cell: Cell, folder: str, stamp: str) -> Outcome:
    """One cell, on one rank."""
    import metashard.lora  # patched below

    rank = dist.get_rank()
    call = fault(cell, Path(stamp))
    before = state_of_process()
    with ExitStack() as stack:
        hook = partial(call, add_buffer) if rank == cell.rank and cell.point == "hook" else add_buffer
        if rank == cell.rank and cell.point != "hook":
            stack.enter_context(put_in(call, POINTS[cell.point].target))
        try:
            module = load(folder, cell.way, hook)
        except metashard.MetaShardError as error:
            at = time.monotonic()
            names = ("rank", "phase", "file", "key", "ranks")
            told = {"type": type(error).__name__, "text": str(error)} | {n: getattr(error, n) for n in names}
            outcome = Outcome(rank, at, told, repr(error.__cause__))
        else:
            outcome = Outcome(rank, time.monotonic(), digest=metashard.digest_shards(module))
    after = state_of_process()
    return replace(outcome, left=tuple(name for name in before if before[name] != after[name]))


def healthy(folder: str, ways: list[str]) -> dict[str, str]:
    """This rank's digests without a fault."""
    return {way: metashard.digest_shards(load(folder, way)) for way in ways}


# --- in the parent


def save_checkpoint(folder: Path) -> None:
    """The small transformer that every cell loads."""
    from tests import zoo

    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(folder)


def judge(cell: Cell, outcomes: list[Any], fired_at: float, digests: list[dict[str, str]]) -> list[str]:
    """What is wrong about how a cell ended; empty if nothing is."""
    point = POINTS[cell.point]
    strange = [
        repr(o)
        for r, o in enumerate(outcomes)
        if not isinstance(o, Outcome) and (cell.kind, r) != ("killed", cell.rank)
    ]
    if strange:
        return strange
    living: list[Outcome] = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    if cell.kind == "slow":
        return [
            f"rank {o.rank}: {o.error or 'other bytes'}"
            for o in living
            if o.digest != digests[o.rank][cell.way] or o.left
        ]
    found: list[str] = []
    errors = [outcome.error for outcome in living]
    if cell.kind == "killed" and not isinstance(outcomes[cell.rank], RankDiedError):
        found.append("the rank was not killed")
    first = errors[0]
    if any(error != first for error in errors) or first is None:
        return [*found, f"ranks differ: {errors}"]
    wanted: dict[str, Any] = {"type": "LoadError", "rank": cell.rank, "phase": point.phase}
    if cell.kind == "wrong":
        del wanted["type"]
        wanted["phase"] = BUILD_WRONG_PHASE[cell.rank] if cell.point == "build" else point.wrong_phase
        if cell.rank == 0 and wanted["phase"] in ("agree", "adapters", "shard"):
            del wanted["rank"]  # rank 0 is what the others are compared with
    found += [f"{name} {first[name]!r}, expected {value!r}" for name, value in wanted.items() if first[name] != value]
    texts = {"exception": INJECTED, "killed": f"Rank {cell.rank} left the load"}
    if texts.get(cell.kind, "") not in first["text"]:
        found.append(f"says {first['text']!r}")
    if cell.kind == "wrong" and point.key and not first["key"]:
        found.append(f"names no key: {first['text']!r}")
    if cell.kind == "wrong" and cell.point.startswith("read") and not first["file"]:
        found.append("names no file")
    for outcome in living:
        if cell.kind == "exception" and (INJECTED in outcome.cause) != (outcome.rank == cell.rank):
            found.append(f"rank {outcome.rank} chains {outcome.cause}")
        if outcome.at - fired_at > ALLOWED_SECONDS:
            found.append(f"rank {outcome.rank} raised {outcome.at - fired_at:.1f} s after the fault")
        left = [name for name in outcome.left if cell.in_step or name != "threads"]
        if left:
            found.append(f"rank {outcome.rank} left {', '.join(left)} changed")
    return found


class Matrix:
    """Runs cells on a pool of ranks, and judges them."""

    def __init__(self, ranks: Ranks, folder: Path, scratch: Path) -> None:
        self.ranks, self.folder, self.scratch = ranks, str(folder), scratch
        self.digests: list[dict[str, str]] = ranks.run(healthy, self.folder, list(WAYS), timeout=240)

    def run(self, cell: Cell) -> tuple[str, list[str], float]:
        """("ok", "hang" or "wrong", why, seconds from the fault to the last error)."""
        stamp = self.scratch / f"{abs(hash(cell))}.txt"
        starts = self.ranks.starts + (not self.ranks.pids)
        try:
            outcomes = self.ranks.run(
                run_cell,
                cell,
                self.folder,
                str(stamp),
                timeout=HARD_LIMIT,
                return_exceptions=True,
                deaths=cell.kind == "killed",
            )
        except RanksTimeoutError as error:
            return "hang", [str(error)], HARD_LIMIT
        except RankDiedError as error:
            return "wrong", [str(error)], 0.0
        if not stamp.exists():
            return "wrong", [f"the fault never happened: {outcomes}"], 0.0
        fired_at = float(stamp.read_text())
        found = judge(cell, outcomes, fired_at, self.digests)
        if cell.in_step and (self.ranks.starts != starts or not self.ranks.pids):
            found.append("the ranks were out of step afterwards")
        if not cell.in_step:
            self.ranks.close()
        seconds = max((o.at - fired_at for o in outcomes if isinstance(o, Outcome)), default=0.0)
        return ("wrong" if found else "ok"), found, seconds


def run_all(cells: list[Cell], jobs: int) -> list[tuple[Cell, str, list[str], float]]:
    """All cells, by `jobs` pools of ranks at a time."""
    results: list[tuple[Cell, str, list[str], float]] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = Path(temporary) / "model"
        save_checkpoint(folder)
        queue = iter(cells)
        lock = threading.Lock()

        def serve(number: int) -> None:
            scratch = Path(temporary) / str(number)
            scratch.mkdir()
            with Ranks(WORLD) as ranks:
                matrix = Matrix(ranks, folder, scratch)
                while True:
                    with lock:
                        cell = next(queue, None)
                    if cell is None:
                        return
                    how, found, seconds = matrix.run(cell)
                    with lock:
                        results.append((cell, how, found, seconds))
                        print(f"{len(results):4}/{len(cells)} {how:5} {seconds:5.1f} s  {cell.name}", flush=True)
                        for text in found:
                            print(f"       {text}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(serve, number) for number in range(jobs)]:
                done.result()
    return results


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cells whose name holds this text")
    parser.add_argument("--jobs", type=int, default=2, help="pools of ranks that work at the same time (default 2)")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    given = parser.parse_args(arguments)
    table = list(all_cells())
    cells = [cell for cell, exists in table if exists and given.only in cell.name]
    if given.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    start = time.monotonic()
    results = run_all(cells, given.jobs)
    counts = Counter(how for _, how, _, _ in results)
    kinds = Counter(cell.kind for cell, _, _, _ in results)
    slowest = max((seconds for cell, _, _, seconds in results if cell.kind != "slow"), default=0.0)
    print(
        f"fault matrix: {len(results)} cells ({', '.join(f'{kinds[kind]} {kind}' for kind in KINDS)}; "
        f"{sum(not exists for _, exists in table)} combinations have no such place), {counts['hang']} hangs, "
        f"{counts['wrong']} wrong errors, slowest error {slowest:.1f} s after its fault, "
        f"{time.monotonic() - start:.0f} s in all"
    )
    return 1 if counts["hang"] or counts["wrong"] or len(results) < len(cells) else 0


if __name__ == "__main__":
    from tools import fault_matrix  # the workers know the functions under this name

    sys.exit(fault_matrix.main())
