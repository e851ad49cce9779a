"""The command line: ``torchrun -m metashard load PATH --component transformer``, ``metashard plan PATH ...``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from metashard.errors import MetaShardError
from metashard.load import load_component
from metashard.plot import check_drawable
from metashard.policy import STRATEGIES, TRANSPORTS, LoadPolicy, ShardPolicy
from metashard.report import Comparison, LoadReport, Mismatch
from metashard.verify import digest_shards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        Exit code: 0; 1 if a check of `verify` failed, 2 if a load failed (on every rank).
    """
    args = make_parser().parse_args(argv)
    if args.command == "verify" and args.against is not None:
        return _verify_against(args)
    if args.command == "verify" and args.lora:
        return _verify_lora(args)
    return {"load": _load, "verify": _verify, "plan": _plan}[args.command](args)


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(prog="metashard", description="Load model components straight into FSDP2 shards.")
    commands = parser.add_subparsers(dest="command", required=True)
    load = commands.add_parser(
        "load",
        help="load a component on all ranks of torchrun (or in one process) and print the report",
        description="Load a component into FSDP2 shards and print what it took. Run it under torchrun: "
        "torchrun --nproc-per-node 2 -m metashard load PATH --component transformer",
    )
    verify = commands.add_parser(
        "verify",
        help="check what a load promises on all ranks of torchrun (or in one process)",
        description="Load a component, read its files again and compare them with every rank's shards, tensor by "
        "tensor; what no file holds is compared from rank to rank. With --lora: load it without an adapter and twice "
        "with a new one, and check that its base, its adapter and its buffers are what they have to be on every rank. "
        "With --against: compare two checkpoints tensor by tensor, in this process, without loading either.",
    )
    plan = commands.add_parser(
        "plan",
        help="tell what a load on any number of ranks would do, in this process alone",
        description="Read config and headers, no weights, and print bytes, reads and peaks of a rank for every "
        "strategy, the FSDP groups, and what auto would pick.",
    )
    for command in (load, verify, plan):
        hub = "" if command is plan else ", or a Hub id"
        command.add_argument("path", help=f"a pipeline folder, a folder that is one model{hub}")
        command.add_argument("--component", help="component of the pipeline, such as transformer")
        command.add_argument("--strategy", choices=STRATEGIES, default="auto")
        command.add_argument("--transport", choices=TRANSPORTS, default="scatter")
        command.add_argument("--dtype", choices=DTYPES, help="dtype to load in (default: as from_pretrained)")
        command.add_argument("--variant", help='weight variant, such as "fp16"')
        command.add_argument("--wrap", nargs="+", help="class names of modules to wrap (default: found in the model)")
    verify.add_argument("--against", metavar="OTHER", help="compare the files with those of another folder instead")
    verify.add_argument("--lora", action="store_true", help="check a load with a new LoRA adapter instead")
    verify.add_argument("--rank", type=int, default=8, help="rank of the adapter")
    verify.add_argument("--targets", nargs="+", help="names of the modules to adapt (default: attention projections)")
    verify.add_argument("--style", choices=("peft", "inject"), default="peft", help="how the adapter is added")
    verify.add_argument("--seed", type=int, default=0)
    for command in (load, verify):
        command.add_argument("--revision", help="Hub revision")
        command.add_argument("--replicas", type=int, default=1, help="HSDP: number of replicas (default 1: plain FSDP)")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument("--world-size", type=int, help="number of ranks of plain FSDP")
    size.add_argument("--mesh", help='mesh for HSDP, such as "2x8": replicas x ranks of a replica')
    plan.add_argument("--device", default="cuda", help="device type that shards are for (default cuda)")
    plan.add_argument("--lora-rank", type=int, help="with a new LoRA adapter of this rank on the attention projections")
    plan.add_argument("--storage-gbps", type=float, help="GB/s of the storage for all ranks together: adds seconds")
    plan.add_argument("--network-gbps", type=float, help="GB/s that one rank sends or receives: adds seconds")
    for command in (load, verify, plan):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    load.add_argument("--digest", action="store_true", help="also print the SHA-256 of every rank's shards")
    load.add_argument("--plot", metavar="FILE", help="also draw phases and memory into FILE (.png, .svg, ...)")
    return parser


def _load(args: argparse.Namespace) -> int:
    # Before the load, which may take minutes; on rank 0 alone, whose machine it is that draws.
    if args.plot is not None and os.environ.get("RANK", "0") == "0":
        try:
            check_drawable(args.plot)
        except (ImportError, ValueError, OSError) as error:
            print(f"metashard: --plot: {error}", file=sys.stderr)
            return 2
    with process_group() as device_type:
        try:
            _, report, digests = _load_and_digest(args, device_type)
        except MetaShardError as error:
            return _failed(error)
        if dist.get_rank() == 0:
            print(report.to_json() if args.json else report)
            for rank, digest in enumerate(digests):
                print(f"  digest of rank {rank}: {digest}", file=sys.stderr if args.json else sys.stdout)
            if args.plot is not None:
                report.plot(args.plot)
    return 0


def _verify(args: argparse.Namespace) -> int:
    with process_group() as device_type:
        try:
            compared: Any = _load_component(args, device_type, verify="full")[1].verified
        except MetaShardError as error:
            if not isinstance(error.got, Comparison):
                return _failed(error)
            compared = error.got
        if dist.get_rank() == 0 and args.json:
            print(json.dumps(asdict(compared), indent=2))
        elif dist.get_rank() == 0:
            _print_mismatches(compared.mismatches)
            print(f"metashard verify: {compared}")
    return 1 if compared.mismatches else 0


def _print_mismatches(mismatches: Sequence[Mismatch]) -> None:
    rows = [("tensor", "rank", "elements", "compared with", "expected", "got")]
    rows += [
        (
            m.name,
            str(m.rank),
            str(m.elements),
            f"{m.file} at byte {m.offset}" if m.file else "other ranks",
            m.expected,
            m.got,
        )
        for m in mismatches
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows if mismatches else ():
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _failed(error: MetaShardError) -> int:
    if dist.get_rank() == 0:  # every rank raises the same
        print(f"metashard: {type(error).__name__}: {error}", file=sys.stderr)
    return 2


def _verify_lora(args: argparse.Namespace) -> int:
    from peft import LoraConfig

    from metashard.adapters import LoraSpec
    from metashard.verify_lora import ATTENTION, verify_lora

    with process_group() as device_type:
        try:
            checks = verify_lora(
                args.path,
                args.component,
                mesh=make_mesh(device_type, args.replicas),
                lora=LoraSpec(LoraConfig(r=args.rank, target_modules=args.targets or ATTENTION), style=args.style),
                seed=args.seed,
                dtype=DTYPES[args.dtype] if args.dtype else None,
                shard=ShardPolicy(wrap=args.wrap),
                load=LoadPolicy(strategy=args.strategy, transport=args.transport),
                variant=args.variant,
                revision=args.revision,
            )
        except MetaShardError as error:
            return _failed(error)
        if dist.get_rank() == 0 and args.json:
            print(json.dumps([asdict(check) for check in checks], indent=2))
        for check in checks if dist.get_rank() == 0 and not args.json else ():
            print(f"{'ok    ' if check.ok else 'WRONG '} {check.name}")
            for fault in check.faults[:10]:
                print(f"         {fault}")
    return 0 if all(check.ok for check in checks) else 1


def _verify_against(args: argparse.Namespace) -> int:
    from metashard.compare_files import compare_checkpoints

    plain = vars(make_parser().parse_args(["verify", "", "--against", ""]))
    of_loads = [name for name in plain if name not in ("path", "against", "component", "variant", "json")]
    given = [f"--{name}" for name in of_loads if getattr(args, name) != plain[name]]
    if given:
        print(f"metashard: --against compares files and loads nothing: leave out {', '.join(given)}", file=sys.stderr)
        return 2
    try:
        found = compare_checkpoints(args.path, args.against, args.component, variant=args.variant)
    except MetaShardError as error:
        print(f"metashard: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(found.to_json() if args.json else f"metashard verify: {found}")
    return 1 if found.differences else 0


def _plan(args: argparse.Namespace) -> int:
    from metashard.dry_run import plan_load
    from metashard.plan_table import print_plan

    lora = None
    if args.lora_rank is not None:
        from peft import LoraConfig

        from metashard.verify_lora import ATTENTION

        lora = LoraConfig(r=args.lora_rank, target_modules=ATTENTION)
    try:
        if (args.storage_gbps is None) != (args.network_gbps is None):
            raise ValueError("Give both --storage-gbps and --network-gbps, or neither.")
        if args.json and args.storage_gbps is not None:
            raise ValueError("--storage-gbps and --network-gbps add seconds to the table: leave out --json.")
        plan = plan_load(
            args.path,
            args.component,
            world_size=args.world_size,
            mesh_shape=_mesh_shape(args.mesh) if args.mesh is not None else None,
            dtype=DTYPES[args.dtype] if args.dtype else None,
            lora=lora,
            shard=ShardPolicy(wrap=args.wrap),
            load=LoadPolicy(strategy=args.strategy, transport=args.transport),
            variant=args.variant,
            device_type=args.device,
        )
        if args.json:
            print(plan.to_json())
        else:
            print_plan(plan, storage_gbps=args.storage_gbps, network_gbps=args.network_gbps)
    except (MetaShardError, ValueError, OSError) as error:
        print(f"metashard: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _mesh_shape(text: str) -> list[int]:
    sizes = text.split("x")
    if not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f'--mesh {text!r}: expected replicas x ranks of a replica, such as "2x8".')
    return [int(size) for size in sizes]


def _load_component(args: argparse.Namespace, device_type: str, *, verify: str = "basic") -> tuple[Any, LoadReport]:
    loaded: tuple[Any, LoadReport] = load_component(
        args.path,
        args.component,
        mesh=make_mesh(device_type, args.replicas),
        dtype=DTYPES[args.dtype] if args.dtype else None,
        shard=ShardPolicy(wrap=args.wrap),
        load=LoadPolicy(strategy=args.strategy, transport=args.transport, verify=verify),
        variant=args.variant,
        revision=args.revision,
        output_loading_info=True,
    )
    return loaded


def _load_and_digest(args: argparse.Namespace, device_type: str) -> tuple[Any, LoadReport, list[str]]:
    module, report = _load_component(args, device_type)
    digests: list[str] = []
    if args.digest:
        gathered: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, digest_shards(module))
        digests = [str(digest) for digest in gathered]
    return module, report, digests


def make_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """A mesh over all ranks: (shard,), or (replicate, shard) with more than one replica."""
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    if replicas < 1 or world % replicas:
        raise MetaShardError(f"{world} ranks cannot be cut into {replicas} replicas; choose a divisor.", got=replicas)
    return init_device_mesh(device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


@contextmanager
def process_group() -> Iterator[str]:
    """The process group that torchrun has prepared, or one of a single process; yields the device type to use.

    Takes the accelerator if every local rank has one of its own, else the CPU with gloo.
    """
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and torch.accelerator.device_count() >= local_world:
        device_type = accelerator.type
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        device_type = "cpu"
    backend = dist.get_default_backend_for_device(device_type)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device_type
    finally:
        dist.destroy_process_group()
