#!/usr/bin/env python3
"""Writes synthetic checkpoints: whole pipeline folders at real shapes, in a stream, with bounded memory.

    python tools/make_checkpoint.py OUT --family sd3.5-medium
    python tools/make_checkpoint.py OUT --family wan2.2-a14b --layers 2 --max-shard-size 5GB

The model is built on the meta device to learn names, shapes and the config file; no weight of it ever exists. Each
file's header is computed first, then its tensors are drawn and written in pieces of a few MiB, so a checkpoint may be
larger than the machine's memory. Values depend on the seed, the component and the tensor's name only: the same tensor
gets the same values (rounded to its dtype) at any dtype and file size, and at any depth.

Dtypes are as published: parameters in --dtype, modules that the class pins to fp32 in fp32, persistent buffers in fp32.
Text encoders are small stand-ins of the kind the pipeline uses where that is CLIP or UMT5, and a CLIP otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PIECE = 1 << 22  # elements drawn at a time: 16 MiB of fp32
STD = 0.02
FREE_SPACE_MARGIN = 64 << 20  # bytes left over for configs and file system overhead


class UsageError(ValueError):
    """What the caller asked for cannot be done; one line says why."""


@dataclass(frozen=True)
class Family:
    """A pipeline and its denoiser(s): the library's class with the published hyper-parameters."""

    pipeline: str
    cls: str
    config: dict[str, Any]
    text_encoder: str  # class name in transformers
    components: tuple[str, ...] = ("transformer",)  # each a model of `cls`, with weights of its own
    absent: tuple[str, ...] = ()  # written as [null, null] in model_index.json
    extra: dict[str, Any] = field(default_factory=dict)  # further entries of model_index.json
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    scheduler_config: dict[str, Any] = field(default_factory=dict)

    def config_for(self, layers: int | None) -> dict[str, Any]:
        """The config at a depth of `layers` blocks; other lists of blocks keep their proportion to it."""
        config = dict(self.config)
        if layers is None:
            return config
        full = config["num_layers"]
        config["num_layers"] = layers
        if "num_single_layers" in config:
            config["num_single_layers"] = max(1, round(layers * config["num_single_layers"] / full))
        if "dual_attention_layers" in config:
            config["dual_attention_layers"] = tuple(i for i in config["dual_attention_layers"] if i < layers)
        return config


_SD3 = dict(
    sample_size=128,
    patch_size=2,
    in_channels=16,
    out_channels=16,
    attention_head_dim=64,
    joint_attention_dim=4096,
    pooled_projection_dim=2048,
    qk_norm="rms_norm",
)
_SD3_ABSENT = ("text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3", "vae")

FAMILIES = {
    "sd3.5-medium": Family(
        pipeline="StableDiffusion3Pipeline",
        cls="SD3Transformer2DModel",
        config=dict(
            _SD3,
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
        ),
        text_encoder="CLIPTextModelWithProjection",
        absent=_SD3_ABSENT,
        scheduler_config=dict(shift=3.0),
    ),
    # Of no published model: SD3.5's structure at about 600 MB in bf16, for the demo.
    "sd3-small": Family(
        pipeline="StableDiffusion3Pipeline",
        cls="SD3Transformer2DModel",
        config=dict(
            _SD3,
            num_layers=7,
            num_attention_heads=16,
            caption_projection_dim=1024,
            pos_embed_max_size=96,
            dual_attention_layers=(0, 1, 2),
        ),
        text_encoder="CLIPTextModelWithProjection",
        absent=_SD3_ABSENT,
        scheduler_config=dict(shift=3.0),
    ),
    "qwen-image": Family(
        pipeline="QwenImagePipeline",
        cls="QwenImageTransformer2DModel",
        config=dict(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=60,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=3584,
            guidance_embeds=False,
            axes_dims_rope=(16, 56, 56),
        ),
        text_encoder="CLIPTextModel",
        absent=("tokenizer", "vae"),
        scheduler_config=dict(shift=1.0, use_dynamic_shifting=True),
    ),
    "wan2.2-a14b": Family(
        pipeline="WanPipeline",
        cls="WanTransformer3DModel",
        config=dict(
            patch_size=(1, 2, 2),
            num_attention_heads=40,
            attention_head_dim=128,
            in_channels=16,
            out_channels=16,
            text_dim=4096,
            freq_dim=256,
            ffn_dim=13824,
            num_layers=40,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            eps=1e-6,
            image_dim=None,
            added_kv_proj_dim=None,
            rope_max_seq_len=1024,
        ),
        text_encoder="UMT5EncoderModel",
        components=("transformer", "transformer_2"),
        absent=("tokenizer", "vae"),
        extra=dict(boundary_ratio=0.875),
        scheduler="UniPCMultistepScheduler",
        scheduler_config=dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ),
    "ltx-2": Family(
        pipeline="LTX2Pipeline",
        cls="LTX2VideoTransformer3DModel",
        config=dict(
            in_channels=128,
            out_channels=128,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=32,
            attention_head_dim=128,
            cross_attention_dim=4096,
            audio_in_channels=128,
            audio_out_channels=128,
            audio_num_attention_heads=32,
            audio_attention_head_dim=64,
            audio_cross_attention_dim=2048,
            num_layers=48,
            caption_channels=3840,
            rope_type="split",
        ),
        text_encoder="CLIPTextModel",
        absent=("tokenizer", "vae", "audio_vae", "connectors", "vocoder"),
        scheduler_config=dict(shift=1.0, use_dynamic_shifting=True),
    ),
    "flux": Family(
        pipeline="FluxPipeline",
        cls="FluxTransformer2DModel",
        config=dict(
            patch_size=1,
            in_channels=64,
            num_layers=19,
            num_single_layers=38,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            guidance_embeds=True,
            axes_dims_rope=(16, 56, 56),
        ),
        text_encoder="CLIPTextModel",
        absent=("text_encoder_2", "tokenizer", "tokenizer_2", "vae"),
        scheduler_config=dict(shift=3.0, use_dynamic_shifting=True),
    ),
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to write: what a safetensors header says about it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenPipeline:
    """What `write_pipeline` wrote."""

    path: Path
    components: tuple[str, ...]  # those with weights from the stream; the text encoder is beside them
    files: tuple[Path, ...]  # their weight files
    weight_bytes: int  # tensor bytes in these files, headers left out
    parameters: int  # elements in these files, buffers included


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
        overwrite: Replace weight files of the same names.

    Peak host memory: about 50 MB, plus the small text encoder.

    Raises:
        UsageError: Unknown family, a bad size or depth, files in the way, too little disk space. Nothing was written.
    """
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}: expected one of {', '.join(sorted(FAMILIES))}")
    if layers is not None and layers < 1:
        raise UsageError(f"layers must be at least 1, got {layers}")
    if max_shard_bytes < 1:
        raise UsageError(f"the largest file size must be positive, got {max_shard_bytes}")
    import diffusers

    chosen = FAMILIES[family]
    root = Path(out)
    shell = _meta_model(getattr(diffusers, chosen.cls), {**chosen.config_for(layers), **(config or {})})
    files = _split(_specs(shell, dtype, buffer_dtype), max_shard_bytes)
    names = _file_names(len(files), variant)
    one = sum(spec.nbytes for file in files for spec in file)
    _check_destination(root, chosen.components, variant, overwrite)
    _check_space(root, one * len(chosen.components))

    written = []
    for component in chosen.components:
        folder = root / component
        folder.mkdir(parents=True, exist_ok=True)
        for name, specs in zip(names, files, strict=True):
            _write_file(folder / name, specs, seed, component)
            written.append(folder / name)
        if len(files) > 1:
            weight_map = {spec.key: name for name, specs in zip(names, files, strict=True) for spec in specs}
            index = {"metadata": {"total_size": one}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / _index_name(variant), index)
        shell.save_config(folder)
    _write_text_encoder(root / "text_encoder", chosen.text_encoder, dtype, seed, variant)
    getattr(diffusers, chosen.scheduler)(**chosen.scheduler_config).save_pretrained(root / "scheduler")
    _write_json(root / "model_index.json", _model_index(chosen, diffusers.__version__))
    return WrittenPipeline(
        path=root,
        components=chosen.components,
        files=tuple(written),
        weight_bytes=one * len(chosen.components),
        parameters=sum(spec.numel for file in files for spec in file) * len(chosen.components),
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


def _split(specs: list[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Files in the order of the state dict, each filled until the next tensor would not fit (as huggingface_hub does).

    Within a file the wider dtypes come first, so that every tensor is aligned to its own element size.
    """
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not files or spec.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(spec)
        room -= spec.nbytes
    return [sorted(file, key=lambda spec: (-spec.dtype.itemsize, spec.key)) for file in files]


def _file_names(count: int, variant: str | None) -> list[str]:
    stem = "diffusion_pytorch_model" + (f".{variant}" if variant else "")
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _index_name(variant: str | None) -> str:
    return "diffusion_pytorch_model.safetensors.index." + (f"{variant}." if variant else "") + "json"


def _check_destination(root: Path, components: tuple[str, ...], variant: str | None, overwrite: bool) -> None:
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file: expected a folder, or a path where none is yet")
    stem = "diffusion_pytorch_model" + (f".{variant}" if variant else "")
    names = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors$")
    for component in components:
        stale = [p for p in sorted((root / component).glob("*")) if names.match(p.name)]
        index = root / component / _index_name(variant)
        stale += [index] if index.exists() else []
        if stale and not overwrite:
            raise UsageError(f"{stale[0]} is there already: pass another folder, or --overwrite to replace it")
        # All of them: a file of an earlier, larger split must not stay beside the new ones. The marker of a complete
        # folder goes first.
        if stale:
            (root / "model_index.json").unlink(missing_ok=True)
        for path in stale:
            path.unlink()


def _check_space(root: Path, wanted: int) -> None:
    existing = next(parent for parent in (root.absolute(), *root.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(f"no permission to write in {existing}")
    free = shutil.disk_usage(existing).free
    if wanted + FREE_SPACE_MARGIN > free:
        raise UsageError(
            f"the checkpoint takes {wanted / 1e9:.1f} GB and {existing} has {free / 1e9:.1f} GB free: "
            "pass fewer --layers, a smaller --dtype or another folder"
        )


def _write_file(path: Path, specs: list[TensorSpec], seed: int, component: str) -> None:
    """One safetensors file: 8 bytes of header length, the header as JSON padded to 8 bytes, the tensors gapless."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.key] = {
            "dtype": SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb", buffering=0) as file:
            _write_all(file, len(encoded).to_bytes(8, "little") + encoded)
            for spec in specs:
                for piece in _values(spec, seed, component):
                    _write_all(file, memoryview(piece.reshape(-1).view(torch.uint8).numpy()))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _values(spec: TensorSpec, seed: int, component: str) -> Iterator[torch.Tensor]:
    """The tensor's elements in order, in pieces: normals around 0, around 1 for the scales of norms; integers are 0."""
    if not spec.dtype.is_floating_point:
        for start in range(0, spec.numel, PIECE):
            yield torch.zeros(min(PIECE, spec.numel - start), dtype=spec.dtype)
        return
    digest = hashlib.sha256(f"{seed}/{component}/{spec.key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    *path, last = spec.key.split(".")
    is_scale = last == "weight" and len(spec.shape) == 1 and any("norm" in part for part in path)
    piece = torch.empty(min(PIECE, spec.numel))
    for start in range(0, spec.numel, PIECE):
        drawn = piece[: spec.numel - start].normal_(1.0 if is_scale else 0.0, STD, generator=generator)
        yield drawn.to(spec.dtype)


def _write_text_encoder(folder: Path, cls_name: str, dtype: torch.dtype, seed: int, variant: str | None) -> None:
    import transformers

    if cls_name == "UMT5EncoderModel":
        config: Any = transformers.UMT5Config(
            vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4
        )
    else:
        config = transformers.CLIPTextConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            projection_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            bos_token_id=0,
            eos_token_id=511,
            pad_token_id=1,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, cls_name)(config).to(dtype)
    model.save_pretrained(folder, variant=variant)


def _model_index(family: Family, version: str) -> dict[str, Any]:
    entries: dict[str, Any] = {name: [None, None] for name in family.absent}
    entries.update({name: ["diffusers", family.cls] for name in family.components})
    entries["text_encoder"] = ["transformers", family.text_encoder]
    entries["scheduler"] = ["diffusers", family.scheduler]
    entries.update(family.extra)
    return {"_class_name": family.pipeline, "_diffusers_version": version, **dict(sorted(entries.items()))}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


def parse_size(text: str) -> int:
    """Bytes of "200MB" or "1.5GiB"; decimal units unless they say otherwise, as huggingface_hub reads them."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if match is None:
        raise UsageError(f"bad size {text!r}: expected a number with a unit, such as 200MB, 2GB or 512MiB")
    number, unit, binary = match.groups()
    if binary and not unit:
        raise UsageError(f"bad size {text!r}: expected a number with a unit, such as 200MB, 2GB or 512MiB")
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--family", required=True, help=", ".join(sorted(FAMILIES)))
    parser.add_argument("--layers", type=int, help="depth in blocks (default: as published)")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of the parameters (default: bf16)")
    parser.add_argument("--max-shard-size", default="2GB", help="largest weight file (default: 2GB)")
    parser.add_argument("--seed", type=int, default=0, help="of all values (default: 0)")
    parser.add_argument("--variant", help="variant in the file names, such as fp16")
    parser.add_argument("--overwrite", action="store_true", help="replace weight files that are there already")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the small text encoder is not worth a bar
    try:
        written = write_pipeline(
            args.out,
            args.family,
            layers=args.layers,
            dtype=DTYPES[args.dtype],
            max_shard_bytes=parse_size(args.max_shard_size),
            seed=args.seed,
            variant=args.variant,
            overwrite=args.overwrite,
        )
    except (UsageError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    print(
        f"{written.path}: {', '.join(written.components)}, {written.parameters / 1e9:.2f} B elements, "
        f"{written.weight_bytes / 1e9:.2f} GB in {len(written.files)} file(s)"
    )
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
