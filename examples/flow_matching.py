"""What the examples share: ranks, a small checkpoint, generated pictures, the flow-matching loss, checkpoints.

Nothing in here is about loading; that is `train_lora.py`, `train_full.py` and the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LRScheduler

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

SD3 = dict(
    sample_size=8,
    in_channels=4,
    out_channels=4,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=64,
    pooled_projection_dim=64,
    caption_projection_dim=64,
    pos_embed_max_size=16,
    dual_attention_layers=(0,),
)
WAN = dict(
    num_attention_heads=4,
    attention_head_dim=24,
    in_channels=4,
    out_channels=4,
    text_dim=64,
    freq_dim=32,
    ffn_dim=128,
    rope_max_seq_len=32,
)
FAMILIES = {"sd3": ("sd3-small", SD3), "wan": ("wan2.2-a14b", WAN)}
BATCH = 8  # pictures of a step over all ranks: a run takes the same steps on 1, 2, 4 and 8 of them
COLOURS = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.1, 0.1, 0.9], [0.9, 0.9, 0.1]])


def under_torchrun(ranks: int) -> None:
    """Start this script again under torchrun, unless it runs under it already. Does not return if it does."""
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, _torchrun(ranks))


def smoke(args: argparse.Namespace) -> None:
    """With --smoke: run this script on two ranks and resume what it has saved on one. Does not return if it does."""
    if not args.smoke or "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        out = ["--out", str(args.out or temporary)]
        for ranks, more in ((2, []), (1, ["--resume"])):
            code = subprocess.run([*_torchrun(ranks), *out, *more], check=False).returncode
            if code:
                sys.exit(code)
    sys.exit()


def _torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *sys.argv]


@contextmanager
def all_ranks() -> Iterator[DeviceMesh]:
    """A mesh over all ranks, on their accelerators if each has one and on the CPU otherwise."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device_type = torch.accelerator.current_accelerator().type
    else:
        device_type = "cpu"
    dist.init_process_group(dist.get_default_backend_for_device(device_type))
    try:
        yield init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def make_checkpoint(out: Path, family: str) -> Path:
    """A pipeline folder of a small model with random weights, written once by rank 0."""
    from make_checkpoint import write_pipeline

    if dist.get_rank() == 0 and not (out / "model_index.json").exists():
        name, config = FAMILIES[family]
        write_pipeline(out, name, layers=2, dtype=torch.float32, config=config)
    dist.barrier()
    return out


def pictures(labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Discs of the labels' colours at random places on grey, as latents: shape (batch, 4, 8, 8), about unit size.

    A fixed linear map to four channels stands in for an image encoder.
    """
    axis = torch.linspace(-1, 1, 8)
    centre = torch.rand(len(labels), 2, 1, 1, generator=generator) - 0.5
    inside = ((axis[None, :, None] - centre[:, 0]) ** 2 + (axis[None, None] - centre[:, 1]) ** 2 < 0.4).float()
    rgb = 0.5 + inside[:, None] * (COLOURS[labels][:, :, None, None] - 0.5)
    to_latent = torch.randn(4, 3, generator=torch.Generator().manual_seed(11))
    return 2 * torch.einsum("lc,bchw->blhw", to_latent, rgb - 0.5)


def captions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fixed embeddings that stand in for a text encoder's: (batch, 6, 64) tokens, (batch, 64) pooled."""
    table = torch.randn(len(COLOURS), 7, 64, generator=torch.Generator().manual_seed(12))[labels]
    return table[:, :6], table[:, 6]


def flow_loss(
    model: nn.Module,
    family: str,
    device: torch.device,
    *,
    seed: int,
    count: int = 4,
    share: slice = slice(None),
    sigmas: tuple[float, float] = (0.0, 1.0),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Flow matching: from x = (1 - s) * picture + s * noise, the model predicts noise - picture.

    Args:
        model: A transformer of the family.
        family: "sd3" or "wan".
        device: Where to compute.
        seed: Decides pictures, noise and times, so that a step of a resumed run is the step it would have been.
        count: Pictures of the batch.
        share: Those of them to compute with: a rank's part of a batch that all ranks draw alike.
        sigmas: Range of times s; each of Wan's experts has its own.
        dtype: Of the inputs.
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(COLOURS), (count,), generator=draw)
    clean = pictures(labels, draw)
    noise = torch.randn(clean.shape, generator=draw)
    s = sigmas[0] + (sigmas[1] - sigmas[0]) * torch.rand(count, generator=draw)
    labels, clean, noise, s = labels[share], clean[share], noise[share], s[share]
    noisy = (1 - s[:, None, None, None]) * clean + s[:, None, None, None] * noise
    tokens, pooled = captions(labels)
    inputs: dict[str, Any] = {"hidden_states": noisy, "timestep": 1000 * s, "encoder_hidden_states": tokens}
    if family == "sd3":
        inputs["pooled_projections"] = pooled
    else:
        inputs["hidden_states"] = noisy[:, :, None]  # one frame
    inputs = {k: v.to(device, v.dtype if k == "timestep" else dtype) for k, v in inputs.items()}
    predicted = model(**inputs, return_dict=False)[0].float()
    predicted = predicted if family == "sd3" else predicted[:, :, 0]
    return (predicted - (noise - clean).to(device)).pow(2).mean()


def evaluate(model: nn.Module, family: str, device: torch.device, **kwargs: Any) -> float:
    """Mean loss over a fixed set of pictures that training never sees; the same number on every rank."""
    with torch.no_grad():
        losses = [flow_loss(model, family, device, seed=10_000 + i, **kwargs) for i in range(8)]
    return torch.stack(losses).mean().item()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    family: str,
    device: torch.device,
    *,
    steps: range,
    **kwargs: Any,
) -> list[float]:
    """Plain FSDP2 training: ranks share the pictures of each step, gradients are averaged and clipped.

    Returns:
        The loss of each step, over the pictures of all ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if BATCH % world:
        raise ValueError(f"{BATCH} pictures a step cannot be shared evenly by {world} ranks: use 1, 2, 4 or 8.")
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for step in steps:
        loss = flow_loss(model, family, device, seed=step, count=BATCH, share=share, **kwargs)
        loss.backward()
        losses.append(loss.detach())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    mean = torch.stack(losses) / world
    dist.all_reduce(mean)
    return mean.tolist()


def save_progress(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    """All of a run but the weights, each rank its own part of the optimizer's state.

    DCP writes its `.metadata` last: saved after the weights, it says that both are there.
    """
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer), "scheduler": scheduler}, checkpoint_id=folder)


def load_progress(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    """What `save_progress` saved, on any number of ranks: DCP cuts the optimizer's state as the model is cut now."""
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": state, "scheduler": scheduler}, checkpoint_id=folder)  # the scheduler takes its own
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state)


def note_losses(path: Path, losses: list[float]) -> None:
    """Keep the losses after a checkpoint, to compare those of a resumed run with."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps({"ranks": dist.get_world_size(), "losses": losses}))
    dist.barrier()


def compare_losses(path: Path, losses: list[float], *, start: int, rounding: float) -> None:
    """Hold a resumed run's losses against those that `note_losses` kept, side by side.

    On the same number of ranks they are equal to the last bit. On another number they are not: the same state computes
    with the same pictures, but matrix products of other batch sizes and gradients averaged in another order round
    otherwise, and every step carries that on.

    Args:
        path: What `note_losses` wrote.
        losses: Of the resumed run.
        start: The first step of both.
        rounding: How much of a loss that may come to.
    """
    if not path.exists():
        say("  the run that was stopped has not noted what comes after the checkpoint: nothing to compare")
        return
    noted, world = json.loads(path.read_text()), dist.get_world_size()
    tolerance = 0.0 if noted["ranks"] == world else rounding
    say(f"  step   went on, {noted['ranks']} ranks   resumed, {world} ranks")
    for step, (before, after) in enumerate(zip(noted["losses"], losses, strict=True), start):
        say(f"  {step:4}   {before:16.8f}   {after:16.8f}")
        assert abs(after - before) <= tolerance * before, f"step {step}: loss {after}, expected {before}"


def say(text: str) -> None:
    """Print, on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)  # noqa: T201
