#!/usr/bin/env python3
"""A full fine-tune of Wan on shards that metashard has loaded, with the parameters that its class keeps in fp32.

    torchrun --nproc-per-node 8 examples/train_full.py --steps 200     fp32 masters, computed in bf16
    torchrun --nproc-per-node 8 examples/train_full.py --bf16          bf16 parameters beside those pinned to fp32
    torchrun --nproc-per-node 2 examples/train_full.py --out RUN       and then, on another number of ranks,
    torchrun --nproc-per-node 4 examples/train_full.py --out RUN --resume
    python examples/train_full.py --smoke                              both, a few steps, on 2 ranks; resumed on 1

Wan keeps norms, the time embedder and a bare parameter of each block (`scale_shift_table`) in fp32. FSDP2 refuses such
a mixture among trainable parameters; metashard gives each dtype its own group, and mixed precision leaves the pinned
ones in fp32. Without torchrun it starts itself under it, on two ranks, and writes a small checkpoint first.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from flow_matching import (
    all_ranks,
    compare_losses,
    evaluate,
    load_progress,
    make_checkpoint,
    note_losses,
    save_progress,
    say,
    smoke,
    train,
    under_torchrun,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LinearLR, LRScheduler

import metashard

WAN = dict(sigmas=(0.0, 0.875), dtype=torch.bfloat16)  # times of the second expert; what the inputs are in


def load(
    folder: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """The model in shards, its optimizer and the schedule of its learning rate."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    model = metashard.load_component(
        folder,
        component,
        mesh=mesh,
        dtype=dtype,
        prepare=lambda module: module.enable_gradient_checkpointing(),
        shard=metashard.ShardPolicy(mp_policy=mixed if dtype == torch.float32 else None),
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return model, optimizer, LinearLR(optimizer, start_factor=1.0, end_factor=0.5, total_iters=steps)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    """A checkpoint: the weights as a folder that any library loads, and the rest of the run."""
    metashard.save_component(model, folder / "transformer_2", overwrite=True)  # every rank writes its shards
    save_progress(folder / "progress", model, optimizer, scheduler)


def resume(out: Path, mesh: DeviceMesh, dtype: torch.dtype, steps: int) -> nn.Module:
    """Go on from the checkpoint, on any number of ranks, and compare with the run that did not stop."""
    model, optimizer, scheduler = load(out / "checkpoint" / "transformer_2", None, mesh, dtype, steps)
    load_progress(out / "checkpoint" / "progress", model, optimizer, scheduler)
    start = scheduler.last_epoch
    losses = train(model, optimizer, scheduler, "wan", torch.device(mesh.device_type), steps=range(start, steps), **WAN)
    say(f"{dtype}:")
    compare_losses(out / "losses.json", losses, start=start, rounding=1e-3)
    return model


def check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Pinned parameters are fp32, the others as asked."""
    for name, parameter in model.named_parameters():
        pinned = not set(WanTransformer3DModel._keep_in_fp32_modules).isdisjoint(name.split("."))
        assert parameter.dtype == (torch.float32 if pinned else dtype), f"{name} is {parameter.dtype}"


def watch_compute(model: nn.Module) -> dict[str, torch.dtype]:
    """Note down in which dtypes a block's gathered parameters are computed with."""
    seen: dict[str, torch.dtype] = {}
    block = model.blocks[0]  # type: ignore[index]
    block.norm1.register_forward_pre_hook(lambda *_: seen.update({n: p.dtype for n, p in block.named_parameters()}))
    return seen


def fine_tune(root: Path, mesh: DeviceMesh, dtype: torch.dtype, steps: int, out: Path) -> None:
    """Train half the steps, checkpoint, train the rest; resume in a new model and compare; save and reload."""
    device = torch.device(mesh.device_type)
    model, optimizer, scheduler = load(root, "transformer_2", mesh, dtype, steps)
    check_dtypes(model, dtype)
    seen = watch_compute(model)
    before = evaluate(model, "wan", device, **WAN)
    assert seen["scale_shift_table"] == torch.float32
    assert seen["attn1.to_q.weight"] == torch.bfloat16
    train(model, optimizer, scheduler, "wan", device, steps=range(steps // 2), **WAN)
    save(out / "checkpoint", model, optimizer, scheduler)
    losses = train(model, optimizer, scheduler, "wan", device, steps=range(steps // 2, steps), **WAN)
    note_losses(out / "losses.json", losses)
    after = evaluate(model, "wan", device, **WAN)
    say(f"{dtype}: loss {before:.3f} before, {after:.3f} after {steps} steps")
    assert after < 0.95 * before, "the model has not learned"

    digest = metashard.digest_shards(model)
    model = resume(out, mesh, dtype, steps)
    assert metashard.digest_shards(model) == digest, "the resumed run ends with other weights"
    check_dtypes(model, dtype)
    say(f"{dtype}: the resumed run ends with the same weights")

    metashard.save_component(model.eval(), out / "saved", overwrite=True)
    again = metashard.load_component(out / "saved", mesh=mesh, dtype=dtype)
    assert metashard.digest_shards(again) == digest, "the saved model is another one"
    if dtype == torch.bfloat16:  # the plain model computes in the same dtypes
        sharded = evaluate(model, "wan", device, **WAN)
        if dist.get_rank() == 0:
            plain = WanTransformer3DModel.from_pretrained(out / "saved", torch_dtype=dtype).to(device)
            assert evaluate(plain, "wan", device, **WAN) == sharded
        dist.barrier()
    say(f"{dtype}: saved from shards, reloaded, equal")


def main() -> None:
    """Parse arguments, start under torchrun, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters instead of fp32 masters computed in bf16")
    parser.add_argument("--out", type=Path, help="folder for checkpoints (default: a temporary one)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, on these ranks")
    parser.add_argument("--smoke", action="store_true", help="both ways, a few steps; one of them resumed on one rank")
    args = parser.parse_args()
    if args.resume and args.out is None:
        parser.error("--resume goes on from what is in --out: pass it")
    smoke(args)
    under_torchrun(ranks=2)
    both = args.smoke and not args.resume
    dtypes = [torch.float32, torch.bfloat16] if both else [torch.bfloat16 if args.bf16 else torch.float32]
    steps = 16 if args.smoke else args.steps
    with all_ranks() as mesh, tempfile.TemporaryDirectory() as temporary:
        work: list[str] = [str(args.out or temporary)]
        dist.broadcast_object_list(work, src=0)  # rank 0's folder, on storage that all ranks see
        root = make_checkpoint(Path(work[0]) / "wan", "wan")
        for dtype in dtypes:
            out = Path(work[0]) / str(dtype).removeprefix("torch.")
            if args.resume:
                resume(out, mesh, dtype, steps)
            else:
                fine_tune(root, mesh, dtype, steps, out)
        dist.barrier()


if __name__ == "__main__":
    main()
