"""What an adapter is, and how its modules get into a module: by peft's own code, in one of two styles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from metashard.errors import AdapterError

STYLES = ("peft", "inject")


@dataclass(frozen=True)
class LoraSpec:
    """One adapter to add.

    Args:
        source: A `PeftConfig` for a new adapter; a path for an existing one: a peft folder (adapter_config.json beside
            its weights), or a diffusers LoRA file, or the folder that holds one (pytorch_lora_weights.safetensors).
        name: Name of the adapter.
        style: "peft" wraps the module as `get_peft_model` does, with fp32 adapters on a half-precision base; "inject"
            changes it in place as diffusers' `add_adapter` and `load_lora_adapter` do, in the base's dtype. None takes
            what another adapter of the list asks for, else "inject" if one is a diffusers LoRA file, else "peft".
        trainable: Whether an existing adapter is trained. New ones always are.
        active: Whether the adapter takes part in the forward. None leaves it to the library: the first adapter in style
            "peft", the last one in style "inject". If it is given for any adapter, those with True are active.
    """

    source: Any
    name: str = "default"
    style: str | None = None
    trainable: bool = True
    active: bool | None = None

    def __post_init__(self) -> None:
        if self.style is not None and self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: expected one of {', '.join(STYLES)}.")
        if not self.exists and not hasattr(self.source, "peft_type"):
            raise TypeError(f"source={self.source!r}: expected a peft config, or the path of an adapter.")
        if not self.name or "." in self.name:
            raise ValueError(f"name={self.name!r}: expected a name without dots; it becomes a part of parameter names.")

    @property
    def exists(self) -> bool:
        """Whether the adapter has weights on disk."""
        return isinstance(self.source, (str, Path))


@dataclass(frozen=True)
class Added:
    """What rank 0 tells the others about an adapter that it has added.

    Attributes:
        name: Name of the adapter.
        style: "peft" or "inject".
        config: Its peft config, as peft has left it.
        keys: Keys of its weights, where they decide which modules are adapted; None where the config does.
        exists: Whether it came from a file.
    """

    name: str
    style: str
    config: Any
    keys: tuple[str, ...] | None = None
    exists: bool = False


def as_specs(lora: Any) -> list[LoraSpec]:
    """What `lora=` takes (a LoraSpec, a bare PeftConfig, a path, or a list of them), as a list of specs."""
    items = list(lora) if isinstance(lora, (list, tuple)) else [lora]
    specs = [item if isinstance(item, LoraSpec) else LoraSpec(item) for item in items]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise AdapterError(f"Two adapters have one name: {', '.join(names)}. Give each its own.", phase="adapters")
    return specs


def add_module(
    module: nn.Module, config: Any, name: str, style: str, *, on_meta: bool, keys: Iterable[str] | None = None
) -> nn.Module:
    """Add an adapter's modules by peft's own code, in the way of `style`.

    Args:
        module: The module, maybe with other adapters already.
        config: The adapter's config; peft may change it.
        name: Its name.
        style: "peft" or "inject".
        on_meta: Make parameters on meta (peft's ``low_cpu_mem_usage``).
        keys: Keys of its weights, to adapt the modules that they name instead of those of the config.

    Returns:
        The module or, in style "peft", the `PeftModel` around it.
    """
    from peft import PeftModel, get_peft_model, inject_adapter_in_model

    if style == "peft":
        if isinstance(module, PeftModel):
            module.add_adapter(name, config, low_cpu_mem_usage=on_meta)
            return module
        return get_peft_model(module, config, name, low_cpu_mem_usage=on_meta)
    if isinstance(module, PeftModel):
        raise AdapterError(
            f'Adapter {name}: styles "peft" and "inject" cannot be mixed in one module.', phase="adapters", key=name
        )
    state = None if keys is None else dict.fromkeys(keys)
    library_adds = hasattr(module, "_hf_peft_config_loaded")  # diffusers' and transformers' models
    if library_adds and state is None:
        config.base_model_name_or_path = None
    inject_adapter_in_model(config, module, name, low_cpu_mem_usage=on_meta, state_dict=state)
    if library_adds:
        module._hf_peft_config_loaded = True  # type: ignore[assignment]
        if state is None:  # their `add_adapter` activates what it adds, their loaders do not
            module.set_adapter(name)  # type: ignore[operator]
    return module


def config_of(module: nn.Module, name: str) -> Any:
    """The config that the module holds for an adapter."""
    return module.peft_config[name]  # type: ignore[index]
