"""The harness under the benchmarks: a page cache that is cold or warm, fresh ranks, a clock.

One run is one flow, loaded once by N new processes in a new process group:

    import libraries (once, in the process the ranks are forked from)
    -> join the group, load a tiny checkpoint with the same flow (lazy imports, connections)
    -> barrier, clock starts
    -> the flow
    -> device synchronised, barrier, clock stops
    -> digests of the shards, counters, memory over time, goodbye

Runs are interleaved (A B C A B C), so that a machine that slows down slows all flows alike; the median of a flow's runs
is what counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from held import adapter_digest, base_digest, digest, resident_bytes, together
from memory import Memory, io_counters, kib_after
from page import evict, read_into_cache
from phases import Stretch, take_marked
from runs import Case, Flow, NotAvailableError, RankResult, RunResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GRACE = 5.0  # seconds other ranks have to tell their own error after the first one

_libc = ctypes.CDLL(None, use_errno=True)


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


def fork_server(preload: Sequence[str] = ("harness", "floor", "peers")) -> Any:
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
    for component in case.components:
        if case.imports is not None:
            case.imports(case.path, component)
    if case.tiny is not None:
        _prepare(flow, case, case.tiny, case.tiny_component, mesh)
        _call(flow, case, case.tiny, case.tiny_component, mesh)
    for component in case.components:
        _prepare(flow, case, case.path, component, mesh)
    gc.collect()
    if accelerator is not None:
        accelerator.empty_cache()
        accelerator.synchronize()
    if case.memory_limit is not None:
        import resource

        with open("/proc/self/status", "rb") as status:
            allowed = kib_after(status.read(), b"VmData:") * 1024 + case.memory_limit
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    take_marked()
    loaded, calls = [], []
    dist.barrier()
    storage_start, called_start = io_counters()
    with Memory(accelerator) as memory:
        dist.barrier()
        start = time.perf_counter()
        for component in case.components:
            calls.append(time.perf_counter() - start)
            loaded.append(_call(flow, case, case.path, component, mesh))
        if accelerator is not None:
            accelerator.synchronize()
        own = time.perf_counter() - start
        dist.barrier()
        seconds = time.perf_counter() - start
    storage_end, called_end = io_counters()
    marked = [Stretch(name, began - start, end - start) for name, began, end in take_marked()]
    modules = [item[0] if isinstance(item, tuple) else item for item in loaded]
    modules = [module for module in modules if module is not None]
    reports = [_as_json(item[1]) for item in loaded if isinstance(item, tuple)]
    for called, report in zip(calls, reports, strict=False):
        marked += [Stretch(s["name"], called + s["start"], called + s["end"]) for s in report.get("spans", ())]
    late = start - memory.began
    result = RankResult(
        rank=rank,
        seconds=seconds,
        own_seconds=own,
        digest=together([digest(module) for module in modules]),
        resident_bytes=resident_bytes(modules),
        storage_bytes=storage_end - storage_start,
        called_bytes=called_end - called_start,
        peak_host_bytes=memory.peak_host,
        peak_resident_bytes=memory.peak_resident,
        peak_device_bytes=memory.peak_device,
        reports=tuple(reports) if rank == 0 else (),
        stretches=tuple(sorted(marked, key=lambda stretch: stretch.start)),
        samples=tuple(sample._replace(seconds=sample.seconds - late) for sample in memory.samples),
        base_digest=together([base_digest(module) for module in modules]) if case.adapter else None,
        adapter_digest=together([adapter_digest(module) for module in modules]) if case.adapter else None,
    )
    dist.barrier()  # nobody closes its connections while another still works
    return result


def _prepare(flow: Flow, case: Case, path: Path, component: str | None, mesh: DeviceMesh) -> None:
    if hasattr(flow, "prepare"):
        flow.prepare(path, component, mesh, case.dtype)


def _call(flow: Flow, case: Case, path: Path, component: str | None, mesh: DeviceMesh) -> Any:
    adapter = {} if case.adapter is None else {"adapter": case.adapter}
    return flow(path, component, mesh, case.dtype, **adapter)


def _as_json(report: Any) -> dict[str, Any]:
    text = report.to_json() if hasattr(report, "to_json") else asdict(report)
    return json.loads(text) if isinstance(text, str) else text
