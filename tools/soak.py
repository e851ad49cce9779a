"""Load and free a component many times in one process group: what a process holds must not grow.

    python tools/soak.py --loads 200

Every rank counts its anonymous memory, threads, open files and process groups after each load, once the module is gone.
The last line tells the growth; exit code 1 if anything grew.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import metashard
from metashard.report import anonymous_host_bytes

# What memory may wander. The C heap takes 3 to 5 MiB more in the first dozen loads and stays there; a shard of the
# component below, on few ranks, that every load leaves behind is several times this in 8 loads.
MOST_BYTES = 8 << 20
WARM_UP = 6  # loads by each strategy that are not counted: arenas, caches of imports and classes

# 3 blocks, some 20 MB in fp32. Its fp32 pins make a second process group in a bf16 load.
COMPONENT = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 96,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 768,
    "num_layers": 3,
}


@dataclass(frozen=True)
class Held:
    """What a process holds: anonymous memory in bytes, threads of Python and of the system, files, process groups."""

    memory: int
    python_threads: int
    threads: int
    files: int
    groups: int
    groups_made: int

    @staticmethod
    def now() -> Held:
        """Counted after a garbage collection; what malloc keeps for later goes back to the system first."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        world: Any = dist.distributed_c10d._world
        return Held(
            memory=anonymous_host_bytes(),
            python_threads=threading.active_count(),
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            groups=len(world.pg_map),
            groups_made=world.group_count,
        )

    @property
    def grew(self) -> list[str]:
        """Taken as growth: what is more than it may be."""
        return [name for name, n in asdict(self).items() if n > (MOST_BYTES if name == "memory" else 0)]


def growth(held: list[Held]) -> Held:
    """Median of the last quarter less that of the first."""
    quarter = max(1, len(held) // 4)
    columns = zip(*map(astuple, held), strict=True)
    return Held(*(int(median(column[-quarter:]) - median(column[:quarter])) for column in columns))


def soak(folder: str, strategies: list[str], loads: int, *, every: int = 0, seconds: float = 600.0) -> dict[str, Held]:
    """Load and free a component `loads` times by each strategy in turns, on a new mesh each; call it on every rank.

    Args:
        folder: The component.
        strategies: Strategies of `LoadPolicy`.
        loads: Loads by each, after the warm-up.
        every: Print a line on rank 0 every so many loads; 0 for none.
        seconds: Timeout of a phase of a load.

    Returns:
        Strategy -> growth on this rank.
    """
    held: dict[str, list[Held]] = {strategy: [] for strategy in strategies}
    gc.collect()
    gc.freeze()  # what was imported is not looked through again after every load
    for number in range(WARM_UP + loads):
        for strategy in strategies:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
            policy = metashard.LoadPolicy(strategy=strategy, progress=False, timeout=seconds)
            metashard.load_component(folder, mesh=mesh, dtype=torch.bfloat16, load=policy)
            held[strategy].append(Held.now())
        if every and (number + 1) % every == 0 and dist.get_rank() == 0:
            print(f"{number + 1:5} loads each: {held[strategies[0]][-1]}", flush=True)
    gc.unfreeze()
    return {strategy: growth(values[WARM_UP:]) for strategy, values in held.items()}


def save_component(folder: Path) -> None:
    """Write the component that is loaded."""
    from diffusers import WanTransformer3DModel

    WanTransformer3DModel(**COMPONENT).save_pretrained(folder)


def _rank(rank: int, args: argparse.Namespace, folder: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(args.nproc)
    files = dist.FileStore(store, args.nproc)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=args.nproc, timeout=timedelta(minutes=5))
    start = time.perf_counter()
    mine = soak(folder, args.strategies, args.loads, every=args.every)
    everyone: list[Any] = [None] * args.nproc
    dist.all_gather_object(everyone, mine)
    grown = [held for ranks in everyone for held in ranks.values()]
    most = Held(*map(max, zip(*map(astuple, grown), strict=True)))
    if rank == 0:
        print(
            f"soak: {args.loads} loads each of {', '.join(args.strategies)} on {args.nproc} ranks in "
            f"{time.perf_counter() - start:.0f} s; most growth of a rank: memory {most.memory / 2**20:+.2f} MiB, "
            f"threads {most.threads:+d}, files {most.files:+d}, process groups {most.groups:+d}: "
            + (f"GREW: {', '.join(most.grew)}" if most.grew else "ok")
        )
    dist.destroy_process_group()
    sys.exit(1 if most.grew else 0)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=200, help="loads by each strategy (default 200)")
    parser.add_argument("--strategies", nargs="+", default=["direct", "rank0", "stream"])
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--every", type=int, default=50, help="print a line every so many loads (default 50)")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="metashard-soak-") as folder:
        save_component(Path(folder))
        try:
            mp.spawn(_rank, (args, folder, str(Path(folder) / "store")), nprocs=args.nproc)
        except mp.ProcessExitedException:  # the line above it says what grew, or the rank's own traceback
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
