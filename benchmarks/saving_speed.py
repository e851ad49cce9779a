#!/usr/bin/env python3
"""Saving a model from FSDP2 shards: ours and the public flows, on the same shards in the same processes.

    python benchmarks/saving_speed.py --quick                       a small model, under a minute
    python benchmarks/saving_speed.py --nproc 2 4 --repeats 3       SD3.5-medium's real shape, 4.5 GB

Each number of ranks loads the model once and then saves it by each flow in turn, each time into a new folder that is
removed again; what is dirty is flushed before the clock starts. `ours` flushes its files to the storage before it is
done, as a save that is all or nothing has to; the others do not. The seconds up to that flush are given beside it.

    gather       get_model_state_dict(full_state_dict=True, cpu_offload=True), save_pretrained on rank 0
    dcp          torch.distributed.checkpoint's HuggingFaceStorageWriter, with consolidation into files of full tensors

Exit code: 0; 1 if our files are not those of `gather`, byte for byte.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tools")]

from harness import HostMemory, machine, markdown_table  # noqa: E402

import metashard  # noqa: E402

GB = 1e9


def ours(module: nn.Module, out: Path) -> dict[str, float]:
    """Every rank its own bytes."""
    return metashard.save_component(module, out).phases


def gather(module: nn.Module, out: Path) -> dict[str, float]:
    """Everything to rank 0, which saves as a single process would."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        from diffusers import SD3Transformer2DModel

        with torch.device("meta"):
            plain = SD3Transformer2DModel.from_config(module.config)
        plain.load_state_dict(state, assign=True)
        plain.save_pretrained(out, max_shard_size="5GB")
    return {}


def with_dcp(module: nn.Module, out: Path) -> dict[str, float]:
    """Every rank a file of its shards, then files of full tensors out of these."""
    state = get_model_state_dict(module)
    writer = HuggingFaceStorageWriter(
        path=str(out),
        fqn_to_index_mapping=dict.fromkeys(state, 1),
        save_distributed=True,
        enable_consolidation=True,
        thread_count=4,
        thread_count_consolidation=4,
    )
    dcp.save(state, storage_writer=writer)
    return {}


FLOWS: dict[str, Callable[[nn.Module, Path], dict[str, float]]] = {"ours": ours, "gather": gather, "dcp": with_dcp}


def measure(flow: str, module: nn.Module, out: Path, *, keep: bool) -> dict[str, Any]:
    """One save; seconds of the slowest rank, phases, and each rank's peak above its start."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    start = time.perf_counter()
    with HostMemory() as memory:
        phases = FLOWS[flow](module, out)
        dist.barrier()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (time.perf_counter() - start, memory.peak - memory.start))
    if dist.get_rank() == 0 and not keep:
        shutil.rmtree(out)
    return {"seconds": max(t for t, _ in told), "peaks": [peak for _, peak in told], "flush": phases.get("flush", 0.0)}


def rank_main(rank: int, nproc: int, checkpoint: str, work: str, repeats: int, results: Any) -> None:
    """Load once, save by each flow in turn."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // nproc))
    dist.init_process_group("gloo", store=dist.FileStore(f"{work}/store-{nproc}", nproc), rank=rank, world_size=nproc)
    mesh = init_device_mesh("cpu", (nproc,), mesh_dim_names=("shard",))
    module = metashard.load_component(checkpoint, "transformer", mesh=mesh, dtype=torch.bfloat16)
    for number in range(repeats + 1):  # the first round, not counted, imports and fills pools
        for flow in FLOWS:
            keep = number == repeats and flow != "dcp"
            told = measure(flow, module, Path(work, f"{flow}-{nproc}-{number}"), keep=keep)
            if rank == 0 and number:
                results.put((flow, told))
                print(f"{nproc} ranks, {flow}: {told['seconds']:.2f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def differences(folder: Path, expected: Path) -> list[str]:
    """Files that are not equal; without the name of the folder that diffusers keeps in a config."""
    weights = sorted(path.name for path in expected.iterdir() if path.suffix == ".safetensors")
    return [name for name in weights if not filecmp.cmp(folder / name, expected / name, shallow=False)]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="blocks of SD3.5-medium; all 24 without it")
    parser.add_argument("--quick", action="store_true", help="2 blocks, 1 repeat")
    parser.add_argument("--work", type=Path, help="folder for the checkpoint and what is saved (removed at the end)")
    args = parser.parse_args()
    layers, repeats = (2, 1) if args.quick else (args.layers, args.repeats)
    from make_checkpoint import write_pipeline

    wrong: list[str] = []
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        write_pipeline(Path(work, "model"), "sd3.5-medium", layers=layers)
        for nproc in args.nproc:
            context = mp.get_context("spawn")
            results = context.SimpleQueue()
            mp.spawn(rank_main, (nproc, f"{work}/model", work, repeats, results), nprocs=nproc)
            runs: dict[str, list[dict[str, Any]]] = {flow: [] for flow in FLOWS}
            while not results.empty():
                flow, told = results.get()
                runs[flow].append(told)
            saved = Path(work, f"ours-{nproc}-{repeats}")
            wrong += differences(saved, Path(work, f"gather-{nproc}-{repeats}"))
            nbytes = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
            best = statistics.median(run["seconds"] for run in runs["ours"])
            for flow, told in runs.items():
                seconds = sorted(run["seconds"] for run in told)
                middle = statistics.median(seconds)
                before = statistics.median(run["seconds"] - run["flush"] for run in told)
                peak = max(max(run["peaks"]) for run in told)
                rows.append(
                    [
                        f"{flow}, {nproc} ranks",
                        f"{middle:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})",
                        f"{before:.2f}",
                        f"{middle / best:.2f}",
                        f"{nbytes / middle / GB:.2f}",
                        f"{peak / GB:.2f}",
                    ]
                )
            for flow in ("ours", "gather"):
                shutil.rmtree(Path(work, f"{flow}-{nproc}-{repeats}"))
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{nbytes / GB:.2f} GB, {repeats} repeats")
    headers = ["flow", "seconds", "without flush", "to ours", "GB/s", "peak of a rank above its start, GB"]
    print(markdown_table(headers, rows))
    print(f"files that differ from those of save_pretrained: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
