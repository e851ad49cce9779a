"""The harness under the benchmarks: cold and warm page cache, fresh ranks a run, clocks, memory, digests, tables.

One run is one flow, loaded once by N new processes in a new process group:

    import libraries (once, in the process the ranks are forked from)
    -> join the group, load a tiny checkpoint with the same flow (lazy imports, connections)
    -> barrier, clock starts
    -> the flow
    -> device synchronised, barrier, clock stops
    -> digest of the shards, counters, goodbye

Runs are interleaved (A B C A B C), so that a machine that slows down slows all flows alike; the median of a flow's runs
is what counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import math
import mmap
import multiprocessing as mp
import os
import platform
import resource
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

PAGE = mmap.PAGESIZE
GRACE = 5.0  # seconds other ranks have to tell their own error after the first one
SAMPLE_SECONDS = 0.01
EVICTED = 0.01  # a cold run may start with at most this fraction of the checkpoint in the page cache
_MINCORE_BYTES = 1 << 30  # of a file mapped at a time for mincore(2), which writes one byte a page

_libc = ctypes.CDLL(None, use_errno=True)


class NotAvailableError(Exception):
    """This install cannot run the flow at all, such as a library that is not there. Reported as 'not run'."""


# ---- page cache -----------------------------------------------------------------------------------------------------


def evict(files: Iterable[Path]) -> float:
    """Drops files from the page cache and returns the fraction of them that stayed.

    Dirty pages cannot be dropped, hence the fsync before. Pages that some process maps stay as well, and so does all of
    it on file systems without a page cache of their own; the fraction tells.
    """
    files = list(files)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return resident_fraction(files)


def read_into_cache(files: Iterable[Path]) -> float:
    """Reads files once, in pieces, and returns the fraction of them that is in the page cache afterwards."""
    files = list(files)
    piece = bytearray(8 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return resident_fraction(files)


def resident_fraction(files: Iterable[Path]) -> float:
    """Fraction of the files' pages that the page cache holds, by mincore(2); NaN where there is no such call.

    Linux tells the truth only to who owns a file or may write it; to others every page seems resident.
    """
    if sys.platform != "linux":
        return math.nan
    pages = resident = 0
    for path in files:
        size = path.stat().st_size
        with open(path, "rb") as file:
            for start in range(0, size, _MINCORE_BYTES):
                length = min(_MINCORE_BYTES, size - start)
                with mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, offset=start) as mapped:
                    count = -(-length // PAGE)
                    vector = (ctypes.c_ubyte * count)()
                    anchor = ctypes.c_char.from_buffer(mapped)
                    failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), vector)
                    del anchor  # the mapping cannot be closed while it is exported
                    if failed:
                        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
                    pages += count
                    resident += sum(byte & 1 for byte in bytes(vector))
    return resident / pages if pages else 0.0


# ---- memory and I/O of this process ---------------------------------------------------------------------------------


def count_elements(files: Iterable[Path]) -> int:
    """Elements of all tensors in safetensors files."""
    from safetensors import safe_open

    total = 0
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                total += torch.Size(opened.get_slice(key).get_shape()).numel()
    return total


class HostMemory:
    """Peak of this process's own host memory, sampled by a thread; `with HostMemory() as memory: ...; memory.peak`.

    Own memory is anonymous plus shared memory (RssAnon and RssShmem of /proc/self/status): staging in /dev/shm counts,
    mapped files do not. Elsewhere than on Linux it is the peak of all resident memory since the process began.

    Attributes:
        start: Bytes when sampling began.
        peak: Highest bytes seen.
    """

    def __enter__(self) -> HostMemory:
        self._fd = os.open("/proc/self/status", os.O_RDONLY) if sys.platform == "linux" else -1
        self.start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="host-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())
        if self._fd >= 0:
            os.close(self._fd)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        if self._fd < 0:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        text = os.pread(self._fd, 8192, 0)
        return sum(_kib_after(text, name) for name in (b"RssAnon:", b"RssShmem:")) * 1024


def _kib_after(text: bytes, name: bytes) -> int:
    at = text.find(name)
    return int(text[at + len(name) :].split(None, 1)[0]) if at >= 0 else 0


def io_counters() -> tuple[int, int]:
    """(bytes this process made the storage read, bytes it asked for with read calls) so far.

    Reads through mapped files are in the first only. Both are 0 where /proc/self/io cannot be read.
    """
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0, 0
    return int(lines["read_bytes"]), int(lines["rchar"])


# ---- digests --------------------------------------------------------------------------------------------------------


def digest(module: nn.Module) -> str:
    """sha256 over what this rank holds of a module: local shards, buffers and plain tensor attributes, in FQN order.

    Names, dtypes, shapes and placements go in as well. Tied tensors count under each of their names, so a load that
    breaks a tie differs only if the values do.
    """
    held: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        held[name] = ("parameter", tensor.detach())
    for name, tensor in module.named_buffers(remove_duplicate=False):
        held[name] = ("buffer", tensor.detach())
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for attribute, value in vars(sub).items():
            if isinstance(value, torch.Tensor):
                held[f"{prefix}.{attribute}".lstrip(".")] = ("attribute", value.detach())
    total = hashlib.sha256()
    for name in sorted(held):
        kind, tensor = held[name]
        placements = tuple(map(str, tensor.placements)) if isinstance(tensor, DTensor) else ()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            raise RuntimeError(f"{name}: still on meta after the load")
        total.update(f"{name} {kind} {tensor.dtype} {tuple(tensor.shape)} {tuple(local.shape)} {placements}\n".encode())
        total.update(_bytes_of(local))
    return total.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def resident_bytes(module: nn.Module) -> int:
    """Bytes of this rank's shards and buffers, tied tensors once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())


# ---- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What every flow of a comparison is given.

    Attributes:
        path: Checkpoint folder.
        component: Component in it; None where the folder is one model.
        dtype: As `from_pretrained` takes it.
        device: "cpu", "cuda", ...
        backend: Of the process group, as `init_process_group` takes it.
        tiny: A tiny checkpoint folder that the flow loads before the clock starts; None for no such warm-up.
        tiny_component: Component in `tiny`.
        imports: Called with `path` and `component` before the clock starts, to import what all flows will need.
        threads: Threads of torch's own operators a rank; 1 is torchrun's default.
        memory_limit: Bytes of private memory a rank may add while the clock runs (RLIMIT_DATA); None for no limit.
    """

    path: Path
    component: str | None
    dtype: torch.dtype
    device: str = "cpu"
    backend: str = "gloo"
    tiny: Path | None = None
    tiny_component: str | None = "transformer"
    imports: Callable[[Path, str | None], Any] | None = None
    threads: int = 1
    memory_limit: int | None = None


# (path, component, mesh, dtype) -> the sharded module, or (module, report), or None where nothing is loaded. Must
# pickle. Where it has a method `prepare` of the same arguments, that is called before the clock starts.
Flow = Callable[[Path, "str | None", DeviceMesh, torch.dtype], Any]


@dataclass(frozen=True)
class RankResult:
    """One rank's figures of one run.

    Attributes:
        rank: Of the process group.
        seconds: From the barrier before the flow to the barrier after it.
        own_seconds: The same without waiting for the others at the end.
        digest: Of what the rank holds; None where nothing is loaded.
        resident_bytes: Bytes of its shards and buffers.
        storage_bytes: Bytes its reads made the storage deliver (0 from a warm cache).
        called_bytes: Bytes it asked for in read calls; mapped files are not in it.
        peak_host_bytes: Own host memory at its highest, above what it was when the clock started.
        peak_device_bytes: The same for the device's allocator; 0 on the CPU.
        report: The flow's own report, as JSON has it; None if it makes none.
    """

    rank: int
    seconds: float
    own_seconds: float
    digest: str | None
    resident_bytes: int
    storage_bytes: int
    called_bytes: int
    peak_host_bytes: int
    peak_device_bytes: int
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class RunResult:
    """One run of one flow.

    Attributes:
        flow: Its name.
        cache: "cold" or "warm".
        nproc: Ranks.
        repeat: Number of the repetition, from 0.
        status: "ok", "not run", "failed" or "timed out".
        reason: One line for every status but "ok".
        resident_fraction: Fraction of the checkpoint in the page cache when the run began.
        ranks: One a rank; empty unless "ok".
    """

    flow: str
    cache: str
    nproc: int
    repeat: int
    status: str
    reason: str = ""
    resident_fraction: float = math.nan
    ranks: tuple[RankResult, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds until every rank had its shards."""
        return max((rank.seconds for rank in self.ranks), default=math.nan)

    @property
    def digests(self) -> tuple[str | None, ...]:
        """Digest of each rank."""
        return tuple(rank.digest for rank in self.ranks)

    @property
    def peak_host_bytes(self) -> int:
        """Highest of the ranks."""
        return max((rank.peak_host_bytes for rank in self.ranks), default=0)

    @property
    def peak_device_bytes(self) -> int:
        """Highest of the ranks."""
        return max((rank.peak_device_bytes for rank in self.ranks), default=0)

    @property
    def storage_bytes(self) -> int:
        """Sum over the ranks."""
        return sum(rank.storage_bytes for rank in self.ranks)

    @property
    def reported_bytes(self) -> int | None:
        """Bytes read from files as the flow's own report says, summed over ranks; None if it makes none."""
        report = next((rank.report for rank in self.ranks if rank.report), None)
        if not report or not report.get("ranks"):
            return None
        return sum(entry["bytes_read"] for entry in report["ranks"])


def run_flow(
    flow: Flow,
    case: Case,
    *,
    name: str,
    nproc: int,
    cache: str,
    files: Sequence[Path],
    repeat: int = 0,
    limit: float = 300,
) -> RunResult:
    """Runs a flow once on `nproc` fresh ranks, with `files` evicted from the page cache or read into it before.

    Never raises for what the flow does: errors and overruns are results. No process outlives the call.

    Args:
        flow: What to run.
        case: What to run it on.
        name: Its name in results.
        nproc: Ranks, all on this machine.
        cache: "cold" or "warm".
        files: The checkpoint's weight files.
        repeat: Number of the repetition.
        limit: Seconds until the run is ended by force, start of the ranks included.
    """
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache={cache!r}: expected 'cold' or 'warm'")
    result = RunResult(flow=name, cache=cache, nproc=nproc, repeat=repeat, status="ok")
    fraction = evict(files) if cache == "cold" else read_into_cache(files)
    result = replace(result, resident_fraction=fraction)
    answers, trouble = _run_ranks(flow, case, nproc, limit)
    if trouble:
        return replace(result, status="timed out", reason=trouble)
    errors = [answer for answer in answers if not isinstance(answer, RankResult)]
    if errors:
        absent = next((reason for kind, reason in errors if kind == "not run"), None)
        # A rank that fails makes the others fail in their next collective: the first to answer is the one to believe.
        return replace(result, status="not run" if absent else "failed", reason=absent or errors[0][1])
    return replace(result, ranks=tuple(sorted(answers, key=lambda rank: rank.rank)))


def run_interleaved(
    flows: dict[str, Flow],
    case: Case,
    *,
    nproc: int,
    cache: str,
    files: Sequence[Path],
    repeats: int,
    limit: float = 300,
    on_result: Callable[[RunResult], None] | None = None,
) -> list[RunResult]:
    """Runs all flows, then all of them again, `repeats` times. A flow that cannot run is tried once only."""
    results: list[RunResult] = []
    given_up: set[str] = set()
    for repeat in range(repeats):
        for name, flow in flows.items():
            if name in given_up:
                continue
            result = run_flow(flow, case, name=name, nproc=nproc, cache=cache, files=files, repeat=repeat, limit=limit)
            if result.status != "ok":
                given_up.add(name)
            results.append(result)
            if on_result:
                on_result(result)
    return results


def _run_ranks(flow: Flow, case: Case, nproc: int, limit: float) -> tuple[list[Any], str]:
    """Answers of the ranks in the order they came, or a line about why there are none."""
    context = fork_server()
    # The store's server lives here, on a port the system chooses: nothing to race for.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, connections = [], []
    answers: list[Any] = []
    try:
        for rank in range(nproc):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, flow, case, rank, nproc, store.port), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        deadline = time.monotonic() + limit
        open_connections: dict[Connection, int] = {connection: rank for rank, connection in enumerate(connections)}
        while open_connections:
            ready = wait(list(open_connections), max(0.0, deadline - time.monotonic()))
            if not ready:
                if any(not isinstance(answer, RankResult) for answer in answers):
                    break  # somebody failed; the others had their grace
                return [], f"rank(s) {sorted(open_connections.values())} not done after {limit:g} s"
            for connection in ready:
                rank = open_connections.pop(connection)
                try:
                    answers.append(connection.recv())
                except EOFError:
                    processes[rank].join(1.0)
                    answers.append(("failed", f"rank {rank} died (exit code {processes[rank].exitcode})"))
                if not isinstance(answers[-1], RankResult):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers, ""
    finally:
        for process in processes:
            process.join(0.0 if len(answers) < nproc else 10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
        for connection in connections:
            connection.close()


_server: Any = None


def fork_server(preload: Sequence[str] = ("harness", "peers")) -> Any:
    """The multiprocessing context that ranks come from: a server that has imported `preload`, and forks.

    So ranks are fresh processes, with their libraries loaded and nothing else done. The first call decides `preload`.
    On systems without fork servers ranks import for themselves, before the clock starts as well.
    """
    global _server
    if _server is None:
        if "forkserver" not in mp.get_all_start_methods():
            _server = mp.get_context("spawn")
            return _server
        _server = mp.get_context("forkserver")
        _server.set_forkserver_preload(list(preload))
        from multiprocessing import forkserver, resource_tracker

        # The server is started with this process's environment, and its threads, once made, would not survive a fork.
        wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_RANK_ENVIRONMENT}
        with _environment(wanted):
            resource_tracker.ensure_running()
            forkserver.ensure_running()
    return _server


_RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _rank(connection: Connection, flow: Flow, case: Case, rank: int, nproc: int, port: int) -> None:
    """The life of a rank: one answer, then it is gone."""
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the benchmark, however that ends
    os.environ.update(_RANK_ENVIRONMENT)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    try:
        answer: Any = _measure(flow, case, rank, nproc, port)
    except NotAvailableError as error:
        answer = ("not run", str(error))
    except BaseException as error:  # noqa: BLE001  whatever a flow raises is its result
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = (str(error).strip().splitlines() or [""])[0][:300]
        answer = ("failed", f"{type(error).__name__}: {line} ({Path(where.filename).name}:{where.lineno}, rank {rank})")
    connection.send(answer)
    connection.close()
    if not isinstance(answer, RankResult):
        time.sleep(0.5)  # the error is told before others see a closed connection and tell that
    # Others may be gone already: no collective farewell, and no thread of a library to wait for.
    os._exit(0)


def _measure(flow: Flow, case: Case, rank: int, nproc: int, port: int) -> RankResult:
    torch.set_num_threads(case.threads)
    accelerator = None
    if case.device != "cpu":
        accelerator = torch.get_device_module(case.device)
        accelerator.set_device(rank % accelerator.device_count())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    limit = timedelta(seconds=1800)  # the parent's limit is the one that counts
    dist.init_process_group(case.backend, store=store, rank=rank, world_size=nproc, timeout=limit)
    mesh = init_device_mesh(case.device, (nproc,))
    if case.imports is not None:
        case.imports(case.path, case.component)
    if case.tiny is not None:
        if hasattr(flow, "prepare"):
            flow.prepare(case.tiny, case.tiny_component, mesh, case.dtype)
        flow(case.tiny, case.tiny_component, mesh, case.dtype)
    if hasattr(flow, "prepare"):
        flow.prepare(case.path, case.component, mesh, case.dtype)
    gc.collect()
    device_start = 0
    if accelerator is not None:
        accelerator.empty_cache()
        accelerator.synchronize()
        accelerator.reset_peak_memory_stats()
        device_start = accelerator.memory_allocated()
    if case.memory_limit is not None:
        import resource

        with open("/proc/self/status", "rb") as status:
            allowed = _kib_after(status.read(), b"VmData:") * 1024 + case.memory_limit
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    dist.barrier()
    storage_start, called_start = io_counters()
    with HostMemory() as memory:
        dist.barrier()
        start = time.perf_counter()
        loaded = flow(case.path, case.component, mesh, case.dtype)
        if accelerator is not None:
            accelerator.synchronize()
        own = time.perf_counter() - start
        dist.barrier()
        seconds = time.perf_counter() - start
    storage_end, called_end = io_counters()
    module, report = loaded if isinstance(loaded, tuple) else (loaded, None)
    result = RankResult(
        rank=rank,
        seconds=seconds,
        own_seconds=own,
        digest=digest(module) if module is not None else None,
        resident_bytes=resident_bytes(module) if module is not None else 0,
        storage_bytes=storage_end - storage_start,
        called_bytes=called_end - called_start,
        peak_host_bytes=memory.peak - memory.start,
        peak_device_bytes=accelerator.max_memory_allocated() - device_start if accelerator else 0,
        report=_as_json(report) if report is not None and rank == 0 else None,
    )
    dist.barrier()  # nobody closes its connections while another still works
    return result


def _as_json(report: Any) -> dict[str, Any]:
    text = report.to_json() if hasattr(report, "to_json") else asdict(report)
    return json.loads(text) if isinstance(text, str) else text


# ---- summaries and tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """All runs of one flow at one number of ranks in one state of the cache.

    Attributes:
        flow: Its name.
        cache: "cold" or "warm".
        nproc: Ranks.
        status: "ok", or that of the run that ended it, with `reason`.
        seconds: Of each run.
        storage_bytes: Median over runs of the sum over ranks.
        reported_bytes: As the flow's own report says; None if it makes none.
        peak_host_bytes: Highest over runs and ranks.
        peak_device_bytes: Highest over runs and ranks.
        digest_equal: Whether every rank's digest was the reference's in every run; None for flows that load nothing.
        phases: Median seconds by phase of the flow's own report.
    """

    flow: str
    cache: str
    nproc: int
    status: str
    reason: str = ""
    seconds: tuple[float, ...] = ()
    storage_bytes: int = 0
    reported_bytes: int | None = None
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0
    digest_equal: bool | None = None
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median seconds; NaN where there is none."""
        return statistics.median(self.seconds) if self.seconds else math.nan


def summarise(results: Iterable[RunResult], *, reference: str | None = None) -> list[Summary]:
    """One summary a flow, number of ranks and state of the cache, in the order they first ran.

    Args:
        results: Any runs.
        reference: Flow whose digests are the right ones; without it, or where it has none, the first that has some.
    """
    grouped: dict[tuple[str, int, str], list[RunResult]] = {}
    for result in results:
        grouped.setdefault((result.flow, result.nproc, result.cache), []).append(result)
    right: dict[int, tuple[str | None, ...]] = {}
    everything = [result for runs in grouped.values() for result in runs if result.ranks and result.digests[0]]
    for result in sorted(everything, key=lambda result: result.flow != reference):
        right.setdefault(result.nproc, result.digests)
    summaries = []
    for (flow, nproc, cache), runs in grouped.items():
        good = [run for run in runs if run.status == "ok"]
        bad = next((run for run in runs if run.status != "ok"), None)
        loads = [run for run in good if run.digests[0]]
        reports = [run.ranks[0].report for run in good if run.ranks[0].report]
        phases = {
            phase: statistics.median(report["phases"][phase] for report in reports if phase in report["phases"])
            for phase in (reports[0].get("phases", {}) if reports else {})
        }
        summaries.append(
            Summary(
                flow=flow,
                cache=cache,
                nproc=nproc,
                status=bad.status if bad else "ok",
                reason=bad.reason if bad else "",
                seconds=tuple(run.seconds for run in good),
                storage_bytes=round(statistics.median(run.storage_bytes for run in good)) if good else 0,
                reported_bytes=good[0].reported_bytes if good else None,
                peak_host_bytes=max((run.peak_host_bytes for run in good), default=0),
                peak_device_bytes=max((run.peak_device_bytes for run in good), default=0),
                digest_equal=all(run.digests == right[nproc] for run in loads) if loads else None,
                phases=phases,
            )
        )
    return summaries


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns padded to be read as plain text too; the first column to the left, others right."""
    rows = [list(headers), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(headers))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join([":" + "-" * (widths[0] + 1), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Facts of this machine and its software that a reader of the numbers needs; nothing that names it."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
    }
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts["cpu"] = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    with contextlib.suppress(OSError):
        facts["huge_pages"] = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    from importlib.metadata import PackageNotFoundError, version

    for package in ("torch", "diffusers", "transformers", "accelerate", "safetensors", "metashard"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts
