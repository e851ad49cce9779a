#!/usr/bin/env python3
"""Ray actors as ranks: they load a model into shards, train a LoRA in it, and return the report of the load.

    python examples/train_ray.py --ranks 8 --steps 200     one actor a GPU; RAY_ADDRESS names a cluster that is running
    python examples/train_ray.py --smoke                   one step of two actors on CPU

It writes a small checkpoint with random weights first, in a folder that all nodes have to see (`--out`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
import torch.distributed as dist
from flow_matching import evaluate, make_checkpoint, train
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh

import metashard
import metashard.integrations.ray as metashard_ray


class Trainer:
    """One rank. `ray.remote` makes it an actor, whose options decide its device."""

    def address(self) -> str:
        """Where all ranks meet; asked of rank 0's actor."""
        return metashard_ray.address()

    def set_up(self, rank: int, world_size: int, address: str, device_type: str) -> metashard_ray.Seat:
        """Become a rank."""
        self.seat = metashard_ray.join(rank, world_size, address, device_type=device_type)
        self.mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
        return self.seat

    def train(self, folder: Path, steps: int) -> dict[str, Any]:
        """Load and train; what a driver wants to know."""
        root, device = make_checkpoint(folder, "sd3"), self.seat.device
        torch.manual_seed(0)
        model, report = metashard.load_component(
            root,
            "transformer",
            mesh=self.mesh,
            dtype=torch.float32,
            lora=LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]),
            output_loading_info=True,
        )
        model.train()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=steps)
        before = evaluate(model, "sd3", device)
        train(model, optimizer, scheduler, "sd3", device, steps=range(steps))
        after = evaluate(model, "sd3", device)
        dist.destroy_process_group()
        return {"report": report, "before": before, "after": after}


def run(ranks: int, steps: int, folder: Path, device_type: str) -> None:
    """The driver: actors, then all of them through the same calls."""
    devices: dict[str, Any] = {"num_cpus": 1} if device_type == "cpu" else {"num_gpus": 1}
    actors = [ray.remote(Trainer).options(**devices).remote() for _ in range(ranks)]
    address = ray.get(actors[0].address.remote())
    seats = ray.get([actor.set_up.remote(rank, ranks, address, device_type) for rank, actor in enumerate(actors)])
    for seat in seats:
        print(f"rank {seat.rank}: {seat.device}, number {seat.local_rank} on node {seat.node_rank}")
    told = ray.get([actor.train.remote(folder, steps) for actor in actors])
    print(told[0]["report"])
    print(f"loss {told[0]['before']:.4f} before, {told[0]['after']:.4f} after {steps} steps")
    assert all(one["after"] == told[0]["after"] for one in told), "ranks differ"
    assert told[0]["after"] < told[0]["before"], "the adapter has not learned"


def main() -> None:
    """Parse arguments, start Ray or find it, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder that all nodes see (default: a temporary one on this machine)")
    parser.add_argument("--smoke", action="store_true", help="two actors on CPU, one step")
    args = parser.parse_args()
    accelerator = None if args.smoke else torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    ranks, steps = (2, 1) if args.smoke else (args.ranks, args.steps)
    # Without a cluster at RAY_ADDRESS this starts one here, for as long as the script runs.
    fresh: dict[str, Any] = {"num_cpus": ranks, "object_store_memory": 80 << 20} if args.smoke else {}
    ray.init("local" if args.smoke else None, include_dashboard=False, logging_level="ERROR", **fresh)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            run(ranks, steps, args.out or Path(temporary), device_type)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
