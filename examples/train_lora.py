#!/usr/bin/env python3
"""A short LoRA fine-tune on shards that metashard has loaded: train, checkpoint, resume, save, reload in diffusers.

    torchrun --nproc-per-node 8 examples/train_lora.py --steps 200     SD3 on generated pictures
    python examples/train_lora.py --family wan                         Wan 2.2, an adapter for each of its two experts
    torchrun --nproc-per-node 2 examples/train_lora.py --out RUN       and then, on another number of ranks,
    torchrun --nproc-per-node 4 examples/train_lora.py --out RUN --resume
    python examples/train_lora.py --smoke                              both, a few steps, on 2 ranks; SD3 resumed on 1

Without torchrun it starts itself under it, on two ranks. It writes a small checkpoint with random weights first; the
lines that matter in a trainer of your own are those of `load` and `fine_tune`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
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
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LinearLR, LRScheduler

import metashard

# Wan 2.2's pipeline gives times above its boundary_ratio to `transformer` and those below to `transformer_2`.
EXPERTS = {
    "sd3": {"transformer": (0.0, 1.0)},
    "wan": {"transformer": (0.875, 1.0), "transformer_2": (0.0, 0.875)},
}


NEW = LoraConfig(
    r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "proj_out"]
)


def load(
    root: Path, component: str, adapter: LoraConfig | Path, mesh: DeviceMesh, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """The frozen base in shards with a new or a saved adapter in it, the optimizer of what is trained, its schedule."""
    torch.manual_seed(0)  # decides a new adapter; only rank 0 draws it, from peft's own code
    model = metashard.load_component(
        root,
        component,
        mesh=mesh,
        dtype=torch.float32,
        lora=metashard.LoraSpec(adapter, style="inject"),  # as diffusers' add_adapter: no PeftModel around the model
        prepare=lambda module: module.enable_gradient_checkpointing(),
    )
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3, weight_decay=0.0)
    return model, optimizer, LinearLR(optimizer, start_factor=1.0, end_factor=0.5, total_iters=steps)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    """A checkpoint: the adapter, out of the shards, as diffusers loads it, and the rest of the run. Not the base."""
    metashard.save_lora(model, folder / "adapter", overwrite=True)
    save_progress(folder / "progress", model, optimizer, scheduler)


def resume(root: Path, component: str, family: str, mesh: DeviceMesh, steps: int, out: Path) -> nn.Module:
    """Go on from the checkpoint, on any number of ranks, and compare with the run that did not stop."""
    device, sigmas = torch.device(mesh.device_type), EXPERTS[family][component]
    model, optimizer, scheduler = load(root, component, out / "checkpoint" / "adapter", mesh, steps)
    load_progress(out / "checkpoint" / "progress", model, optimizer, scheduler)
    start = scheduler.last_epoch
    losses = train(model, optimizer, scheduler, family, device, steps=range(start, steps), sigmas=sigmas)
    say(f"{family} {component}:")
    compare_losses(out / "losses.json", losses, start=start, rounding=1e-4)
    return model


def fine_tune(root: Path, component: str, family: str, mesh: DeviceMesh, steps: int, out: Path) -> nn.Module:
    """Train half the steps, checkpoint, train the rest; then resume the checkpoint in a new model and compare."""
    device, sigmas = torch.device(mesh.device_type), EXPERTS[family][component]
    model, optimizer, scheduler = load(root, component, NEW, mesh, steps)
    before = evaluate(model, family, device, sigmas=sigmas)
    train(model, optimizer, scheduler, family, device, steps=range(steps // 2), sigmas=sigmas)
    save(out / "checkpoint", model, optimizer, scheduler)
    losses = train(model, optimizer, scheduler, family, device, steps=range(steps // 2, steps), sigmas=sigmas)
    note_losses(out / "losses.json", losses)
    after = evaluate(model, family, device, sigmas=sigmas)
    say(f"{family} {component}: loss {before:.3f} before, {after:.3f} after {steps} steps")
    assert after < 0.95 * before, "the adapter has not learned"

    trained = metashard.digest_shards(model)
    model = resume(root, component, family, mesh, steps, out)
    assert metashard.digest_shards(model) == trained, "the resumed run ends with another adapter"
    say(f"{family} {component}: the resumed run ends with the same adapter")
    metashard.save_lora(model, out / "adapter", overwrite=True)  # from shards, the adapter alone
    return model


def check_reload(model: nn.Module, root: Path, component: str, family: str, folder: Path, device: torch.device) -> None:
    """Load the saved adapter in a plain pipeline of one process: the output has to be that of the trained shards."""
    import diffusers

    sharded = evaluate(model, family, device)
    if dist.get_rank() == 0:
        pipeline_class = {"sd3": diffusers.StableDiffusion3Pipeline, "wan": diffusers.WanPipeline}[family]
        absent = {"sd3": ("text_encoder_2", "text_encoder_3", "tokenizer_2", "tokenizer_3"), "wan": ()}[family]
        nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer", *absent))
        pipeline = pipeline_class.from_pretrained(root, torch_dtype=torch.float32, **nothing)
        second = {"load_into_transformer_2": True} if component == "transformer_2" else {}
        pipeline.load_lora_weights(folder, **second)
        plain = evaluate(getattr(pipeline, component).to(device), family, device)
        assert plain == sharded, f"the reloaded adapter gives loss {plain}, the shards {sharded}"
        say(f"{family} {component}: saved from shards, reloaded in {pipeline_class.__name__}, equal output")
    dist.barrier()


def run(family: str, mesh: DeviceMesh, steps: int, work: Path, *, resumed: bool) -> None:
    """The whole of it for one family, or the rest of it."""
    root = make_checkpoint(work / family, family)
    for component in EXPERTS[family]:
        out = work / f"{family}-{component}"
        if resumed:
            resume(root, component, family, mesh, steps, out)
            continue
        model = fine_tune(root, component, family, mesh, steps, out).eval()
        check_reload(model, root, component, family, out / "adapter", torch.device(mesh.device_type))


def main() -> None:
    """Parse arguments, start under torchrun, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(EXPERTS), default="sd3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for checkpoints and adapters (default: a temporary one)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, on these ranks")
    parser.add_argument("--smoke", action="store_true", help="both families, a few steps; SD3 resumed on one rank")
    args = parser.parse_args()
    if args.resume and args.out is None:
        parser.error("--resume goes on from what is in --out: pass it")
    smoke(args)
    under_torchrun(ranks=2)
    families = sorted(EXPERTS) if args.smoke and not args.resume else [args.family]
    steps = 16 if args.smoke else args.steps
    with all_ranks() as mesh, tempfile.TemporaryDirectory() as temporary:
        work: list[str] = [str(args.out or temporary)]
        dist.broadcast_object_list(work, src=0)  # rank 0's folder, on storage that all ranks see
        for family in families:
            run(family, mesh, steps, Path(work[0]), resumed=args.resume)
        dist.barrier()


if __name__ == "__main__":
    main()
