#!/usr/bin/env python3
"""A full fine-tune of Wan on shards that metashard has loaded, with the parameters that its class keeps in fp32.

    torchrun --nproc-per-node 8 examples/train_full.py --steps 200     fp32 masters, computed in bf16
    torchrun --nproc-per-node 8 examples/train_full.py --bf16          bf16 parameters beside those pinned to fp32
    python examples/train_full.py --smoke                              both, a few steps, on 2 ranks

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
    evaluate,
    load_checkpoint,
    make_checkpoint,
    save_checkpoint,
    say,
    train,
    under_torchrun,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import metashard

SIGMAS = (0.0, 0.875)  # of the second expert


def load(root: Path, mesh: DeviceMesh, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in shards, and its optimizer."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    model = metashard.load_component(
        root,
        "transformer_2",
        mesh=mesh,
        dtype=dtype,
        prepare=lambda module: module.enable_gradient_checkpointing(),
        shard=metashard.ShardPolicy(mp_policy=mixed if dtype == torch.float32 else None),
    )
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


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
    device, inputs = torch.device(mesh.device_type), dict(sigmas=SIGMAS, dtype=torch.bfloat16)
    model, optimizer = load(root, mesh, dtype)
    check_dtypes(model, dtype)
    seen = watch_compute(model)
    before = evaluate(model, "wan", device, **inputs)
    assert seen["scale_shift_table"] == torch.float32
    assert seen["attn1.to_q.weight"] == torch.bfloat16
    train(model, optimizer, "wan", device, steps=range(steps // 2), **inputs)
    save_checkpoint(out / "checkpoint", model, optimizer)
    train(model, optimizer, "wan", device, steps=range(steps // 2, steps), **inputs)
    after = evaluate(model, "wan", device, **inputs)
    say(f"{dtype}: loss {before:.3f} before, {after:.3f} after {steps} steps")
    assert after < 0.95 * before, "the model has not learned"

    digest = metashard.digest_shards(model)
    model, optimizer = load(root, mesh, dtype)
    load_checkpoint(out / "checkpoint", model, optimizer)
    train(model, optimizer, "wan", device, steps=range(steps // 2, steps), **inputs)
    assert metashard.digest_shards(model) == digest, "the resumed run ends with other weights"
    check_dtypes(model, dtype)
    say(f"{dtype}: the resumed run ends with the same weights")

    metashard.save_component(model.eval(), out / "saved", overwrite=True)  # every rank writes its shards
    again = metashard.load_component(out / "saved", mesh=mesh, dtype=dtype)
    assert metashard.digest_shards(again) == digest, "the saved model is another one"
    if dtype == torch.bfloat16:  # the plain model computes in the same dtypes
        sharded = evaluate(model, "wan", device, **inputs)
        if dist.get_rank() == 0:
            plain = WanTransformer3DModel.from_pretrained(out / "saved", torch_dtype=dtype).to(device)
            assert evaluate(plain, "wan", device, **inputs) == sharded
        dist.barrier()
    say(f"{dtype}: saved from shards, reloaded, equal")


def main() -> None:
    """Parse arguments, start under torchrun, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters instead of fp32 masters computed in bf16")
    parser.add_argument("--out", type=Path, help="folder for checkpoints (default: a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="both ways, a few steps")
    args = parser.parse_args()
    under_torchrun(ranks=2)
    dtypes = [torch.float32, torch.bfloat16] if args.smoke else [torch.bfloat16 if args.bf16 else torch.float32]
    with all_ranks() as mesh, tempfile.TemporaryDirectory() as temporary:
        work: list[str] = [str(args.out or temporary)]
        dist.broadcast_object_list(work, src=0)  # rank 0's folder, on storage that all ranks see
        root = make_checkpoint(Path(work[0]) / "wan", "wan")
        for dtype in dtypes:
            out = Path(work[0]) / str(dtype).removeprefix("torch.")
            fine_tune(root, mesh, dtype, 16 if args.smoke else args.steps, out)
        dist.barrier()


if __name__ == "__main__":
    main()
