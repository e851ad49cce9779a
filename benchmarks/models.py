"""Models of the libraries: their files and classes, their shells, and how all flows cut them into FSDP groups."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def component_folder(path: Path, component: str | None) -> Path:
    """Folder with the component's config.json and weight files."""
    folder = Path(path) / component if component else Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json. Is the component's name right?")
    return folder


def weight_files(path: Path, component: str | None) -> list[Path]:
    """The component's safetensors files: those its index names, else all in the folder."""
    folder = component_folder(path, component)
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        return [folder / name for name in sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors files")
    return files


def component_class(path: Path, component: str | None) -> type[Any]:
    """The model's class, from the config alone."""
    config = json.loads((component_folder(path, component) / "config.json").read_text())
    if "_class_name" in config:
        return getattr(diffusers, config["_class_name"])
    return getattr(transformers, config["architectures"][0])


def from_pretrained(path: Path, component: str | None, dtype: torch.dtype, **kwargs: Any) -> nn.Module:
    """The library's own loader."""
    cls = component_class(path, component)
    name = "torch_dtype" if issubclass(cls, diffusers.ModelMixin) else "dtype"
    return cls.from_pretrained(component_folder(path, component), **{name: dtype}, local_files_only=True, **kwargs)


def shard_blocks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`fully_shard` on the blocks that the class says not to split, else those it says repeat; then on the root."""
    blocks = set(getattr(module, "_no_split_modules", None) or getattr(module, "_repeated_blocks", None) or ())
    for sub in reversed(list(module.modules())):
        if type(sub).__name__ in blocks and sub is not module:
            fully_shard(sub, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def compute_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank's shards."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).currentcompute_device())


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Moves buffers that are real."""
    for sub in module.modules():
        for name, buffer in sub._buffers.items():
            if buffer is not None and not buffer.is_meta:
                sub._buffers[name] = buffer.to(device)


def parameters_to_meta(module: nn.Module) -> nn.Module:
    """Frees a module's parameters; buffers stay real, ties stay ties."""
    on_meta: dict[nn.Parameter, nn.Parameter] = {}
    for sub in module.modules():
        for name, parameter in sub._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                sub._parameters[name] = on_meta.setdefault(parameter, empty)
    return module


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_shell(path: Path, component: str | None, dtype: torch.dtype) -> nn.Module:
    """The model with its parameters on meta, in the dtypes that `from_pretrained` would give; no weight byte is read.

    Built on the meta device, which is fastest, where nothing is lost by it; else under `init_empty_weights`, with all
    that the constructor computes being real.
    """
    cls, folder = component_class(path, component), component_folder(path, component)

    def construct() -> nn.Module:
        if issubclass(cls, diffusers.ModelMixin):
            return cls.from_config(cls.load_config(folder))
        return cls._from_config(cls.config_class.from_pretrained(folder), dtype=dtype)

    with _default_dtype(dtype):
        with torch.device("meta"):
            shell = construct()
        if _computed_on_meta(shell):
            with init_empty_weights(include_buffers=False):
                shell = construct()
    for sub_name, sub in shell.named_modules():
        for name, parameter in sub._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(_dtype_of(f"{sub_name}.{name}", cls, dtype))
        for name, buffer in sub._buffers.items():
            # The loader casts what it finds in the file, and only persistent buffers are there.
            if buffer is not None and buffer.is_floating_point() and name not in sub._non_persistent_buffers_set:
                sub._buffers[name] = buffer.to(_dtype_of(f"{sub_name}.{name}", cls, dtype))
    return shell


def _computed_on_meta(shell: nn.Module) -> bool:
    """Whether anything is on meta that no checkpoint holds: non-persistent buffers, plain tensor attributes."""
    for sub in shell.modules():
        if any(
            sub._buffers[name] is not None and sub._buffers[name].is_meta for name in sub._non_persistent_buffers_set
        ):
            return True
        for name, value in vars(sub).items():
            if name not in ("_parameters", "_buffers", "_modules") and any(t.is_meta for t in _tensors(value)):
                return True
    return False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _dtype_of(name: str, cls: type[Any], dtype: torch.dtype) -> torch.dtype:
    """diffusers pins to fp32 in any dtype; transformers has one list for fp16, and one for fp16 and bf16."""
    pins = set(getattr(cls, "_keep_in_fp32_modules", None) or ())
    if not issubclass(cls, diffusers.ModelMixin):
        pins = pins if dtype == torch.float16 else set()
        if dtype in (torch.float16, torch.bfloat16):
            pins |= set(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
    return torch.float32 if pins & set(name.split(".")) else dtype


@contextlib.contextmanager
def without_fp32_pins(cls: type[Any]) -> Iterator[None]:
    """diffusers refuses `low_cpu_mem_usage=False` for classes with pins."""
    before = cls.__dict__.get("_keep_in_fp32_modules", ...)
    cls._keep_in_fp32_modules = None
    try:
        yield
    finally:
        if before is ...:
            del cls._keep_in_fp32_modules
        else:
            cls._keep_in_fp32_modules = before
