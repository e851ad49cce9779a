#!/usr/bin/env python3
"""Saving a model from FSDP2 shards: ours and the public flows, on the same shards in the same processes.

    python benchmarks/saving_speed.py --quick                                  a small model, under a minute
    python benchmarks/saving_speed.py --nproc 2 4 --repeats 3                  SD3.5-medium's real shape, 4.9 GB
    python benchmarks/saving_speed.py --model-path MODEL --component transformer

Each number of ranks loads the model once and then saves it by each flow in turn, each time into a new folder that is
removed again; what is dirty is flushed before the clock starts. `ours` flushes its files to the storage before it is
done, as a save that is all or nothing has to; the others do not. The seconds up to that flush are given beside it.

    ours         metashard.save_component
    gather       get_model_state_dict(full_state_dict=True, cpu_offload=True), save_pretrained on rank 0
    dcp          torch.distributed.checkpoint's HuggingFaceStorageWriter, with consolidation into files of full tensors

Exit code: 0; 1 if our files are not those of `gather`, byte for byte, or other bytes were written than they hold; 2 for
a wrong call.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tools")]

from harness import fork_server  # noqa: E402  found by the line above
from memory import Memory  # noqa: E402
from preflight import (  # noqa: E402
    UsageError,
    as_script,
    check_disk,
    check_memory,
    check_outputs,
    check_weights,
    command_line,
    positive,
)
from setting import (  # noqa: E402
    DTYPES,
    add_subject_arguments,
    count_elements,
    device_and_backend,
    find_subject,
    model_elements,
)
from summary import machine, markdown_table, plain  # noqa: E402

import metashard  # noqa: E402

GB = 1e9
COPIES = 5  # at the most in the folder at a time: what ours and gather have saved, and dcp's files, shards and whole


@dataclass(frozen=True)
class Source:
    """What the ranks load and save.

    Attributes:
        path: Checkpoint folder.
        component: Which of it; None is the folder itself.
        dtype: To load and save in.
        device: "cpu", "cuda", ...
        backend: Of the process group.
    """

    path: Path
    component: str | None
    dtype: torch.dtype
    device: str
    backend: str


def ours(module: nn.Module, source: Source, out: Path) -> dict[str, Any]:
    """Every rank its own bytes."""
    report = metashard.save_component(module, out)
    return {"flush": report.phases["flush"], "written": list(report.written)}


def gather(module: nn.Module, source: Source, out: Path) -> dict[str, Any]:
    """Everything to rank 0, which saves as a single process would."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        from models import build_shell

        whole = build_shell(source.path, source.component, source.dtype)
        whole.load_state_dict(state, assign=True)
        whole.save_pretrained(out, max_shard_size="5GB")  # type: ignore[operator]
    return {}


def with_dcp(module: nn.Module, source: Source, out: Path) -> dict[str, Any]:
    """Every rank a file of its shards, then files of full tensors out of these."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(module)
    writer = dcp.HuggingFaceStorageWriter(
        path=str(out),
        fqn_to_index_mapping=dict.fromkeys(state, 1),
        save_distributed=True,
        enable_consolidation=True,
        thread_count=4,
        thread_count_consolidation=4,
    )
    dcp.save(state, storage_writer=writer)
    return {}


FLOWS: dict[str, Callable[[nn.Module, Source, Path], dict[str, Any]]] = {
    "ours": ours,
    "gather": gather,
    "dcp": with_dcp,
}


def measure(flow: str, module: nn.Module, source: Source, out: Path) -> dict[str, Any]:
    """One save; seconds of the slowest rank, of these our flush, and each rank's peak above its start."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    start = time.perf_counter()
    with Memory() as memory:
        told = FLOWS[flow](module, source, out)
        dist.barrier()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (time.perf_counter() - start, memory.peak_host))
    return {"flush": 0.0, **told, "seconds": max(t for t, _ in ranks), "peaks": [peak for _, peak in ranks]}


def rank_main(rank: int, nproc: int, source: Source, work: str, repeats: int) -> None:
    """Load once, save by each flow in turn. Leaves the last of `ours` and `gather`, and results.json."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))
    if source.device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(source.backend, store=dist.FileStore(f"{work}/store", nproc), rank=rank, world_size=nproc)
    mesh = init_device_mesh(source.device, (nproc,), mesh_dim_names=("shard",))
    module = metashard.load_component(source.path, source.component, mesh=mesh, dtype=source.dtype)
    results: dict[str, list[Any]] = {flow: [] for flow in FLOWS}
    for number in range(repeats + 1):  # the first round, not counted, imports and fills pools
        for flow in FLOWS:
            out = Path(work, flow)
            told = measure(flow, module, source, out)
            if rank == 0 and (number < repeats or flow == "dcp"):
                shutil.rmtree(out)
            if rank == 0 and number:
                results[flow].append(told)
                print(f"{nproc} ranks, {flow}: {told['seconds']:.2f} s", flush=True)
    if rank == 0:
        Path(work, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def differences(folder: Path, expected: Path) -> list[str]:
    """Weight and index files that are not equal; configs differ in the name of the folder that diffusers keeps."""
    names = {path.name for path in (*folder.iterdir(), *expected.iterdir()) if path.name != "config.json"}
    both = {name for name in names if (folder / name).is_file() and (expected / name).is_file()}
    equal = {name for name in both if filecmp.cmp(folder / name, expected / name, shallow=False)}
    return sorted(names - equal)


def compare(source: Source, nproc: int, repeats: int, work: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All flows on `nproc` ranks: their figures, and what is wrong with ours."""
    work.mkdir()
    method = fork_server().get_start_method()
    mp.start_processes(rank_main, (nproc, source, str(work), repeats), nprocs=nproc, start_method=method)
    runs = json.loads((work / "results.json").read_text())
    wrong = [f"{nproc} ranks: {name} differs from gather's" for name in differences(work / "ours", work / "gather")]
    nbytes = check_weights(work / "ours").nbytes
    written = {sum(run["written"]) for run in runs["ours"]}
    if written != {nbytes}:
        wrong.append(f"{nproc} ranks: {written} bytes were written for tensors of {nbytes}")
    best = statistics.median(run["seconds"] for run in runs["ours"])
    found = []
    for flow, told in runs.items():
        seconds = statistics.median(run["seconds"] for run in told)
        found.append(
            {
                "flow": flow,
                "nproc": nproc,
                "nbytes": nbytes,
                "median": seconds,
                "before_flush": statistics.median(run["seconds"] - run["flush"] for run in told),
                "to_ours": seconds / best,
                "peak_host_bytes": max(max(run["peaks"]) for run in told),
                "runs": told,
            }
        )
    shutil.rmtree(work)
    return found, wrong


def report(facts: dict[str, Any], found: Sequence[dict[str, Any]], wrong: Sequence[str]) -> str:
    """The Markdown page."""
    rows = []
    for one in found:
        seconds = [run["seconds"] for run in one["runs"]]
        rows.append(
            [
                f"{one['flow']}, {one['nproc']} ranks",
                f"{one['median']:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
                f"{one['before_flush']:.2f}",
                f"{one['to_ours']:.2f}",
                f"{one['nbytes'] / one['median'] / GB:.2f}",
                f"{one['peak_host_bytes'] / 1e6:.0f}",
            ]
        )
    headers = ["flow", "seconds", "without flush", "to ours", "GB/s", "peak of a rank above its start, MB"]
    model = facts["checkpoint"]
    host = ", ".join(f"{name} {value}" for name, value in facts["machine"].items())
    lines = [
        "# Saving speed",
        "",
        f"`{facts['command']}`, {facts['date']}.",
        f"{model['model']}, {model['component'] or 'whole folder'}: {model['gigabytes']} GB, as {facts['dtype']}.",
        f"{host}.",
        f"Medians of {facts['repeats']} interleaved run(s), in brackets the range.",
        "",
        markdown_table(headers, rows),
        "",
        f"Our files are those of save_pretrained, every byte written once: {'; '.join(wrong) or 'yes'}",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_subject_arguments(parser)
    parser.add_argument("--component", help="to save (default: transformer; with --model-path, the folder itself)")
    parser.add_argument("--nproc", type=int, nargs="+", help="numbers of ranks (default: 2 4; with --quick, 2)")
    parser.add_argument("--repeats", type=int, help="saves by each flow (default: 3; with --quick, 1)")
    parser.add_argument("--quick", action="store_true", help="a small model, 2 ranks, 1 repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")
    args = parser.parse_args(argv)

    def body() -> int:
        with contextlib.ExitStack() as stack:
            return _run(args, stack)

    return command_line("saving_speed", body)


def _run(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    world_sizes = list(dict.fromkeys(args.nproc or ([2] if args.quick else [2, 4])))
    repeats = args.repeats if args.repeats is not None else (1 if args.quick else 3)
    positive({"--nproc": world_sizes, "--repeats": repeats, "--layers": args.layers})
    check_outputs({"--json": args.json, "--markdown": args.markdown})
    if args.workdir is not None:
        check_disk(args.workdir, 0)
        args.workdir.mkdir(parents=True, exist_ok=True)
    device, backend = device_and_backend(args)
    dtype = getattr(torch, DTYPES[args.dtype])
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saving-speed-", dir=args.workdir)))

    def check_room(elements: int, copies: int) -> None:
        check_disk(scratch, elements * dtype.itemsize * copies)
        check_memory(2 * elements * dtype.itemsize, 1, what="all shards and what gather holds on rank 0")

    component = args.component or (None if args.model_path else "transformer")
    subject = find_subject(
        args,
        scratch,
        [component] if component else None,
        before_writing=lambda family, layers: check_room(model_elements(family, layers), COPIES + 1),
    )
    check_room(count_elements(subject.files), COPIES)
    config = json.loads((subject.path / (component or "") / "config.json").read_text())
    if "_class_name" not in config:
        raise UsageError(f"{subject.path / (component or '')} is no diffusers model; pass one, or its --component")
    facts = {
        "command": " ".join(["python", "benchmarks/saving_speed.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | {"device": device, "backend": backend},
        "checkpoint": subject.facts,
        "dtype": args.dtype,
        "repeats": repeats,
    }
    source = Source(subject.path, component, dtype, device, backend)
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    for nproc in world_sizes:
        told, problems = compare(source, nproc, repeats, scratch / f"ranks-{nproc}")
        found += told
        wrong += problems
    text = report(facts, found, wrong)
    print("\n" + text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        args.json.write_text(json.dumps(plain(facts | {"flows": found, "wrong": wrong}), indent=2))
    return int(bool(wrong))


if __name__ == "__main__":
    as_script(main)
