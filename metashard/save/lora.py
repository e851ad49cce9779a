"""Save an adapter alone: its full tensors from shards, in the format of diffusers or of peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from metashard.adapter_files import PEFT_FILE, PEFT_PREFIX
from metashard.adapters import config_of
from metashard.errors import SaveError
from metashard.layout import named_slots
from metashard.policy import SavePolicy
from metashard.save.report import SaveReport
from metashard.save.run import SaveRun
from metashard.save.twin import base_model, check_real, plain_class

FORMATS = ("diffusers", "peft")


def save_lora(
    module: nn.Module,
    folder: str | Path,
    *,
    format: str = "diffusers",
    adapter: str | None = None,
    component: str | None = None,
    overwrite: bool = False,
    save: SavePolicy = SavePolicy(),
) -> SaveReport:
    """Write an adapter for stock diffusers or peft out of FSDP2 shards; call it on every rank that holds some.

    Adapter bytes only: A and B in full, DoRA's magnitudes, `modules_to_save`, and the adapter's config. The base stays
    in its shards, and each rank writes what it holds, as in `save_component`.

    Args:
        module: A module with adapters, in a `PeftModel` or not.
        folder: A new or empty folder on rank 0.
        format: "diffusers" for a pipeline's `load_lora_weights` (pytorch_lora_weights.safetensors, the config in its
            header), "peft" for `PeftModel.from_pretrained` (adapter_model.safetensors, adapter_config.json).
        adapter: Name of the adapter; None for the only one.
        component: What a diffusers file calls the module: None for "unet", "text_encoder" or "transformer" by its
            class. Pipelines keep a second expert (`transformer_2`) in a file of its own, as "transformer".
        overwrite: Whether `folder` may hold something. Files of the same names are replaced, all else stays.
        save: How the bytes go out.

    Returns:
        What was done.

    Raises:
        SaveError: On every rank; the folder is as it was.
    """
    run = SaveRun(module, folder, overwrite, save)
    with run.going_on():
        run.agreement.same((run.folder.name, format, adapter, component, overwrite), what="arguments", phase="resolve")
        with run.phase("resolve"):
            if format not in FORMATS:
                raise SaveError(f"format={format!r}: expected one of {', '.join(FORMATS)}.", phase="resolve")
            name = _choose(module, adapter)
            check_real(module)
        held = [(slot, tensor) for slot, tensor in named_slots(module, attributes=False) if slot.persistent]
        facts = [(slot.fqn, slot.shape, slot.dtype, slot.trait) for slot, _ in held]
        run.agreement.same(facts, what="the tensors that they hold", phase="agree")

        def write(path: Path) -> None:
            from peft import get_peft_model_state_dict

            shards = {slot.fqn: tensor for slot, tensor in held}
            state = get_peft_model_state_dict(module, shards, name, save_embedding_layers=False)
            plain = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in state.items()}
            if format == "peft":
                _write_peft(module, name, plain, path)
            else:
                _write_diffusers(module, name, plain, path, component or component_of(module))

        return run.write(write, {id(tensor): slot.tie for slot, tensor in held})


def component_of(module: nn.Module) -> str:
    """What a diffusers LoRA file calls a module of this class."""
    cls = plain_class(base_model(module))
    if not hasattr(cls, "save_config"):
        return "text_encoder"
    return "unet" if "UNet" in cls.__name__ else "transformer"


def _choose(module: nn.Module, adapter: str | None) -> str:
    names = list(getattr(module, "peft_config", None) or {})
    if not names:
        raise SaveError(
            f"{type(module).__name__} has no adapter. Add one with the load (lora=), or save the module with "
            "save_component.",
            phase="resolve",
            expected="an adapter",
            got="none",
        )
    if (adapter is None and len(names) > 1) or adapter not in (None, *names):
        raise SaveError(
            f"adapter={adapter!r}: the module has the adapters {', '.join(names)}. Say which one to save.",
            phase="resolve",
            expected=names,
            got=adapter,
        )
    return adapter or names[0]


def _write_peft(module: nn.Module, name: str, state: dict[str, Any], path: Path) -> None:
    """As `PeftModel.save_pretrained`, but without a model card, and whatever its name not into a folder below."""
    from safetensors import torch as safetensors

    base = base_model(module)
    config = copy.deepcopy(config_of(module, name))
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path")
    config.inference_mode = True
    auto_mapping = None
    if base is not module and config.task_type is None:
        cls = plain_class(base)
        auto_mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.save_pretrained(str(path), auto_mapping_dict=auto_mapping)
    weights = {PEFT_PREFIX + key: tensor for key, tensor in state.items()}
    safetensors.save_file(weights, str(path / PEFT_FILE), metadata={"format": "pt"})


def _write_diffusers(module: nn.Module, name: str, state: dict[str, Any], path: Path, component: str) -> None:
    """As a pipeline's `save_lora_weights` with the adapter's config as metadata."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader
    from diffusers.utils import convert_state_dict_to_diffusers

    config = {key: _listed(value) for key, value in config_of(module, name).to_dict().items()}
    if component.startswith("text_encoder"):
        state = convert_state_dict_to_diffusers(state)
    Loader.write_lora_layers(
        Loader.pack_weights(state, component),
        save_directory=str(path),
        is_main_process=True,
        weight_name=None,
        save_function=None,
        safe_serialization=True,
        lora_adapter_metadata=Loader.pack_weights(config, component),
    )


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
