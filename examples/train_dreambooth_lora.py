#!/usr/bin/env python3
"""DreamBooth LoRA for SD3 in the flow of diffusers' scripts, with a transformer that no process ever holds whole.

    accelerate launch --config_file fsdp2.yaml examples/train_dreambooth_lora.py \\
        --pretrained_model_name_or_path stabilityai/stable-diffusion-3.5-large --data_path data.pt \\
        --output_dir out --mixed_precision bf16 --gradient_checkpointing --rank 16 --max_train_steps 500
    python examples/train_dreambooth_lora.py --smoke

Flags, loss, checkpoints and the saved adapter are those of `train_dreambooth_lora_sd3.py`. What differs is marked with
"metashard:" below: the plugin, the load, and the gathering of the adapter from its shards. As in diffusers' miniature
script the prompt is encoded beforehand, and here the pictures are too: `data.pt` holds "latents" (n, c, h, w),
"prompt_embeds" (n, tokens, d) and "pooled_prompt_embeds" (n, p).

accelerate selects FSDP on accelerators only. For the small form on CPU (`--smoke`, two processes, generated data) its
record of what process group it has found is set to that of GPUs; everything else, accelerate's own code included, is
what runs on GPUs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, set_seed
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from flow_matching import captions, evaluate, make_checkpoint, pictures, say, under_torchrun
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import metashard
from metashard.integrations.accelerate import MetaShardPlugin

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    """The flags of diffusers' script that matter here, under their names and with their defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained_model_name_or_path")
    parser.add_argument("--revision")
    parser.add_argument("--variant")
    parser.add_argument("--data_path", type=Path, help="encoded pictures and prompts, see above")
    parser.add_argument("--output_dir", type=Path, default=Path("sd3-dreambooth-lora"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--max_train_steps", type=int, default=500)
    parser.add_argument("--checkpointing_steps", type=int, default=500)
    parser.add_argument("--resume_from_checkpoint", help="a checkpoint-N in output_dir")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--lr_scheduler", default="constant")
    parser.add_argument("--lr_warmup_steps", type=int, default=0)
    parser.add_argument("--weighting_scheme", default="logit_normal")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", choices=sorted(DTYPES), default=None)
    parser.add_argument("--smoke", action="store_true", help="the small form: CPU, generated data, a few steps")
    args = parser.parse_args()
    if not args.smoke and None in (args.pretrained_model_name_or_path, args.data_path):
        parser.error("--pretrained_model_name_or_path and --data_path are required (or --smoke)")
    return args


def train(args: argparse.Namespace, accelerator: Accelerator, plugin: MetaShardPlugin) -> nn.Module:
    """What is `main` in diffusers' script."""
    set_seed(args.seed)
    noise_scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        args.pretrained_model_name_or_path, subfolder="scheduler", revision=args.revision
    )
    lora_config = LoraConfig(
        r=args.rank,
        lora_alpha=args.rank,
        init_lora_weights="gaussian",
        target_modules=["to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"],
    )
    # metashard: one call for from_pretrained, requires_grad_(False), to(device, dtype), enable_gradient_checkpointing,
    # add_adapter and the cast of what is trained to fp32.
    transformer = plugin.load_component(
        accelerator,
        args.pretrained_model_name_or_path,
        "transformer",
        dtype=DTYPES[accelerator.mixed_precision],
        lora=metashard.LoraSpec(lora_config, style="inject"),
        revision=args.revision,
        variant=args.variant,
    )
    transformer.train()

    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=1e-4)
    data = torch.load(args.data_path, weights_only=True)
    samples = [{key: value[i] for key, value in data.items()} for i in range(len(data["latents"]))]
    loader = DataLoader(samples, batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    transformer, optimizer, loader, lr_scheduler = accelerator.prepare(transformer, optimizer, loader, lr_scheduler)

    step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.output_dir / args.resume_from_checkpoint)
        step = int(args.resume_from_checkpoint.split("-")[1])
    while step < args.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(transformer):
                loss = loss_of(transformer, noise_scheduler, batch, args.weighting_scheme)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % args.checkpointing_steps == 0:  # on all processes: each saves its shards
                accelerator.save_state(args.output_dir / f"checkpoint-{step}")
            if step >= args.max_train_steps:
                break
    return transformer


def loss_of(
    transformer: nn.Module, scheduler: FlowMatchEulerDiscreteScheduler, batch: dict[str, torch.Tensor], scheme: str
) -> torch.Tensor:
    """Flow matching as diffusers' script has it."""
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    u = compute_density_for_timestep_sampling(scheme, len(latents), logit_mean=0.0, logit_std=1.0, mode_scale=1.29)
    indices = (u * scheduler.config.num_train_timesteps).long()
    timesteps = scheduler.timesteps[indices].to(latents.device)
    sigmas = scheduler.sigmas[indices].to(latents)[:, None, None, None]
    predicted = transformer(
        hidden_states=(1.0 - sigmas) * latents + sigmas * noise,
        timestep=timesteps,
        encoder_hidden_states=batch["prompt_embeds"],
        pooled_projections=batch["pooled_prompt_embeds"],
        return_dict=False,
    )[0]
    weighting = compute_loss_weighting_for_sd3(scheme, sigmas=sigmas)
    return (weighting.float() * (predicted.float() - (noise - latents).float()) ** 2).mean()


def gather_adapter(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """metashard: the adapter's full tensors, from their shards; a call of all processes."""
    found = sorted(get_peft_model_state_dict(transformer).items())
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu() for name, t in found}


def make_accelerator(args: argparse.Namespace) -> tuple[Accelerator, MetaShardPlugin]:
    """metashard: its plugin, which takes accelerate's arguments and the settings of `accelerate config`."""
    checkpointing = {"activation_checkpointing": True} if args.gradient_checkpointing else {}
    plugin = MetaShardPlugin(**checkpointing)
    if args.smoke:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        fsdp_plugin=plugin,
    )
    return accelerator, plugin


def smoke(args: argparse.Namespace, accelerator: Accelerator, plugin: MetaShardPlugin, work: Path) -> None:
    """Train half, resume, train the rest: with a small model that has learned something then."""
    args.pretrained_model_name_or_path = str(make_checkpoint(work / "model", "sd3"))
    args.output_dir, args.data_path = work / "out", work / "data.pt"
    if accelerator.is_main_process:
        draw = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 4, (64,), generator=draw)
        tokens, pooled = captions(labels)
        latents = pictures(labels, draw)
        torch.save({"latents": latents, "prompt_embeds": tokens, "pooled_prompt_embeds": pooled}, args.data_path)
    accelerator.wait_for_everyone()
    args.learning_rate, args.checkpointing_steps = 5e-3, 16

    def run(until: int, resume: str | None = None) -> tuple[dict[str, torch.Tensor], float]:
        args.max_train_steps, args.resume_from_checkpoint = until, resume
        model = train(args, accelerator, plugin)
        accelerator.free_memory()
        return gather_adapter(model), evaluate(model, "sd3", accelerator.device)

    before = run(0)[1]
    middle = run(16)[0]
    resumed = run(16, "checkpoint-16")[0]
    different = [name for name in middle if not torch.equal(middle[name], resumed[name])]
    assert not different, f"{different[:3]} are not what was saved"
    adapter, after = run(32, "checkpoint-16")
    save(args, accelerator, adapter)
    say(f"loss {before:.3f} before, {after:.3f} after {args.max_train_steps} steps")
    assert after < 0.95 * before, "the adapter has not learned"
    assert (args.output_dir / "pytorch_lora_weights.safetensors").exists()


def save(args: argparse.Namespace, accelerator: Accelerator, adapter: dict[str, Any]) -> None:
    """The adapter, as `StableDiffusion3Pipeline.load_lora_weights` takes it."""
    if accelerator.is_main_process:
        StableDiffusion3Pipeline.save_lora_weights(args.output_dir, transformer_lora_layers=adapter)
    accelerator.wait_for_everyone()


def main() -> None:
    """Train and save; or the small form."""
    args = parse_args()
    if args.smoke:
        under_torchrun(ranks=2)
    accelerator, plugin = make_accelerator(args)
    if not args.smoke:
        save(args, accelerator, gather_adapter(train(args, accelerator, plugin)))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            work = [temporary]
            dist.broadcast_object_list(work, src=0)
            smoke(args, accelerator, plugin, Path(work[0]))
            accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
