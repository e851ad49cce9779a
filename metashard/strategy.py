"""Which strategy a load takes, and why; and what rank 0 loads where it is `rank0`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from metashard import _compat
from metashard.checkpoint import Checkpoint
from metashard.component import Component
from metashard.errors import ComponentError, LayoutError
from metashard.files import resolve_error, short
from metashard.layout import named_slots, set_tensor
from metashard.mapping import Mapping, library_reads, map_entries, missing_error
from metashard.policy import LoadPolicy
from metashard.run import Run
from metashard.shell import own_config
from metashard.weight_files import CONFIG

ASKED_FOR = "asked for"  # the reason where a caller names the strategy


def as_dtype(dtype: Any) -> torch.dtype | None:
    """A caller's `dtype`, by its name too; None, and transformers' "auto", leave it to the library."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype in (None, "auto"):
        return None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: expected a torch.dtype, such as torch.bfloat16, or None.")
    return found


def build_dtype(found: Component, headers: Checkpoint | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that the library builds under.

    transformers' "auto" is the config's, else that of the first float weight in the first file.
    """
    if found.library != "transformers" or dtype is not None:
        return dtype
    config = own_config(found.cls, found.config)
    named = config.get("dtype") or config.get("torch_dtype")
    if named is not None:
        made = getattr(torch, str(named).removeprefix("torch."), None)
        if not isinstance(made, torch.dtype):
            text = f"config.json says dtype {short(named)}, which torch does not have"
            raise resolve_error(text, file=found.folder / CONFIG, expected="such as bfloat16", got=short(named))
        return made
    first = [e.dtype for e in (headers.entries.values() if headers else ()) if e.file == found.files[0]]
    return next((kind for kind in first if kind.is_floating_point and kind.itemsize > 1), None)


def map_or_refuse(module: nn.Module, found: Component, headers: Checkpoint | None, load: LoadPolicy) -> Mapping:
    if headers is None:
        return Mapping(reason="the weights are pickled")
    mapping = map_entries(module, headers, library=found.library)
    if mapping.reason is None and mapping.missing:
        if load.missing == "error":
            raise missing_error(mapping.missing, found.name or found.class_name, phase="plan")
        return Mapping(missing=mapping.missing, reason=f"{len(mapping.missing)} missing tensors take their own init")
    return mapping


def choose_strategy(
    run: Run, found: Component, headers: Checkpoint | None, mapping: Mapping, folder: Path, lora: Any
) -> tuple[str, str, tuple[int, ...]]:
    """The strategy and why, from facts that all ranks share; and this rank's crew, see `crew_of`."""
    asked = run.load.strategy
    lora_obstacle = _lora_obstacle(run, lora)
    obstacle = mapping.reason or lora_obstacle
    if obstacle is not None:
        if asked in ("direct", "stream"):
            raise ComponentError(
                f'Strategy "{asked}" cannot load this: {obstacle}. Use strategy "rank0" or "auto".',
                phase="plan",
                expected="one entry for every parameter",
                got=obstacle,
            )
        return "rank0", ASKED_FOR if asked == "rank0" else obstacle, ()
    assert headers is not None
    visible = run.agreement.gather(_sees(folder, headers))
    blind = [rank for rank, sees in enumerate(visible) if not sees]
    crew = crew_of(run, visible)
    if asked == "auto":
        if not blind:
            return "direct", "every rank sees the files and every parameter is one entry", crew
        return "stream", f"ranks {', '.join(map(str, blind[:8]))} do not see the files", crew
    if asked == "direct" and blind:
        raise ComponentError(
            f'Strategy "direct" needs the files on every rank; ranks {blind[:8]} do not see {folder} with the '
            f'sizes that rank 0 sees. Use "stream" or "auto".',
            rank=blind[0],
            phase="plan",
            file=str(folder),
        )
    return asked, ASKED_FOR, crew


def crew_of(run: Run, sees: Sequence[bool]) -> tuple[int, ...]:
    """Global ranks that get file bytes through the same reader as this rank, the reader first.

    One reader a host, the first rank there that sees the files, so that no weights go from host to host; rank 0 for all
    if a host has none.

    Args:
        run: The load.
        sees: Whether a rank sees the files, by rank in the load.
    """
    host = dict(zip(run.agreement.ranks, run.hosts, strict=True))
    seeing = dict(zip(run.agreement.ranks, sees, strict=True))
    group = dist.get_process_group_ranks(run.mesh.get_group(run.mesh.ndim - 1))
    if {host[rank] for rank in group if seeing[rank]} != {host[rank] for rank in group}:
        return tuple(group)
    mine = [rank for rank in group if host[rank] == host[dist.get_rank()]]
    first = next(rank for rank in mine if seeing[rank])
    return (first, *(rank for rank in mine if rank != first))


def check_verifiable(run: Run, headers: Checkpoint | None, mapping: Mapping, folder: Path) -> None:
    """Refuse `verify="full"` before any weight is read where the files cannot be held against the shards."""
    if headers is None or mapping.reason is not None:
        raise ComponentError(
            f'verify="full" cannot compare this load with its files: {mapping.reason}. That needs one entry for every '
            'parameter, cast at most; use verify="basic".',
            phase="plan",
            expected="one entry for every parameter",
            got=mapping.reason,
        )
    visible = run.agreement.gather(_sees(folder, headers))
    blind = [rank for rank, sees in enumerate(visible) if not sees]
    if blind:
        raise ComponentError(
            f'verify="full" reads the files on every rank; ranks {blind[:8]} do not see {folder} with the sizes that '
            'rank 0 sees. Use verify="basic".',
            rank=blind[0],
            phase="plan",
            file=str(folder),
        )


def _lora_obstacle(run: Run, lora: Any) -> str | None:
    """Why the adapters need the real base on rank 0, which alone reads the configs of existing ones."""

    def ask() -> tuple[bool, str | None]:
        if lora is None:
            return False, None
        from metashard.lora import needs_base_weights

        return True, needs_base_weights(lora)

    wanted, obstacle = run.on_leader("plan", ask)
    with run.phase("plan"):
        if wanted is not (lora is not None):
            raise LayoutError(
                f"lora= is {'given' if wanted else 'None'} on rank 0 and {'None' if wanted else 'given'} here; "
                f"pass the same adapters on every rank.",
                phase="plan",
                expected=wanted,
                got=not wanted,
            )
    return obstacle


def _sees(folder: Path, headers: Checkpoint) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, size in headers.sizes.items())
    except OSError:
        return False


def load_on_leader(
    run: Run,
    shell: nn.Module,
    found: Component,
    headers: Checkpoint | None,
    mapping: Mapping,
    dtype: torch.dtype | None,
) -> tuple[nn.Module, Mapping]:
    """Strategy `rank0`: the library's own `from_pretrained` on rank 0; the shell elsewhere."""
    if not run.agreement.leader:
        return shell, Mapping()  # nothing comes from the files
    del shell
    with _compat.default_dtype(None):
        module, info = found.cls.from_pretrained(
            str(found.folder),
            **{"torch_dtype" if found.library == "diffusers" else "dtype": dtype},
            variant=found.variant,
            use_safetensors=found.format == "safetensors",
            local_files_only=True,
            output_loading_info=True,
        )
    if headers is not None:
        run.recorder.add(bytes_read=library_reads(mapping, headers, library=found.library))
    missing = sorted(info.get("missing_keys") or ())
    if missing and run.load.missing == "error":
        raise missing_error(missing, found.name or found.class_name, phase="build")
    if missing:
        _own_init(module, missing, found, dtype)
    return module, Mapping(missing=tuple(missing), unexpected=tuple(sorted(info.get("unexpected_keys") or ())))


def _own_init(module: nn.Module, missing: list[str], found: Component, dtype: torch.dtype | None) -> None:
    """Give tensors that the checkpoint lacks the values that a newly built module has (transformers does so itself)."""
    left = {slot.fqn: slot for slot, tensor in named_slots(module) if tensor.is_meta and slot.fqn in set(missing)}
    if not left:
        return
    fresh = found.cls.from_config(dict(found.config))
    state = fresh.state_dict()
    for fqn, slot in left.items():
        value = state[fqn].to(dtype if dtype is not None and slot.dtype.is_floating_point else slot.dtype)
        set_tensor(module, fqn, nn.Parameter(value, slot.requires_grad) if slot.kind == "parameter" else value)
