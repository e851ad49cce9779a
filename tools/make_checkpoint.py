#!/usr/bin/env python3
"""Writes synthetic checkpoints: whole pipeline folders at real shapes, in a stream, with bounded memory.

    python tools/make_checkpoint.py OUT --family sd3.5-medium
    python tools/make_checkpoint.py OUT --family wan2.2-a14b --layers 2 --max-shard-size 5GB --lora-rank 64
    python tools/make_checkpoint.py OUT --family sd3-small --layers 1 --damage truncated

The model is built on the meta device to learn names, shapes and the config file; no weight of it ever exists. Each
file's header is computed first, then its tensors are drawn and written in pieces of a few MiB, so a checkpoint may be
larger than the machine's memory. Values depend on the seed, the component and the tensor's name only: the same tensor
gets the same values (rounded to its dtype) at any dtype and file size, and at any depth.

Dtypes are as published: parameters in --dtype, modules that the class pins to fp32 in fp32, persistent buffers in fp32.
Text encoders are small stand-ins of the kind the pipeline uses where that is CLIP or UMT5, and a CLIP otherwise. A
family with two experts has both, `transformer` and `transformer_2`, with weights of their own.

With --lora-rank the folder OUT/lora holds an adapter for each component, as a peft folder and as a diffusers file.
With --damage the first component is broken afterwards, in one of the ways listed below.

Exit code: 0; 2 for bad input or too little disk (checked before anything is written), with one line that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))  # the checks that are shared with them
sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkpoint_damage import DAMAGE, damage
from checkpoint_families import FAMILIES, model_index, write_text_encoder
from checkpoint_lora import write_lora
from checkpoint_writer import TensorSpec, Written, file_names, index_name, split, write_file, write_json
from preflight import UsageError, check_disk, command_line

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class WrittenPipeline:
    """What `write_pipeline` wrote."""

    path: Path
    components: tuple[str, ...]  # those with weights from the stream; the text encoder is beside them
    files: tuple[Path, ...]  # their weight files
    weight_bytes: int  # tensor bytes in these files, headers left out
    parameters: int  # elements in these files, buffers included
    peak_buffer_bytes: int  # the most bytes of elements that were held at a time
    lora: Path | None = None  # folder of the adapters


def write_pipeline(
    out: str | os.PathLike[str],
    family: str,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    buffer_dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 2_000_000_000,
    seed: int = 0,
    variant: str | None = None,
    config: dict[str, Any] | None = None,
    lora_rank: int | None = None,
    overwrite: bool = False,
) -> WrittenPipeline:
    """Writes a pipeline folder: denoiser(s), a small text encoder, a scheduler and, last of all, model_index.json.

    Args:
        out: Folder; made where it does not exist. Another variant may be written into a folder that holds one already.
        family: A key of `FAMILIES`.
        layers: Depth in blocks; None for the published one.
        dtype: Of the parameters, apart from those the class pins to fp32.
        buffer_dtype: Of the persistent buffers.
        max_shard_bytes: Tensor bytes a file may hold; a single larger tensor gets a file of its own.
        seed: Of all values.
        variant: Written into the file names, as in `diffusion_pytorch_model.fp16.safetensors`.
        config: Entries that replace published hyper-parameters, for small models of the same family.
        lora_rank: Also write an adapter of this rank for each component, into `lora/` (see `write_lora`).
        overwrite: Replace weight files of the same names.

    Peak host memory: about 25 MB above the libraries, whatever the size.

    Raises:
        UsageError: Unknown family, a bad size or depth, files in the way, too little disk space. Nothing was written.
    """
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}: expected one of {', '.join(sorted(FAMILIES))}")
    if layers is not None and layers < 1:
        raise UsageError(f"layers must be at least 1, got {layers}")
    if lora_rank is not None and lora_rank < 1:
        raise UsageError(f"the adapter's rank must be at least 1, got {lora_rank}")
    if max_shard_bytes < 1:
        raise UsageError(f"the largest file size must be positive, got {max_shard_bytes}")
    import diffusers

    chosen = FAMILIES[family]
    root = Path(out)
    model_config = {**chosen.config_for(layers), **(config or {})}
    shell = _meta_model(getattr(diffusers, chosen.cls), model_config)
    files = split(_specs(shell, dtype, buffer_dtype), max_shard_bytes)
    names = file_names(len(files), variant)
    one = sum(spec.nbytes for file in files for spec in file)
    _check_destination(root, chosen.components, variant, overwrite)
    check_disk(root, one * len(chosen.components))
    _remove_stale(root, chosen.components, variant)

    written, paths = Written(0, 0), []
    for component in chosen.components:
        folder = root / component
        folder.mkdir(parents=True, exist_ok=True)
        for name, specs in zip(names, files, strict=True):
            written += write_file(folder / name, specs, seed=seed, scope=component)
            paths.append(folder / name)
        if len(files) > 1:
            weight_map = {spec.key: name for name, specs in zip(names, files, strict=True) for spec in specs}
            index = {"metadata": {"total_size": one}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / index_name(variant), index)
        shell.save_config(folder)
    write_text_encoder(root / "text_encoder", chosen.text_encoder, dtype, seed, variant)
    getattr(diffusers, chosen.scheduler)(**chosen.scheduler_config).save_pretrained(root / "scheduler")
    for component in chosen.components if lora_rank is not None else ():
        shell = _meta_model(getattr(diffusers, chosen.cls), model_config)  # the last one has an adapter
        written += write_lora(root / "lora", shell, component, rank=lora_rank, dtype=dtype, seed=seed)
    write_json(root / "model_index.json", model_index(chosen, diffusers.__version__))
    return WrittenPipeline(
        path=root,
        components=chosen.components,
        files=tuple(paths),
        weight_bytes=one * len(chosen.components),
        parameters=sum(spec.numel for file in files for spec in file) * len(chosen.components),
        peak_buffer_bytes=written.peak_buffer_bytes,
        lora=root / "lora" if lora_rank is not None else None,
    )


def _meta_model(cls: type, config: dict[str, Any]) -> Any:
    try:
        with torch.device("meta"):
            return cls(**config)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{cls.__name__} does not take this config: {error}") from error


def _specs(shell: Any, dtype: torch.dtype, buffer_dtype: torch.dtype) -> list[TensorSpec]:
    """The tensors of the state dict in its order, in the dtypes to write."""
    pins = tuple(getattr(shell, "_keep_in_fp32_modules", None) or ())
    buffers = {name for name, _ in shell.named_buffers()}

    def dtype_of(key: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        if any(pin in key.split(".") for pin in pins):  # the library's own rule: a pin names one part of the path
            return torch.float32
        return buffer_dtype if key in buffers else dtype

    return [TensorSpec(key, dtype_of(key, t), tuple(t.shape)) for key, t in shell.state_dict().items()]


def _check_destination(root: Path, components: tuple[str, ...], variant: str | None, overwrite: bool) -> None:
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file: expected a folder, or a path where none is yet")
    stale = _stale(root, components, variant)
    if stale and not overwrite:
        raise UsageError(f"{stale[0]} is there already: pass another folder, or --overwrite to replace it")


def _stale(root: Path, components: tuple[str, ...], variant: str | None) -> list[Path]:
    """Weight files and indices of this variant that are there already."""
    stem = file_names(1, variant)[0].removesuffix(".safetensors")
    names = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors$")
    found = []
    for component in components:
        found += [path for path in sorted((root / component).glob("*")) if names.match(path.name)]
        index = root / component / index_name(variant)
        found += [index] if index.exists() else []
    return found


def _remove_stale(root: Path, components: tuple[str, ...], variant: str | None) -> None:
    """All of them: a file of an earlier, larger split must not stay beside the new ones."""
    stale = _stale(root, components, variant)
    if stale:
        (root / "model_index.json").unlink(missing_ok=True)  # the mark of a complete folder goes first
    for path in stale:
        path.unlink()


def parse_size(text: str) -> int:
    """Bytes of "200MB" or "1.5GiB"; decimal units unless they say otherwise, as huggingface_hub reads them."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if match is None:
        raise UsageError(f"bad size {text!r}: expected a number with a unit, such as 200MB, 2GB or 512MiB")
    number, unit, binary = match.groups()
    if binary and not unit:
        raise UsageError(f"bad size {text!r}: expected a number with a unit, such as 200MB, 2GB or 512MiB")
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))


def layers_at(family: str, scale: float) -> int:
    """Depth in blocks at a fraction of the published one; at least 1."""
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}: expected one of {', '.join(sorted(FAMILIES))}")
    if not 0 < scale <= 1:
        raise UsageError(f"--scale is a part of the published depth: expected more than 0 and at most 1, got {scale:g}")
    return max(1, round(FAMILIES[family].layers * scale))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    width = max(map(len, (*FAMILIES, *DAMAGE)))
    families = [f"  {name:<{width}}  {family.cls}, {family.layers} blocks" for name, family in FAMILIES.items()]
    kinds = [f"  {kind:<{width}}  {about}" for kind, (about, _) in DAMAGE.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["families:", *families, "", "kinds of damage:", *kinds]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--family", required=True, help="see below")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--layers", type=int, help="depth in blocks (default: as published)")
    depth.add_argument("--scale", type=float, help="depth as a fraction of the published one, such as 0.1")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of the parameters (default: bf16)")
    parser.add_argument("--max-shard-size", default="2GB", help="largest weight file (default: 2GB)")
    parser.add_argument("--seed", type=int, default=0, help="of all values (default: 0)")
    parser.add_argument("--variant", help="variant in the file names, such as fp16")
    parser.add_argument("--lora-rank", type=int, help="also write LoRA adapters of this rank, into OUT/lora")
    parser.add_argument("--damage", metavar="KIND", help="break the first component, see below")
    parser.add_argument("--overwrite", action="store_true", help="replace weight files that are there already")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the small text encoder is not worth a bar
    return command_line("make_checkpoint", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.damage is not None and args.damage not in DAMAGE:
        raise UsageError(f"unknown damage {args.damage!r}: expected one of {', '.join(DAMAGE)}")
    try:
        written = write_pipeline(
            args.out,
            args.family,
            layers=args.layers if args.scale is None else layers_at(args.family, args.scale),
            dtype=DTYPES[args.dtype],
            max_shard_bytes=parse_size(args.max_shard_size),
            seed=args.seed,
            variant=args.variant,
            lora_rank=args.lora_rank,
            overwrite=args.overwrite,
        )
    except OSError as error:  # the disk was filled by others
        raise UsageError(str(error)) from error
    print(
        f"{written.path}: {', '.join(written.components)}, {written.parameters / 1e9:.2f} B elements, "
        f"{written.weight_bytes / 1e9:.2f} GB in {len(written.files)} file(s)"
    )
    if written.lora is not None:
        print(f"adapters: {', '.join(sorted(path.name for path in written.lora.iterdir()))} in {written.lora}")
    if args.damage is not None:
        print(f"damaged ({args.damage}): {damage(written.path / written.components[0], args.damage)}")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
