"""What a benchmark is run on: the checkpoint (the caller's, or one that is made), the device, the warm-up model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight import UsageError, WeightFiles, check_weights

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
FAMILY = "sd3.5-medium"
QUICK_FAMILY, QUICK_LAYERS = "sd3-small", 4
# The smallest model of that class, to load before the clock starts.
TINY = dict(
    num_attention_heads=2,
    attention_head_dim=16,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    caption_projection_dim=32,
    pos_embed_max_size=16,
    sample_size=16,
)


@dataclass(frozen=True)
class Subject:
    """The weights that are loaded.

    Attributes:
        path: Checkpoint folder.
        components: What to load of it, in this order; None is the folder itself.
        weights: The weight files of each.
        model: What to call it in a report.
    """

    path: Path
    components: tuple[str | None, ...]
    weights: tuple[WeightFiles, ...]
    model: str

    @property
    def files(self) -> tuple[Path, ...]:
        """All weight files."""
        return tuple(path for weights in self.weights for path in weights.paths)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def facts(self) -> dict[str, Any]:
        """What a report says of it; no path."""
        names = [name for name in self.components if name is not None]
        return {
            "model": self.model,
            "component": " and ".join(names) or None,
            "gigabytes": round(self.nbytes / 1e9, 3),
            "files": len(self.files),
        }


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `find_subject` and `device_and_backend` look at."""
    parser.add_argument("--model-path", type=Path, help="checkpoint folder (default: one is made)")
    parser.add_argument("--family", help=f"of the checkpoint to make (default: {FAMILY}; with --quick, {QUICK_FAMILY})")
    parser.add_argument("--layers", type=int, help="its depth in blocks (default: as published; with --quick, 4)")
    parser.add_argument("--workdir", type=Path, help="where it is made, and kept and used again (default: temporary)")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="to load in (default: bf16)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the accelerator, where there is one)")
    parser.add_argument("--backend", help="of the process group (default: gloo on cpu, else what torch pairs with it)")


def depth(family: str, layers: int | None, scale: float | None) -> int | None:
    """Blocks of a made checkpoint: as many as asked for, or that part of the published ones; None is all of them."""
    import make_checkpoint

    if family not in make_checkpoint.FAMILIES:
        raise UsageError(f"unknown family {family!r}: expected one of {', '.join(sorted(make_checkpoint.FAMILIES))}")
    if scale is None:
        return layers
    if layers is not None:
        raise UsageError("--layers and --scale both set the depth: pass one of them")
    return make_checkpoint.layers_at(family, scale)


def model_elements(family: str, layers: int | None) -> int:
    """Elements of each of a family's models, from its shell alone."""
    import diffusers
    import make_checkpoint
    import torch

    chosen = make_checkpoint.FAMILIES[family]
    with torch.device("meta"):
        shell = getattr(diffusers, chosen.cls)(**chosen.config_for(layers))
    return sum(tensor.numel() for tensor in shell.state_dict().values())


def find_subject(
    args: argparse.Namespace,
    scratch: Path,
    components: Sequence[str] | None = None,
    before_writing: Callable[[str, int | None], None] | None = None,
) -> Subject:
    """The caller's checkpoint, or one that is made in `args.workdir`, else in `scratch`.

    Args:
        args: With `model_path`, `family`, `layers`, `workdir`, `quick` and, where the script has it, `scale`.
        scratch: A folder that is removed at the end.
        components: To load; None for the folder itself, or for all of a family's.
        before_writing: Called with family and depth before a checkpoint is made; raises where it should not be.
    """
    if args.model_path is not None:
        if args.family or args.layers or getattr(args, "scale", None):
            raise UsageError("--family and depth are for a checkpoint that is made: leave out --model-path")
        return _subject(args.model_path, components or (None,), args.model_path.resolve().name)
    import make_checkpoint

    family = args.family or (QUICK_FAMILY if args.quick else FAMILY)
    layers = depth(family, args.layers, getattr(args, "scale", None))
    layers = QUICK_LAYERS if layers is None and args.quick and not args.family else layers
    if before_writing is not None:
        before_writing(family, layers)
    out = (args.workdir or scratch) / (f"{family}-{layers}" if layers else family)
    if not (out / "model_index.json").is_file():
        print(f"making {out} ...", flush=True)
        make_checkpoint.write_pipeline(out, family, layers=layers)
    return _subject(
        out,
        components or make_checkpoint.FAMILIES[family].components,
        family + (f", {layers} block{'s' if layers > 1 else ''}" if layers else ""),
    )


def _subject(path: Path, components: Sequence[str | None], model: str) -> Subject:
    weights = tuple(check_weights(path, component) for component in components)
    for component in components:
        if not (path / (component or "") / "config.json").is_file():
            raise UsageError(f"{path / (component or '')} has no config.json: pass the component's name")
    return Subject(path, tuple(components), weights, model)


def tiny_checkpoint(scratch: Path) -> Path:
    """A pipeline of a few KB, for what a first load brings with it (imports, connections)."""
    import make_checkpoint

    return make_checkpoint.write_pipeline(scratch / "tiny", "sd3-small", layers=2, config=TINY).path


def device_and_backend(args: argparse.Namespace) -> tuple[str, str]:
    """What was asked for, else the accelerator, else the CPU, with the backends that go with it."""
    import torch
    import torch.distributed as dist

    device = args.device
    if device is not None and not _is_here(device):
        raise UsageError(f"--device {device}: expected cpu, or the type of an accelerator that is here, such as cuda")
    names = [pair.rpartition(":")[2] for pair in (args.backend or "").split(",")] if args.backend else []
    unknown = [name for name in names if not dist.is_backend_available(name)]
    if unknown:
        raise UsageError(
            f"--backend {args.backend}: torch has no {unknown[0]!r} here; such as gloo or cpu:gloo,cuda:nccl"
        )
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found.type if found is not None else "cpu"
    if args.backend:
        return device, args.backend
    if device == "cpu":
        return device, "gloo"
    return device, f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def _is_here(device: str) -> bool:
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return device in ("cpu", found.type if found is not None else "cpu")


def count_elements(files: Iterable[Path]) -> int:
    """Elements of all tensors in safetensors files."""
    import torch
    from safetensors import safe_open

    total = 0
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                total += torch.Size(opened.get_slice(key).get_shape()).numel()
    return total
