"""The ways to load a model into FSDP2 shards that are compared: the public flows, and ours.

Each is `flow(path, component, mesh, dtype)` and returns the sharded module (ours with its report). All cut the model
into the same FSDP groups. Public flows are run as their own documentation runs them; where one cannot load a model that
way, it is given what it lacks, and a comment says so: their times are those of loads that end with the right weights.

Importing this module imports all that the flows need, so no import is on the clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
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
from adapter import Adapter
from models import (
    buffers_to,
    build_shell,
    component_class,
    component_folder,
    compute_device,
    from_pretrained,
    parameters_to_meta,
    shard_blocks,
    without_fp32_pins,
)
from phases import phase
from runs import NotAvailableError
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()
# One for each parameter of a shell that is built by `from_pretrained`: that it stays empty is the point.
warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
# Both are imported on first use otherwise: the class of the warm-up, and ours, which may be missing or broken.
diffusers.SD3Transformer2DModel  # noqa: B018
with contextlib.suppress(Exception):
    import metashard

    metashard.load_component  # noqa: B018


# ---- the public flows -----------------------------------------------------------------------------------------------


def all_load(
    path: Path,
    component: str | None,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    adapter: Adapter | None = None,
    move_first: bool = False,
) -> nn.Module:
    """Every rank loads all of the model, then shards it.

    Args:
        move_first: All of it goes to the device before it is sharded, and not group by group. The same on the CPU.
    """
    device = compute_device(mesh)
    with phase("from_pretrained"):
        module = from_pretrained(path, component, dtype)
    module = _adapted(module, adapter)
    if move_first:
        with phase("to device"):
            module.to(device)
    with phase("shard"):
        shard_blocks(module, mesh)
        buffers_to(module, device)
    return module


def _adapted(module: nn.Module, adapter: Adapter | None, *, meta: bool = False) -> nn.Module:
    if adapter is None:
        return module
    with phase("adapters"):
        return adapter.add(module, meta=meta)


def rank0_broadcast(
    path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype, *, adapter: Adapter | None = None
) -> nn.Module:
    """Rank 0 loads all of the model, others build it empty; torch broadcasts every tensor whole."""
    full = {}
    with phase("from_pretrained"):
        if dist.get_rank() == 0:
            module = from_pretrained(path, component, dtype)
        else:
            cls = component_class(path, component)
            kwargs = {"low_cpu_mem_usage": False} if issubclass(cls, diffusers.ModelMixin) else {}
            with init_empty_weights(include_buffers=False), without_fp32_pins(cls):
                module = from_pretrained(path, component, dtype, **kwargs)
    module = _adapted(module, adapter, meta=dist.get_rank() != 0)
    if dist.get_rank() == 0:
        full = module.state_dict()
        parameters_to_meta(module)
    with phase("shard"):
        shard_blocks(module, mesh)
        # Buffers first: torch takes the device of the broadcast from what is not on meta. Persistent ones are in the
        # state dict and come from rank 0; the others were computed on every rank.
        buffers_to(module, compute_device(mesh))
    with phase("broadcast"):
        set_model_state_dict(module, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return module


def dcp_reader(
    path: Path,
    component: str | None,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    adapter: Adapter | None = None,
    thread_count: int = 1,
) -> nn.Module:
    """Shells everywhere; torch.distributed.checkpoint reads each rank's part from the safetensors files and casts it.

    Args:
        thread_count: Files read at a time by a rank; 1 is torch's default.
    """
    if adapter is not None:
        raise NotAvailableError("it loads what is in the files, and a new adapter is in none")
    with phase("shell"):
        module = build_shell(path, component, dtype)
    with phase("shard"):
        shard_blocks(module, mesh)
    device = compute_device(mesh)
    with phase("allocate"):
        # Module.to_empty would empty the computed buffers too.
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    # A checkpoint holds a tied tensor under one of its names only.
    persistent = module.state_dict()
    ours = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    state = {name: tensor for name, tensor in persistent.items() if name in ours}
    with phase("read"):
        reader = HuggingFaceStorageReader(str(component_folder(path, component)), thread_count=thread_count)
        dcp.load(state, storage_reader=reader)
    return module


def accelerate_full(
    path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype, *, adapter: Adapter | None = None
) -> nn.Module:
    """Rank 0 loads all of the model; accelerate broadcasts every tensor whole, then distributes it."""
    is_main = dist.get_rank() == 0
    with phase("from_pretrained"):
        # A shell has the dtypes of rank 0: accelerate receives into what the shell says.
        module = (from_pretrained if is_main else build_shell)(path, component, dtype)
    module = _adapted(module, adapter, meta=not is_main)
    full = {}
    if is_main:
        full = module.state_dict()
        parameters_to_meta(module)
    with phase("shard"):
        shard_blocks(module, mesh)
    with phase("broadcast"):
        _accelerate_fills(module, full, compute_device(mesh), is_main)
    return module


def _accelerate_fills(module: nn.Module, full: dict[str, Any], device: torch.device, is_main: bool) -> None:
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
    buffers_to(module, device)


def _hide_persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    hidden = {}
    for prefix, sub in module.named_modules():
        for short, buffer in sub._buffers.items():
            if buffer is not None and short not in sub._non_persistent_buffers_set:
                hidden[f"{prefix}.{short}".lstrip(".")] = (sub, short)
                sub._non_persistent_buffers_set.add(short)
    return hidden


def one_process(
    path: Path, component: str | None, mesh: DeviceMesh, dtype: torch.dtype, *, adapter: Adapter | None = None
) -> nn.Module:
    """Nothing is sharded: what all flows are held against."""
    return _adapted(from_pretrained(path, component, dtype), adapter)


# ---- ours -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """`metashard.load_component` with one strategy and transport."""

    strategy: str
    transport: str = "scatter"

    def __call__(
        self,
        path: Path,
        component: str | None,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        *,
        adapter: Adapter | None = None,
    ) -> Any:
        """Returns (module, report)."""
        if importlib.util.find_spec("metashard") is None:
            raise NotAvailableError("metashard is not installed")
        import metashard  # if it is there and cannot be imported, that is a failure

        if not hasattr(metashard, "load_component") or not hasattr(metashard, "LoadPolicy"):
            raise NotAvailableError("this metashard has no load_component")
        if adapter is not None:
            torch.manual_seed(adapter.seed + dist.get_rank())  # rank 0's is the one that counts
        return metashard.load_component(
            path,
            component,
            mesh=mesh,
            dtype=dtype,
            lora=None if adapter is None else adapter.config(),
            load=metashard.LoadPolicy(strategy=self.strategy, transport=self.transport, progress=False),
            output_loading_info=True,
        )


BEFORE = "before"
PEERS: dict[str, Callable[..., Any]] = {
    BEFORE: partial(all_load, move_first=True),
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
    BEFORE: "every rank calls from_pretrained, moves all of it to its device, then shards",
    "all_load": "every rank calls from_pretrained, then shards; each group goes to the device by itself",
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
