"""Every private import of torch, diffusers and transformers, in one file.

Each line says why it is needed; `tests/test_compat.py` fails loudly when one of them moves.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

# Names, stores and timeouts of process groups, see `named_by_members`, `default_store` and `patient_groups`.
from torch.distributed import distributed_c10d

# A second group of parameters in one FSDP module, over the same ranks (see shard.py, [Note: dtype groups]). The result
# type of a public argument of `fully_shard`, but not exported.
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor

# Which part of a DTensor a rank holds: a second opinion beside our own plan, for `verify="full"`.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# FSDP over tensor parallel gives this placement; it is needed to read the layout of such a parameter.
from torch.distributed.tensor.placement_types import _StridedShard

# Sees every operator that runs, by whatever alias of a tensor it is called: a hook's writes (see hook.py).
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "ShardPlacementResult",
    "TorchDispatchMode",
    "_StridedShard",
    "apply_to_tensors",
    "compute_local_shape_and_global_offset",
    "default_dtype",
    "default_store",
    "diffusers_fixed_keys",
    "held_tensor",
    "ignored_by",
    "library_from_pretrained",
    "named_by_members",
    "note_fsdp_for_transformers",
    "patient_groups",
    "recorded_save_file",
    "set_group_policy",
    "transformers_converted_back",
    "transformers_dtype_plan",
    "transformers_from_config",
    "transformers_renamer",
]


def apply_to_tensors(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`nn.Module._apply`, what `to_empty` and `to` are made of.

    `to_empty` itself would wipe the buffers. FSDP overrides `_apply` to re-pad and re-register its shards afterwards.
    """
    module._apply(fn)


def held_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The very tensor object that a parameter keeps its shard in; `to_local` makes a new one of a parameter's."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def set_group_policy(module: nn.Module, mesh_infos: list[Any], policy: Any) -> None:
    """Give those parameter groups of an FSDP module that are on one of `mesh_infos` another mixed precision policy.

    `fully_shard` takes one policy for all groups of a module. FSDP reads a group's `mp_policy` in its lazy init.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        if any(group.mesh_info is info for info in mesh_infos):
            group.mp_policy = policy
            for parameter in group.fsdp_params:
                parameter.mp_policy = policy


def put_back_gathered(module: nn.Module) -> None:
    """Free what the groups of an FSDP module have gathered.

    `FSDPModule.reshard` leaves it where a forward is under way: so does one that an exception has broken off.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        group._to_sharded()


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Build modules under `dtype`, as both libraries' `from_pretrained` do."""
    before = torch.get_default_dtype()
    if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def library_from_pretrained(replacements: Mapping[type, Callable[..., Any]]) -> Iterator[None]:
    """Replace the `from_pretrained` of library base classes for the time of the context, and always put it back."""
    before = {base: base.__dict__["from_pretrained"] for base in replacements}
    try:
        for base, function in replacements.items():
            base.from_pretrained = classmethod(function)  # type: ignore[attr-defined]
        yield
    finally:
        for base, function in before.items():
            base.from_pretrained = function  # type: ignore[attr-defined]


def default_store() -> Any:
    """The store of the default process group, over which ranks can talk without a collective."""
    return distributed_c10d._get_default_store()


@contextmanager
def patient_groups(groups: Iterable[Any], seconds: float) -> Iterator[None]:
    """Let collectives of these process groups wait for at least `seconds` for the slowest rank inside the context.

    The groups are the trainer's, with a timeout made for steps; torch has no public way to change it.
    """
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    before = [backend.options._timeout for backend in backends]
    try:
        for backend, own in zip(backends, before, strict=True):
            backend._set_default_timeout(max(own, timedelta(seconds=seconds)))
        yield
    finally:
        for backend, own in zip(backends, before, strict=True):
            backend._set_default_timeout(own)


_member_groups: Counter[tuple[int, ...]] = Counter()


@contextmanager
def named_by_members(ranks: tuple[int, ...]) -> Iterator[None]:
    """Name the process group that is made inside the context by its ranks and how many of theirs came before.

    torch names a group that only its members make by how many groups this rank is in, too: ranks that are in unequally
    many (a trainer's group of rank 0 alone is enough) wait for each other under different names until the timeout.
    """
    number, _member_groups[ranks] = _member_groups[ranks], _member_groups[ranks] + 1
    name = f"metashard-{'-'.join(map(str, ranks))}-{number}"
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


@contextmanager
def recorded_save_file(record: Callable[[Mapping[str, torch.Tensor], str, Mapping[str, str]], None]) -> Iterator[None]:
    """Give the tensors of each safetensors file that a library wants to write to `record` instead.

    There is no public way to learn what `save_pretrained` would write. diffusers calls `safetensors.torch.save_file`
    by its module, transformers has imported it under another name.
    """
    import safetensors.torch

    def save_file(
        tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None
    ) -> None:
        record(tensors, str(filename), metadata or {})

    places = [(safetensors.torch, "save_file")]
    if "transformers.modeling_utils" in sys.modules:
        places.append((sys.modules["transformers.modeling_utils"], "safe_save_file"))
    before = [getattr(module, name) for module, name in places]
    bars: Any = getattr(sys.modules.get("transformers.modeling_utils"), "logging", None)
    shown = bars is not None and bars.is_progress_bar_enabled()  # it would say that all is written when nothing is
    try:
        if shown:
            bars.disable_progress_bar()
        for module, name in places:
            setattr(module, name, save_file)
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
        for (module, name), original in zip(places, before, strict=True):
            setattr(module, name, original)


def transformers_converted_back(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` makes of live tensors: other names, and for some models other tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, torch.Tensor] = revert_weight_conversion(module, tensors)
    return made


def diffusers_fixed_keys(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries under the names that diffusers gives them when it loads one file (old attention blocks of VAEs)."""
    fixed = dict(entries)
    module._fix_state_dict_keys_on_load(fixed)  # type: ignore[operator]
    return fixed


def note_fsdp_for_transformers(module: nn.Module) -> None:
    """Let `generate` go on until all ranks are done: every step gathers parameters from all of them.

    transformers looks for FSDP2 by this mark, which only its own loader sets (`apply_fully_sharded_data_parallelism`).
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None:
        for part in module.modules():
            if isinstance(part, library.PreTrainedModel):
                part._is_fsdp_managed_module = True


def transformers_from_config(cls: type, config: Any, *, dtype: torch.dtype | None, **kwargs: Any) -> nn.Module:
    """What `AutoModel.from_config` calls once it knows the class."""
    return cls._from_config(config, dtype=dtype, **kwargs)  # type: ignore[attr-defined]


def transformers_dtype_plan(module: nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """FQN -> dtype that transformers pins for it when it loads in `dtype` (None: not pinned)."""
    from transformers.core_model_loading import build_glob_alternation

    plan = module._get_dtype_plan(dtype)  # type: ignore[operator]
    if not plan:
        return lambda fqn: None
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def pinned(fqn: str) -> torch.dtype | None:
        match = pattern.search(fqn)
        return None if match is None else plan[by_group[match.lastgroup]]

    return pinned


def transformers_renamer(module: nn.Module) -> Callable[[str, Mapping[str, Any]], tuple[str, str | None]]:
    """Checkpoint key -> (live key, source pattern of a value conversion or None), from transformers' own map.

    As transformers' loader does, it notes down in the module which transforms were used: a save reverts those.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(module)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix = module.base_model_prefix
    used: Any = []
    module._weight_conversions = used

    def rename(key: str, live: Mapping[str, Any]) -> tuple[str, str | None]:
        # As in transformers' `convert_and_load_state_dict_in_model`, steps 1 and 2.
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, live)
        if renamed not in live and key in live:
            renamed, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=live)
        used[:] = [transform for transform in transforms if transform.was_used()]
        return renamed, pattern

    return rename


def ignored_by(patterns: Any, key: str) -> bool:
    """Whether a library's `_keys_to_ignore_on_load_*` patterns match `key`."""
    return any(re.search(pattern, key) for pattern in patterns or ())
