"""The ways to load a model into FSDP2 shards that are compared: the public flows, and ours.

Each is `flow(path, component, mesh, dtype)` and returns the sharded module (ours with its report). All cut the model
into the same FSDP groups. Public flows are run as their own documentation runs them; where one cannot load a model that
way, it is given what it lacks, and a comment says so: their times are those of loads that end with the right weights.

Importing this module imports all that the flows need, so no import is on the clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils.fsdp_utils  # noqa: F401  on the clock otherwise
import diffusers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import init_empty_weights
from accelerate.utils import fsdp2_load_full_state_dict
from runs import NotAvailableError
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
# One for each parameter of a shell that is built by `from_pretrained`: that it stays empty is the point.
warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
# Both are imported on first use otherwise: the class of the warm-up, and ours, which may be missing or broken.
diffusers.SD3Transformer2DModel  # noqa: B018
with contextlib.suppress(Exception):
    import metashard

    metashard.load_component  # noqa: B018


# ---- what the flows share -------------------------------------------------------------------------------------------


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


def _buffers_to(module: nn.Module, device: torch.device) -> None:
    for sub in module.modules():
        for name, buffer in sub._buffers.items():
            if buffer is not None and not buffer.is_meta:
                sub._buffers[name] = buffer.to(device)


def _parameters_to_meta(module: nn.Module) -> nn.Module:
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
def _without_fp32_pins(cls: type[Any]) -> Iterator[None]:
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


# ---- the public flows -----------------------------------------------------------------------------------------------


def all_load(path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Every rank loads all of the model, then shards it."""
    module = shard_blocks(from_pretrained(path, component, dtype), mesh)
    _buffers_to(module, compute_device(mesh))
    return module


def rank0_broadcast(path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Rank 0 loads all of the model, others build it empty; torch broadcasts every tensor whole."""
    full = {}
    if dist.get_rank() == 0:
        module = from_pretrained(path, component, dtype)
        full = module.state_dict()
        _parameters_to_meta(module)
    else:
        cls = component_class(path, component)
        kwargs = {"low_cpu_mem_usage": False} if issubclass(cls, diffusers.ModelMixin) else {}
        with init_empty_weights(include_buffers=False), _without_fp32_pins(cls):
            module = from_pretrained(path, component, dtype, **kwargs)
    shard_blocks(module, mesh)
    # Buffers first: torch takes the device of the broadcast from what is not on meta. Persistent ones are in the state
    # dict and come from rank 0; the others were computed on every rank.
    _buffers_to(module, compute_device(mesh))
    set_model_state_dict(module, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return module


def dcp_reader(
    path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype, *, thread_count: int = 1
) -> nn.Module:
    """Shells everywhere; torch.distributed.checkpoint reads each rank's part from the safetensors files and casts it.

    Args:
        thread_count: Files read at a time by a rank; 1 is torch's default.
    """
    module = shard_blocks(build_shell(path, component, dtype), mesh)
    device = compute_device(mesh)
    # Module.to_empty would empty the computed buffers too.
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    # A checkpoint holds a tied tensor under one of its names only.
    persistent = module.state_dict()
    ours = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    state = {name: tensor for name, tensor in persistent.items() if name in ours}
    reader = HuggingFaceStorageReader(str(component_folder(path, component)), thread_count=thread_count)
    dcp.load(state, storage_reader=reader)
    return module


def accelerate_full(path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Rank 0 loads all of the model; accelerate broadcasts every tensor whole, then distributes it."""
    is_main = dist.get_rank() == 0
    full = {}
    if is_main:
        module = from_pretrained(path, component, dtype)
        full = module.state_dict()
        _parameters_to_meta(module)
    else:
        # Dtypes as on rank 0: accelerate receives into what the shell says.
        module = build_shell(path, component, dtype)
    shard_blocks(module, mesh)
    device = compute_device(mesh)
    # It takes every tensor of the state dict for a sharded one, so a persistent buffer stops it: those are sent apart.
    buffers = _hide_persistent_buffers(module)
    # It looks the parameter up by this method of transformers; without it, its fallback fails on names without a dot.
    if not hasattr(type(module), "get_parameter_or_buffer"):
        object.__setattr__(module, "get_parameter_or_buffer", module.get_parameter)
    # All that it reads of an Accelerator.
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=is_main), module, full)
    for name, (owner, short) in buffers.items():
        owner._non_persistent_buffers_set.discard(short)
        buffer = full[name].to(device) if is_main else torch.empty_like(owner._buffers[short], device=device)
        dist.broadcast(buffer, src=0)
        owner._buffers[short] = buffer
    vars(module).pop("get_parameter_or_buffer", None)
    _buffers_to(module, device)
    return module


def _hide_persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    hidden = {}
    for prefix, sub in module.named_modules():
        for short, buffer in sub._buffers.items():
            if buffer is not None and short not in sub._non_persistent_buffers_set:
                hidden[f"{prefix}.{short}".lstrip(".")] = (sub, short)
                sub._non_persistent_buffers_set.add(short)
    return hidden


# ---- ours -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """`metashard.load_component` with one strategy and transport."""

    strategy: str
    transport: str = "scatter"

    def __call__(self, path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype) -> Any:
        """Returns (module, report)."""
        if importlib.util.find_spec("metashard") is None:
            raise NotAvailableError("metashard is not installed")
        import metashard  # if it is there and cannot be imported, that is a failure

        if not hasattr(metashard, "load_component") or not hasattr(metashard, "LoadPolicy"):
            raise NotAvailableError("this metashard has no load_component")
        return metashard.load_component(
            path,
            component,
            mesh=mesh,
            dtype=dtype,
            load=metashard.LoadPolicy(strategy=self.strategy, transport=self.transport, progress=False),
            output_loading_info=True,
        )


PEERS: dict[str, Callable[..., Any]] = {
    "all_load": all_load,
    "rank0_broadcast": rank0_broadcast,
    "dcp": dcp_reader,
    "dcp/threads": partial(dcp_reader, thread_count=4),
    "accelerate": accelerate_full,
}
OURS: dict[str, Callable[..., Any]] = {
    "direct": Ours("direct"),
    "stream/scatter": Ours("stream", "scatter"),
    "stream/broadcast": Ours("stream", "broadcast"),
    "rank0/scatter": Ours("rank0", "scatter"),
    "rank0/broadcast": Ours("rank0", "broadcast"),
}
ABOUT = {
    "all_load": "every rank calls from_pretrained, then shards",
    "rank0_broadcast": "rank 0 calls from_pretrained, shells elsewhere; set_model_state_dict from rank 0",
    "dcp": "shells everywhere; torch.distributed.checkpoint with HuggingFaceStorageReader",
    "dcp/threads": "the same with thread_count=4 (that many files at a time)",
    "accelerate": "rank 0 calls from_pretrained, shells elsewhere; accelerate's fsdp2_load_full_state_dict",
    "floor": "the same bytes read into the same amount of fresh memory by the same number of processes, nothing else",
    "floor/direct_io": "the same with O_DIRECT, past the page cache (cold only)",
    "direct": "metashard: every rank reads its own byte runs",
    "stream/scatter": "metashard: one rank reads entry by entry and sends each rank its part",
    "stream/broadcast": "metashard: one rank reads entry by entry and sends everyone everything",
    "rank0/scatter": "metashard: rank 0 calls from_pretrained and sends each rank its part",
    "rank0/broadcast": "metashard: rank 0 calls from_pretrained and sends everyone everything",
}
