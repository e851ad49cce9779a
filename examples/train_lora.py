#!/usr/bin/env python3
"""A short LoRA fine-tune on shards that metashard has loaded: train, checkpoint, resume, save, reload in diffusers.

    torchrun --nproc-per-node 8 examples/train_lora.py --steps 200     SD3 on generated pictures
    python examples/train_lora.py --family wan                         Wan 2.2, an adapter for each of its two experts
    python examples/train_lora.py --smoke                              both, a few steps, on 2 ranks

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
    evaluate,
    load_checkpoint,
    make_checkpoint,
    save_checkpoint,
    say,
    train,
    under_torchrun,
)
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import metashard

# Wan 2.2's pipeline gives times above its boundary_ratio to `transformer` and those below to `transformer_2`.
EXPERTS = {
    "sd3": {"transformer": (0.0, 1.0)},
    "wan": {"transformer": (0.875, 1.0), "transformer_2": (0.0, 0.875)},
}


def load(root: Path, component: str, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The frozen base in shards with a new adapter in it, and the optimizer of what is trained."""
    config = LoraConfig(
        r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "proj_out"]
    )
    torch.manual_seed(0)  # decides the adapter; only rank 0 draws it, from peft's own code
    model = metashard.load_component(
        root,
        component,
        mesh=mesh,
        dtype=torch.float32,
        lora=metashard.LoraSpec(config, style="inject"),  # as diffusers' add_adapter: no PeftModel around the model
        prepare=lambda module: module.enable_gradient_checkpointing(),
    )
    model.train()
    return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3, weight_decay=0.0)


def fine_tune(root: Path, component: str, family: str, mesh: DeviceMesh, steps: int, out: Path) -> nn.Module:
    """Train half the steps, checkpoint, train the rest; then resume the checkpoint in a new model and compare."""
    device = torch.device(mesh.device_type)
    sigmas = EXPERTS[family][component]
    model, optimizer = load(root, component, mesh)
    before = evaluate(model, family, device, sigmas=sigmas)
    train(model, optimizer, family, device, steps=range(steps // 2), sigmas=sigmas)
    save_checkpoint(out / "checkpoint", model, optimizer)
    train(model, optimizer, family, device, steps=range(steps // 2, steps), sigmas=sigmas)
    after = evaluate(model, family, device, sigmas=sigmas)
    say(f"{family} {component}: loss {before:.3f} before, {after:.3f} after {steps} steps")
    assert after < 0.95 * before, "the adapter has not learned"

    trained = metashard.digest_shards(model)
    model, optimizer = load(root, component, mesh)
    load_checkpoint(out / "checkpoint", model, optimizer)
    train(model, optimizer, family, device, steps=range(steps // 2, steps), sigmas=sigmas)
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


def run(family: str, mesh: DeviceMesh, steps: int, work: Path) -> None:
    """The whole of it for one family."""
    root = make_checkpoint(work / family, family)
    for component in EXPERTS[family]:
        out = work / f"{family}-{component}"
        model = fine_tune(root, component, family, mesh, steps, out).eval()
        check_reload(model, root, component, family, out / "adapter", torch.device(mesh.device_type))


def main() -> None:
    """Parse arguments, start under torchrun, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(EXPERTS), default="sd3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for checkpoints and adapters (default: a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="both families, a few steps")
    args = parser.parse_args()
    under_torchrun(ranks=2)
    families = sorted(EXPERTS) if args.smoke else [args.family]
    steps = 16 if args.smoke else args.steps
    with all_ranks() as mesh, tempfile.TemporaryDirectory() as temporary:
        work: list[str] = [str(args.out or temporary)]
        dist.broadcast_object_list(work, src=0)  # rank 0's folder, on storage that all ranks see
        for family in families:
            run(family, mesh, steps, Path(work[0]))
        dist.barrier()


if __name__ == "__main__":
    main()
