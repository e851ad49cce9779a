"""Cut a meta module into FSDP2 groups.

[Note: dtype groups]
FSDP2 all-gathers and reduces a group's trainable parameters in one dtype and refuses a mixture of them ("uniform
original parameter dtype"): fp32 pins in a bf16 model, which may be bare parameters of a block, fail in the first
forward. Frozen mixtures are fine. `fully_shard` makes a second group inside one module for parameters whose
`shard_placement_fn` names another mesh; a mesh over the same ranks with a process group of its own is such a mesh. So
each further trainable dtype of a module gets its own mesh, made once, and is gathered and reduced apart, in its own
dtype. As both meshes are equal (same ranks, same axis names), optimizers, gradient clipping and checkpoints see
DTensors of one mesh.

Mixed precision (`MixedPrecisionPolicy(param_dtype=...)`) would cast the parameters that a class pins to fp32 as well,
trainable or frozen. They get groups of their own too, whose policy computes in fp32.
"""

from __future__ import annotations

import atexit
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from metashard import _compat
from metashard.agree import mesh_ranks, new_group
from metashard.errors import ShardError
from metashard.layout import Slot, named_slots
from metashard.policy import ShardPolicy, WrapRule

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Parts of a block that the model also calls without calling the block, whose hooks gather the parameters: they get a
# group of their own. DiT takes the first block's embedding for its output.
_CALLED_ALONE = {"DiTTransformer2DModel": "CombinedTimestepLabelEmbeddings"}


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Device of this rank on `mesh`: the mesh's type and the current device of it, never one made from the rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse what `fully_shard` cannot take, before any work is done."""
    if not isinstance(mesh, DeviceMesh):
        raise ShardError(f"mesh={mesh!r}: expected a DeviceMesh, such as init_device_mesh gives.", phase="resolve")
    if mesh.ndim not in (1, 2):
        raise ShardError(
            f"The mesh has {mesh.ndim} axes; expected one (FSDP) or two (HSDP: replicate, shard). Pass the "
            'sub-mesh, such as mesh["dp"].',
            phase="resolve",
            expected="1 or 2 axes",
            got=mesh.ndim,
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardError(
            'A two-axis mesh needs names: init_device_mesh(type, shape, mesh_dim_names=("replicate", "shard")).',
            phase="resolve",
        )
    if dist.get_rank() not in mesh_ranks(mesh):
        raise ShardError(f"This rank, {dist.get_rank()}, is not in the mesh {mesh}.", phase="resolve")


def find_blocks(module: nn.Module, wrap: WrapRule | None) -> list[str]:
    """Names of the modules that become FSDP groups of their own, children before parents.

    Raises:
        ShardError: The rule matches nothing; the message says what to pass.
    """
    named = {name: sub for name, sub in module.named_modules() if name}  # shared modules once
    wrappable = {name: sub for name, sub in named.items() if _is_called(sub)}
    if callable(wrap) and not isinstance(wrap, type):
        chosen = [name for name, sub in wrappable.items() if wrap(sub)]
    elif wrap is not None:
        rule = tuple(wrap)  # type: ignore[arg-type]
        if not rule:
            return []
        chosen = _by_class(wrappable, rule)
    else:
        chosen = (
            _by_class(wrappable, getattr(module, "_no_split_modules", None) or ())
            or _by_class(wrappable, getattr(module, "_repeated_blocks", None) or ())
            or _repeated(module)
        )
    alone = [part for model, part in _CALLED_ALONE.items() if any(type(s).__name__ == model for s in module.modules())]
    chosen += [name for name in _by_class(wrappable, alone) if chosen and name not in chosen]
    if not chosen:
        classes = Counter(type(sub).__name__ for sub in wrappable.values() if any(True for _ in sub.children()))
        common = ", ".join(f"{name} ({count})" for name, count in classes.most_common(6)) or "none with children"
        what = f"The wrap rule {wrap!r} matches no module" if wrap is not None else "Found no repeated blocks to wrap"
        raise ShardError(
            f"{what} of {type(module).__name__}; as one single FSDP group it would be gathered whole. Pass "
            f"ShardPolicy(wrap=(class names or classes)), or wrap=() to ask for one group. Its modules: {common}.",
            phase="shard",
            expected="at least one module to wrap",
            got=0,
        )
    kept = _without_ties_across(module, chosen)
    return sorted((name for name in chosen if name in kept), key=lambda name: -name.count("."))


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, which FSDP hooks; ModuleLists and bare `nn.Module()` namespaces have none."""
    return type(module).forward is not nn.Module.forward


def _by_class(named: dict[str, nn.Module], rule: Iterable[str | type]) -> list[str]:
    names = {item for item in rule if isinstance(item, str)}
    classes = tuple(item for item in rule if isinstance(item, type))
    return [name for name, sub in named.items() if type(sub).__name__ in names or isinstance(sub, classes)]


def _repeated(module: nn.Module) -> list[str]:
    """Outermost children of containers, with children of their own, whose class occurs so at least twice."""
    candidates: dict[str, nn.Module] = {}
    for name, sub in module.named_modules():
        for key, child in sub.named_children() if isinstance(sub, _CONTAINERS) else ():
            inner = any(True for _ in child.children()) and any(True for _ in child.parameters())
            if inner and _is_called(child) and not isinstance(child, _CONTAINERS):
                candidates[f"{name}.{key}" if name else key] = child
    count = Counter(type(child) for child in candidates.values())
    blocks = {name for name, child in candidates.items() if count[type(child)] >= 2}
    return [name for name in candidates if name in blocks and not group_of(name.rpartition(".")[0], blocks)]


def group_of(name: str, chosen: set[str]) -> str:
    """The nearest chosen ancestor of a module name, or "" for the root's group."""
    while name and name not in chosen:
        name = name.rpartition(".")[0]
    return name


def _without_ties_across(module: nn.Module, chosen: list[str]) -> set[str]:
    """Drop blocks that share a parameter with another group: `fully_shard` would untie them in silence."""
    kept = set(chosen)
    owners: dict[str, list[str]] = defaultdict(list)
    for slot, _ in named_slots(module, attributes=False):
        if slot.kind == "parameter":
            owners[slot.tie].append(slot.fqn.rpartition(".")[0])
    shared = [names for names in owners.values() if len(names) > 1]
    while conflict := next((g for g in ({group_of(n, kept) for n in names} for names in shared) if len(g) > 1), None):
        kept -= {max(conflict, key=lambda name: (name.count("."), name))}
    return kept


def choose_groups(module: nn.Module, policy: ShardPolicy) -> list[str]:
    """Names of the modules to wrap before the root; changes nothing.

    Raises:
        ShardError: Nothing to wrap, or the module is sharded already.
    """
    already = [name or "(root)" for name, sub in module.named_modules() if isinstance(sub, FSDPModule)]
    if already:
        raise ShardError(
            f"{already[0]} is already sharded. Load and wrap a module once; add adapters before wrap_model.",
            phase="shard",
            key=already[0],
        )
    return find_blocks(module, policy.wrap)


def asked_to_ignore(module: nn.Module, policy: ShardPolicy) -> set[str]:
    """FQNs of the parameters that the policy names, by FQN, predicate or object."""
    slots = [(slot, tensor) for slot, tensor in named_slots(module, attributes=False) if slot.kind == "parameter"]
    if callable(policy.ignored_params):
        return {slot.fqn for slot, _ in slots if policy.ignored_params(slot.fqn)}
    asked = tuple(policy.ignored_params or ())
    given = {id(item) for item in asked}
    names = {item for item in asked if isinstance(item, str)} | {s.fqn for s, tensor in slots if id(tensor) in given}
    unknown = sorted(names - {slot.fqn for slot, _ in slots})
    if unknown:
        raise ShardError(
            f"ignored_params names {unknown[0]}, which is no parameter of {type(module).__name__}.",
            phase="agree",
            key=unknown[0],
        )
    return names


def replicated_names(slots: Iterable[Slot], asked: set[str]) -> set[str]:
    """FQNs of all parameters that stay replicated: those asked for, 0-d ones (FSDP cannot shard them), ties."""
    parameters = [slot for slot in slots if slot.kind == "parameter"]
    ties = {slot.tie for slot in parameters if slot.fqn in asked or not slot.shape}
    return {slot.fqn for slot in parameters if slot.tie in ties}


_FORWARD_METHODS = ("encode", "decode", "get_text_features", "get_image_features", "get_audio_features")


def shard_module(
    module: nn.Module, blocks: list[str], mesh: DeviceMesh, policy: ShardPolicy, ignored: set[str]
) -> None:
    """`fully_shard` the blocks, then the root. Parameters must be on meta; `ignored` FQNs stay replicated."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    mp_policy = policy.mp_policy or MixedPrecisionPolicy()
    pinned = pinned_names(module, mp_policy.param_dtype)
    groups = _dtype_groups(parameters, set(blocks), ignored, pinned)
    kwargs: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": policy.reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": policy.offload_policy or OffloadPolicy(),
        "ignored_params": {parameters[fqn] for fqn in ignored},
        "shard_placement_fn": policy.shard_placement_fn,
    }
    infos = {group: _mesh_info(_own_mesh(mesh, group)) for group in sorted(set(groups.values()))}
    if infos:
        kwargs["shard_placement_fn"] = _placement_by_dtype(
            {id(parameters[fqn]): infos[group] for fqn, group in groups.items()}, policy.shard_placement_fn
        )
    in_fp32 = [info for (is_pinned, _), info in infos.items() if is_pinned]
    for name in [*blocks, ""]:
        fully_shard(module.get_submodule(name), **kwargs)
        if in_fp32:
            _compat.set_group_policy(module.get_submodule(name), in_fp32, _fp32(mp_policy))
    # Autoencoders and CLIP-like encoders are called through these, too; they would see sharded parameters without it.
    for method in _FORWARD_METHODS:
        if callable(getattr(module, method, None)):
            register_fsdp_forward_method(module, method)
    if mesh.size() == dist.get_world_size():  # `generate` would wait for ranks that are not in the mesh
        _compat.note_fsdp_for_transformers(module)


def pinned_names(module: nn.Module, param_dtype: torch.dtype | None) -> set[str]:
    """FQNs of the parameters and buffers that their model's class keeps in fp32 when it loads in `param_dtype`."""
    if param_dtype not in (torch.bfloat16, torch.float16):
        return set()
    found: set[str] = set()
    for prefix, sub in module.named_modules():
        pinned: Callable[[str], Any] | None = None
        if hasattr(type(sub), "_get_dtype_plan"):  # transformers
            pinned = _compat.transformers_dtype_plan(sub, param_dtype)
        elif pins := tuple(getattr(type(sub), "_keep_in_fp32_modules", None) or ()):  # diffusers
            pinned = partial(_has_part, pins)
        if pinned is not None:
            start = f"{prefix}." if prefix else ""
            tensors = (sub.named_parameters(remove_duplicate=False), sub.named_buffers(remove_duplicate=False))
            found |= {start + name for name, _ in chain(*tensors) if pinned(name)}
    return found


def _has_part(parts: tuple[str, ...], name: str) -> bool:
    return not set(parts).isdisjoint(name.split("."))


def _fp32(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of pinned parameters: gathered, computed with and reduced in fp32."""
    reduce_dtype = torch.float32 if policy.reduce_dtype is not None else None
    return replace(policy, param_dtype=torch.float32, reduce_dtype=reduce_dtype)


def _dtype_groups(
    parameters: dict[str, nn.Parameter], blocks: set[str], ignored: set[str], pinned: set[str]
) -> dict[str, tuple[bool, int]]:
    """FQN -> (pinned, number) of the further dtype group it belongs to; see [Note: dtype groups].

    Parameters that are not in the result stay in their module's own group: those of the trainable dtype with most
    bytes, and all frozen ones that are not pinned.
    """
    bytes_of: dict[tuple[str, bool], Counter[torch.dtype]] = defaultdict(Counter)
    kept = {fqn: p for fqn, p in parameters.items() if fqn not in ignored}
    owner = {fqn: (group_of(fqn.rpartition(".")[0], blocks), fqn in pinned) for fqn in kept}
    for fqn, parameter in kept.items():
        if parameter.requires_grad:
            bytes_of[owner[fqn]][parameter.dtype] += parameter.nbytes
    numbers: dict[str, tuple[bool, int]] = {}
    for fqn, parameter in kept.items():
        order = sorted(bytes_of[owner[fqn]].items(), key=lambda x: (-x[1], str(x[0])))
        number = [dtype for dtype, _ in order].index(parameter.dtype) if parameter.requires_grad else 0
        if number or fqn in pinned:
            numbers[fqn] = (fqn in pinned, number)
    return numbers


def _placement_by_dtype(
    infos: dict[int, Any], user_fn: Callable[[nn.Parameter], Any] | None
) -> Callable[[nn.Parameter], Any]:
    def place(parameter: nn.Parameter) -> Any:
        placement = user_fn(parameter) if user_fn is not None else None
        info = infos.get(id(parameter))
        if info is None or not isinstance(placement, (Shard, type(None))):
            return placement
        return _compat.ShardPlacementResult(placement=placement, mesh_info=info)

    return place


# By the process groups that the mesh talks over, not by the mesh: callers make meshes, and sub-meshes, as they go. The
# values keep what the keys name alive, so that no other group gets its id.
_own_meshes: dict[tuple[Any, ...], tuple[Any, list[dist.ProcessGroup], DeviceMesh]] = {}
atexit.register(_own_meshes.clear)  # as the control groups of `metashard.agree`


def _own_mesh(mesh: DeviceMesh, group: tuple[bool, int]) -> DeviceMesh:
    """A mesh over the same ranks with process groups of its own, made once for a dtype group. Collective."""
    world = dist.group.WORLD
    for stale in [key for key, (of, _, _) in _own_meshes.items() if of is not world]:
        del _own_meshes[stale]  # of a process group that was destroyed
    shared = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    key = (tuple(map(id, shared)), mesh_ranks(mesh), mesh.device_type, mesh.mesh_dim_names, group)
    if key not in _own_meshes:
        groups = [new_group(dist.get_process_group_ranks(theirs)) for theirs in shared]
        twin = DeviceMesh.from_group(
            groups if mesh.ndim > 1 else groups[0],
            mesh.device_type,
            mesh=mesh.mesh if mesh.ndim > 1 else None,
            mesh_dim_names=mesh.mesh_dim_names,
        )
        _own_meshes[key] = (world, shared, twin)
    return _own_meshes[key][2]


def _mesh_info(mesh: DeviceMesh) -> Any:
    if mesh.ndim == 1:
        return _compat.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return _compat.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def average_replicated_grads(module: nn.Module, mesh: DeviceMesh, names: Iterable[str]) -> None:
    """Average the gradients of replicated trainable parameters over the mesh, as FSDP does for its own."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            for group in groups:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(mesh.size())

    for name in sorted(names):
        if parameters[name].requires_grad:
            parameters[name].register_post_accumulate_grad_hook(average)


def put_back_shards(module: nn.Module) -> None:
    """Free what FSDP has gathered for a forward, in the dtype of its compute.

    The root's group stays gathered after a forward without a backward, and whatever a forward needed that an exception
    has broken off.
    """
    for sub in module.modules():
        if isinstance(sub, FSDPModule):
            _compat.put_back_gathered(sub)
