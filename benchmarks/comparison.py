"""Before and after: what init_latency and peak_memory share, from their arguments to the verdict on what was loaded."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from adapter import INITS, Adapter
from preflight import (
    UsageError,
    check_device_memory,
    check_evictable,
    check_evicted,
    check_memory,
    check_outputs,
    positive,
)
from runs import Case, Flow, RunResult
from setting import (
    DTYPES,
    Subject,
    add_subject_arguments,
    device_and_backend,
    find_subject,
    model_elements,
    tiny_checkpoint,
)
from summary import machine


@dataclass(frozen=True)
class Setup:
    """What is compared.

    Attributes:
        subject: The weights.
        case: What every flow is given.
        flows: By name; the first is the one before.
        world_sizes: Numbers of ranks.
        repeats: Runs of a flow.
        limit: Seconds a run may take.
        facts: For the head of a report.
    """

    subject: Subject
    case: Case
    flows: dict[str, Flow]
    world_sizes: tuple[int, ...]
    repeats: int
    limit: float
    facts: dict[str, Any]

    @property
    def stem(self) -> str:
        """For the names of files."""
        name = re.sub(r", (\d+) blocks?$", r"-\1", self.subject.model).replace(" ", "-")
        return name + ("-lora" if self.case.adapter else "")


@dataclass(frozen=True)
class Check:
    """One promise about what a flow has loaded.

    Attributes:
        flow: Its name.
        nproc: Ranks.
        promise: A key of `PROMISES`.
        ok: Whether it is, on every rank in every run.
    """

    flow: str
    nproc: int
    promise: str
    ok: bool


SHARDS, BASE, ADAPTER = "shards", "base", "adapter"
PROMISES = {
    SHARDS: "every rank's shards, buffers and tensor attributes equal the first flow's",
    BASE: "all but the adapter equals, on every rank, what a load without an adapter gives",
    ADAPTER: "the adapter's full values equal, on every rank, those of get_peft_model in one process, same seed",
}


def add_arguments(parser: argparse.ArgumentParser, flows: Sequence[str]) -> None:
    """The arguments that `set_up` looks at."""
    add_subject_arguments(parser)
    parser.add_argument("--component", nargs="+", help="to load (default: a family's; with --model-path, the folder)")
    parser.add_argument("--scale", type=float, help="depth as a part of the published one, such as 0.25")
    parser.add_argument("--lora", action="store_true", help="add a new adapter to the attention projections")
    parser.add_argument("--rank", type=int, default=64, help="of the adapter (default: 64)")
    parser.add_argument("--init", default="gaussian", choices=INITS, help="of the adapter (default: gaussian)")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter (default: 0)")
    parser.add_argument("--flows", nargs="+", metavar="FLOW", help=f"beside before (default: {' '.join(flows)})")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a run may take (default: 600)")
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, 2 ranks, 1 run")


def set_up(args: argparse.Namespace, stack: contextlib.ExitStack, script: str, flows: Sequence[str]) -> Setup:
    """Checks the call, makes the checkpoint where there is none, and says what will run.

    Raises:
        UsageError: A wrong call, no weights there, or too little memory or disk; nothing was written.
    """
    world_sizes = tuple(dict.fromkeys(args.nproc or ([2] if args.quick else [2, 4])))
    repeats = args.repeats or (1 if args.quick else 3)
    positive({"--nproc": world_sizes, "--repeats": args.repeats, "--layers": args.layers, "--rank": args.rank})
    positive({"--limit": args.limit}, least=0.001)
    files = {f"--{name}": getattr(args, name, None) for name in ("json", "markdown")}
    check_outputs(files, args.out)

    import harness

    harness.fork_server()  # it imports what the ranks need while this process does the same
    import models
    import peers

    everything = {**peers.PEERS, **peers.OURS}
    names = list(dict.fromkeys([peers.BEFORE, *(args.flows or flows)]))
    unknown = [name for name in names if name not in everything]
    if unknown:
        raise UsageError(f"no flow {unknown[0]!r}: expected some of {', '.join(everything)}")
    device, backend = device_and_backend(args)
    dtype = getattr(torch, DTYPES[args.dtype])

    def before_writing(family: str, layers: int | None) -> None:
        components = args.component or _components(family)
        whole = model_elements(family, layers) * dtype.itemsize
        converted = whole if args.dtype != "bf16" else 0
        _check_room(device, [whole] * len(components), [converted] * len(components), world_sizes)

    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{script}-")))
    subject = find_subject(args, scratch, args.component, before_writing)
    check_evictable(subject.files)
    _check_room(device, *_sizes(subject, dtype), world_sizes)
    case = Case(
        path=subject.path,
        components=subject.components,
        dtype=dtype,
        device=device,
        backend=backend,
        tiny=tiny_checkpoint(scratch),
        imports=models.component_class,
        adapter=Adapter(args.rank, args.init, args.seed) if args.lora else None,
    )
    facts = {
        "command": " ".join(["python", f"benchmarks/{script}.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | {"device": device, "backend": backend},
        "checkpoint": subject.facts,
        "dtype": args.dtype,
        "adapter": f"LoRA, rank {args.rank}, init {args.init}, seed {args.seed}" if args.lora else None,
        "repeats": repeats,
    }
    return Setup(subject, case, {n: everything[n] for n in names}, world_sizes, repeats, args.limit, facts)


def _components(family: str) -> Sequence[str]:
    import make_checkpoint

    return make_checkpoint.FAMILIES[family].components


def _sizes(subject: Subject, dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Bytes of each component in memory, and of its tensors that are not in the files as they are in memory."""
    whole, converted = [], []
    for weights in subject.weights:
        entries = weights.checkpoint.entries.values()
        sizes = [(e.dtype, e.nbytes // e.dtype.itemsize * dtype.itemsize) for e in entries if e.dtype.is_floating_point]
        whole.append(sum(nbytes for _, nbytes in sizes))
        converted.append(sum(nbytes for kept, nbytes in sizes if kept != dtype))
    return whole, converted


def _check_room(device: str, whole: Sequence[int], converted: Sequence[int], world_sizes: Sequence[int]) -> None:
    """The flow before maps what it need not convert; the rest is private to each rank, beside its shards.

    On an accelerator shards are not in host memory, and one component at a time is whole on the device.
    """
    for nproc in world_sizes:
        shards = sum(whole) // nproc
        if device == "cpu":
            check_memory(shards + max(converted), nproc)
        else:
            check_memory(max(converted), nproc)
            ranks = -(-nproc // torch.accelerator.device_count())  # on one device
            check_device_memory(torch.device(device), ranks * ((sum(whole) - max(whole)) // nproc + max(whole)))


def run_all(setup: Setup, on_result: Callable[[RunResult], None]) -> list[RunResult]:
    """Every flow on every number of ranks, cold; raises UsageError where the files cannot be evicted."""
    import harness
    from page import evict

    check_evicted(evict(setup.subject.files), setup.subject.files)
    results: list[RunResult] = []
    for nproc in setup.world_sizes:
        results += harness.run_interleaved(
            setup.flows,
            setup.case,
            nproc=nproc,
            cache="cold",
            files=setup.subject.files,
            repeats=setup.repeats,
            limit=setup.limit,
            on_result=on_result,
        )
    return results


def compare_shards(setup: Setup, results: Sequence[RunResult]) -> list[Check]:
    """Every flow's shards, in every run, against those of the first run that loaded."""
    checks = []
    for nproc in setup.world_sizes:
        loaded = [run for run in results if run.nproc == nproc and run.status == "ok"]
        for flow, mine in _by_flow(loaded):
            checks.append(Check(flow, nproc, SHARDS, all(run.digests == loaded[0].digests for run in mine)))
    return checks


def compare_adapter(setup: Setup, results: Sequence[RunResult], on_result: Callable[[RunResult], None]) -> list[Check]:
    """Base and adapter of every flow against loads made for this purpose; nothing where there is no adapter."""
    checks: list[Check] = []
    for nproc in setup.world_sizes if setup.case.adapter else ():
        plain, adapter = _references(setup, nproc, on_result)
        for flow, mine in _by_flow([run for run in results if run.nproc == nproc and run.status == "ok"]):
            base = all(tuple(rank.base_digest for rank in run.ranks) == plain for run in mine)
            added = adapter is not None and all(rank.adapter_digest == adapter for run in mine for rank in run.ranks)
            checks += [Check(flow, nproc, BASE, base), Check(flow, nproc, ADAPTER, added)]
    return checks


def _by_flow(runs: Sequence[RunResult]) -> list[tuple[str, list[RunResult]]]:
    return [(flow, [run for run in runs if run.flow == flow]) for flow in dict.fromkeys(run.flow for run in runs)]


def _references(
    setup: Setup, nproc: int, on_result: Callable[[RunResult], None]
) -> tuple[tuple[str | None, ...], str | None]:
    """Each rank's digest of a load without an adapter, and the adapter's in one process; off the record."""
    import harness
    import peers

    files = setup.subject.files
    bare = replace(setup.case, adapter=None)
    plain = harness.run_flow(
        peers.all_load, bare, name="without an adapter", nproc=nproc, cache="cold", files=files, limit=setup.limit
    )
    single = harness.run_flow(
        peers.one_process, setup.case, name="one process", nproc=1, cache="cold", files=files, limit=setup.limit
    )
    on_result(plain)
    on_result(single)
    return plain.digests, single.ranks[0].adapter_digest if single.ranks else None


def verdict(results: Sequence[RunResult], checks: Sequence[Check]) -> int:
    """Exit code: 1 if one of our flows did not load, or any flow loaded something else; else 0."""
    import peers

    failed = any(run.status in ("failed", "timed out") and run.flow in peers.OURS for run in results)
    return int(failed or not all(check.ok for check in checks))


def show(run: RunResult) -> None:
    """One line a run, while they go."""
    what = f"{run.seconds:6.2f} s" if run.status == "ok" else f"{run.status}: {run.reason}"
    print(f"{run.nproc} ranks, run {run.repeat + 1}, {run.flow}: {what}", flush=True)
