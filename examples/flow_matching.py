"""What the examples share: ranks, a small checkpoint, generated pictures, the flow-matching loss, checkpoints.

Nothing in here is about loading; that is `train_lora.py`, `train_full.py` and the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
COLOURS = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.1, 0.1, 0.9], [0.9, 0.9, 0.1]])


def under_torchrun(ranks: int) -> None:
    """Start this script again under torchrun, unless it runs under it already. Does not return if it does."""
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


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
    sigmas: tuple[float, float] = (0.0, 1.0),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Flow matching: from x = (1 - s) * picture + s * noise, the model predicts noise - picture.

    Args:
        model: A transformer of the family.
        family: "sd3" or "wan".
        device: Where to compute.
        seed: Decides pictures, noise and times, so that a step of a resumed run is the step it would have been.
        sigmas: Range of times s; each of Wan's experts has its own.
        dtype: Of the inputs.
    """
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(COLOURS), (4,), generator=draw)
    clean = pictures(labels, draw)
    noise = torch.randn(clean.shape, generator=draw)
    s = sigmas[0] + (sigmas[1] - sigmas[0]) * torch.rand(4, generator=draw)
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
    family: str,
    device: torch.device,
    *,
    steps: range,
    **kwargs: Any,
) -> None:
    """Plain FSDP2 training: each rank sees pictures of its own, gradients are averaged and clipped."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in steps:
        seed = step * dist.get_world_size() + dist.get_rank()
        flow_loss(model, family, device, seed=seed, **kwargs).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What is trained and the optimizer's state, each rank its own shards."""
    weights, state = get_state_dict(model, optimizer, options=_TRAINED_ONLY)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Into a newly loaded model and its optimizer, on any number of ranks."""
    weights, state = get_state_dict(model, optimizer, options=_TRAINED_ONLY)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=_TRAINED_ONLY)


def say(text: str) -> None:
    """Print, on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)  # noqa: T201
