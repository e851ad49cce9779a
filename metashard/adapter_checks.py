"""What cannot be added: unsupported kinds, targets that match nothing, adapters that come after sharding."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from metashard.errors import AdapterError

logger = logging.getLogger(__name__)


def check_kind(config: Any) -> None:
    """Refuse kinds of adapters that cannot be added layer by layer to a base on meta."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING

    kind = getattr(config.peft_type, "value", config.peft_type)
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    shared = getattr(tuner, "uses_shared_state", False)
    if config.is_prompt_learning or config.is_adaption_prompt or tuner is None or shared or kind in ("XLORA", "SHADOW"):
        why = "its state is shared between layers" if shared else "it adds no layers to the modules of the base"
        raise AdapterError(
            f"Adapters of kind {kind} are not supported: {why}. Use a kind that adapts single layers, such as LORA.",
            phase="adapters",
            expected="a kind such as LORA, LOHA, LOKR, IA3, OFT",
            got=kind,
        )


def no_match(module: nn.Module, config: Any, adapter: str, error: BaseException) -> AdapterError:
    """The error for targets that match nothing, with near names."""
    targets = config.target_modules
    wanted = [targets] if isinstance(targets, str) else sorted(targets or ())
    near = _near(module, wanted)
    return AdapterError(
        f"Adapter {adapter}: {error} "
        + (f"Near names in {type(module).__name__}: {', '.join(near)}." if near else f"{_common(module)}"),
        phase="adapters",
        key=wanted[0] if wanted else None,
        expected=f"names of modules of {type(module).__name__}",
        got=", ".join(wanted) or "none",
    )


def _tails(module: nn.Module) -> set[str]:
    """Names by which a target can match a module with parameters: its own, and with its parent's before it."""
    full = [name for name, sub in module.named_modules() if name and any(True for _ in sub.parameters(recurse=False))]
    return {".".join(name.split(".")[-count:]) for name in full for count in (1, 2)}


def _near(module: nn.Module, wanted: Iterable[str]) -> list[str]:
    tails = sorted(_tails(module))
    found = [match for name in wanted for match in get_close_matches(name, tails, n=3, cutoff=0.5)]
    return list(dict.fromkeys(found))


def _common(module: nn.Module) -> str:
    linear = {n.rpartition(".")[2] for n, sub in module.named_modules() if isinstance(sub, (nn.Linear, nn.Conv2d))}
    return f"Its layers: {', '.join(sorted(linear)[:12]) or 'none that can be adapted'}."


def warn_of_idle_targets(module: nn.Module, targets: Any, adapter: str) -> None:
    """Say which of several target names match nothing; peft says so only if none does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(targets, (list, set, tuple)):
        return
    adapted = [name for name, sub in module.named_modules() if isinstance(sub, BaseTunerLayer)]
    idle = sorted(t for t in targets if not any(name == t or name.endswith(f".{t}") for name in adapted))
    if idle:
        near = ", ".join(_near(module, idle)) or "none"
        logger.warning("Adapter %s: target names that match no module: %s (near names: %s)", adapter, idle, near)


def refuse_sharded(module: nn.Module) -> None:
    """Refuse to add adapters to a module that is sharded already."""
    sharded = [name or "(root)" for name, sub in module.named_modules() if isinstance(sub, FSDPModule)]
    if sharded:
        raise AdapterError(
            f"{sharded[0]} is sharded already: adapters added now would be plain parameters of each rank whose "
            "gradients are never averaged. Pass lora= to load_component, or call add_lora before wrap_model.",
            phase="adapters",
            key=sharded[0],
            expected="a module before fully_shard",
            got=f"{len(sharded)} FSDP modules",
        )


def watch_adapters(module: nn.Module) -> None:
    """Refuse, in the next forward, adapters that were added to a sharded module behind our back.

    Such as by the module's own `add_adapter`, which takes a shard for the full weight. The check compares names of
    adapters before every forward; it looks at parameters only if there is a new one.
    """
    known = _adapter_names(module)

    def check(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for late in _adapter_names(module) - known:
            plain = [
                name
                for name, parameter in module.named_parameters()
                if late in name.split(".") and not isinstance(parameter, DTensor)
            ]
            if plain:
                raise AdapterError(
                    f"Adapter {late} was added after the module was sharded: its {len(plain)} parameters ({plain[0]}, "
                    "...) are plain parameters of each rank whose gradients are never averaged. Pass lora= to "
                    "load_component, or call add_lora before wrap_model.",
                    phase="adapters",
                    key=plain[0],
                    expected="adapters that are added before sharding",
                    got=late,
                )

    module.register_forward_pre_hook(check, prepend=True)  # before FSDP's own hook gathers parameters


def _adapter_names(module: nn.Module) -> frozenset[str]:
    return frozenset(getattr(module, "peft_config", None) or ())
