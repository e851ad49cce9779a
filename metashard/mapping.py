"""From checkpoint keys to live names and dtypes: what the library's own loader would do, told without reading a weight.

`direct` and `stream` are only right where every live tensor comes from exactly one entry, cast but not otherwise
changed. Where that is not certain, `Mapping.reason` says why, and the load goes through rank 0 and the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from metashard import _compat
from metashard.checkpoint import Checkpoint, Entry
from metashard.errors import CheckpointError
from metashard.layout import Slot, named_slots, retype


@dataclass(frozen=True)
class Mapping:
    """Which entry feeds which live tensor.

    Args:
        sources: FQN (the first of its tie group) -> entry.
        missing: Names that a state dict of the module holds and the checkpoint does not.
        unexpected: Keys of the checkpoint that nothing takes.
        reason: Why the map is not one to one; None where it is.
    """

    sources: dict[str, Entry] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reason: str | None = None


def map_entries(module: nn.Module, checkpoint: Checkpoint, *, library: str) -> Mapping:
    """Map the entries of a checkpoint to the parameters and persistent buffers of a shell.

    Raises:
        CheckpointError: An entry fits a name but not its shape.
    """
    slots = {slot.fqn: slot for slot, _ in named_slots(module, attributes=False) if slot.persistent}
    if library == "transformers":
        renamed, reason = _transformers_names(module, checkpoint, slots)
    else:
        entries = checkpoint.entries
        renamed = _compat.diffusers_fixed_keys(module, entries) if len(checkpoint.sizes) == 1 else dict(entries)
        reason = None
    by_tie: dict[str, Entry] = {}
    for name in sorted(slots.keys() & renamed.keys()):
        slot, entry = slots[name], renamed[name]
        if tuple(entry.shape) != slot.shape:
            raise CheckpointError(
                f"{name}: the checkpoint has shape {tuple(entry.shape)}, the model wants {slot.shape}. Is config.json "
                "from another model?",
                phase="plan",
                file=entry.file,
                key=entry.key,
                expected=slot.shape,
                got=tuple(entry.shape),
            )
        if slot.tie in by_tie and reason is None:
            reason = f"{name} and {slot.tie} are tied, but the checkpoint holds both"
        by_tie.setdefault(slot.tie, entry)
    missing = sorted(name for name, slot in slots.items() if slot.tie not in by_tie)
    unexpected = sorted(renamed.keys() - slots.keys())
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    unexpected = [key for key in unexpected if not _compat.ignored_by(patterns, key)]
    if missing and reason is None and all(_may_be_missing(module, name) for name in missing):
        reason = f"the library itself sets {', '.join(missing[:3])}, which the checkpoint does not hold"
        missing = []
    return Mapping(by_tie, tuple(missing), tuple(unexpected), reason)


def entries_by_identity(module: nn.Module, mapping: Mapping) -> dict[int, Entry]:
    """id of a tensor -> its entry: hooks and adapters may rename what they keep, and replace what they want anew."""
    return {
        id(tensor): mapping.sources[slot.tie]
        for slot, tensor in named_slots(module, attributes=False)
        if slot.persistent and slot.tie in mapping.sources
    }


def library_reads(mapping: Mapping, checkpoint: Checkpoint, *, library: str) -> int:
    """Bytes of the files that `from_pretrained` reads: diffusers all of them, transformers what has a place."""
    if library == "diffusers" or mapping.reason is not None:
        return checkpoint.nbytes
    return sum(entry.nbytes for entry in mapping.sources.values())


def missing_error(missing: Iterable[str], component: str, *, phase: str) -> CheckpointError:
    """The error for weights that a checkpoint lacks."""
    names = sorted(missing)
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return CheckpointError(
        f"The checkpoint of {component} lacks {len(names)} of the model's tensors: {shown}. Is it the checkpoint of "
        'another model, or of a part of it? LoadPolicy(missing="init") takes the module\'s own initial values.',
        phase=phase,
        key=names[0],
        expected="every parameter and persistent buffer of the model",
        got=f"{len(names)} missing",
    )


def _may_be_missing(module: nn.Module, name: str) -> bool:
    return _compat.ignored_by(getattr(module, "_keys_to_ignore_on_load_missing", None), name)


def _transformers_names(
    module: nn.Module, checkpoint: Checkpoint, slots: dict[str, Slot]
) -> tuple[dict[str, Entry], str | None]:
    rename = _compat.transformers_renamer(module)
    renamed: dict[str, Entry] = {}
    for key, entry in checkpoint.entries.items():
        name, converted = rename(key, slots)
        if converted is not None and name in slots:
            return {}, f"transformers converts the values of {key} on load (pattern {converted})"
        if name in renamed:
            return {}, f"two keys, {renamed[name].key} and {key}, are one parameter {name}"
        renamed[name] = entry
    return renamed, None


def apply_library_rules(module: nn.Module, mapping: Mapping, *, library: str, dtype: torch.dtype | None) -> None:
    """Give a shell the dtypes and `requires_grad` that `from_pretrained(dtype=dtype)` gives the real module.

    diffusers casts every tensor that is floating on disk, persistent buffers too, to `dtype`, or to fp32 where a part
    of the name is among the class's pins; without `dtype` all keep the module's own. transformers keeps the module's
    own dtypes (built under `dtype`), but for its two pin rules, and trains every floating parameter that it has loaded,
    also one that the class has frozen (Voxtral's positions). (Sources: diffusers `load_model_dict_into_meta`,
    transformers `convert_and_load_state_dict_in_model` and `set_param_for_module`.)
    """
    pins = tuple(getattr(type(module), "_keep_in_fp32_modules", None) or ())
    planned = (
        _compat.transformers_dtype_plan(module, dtype) if library == "transformers" and dtype else lambda fqn: None
    )

    def wanted(slot: Slot) -> torch.dtype:
        entry = mapping.sources.get(slot.tie)
        if entry is None or not slot.persistent:
            return slot.dtype
        if library == "transformers":
            return planned(slot.fqn) or slot.dtype
        if dtype is None or not entry.dtype.is_floating_point:
            return slot.dtype
        return torch.float32 if any(pin in slot.fqn.split(".") for pin in pins) else dtype

    retype(named_slots(module, attributes=False), wanted)
    for slot, tensor in named_slots(module, attributes=False) if library == "transformers" else ():
        if slot.kind == "parameter" and slot.tie in mapping.sources:
            tensor.requires_grad_(tensor.is_floating_point())
