#!/usr/bin/env python3
"""Loads one component through every strategy and holds each against `from_pretrained`: what `make demo` runs.

    python tools/demo.py                           a synthetic SD3-shaped transformer on 2 CPU ranks
    python tools/demo.py --model PATH --nproc 8    your own checkpoint, on GPUs where there are any

Starts torchrun with this file as the worker. All strategies run in the same processes, one after another, each from
cold files: the page cache of the weight files is dropped before every load. Last of all each rank in turn loads the
whole component with the library's own `from_pretrained`, takes the parts that are its shards, and compares digests.

Exit code 0 when every digest is equal, 1 when one is not or a load failed, 2 on bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO_CHECKPOINT = ROOT / ".demo" / "sd3-small"
DEMO_MAX_SHARD_BYTES = 160_000_000
DTYPES = ("bf16", "fp16", "fp32")
# Strategy and transport of every row; None where nothing but replicated tensors travels.
RUNS: tuple[tuple[str, str | None], ...] = (
    ("rank0", "scatter"),
    ("rank0", "broadcast"),
    ("stream", "scatter"),
    ("direct", None),
    ("auto", None),
)


@dataclass(frozen=True)
class Row:
    """One load, as all ranks together saw it."""

    strategy: str
    transport: str | None
    chosen: str = ""
    seconds: float = 0.0  # the slowest rank's, by the clock around the call
    bytes_read: int = 0  # over all ranks
    peak_host_bytes: int = 0  # the highest rank's, above what it held before the call
    peak_device_bytes: int = 0
    digest: str = ""  # this rank's
    error: str = ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="folder of a pipeline or of one model (default: made in .demo)")
    parser.add_argument("--component", default="transformer", help="name in the pipeline (default: transformer)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="to load in (default: bf16)")
    parser.add_argument("--strategy", action="append", help="only this one; may be given again (default: all)")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU where there are accelerators too")
    parser.add_argument("--json", type=Path, help="also write the table's rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return _worker(args) if args.worker else _parent(args)


def _parent(args: argparse.Namespace) -> int:
    if args.nproc < 1:
        return _bad_input(f"--nproc must be at least 1, got {args.nproc}")
    known = {strategy for strategy, _ in RUNS}
    for strategy in args.strategy or ():
        if strategy not in known:
            return _bad_input(f"unknown strategy {strategy!r}: expected one of {', '.join(sorted(known))}")
    if args.model is None:
        try:
            model = _demo_checkpoint()
        except (OSError, ValueError) as error:
            return _bad_input(str(error))
    else:
        model = args.model.absolute()
        if not model.is_dir():
            return _bad_input(f"{args.model} is not a folder: expected a pipeline (with model_index.json) or one model")
        try:
            _locate(model, args.component)
        except ValueError as error:
            return _bad_input(str(error))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
    worker = [str(Path(__file__).resolve()), "--worker", "--model", str(model), "--component", args.component]
    worker += ["--dtype", args.dtype, *(["--cpu"] if args.cpu else [])]
    for strategy in args.strategy or ():
        worker += ["--strategy", strategy]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    # The children import metashard from this tree, whether or not it is installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        # The rows come back in a file: exit code 1 in a worker would bury the table under torchrun's own report.
        result = Path(folder) / "rows.json"
        finished = subprocess.run([*torchrun, *worker, "--json", str(result)], env=environment, check=False)
        if finished.returncode != 0 or not result.exists():
            print("demo: the ranks did not finish, see above", file=sys.stderr)
            return 1
        text = result.read_text()
    if args.json is not None:
        args.json.write_text(text)
    return 0 if all(row["equal"] for row in json.loads(text)) else 1


def _demo_checkpoint() -> Path:
    """The demo's pipeline folder; made at the first call, reused after that."""
    if (DEMO_CHECKPOINT / "model_index.json").exists():  # written last: the folder is complete
        print(f"using the checkpoint in {DEMO_CHECKPOINT.relative_to(ROOT)}", flush=True)
        return DEMO_CHECKPOINT
    print("making a checkpoint: an SD3-shaped transformer and a small text encoder, about 600 MB ...", flush=True)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from make_checkpoint import write_pipeline  # beside this file

    written = write_pipeline(DEMO_CHECKPOINT, "sd3-small", max_shard_bytes=DEMO_MAX_SHARD_BYTES, overwrite=True)
    print(f"wrote {written.weight_bytes / 1e6:.0f} MB in {len(written.files)} files", flush=True)
    return DEMO_CHECKPOINT


def _worker(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = _device(args.cpu)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if device.type == "cpu" else torch.distributed.get_default_backend_for_device(device.type)
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        return _compare_strategies(args, device, mesh)
    finally:
        dist.destroy_process_group()


def _device(cpu: bool) -> Any:
    """The accelerator of this local rank where each has one of its own, else the CPU."""
    import torch

    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if not cpu and torch.accelerator.is_available() and torch.accelerator.device_count() >= count:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, local)
    return torch.device("cpu")


def _compare_strategies(args: argparse.Namespace, device: Any, mesh: Any) -> int:
    import torch
    import torch.distributed as dist

    from metashard.verify import reference_digest

    model_path = args.model
    library, cls_name, folder = _locate(model_path, args.component)
    cls = getattr(importlib.import_module(library), cls_name)
    for name in ("accelerate", "peft", "transformers"):  # imports are over before any clock starts
        importlib.import_module(name)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _quiet_libraries(rank)
    dist.all_reduce(torch.zeros(1, device=device))  # so are the first connections
    runs = [run for run in RUNS if not args.strategy or run[0] in args.strategy]
    if rank == 0:
        size = sum(path.stat().st_size for path in weights)
        cold = "page cache dropped before every load" if hasattr(os, "posix_fadvise") else "page cache left as it is"
        print(
            f"{cls_name} in {args.dtype}: {size / 1e6:,.0f} MB in {len(weights)} file(s); "
            f"{world_size} rank(s) on {device.type}; {cold}",
            flush=True,
        )

    rows, module = [], None
    for strategy, transport in runs:
        module = None  # the shards of the last load go before the next one starts
        _release_memory()
        if rank == 0:
            _drop_page_cache(weights)
        dist.barrier()
        row, module = _load(args, dtype, mesh, strategy, transport)
        rows.append(row)
        if rank == 0:
            print(
                f"  {strategy}{f' ({transport})' if transport else ''}: {row.error or f'{row.seconds:.2f} s'}",
                flush=True,
            )

    expected = ""
    if module is None:  # the layout to compare in comes from a load that went well
        usable = next((run for run, row in zip(runs, rows, strict=True) if not row.error), None)
        if usable is not None:
            module = _load(args, dtype, mesh, *usable)[1]
    if module is not None:
        for turn in range(world_size):  # one at a time: the only place where a rank holds the whole component
            if turn == rank:
                reference = _reference(cls, library, folder, dtype)
                expected = reference_digest(reference, module)
                del reference
                _release_memory()
            dist.barrier()
    verdicts = [_on_all_ranks(bool(expected) and row.digest == expected) for row in rows]
    if rank == 0:
        _print_table(rows, verdicts, f"{cls_name}, {world_size} rank(s) on {device.type}, {args.dtype}")
        results = [{**asdict(row), "equal": equal} for row, equal in zip(rows, verdicts, strict=True)]
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _load(args: argparse.Namespace, dtype: Any, mesh: Any, strategy: str, transport: str | None) -> tuple[Row, Any]:
    """One load on all ranks: its row, the same on every rank but for the digest, and the module; None if it failed."""
    import torch
    import torch.distributed as dist

    import metashard

    options = {"strategy": strategy, "progress": False, **({"transport": transport} if transport else {})}
    component = args.component if (Path(args.model) / "model_index.json").exists() else None
    start = time.perf_counter()
    module, report, error = None, None, ""
    try:
        module, report = metashard.load_component(
            args.model,
            component,
            mesh=mesh,
            dtype=dtype,
            load=metashard.LoadPolicy(**options),
            output_loading_info=True,
        )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    except (metashard.MetaShardError, NotImplementedError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.perf_counter() - start
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (seconds, error))
    error = next((text for _, text in outcomes if text), "")
    if error or report is None:
        return Row(strategy, transport, error=error), None
    row = Row(
        strategy,
        transport,
        chosen=report.strategy,
        seconds=max(elapsed for elapsed, _ in outcomes),
        bytes_read=sum(entry.bytes_read for entry in report.ranks),
        peak_host_bytes=max(entry.peak_host_bytes for entry in report.ranks),
        peak_device_bytes=max(entry.peak_device_bytes for entry in report.ranks),
        digest=metashard.digest_shards(module),
    )
    return row, module


def _reference(cls: Any, library: str, folder: Path, dtype: Any) -> Any:
    """The component as the library itself loads it, whole, in host memory."""
    keyword = "dtype" if library == "transformers" else "torch_dtype"
    return cls.from_pretrained(folder, **{keyword: dtype})


def _on_all_ranks(verdict: bool) -> bool:
    import torch.distributed as dist

    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    return all(verdicts)


def _locate(model: Path, component: str) -> tuple[str, str, Path]:
    """Library, class name and folder of the component, found without metashard: the reference owes it nothing."""
    index_path = model / "model_index.json"
    if index_path.exists():
        index = json.loads(index_path.read_text())
        entry = index.get(component)
        if not isinstance(entry, list) or len(entry) != 2 or None in entry:
            names = [name for name, value in index.items() if isinstance(value, list) and None not in value]
            raise ValueError(f"{model} has no component {component!r}; it has {', '.join(sorted(names))}")
        return entry[0], entry[1], model / component
    config_path = model / "config.json"
    if not config_path.exists():
        raise ValueError(f"{model} has neither model_index.json nor config.json: expected a pipeline or one model")
    config = json.loads(config_path.read_text())
    if "_class_name" in config:
        return "diffusers", config["_class_name"], model
    if config.get("architectures"):
        return "transformers", config["architectures"][0], model
    raise ValueError(f"{config_path} names no class: expected '_class_name' or 'architectures'")


def _drop_page_cache(paths: list[Path]) -> None:
    """Asks the kernel to forget these files, so that every load reads them from storage."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _release_memory() -> None:
    """Gives freed host memory back to the system, so that the next load's peak is counted from what is truly in use.

    glibc keeps freed blocks below its mmap threshold (up to 32 MiB) in its heap. A later load that fills them again
    would seem to need no memory at all.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _quiet_libraries(rank: int) -> None:
    """No progress bars between the lines of the table; warnings from rank 0 only."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        if rank != 0:
            logging.set_verbosity_error()


def _print_table(rows: list[Row], verdicts: list[bool], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    on_device = any(row.peak_device_bytes for row in rows)
    table = Table(title=title)
    table.add_column("strategy")
    table.add_column("transport")
    table.add_column("seconds", justify="right")
    table.add_column("bytes read,\nall ranks", justify="right")
    table.add_column("peak host\nmemory a rank", justify="right")
    if on_device:
        table.add_column("peak device\nmemory a rank", justify="right")
    table.add_column("digest equal to\nfrom_pretrained", justify="center")
    for row, equal in zip(rows, verdicts, strict=True):
        name = row.strategy if row.chosen in ("", row.strategy) else f"{row.strategy} ({row.chosen})"
        figures = [f"{row.seconds:.2f}", f"{row.bytes_read / 1e6:,.0f} MB", f"{row.peak_host_bytes / 1e6:,.0f} MB"]
        if on_device:
            figures.append(f"{row.peak_device_bytes / 1e6:,.0f} MB")
        if row.error:
            figures = ["-"] * len(figures)
        verdict = "[red]failed[/red]" if row.error else ("[green]yes[/green]" if equal else "[red]NO[/red]")
        table.add_row(name, row.transport or "-", *figures, verdict)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print("Peak host memory: anonymous, above what the rank held before the load; its own shard is part of it.")
    console.print("File pages that the library's loader maps on rank 0 (strategy rank0) are not.")
    for row in rows:
        if row.error:
            console.print(f"{row.strategy}: {row.error}", markup=False)


def _bad_input(message: str) -> int:
    print(f"demo: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
