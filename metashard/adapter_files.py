"""Existing adapters: peft folders and diffusers LoRA files, read on rank 0 by the libraries' own loaders.

A library's loader drops or leaves out keys with at most a warning. Here every key of the file must land in an adapter
parameter and every adapter parameter must come from the file, or an `AdapterError` names what did not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metashard.adapter_checks import check_kind, no_match
from metashard.adapters import Added, LoraSpec, add_module, config_of
from metashard.errors import AdapterError

PEFT_CONFIG = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of the names in a `PeftModel`, and of the keys in its files
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
# What pipelines put before the keys of each of their components.
_PREFIXES = ("transformer", "unet", "prior", "text_encoder", "text_encoder_2", "controlnet")
_SIZE = r"torch\.Size\((\[.*?\])\)"
_MISMATCH = re.compile(rf"size mismatch for (\S+): .*?{_SIZE} from checkpoint.*?{_SIZE}")


def read_config(source: str | Path) -> Any:
    """The config of an existing adapter, or None where its file has none (its modules are known by its keys)."""
    from peft import LoraConfig, PeftConfig

    path = _existing(source)
    if _is_peft(path):
        return PeftConfig.from_pretrained(str(path))
    metadata = _metadata(_diffusers_file(path))
    # One entry for each component; what matters before the model is known is the same in all of them.
    fields = {key.rpartition(".")[2]: value for key, value in (metadata or {}).items()}
    known = {key: value for key, value in fields.items() if key in LoraConfig.__dataclass_fields__}
    return LoraConfig(**known) if known else None


def add_existing(module: nn.Module, spec: LoraSpec, component: str | None) -> tuple[nn.Module, Added]:
    """Add an adapter from its file on rank 0, values included.

    Args:
        module: The base, real or with stand-ins.
        spec: The adapter.
        component: Name of the component, by which a diffusers file tells its keys apart.

    Raises:
        AdapterError: No adapter there, or it does not fit the model.
    """
    path = _existing(spec.source)
    try:
        if _is_peft(path):
            return _add_peft(module, spec, path)
        return _add_diffusers(module, spec, _diffusers_file(path), component)
    except RuntimeError as error:
        found = _MISMATCH.search(str(error))
        if found is None:
            raise
        key, got, expected = found.groups()
        raise AdapterError(
            f"{key}: the adapter {path} has shape {got}, the model wants {expected}. Was it made for another model?",
            phase="adapters",
            file=str(path),
            key=key,
            expected=expected,
            got=got,
        ) from error


def _add_peft(module: nn.Module, spec: LoraSpec, path: Path) -> tuple[nn.Module, Added]:
    """As `PeftModel.from_pretrained`, then `load_adapter`; the base's name in the config is kept."""
    from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict

    style = spec.style or "peft"
    config = PeftConfig.from_pretrained(str(path))
    check_kind(config)
    config.inference_mode = not spec.trainable
    _check_peft_file(path)  # else peft takes a pickle, or asks the hub for a folder of this name
    weights = load_peft_weights(str(path), device="cpu")
    base = config.base_model_name_or_path
    try:
        module = add_module(module, config, spec.name, style, on_meta=False)
    except ValueError as error:
        if "target" not in str(error).lower():
            raise
        raise no_match(module, config, spec.name, error) from error
    config_of(module, spec.name).base_model_name_or_path = base
    try:
        set_peft_model_state_dict(module, weights, spec.name)
    except KeyError as error:  # a module to save that the file does not hold
        raise _misfit(path, spec, missing=[str(error.args[0])], unexpected=[]) from error
    _check_keys(module, weights, path, spec)
    return module, Added(spec.name, style, config_of(module, spec.name), exists=True)


def _add_diffusers(module: nn.Module, spec: LoraSpec, file: Path, component: str | None) -> tuple[nn.Module, Added]:
    """As diffusers' `load_lora_adapter`, which is called where the module has one (transformers' models do not)."""
    from diffusers.utils import convert_unet_state_dict_to_peft
    from diffusers.utils.peft_utils import get_peft_kwargs
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    everything = load_file(str(file))
    prefix = _prefix(everything, module, component, file)
    state = {key.removeprefix(prefix): value for key, value in everything.items() if key.startswith(prefix)}
    metadata = {k.removeprefix(prefix): v for k, v in (_metadata(file) or {}).items() if k.startswith(prefix)} or None
    if not any("lora_A" in key or ".lokr_" in key for key in state):
        state = convert_unet_state_dict_to_peft(state)
    if not any(".lora_B" in key or ".lokr_" in key for key in state):
        raise _misfit(file, spec, missing=[], unexpected=sorted(state))
    style = spec.style or "inject"
    if style == "inject" and hasattr(module, "load_lora_adapter"):
        try:
            module.load_lora_adapter(dict(state), prefix=None, adapter_name=spec.name, metadata=metadata)  # type: ignore[operator]
        except ValueError as error:
            if "target" not in str(error).lower():
                raise
            raise _misfit(file, spec, missing=[], unexpected=sorted(state)) from error
    else:
        ranks = {f"^{key}": value.shape[1] for key, value in state.items() if "lora_B" in key and value.ndim > 1}
        fields = metadata or get_peft_kwargs(ranks, network_alpha_dict=None, peft_state_dict=state)
        module = add_module(module, LoraConfig(**fields), spec.name, style, on_meta=False, keys=list(state))
        wrapped = {PEFT_PREFIX + key: value for key, value in state.items()} if style == "peft" else dict(state)
        set_peft_model_state_dict(module, wrapped, spec.name)
    _check_keys(module, state, file, spec)
    keys = tuple(state) if style == "inject" else None
    return module, Added(spec.name, style, config_of(module, spec.name), keys=keys, exists=True)


def _check_keys(module: nn.Module, weights: Mapping[str, torch.Tensor], path: Path, spec: LoraSpec) -> None:
    """Hold the file's keys against what peft would save of this adapter."""
    from peft import get_peft_model_state_dict

    wanted = get_peft_model_state_dict(module, adapter_name=spec.name, save_embedding_layers=False)
    plain = {key.removeprefix(PEFT_PREFIX) for key in wanted}
    given = {key.removeprefix(PEFT_PREFIX) for key in weights}
    base = {name.removeprefix(PEFT_PREFIX) for name, _ in module.named_parameters()}
    unexpected = sorted(key for key in given - plain if key not in base)  # saved embedding layers are the base's own
    missing = sorted(plain - given)
    if unexpected or missing:
        raise _misfit(path, spec, missing=missing, unexpected=unexpected)


def _misfit(path: Path, spec: LoraSpec, *, missing: list[str], unexpected: list[str]) -> AdapterError:
    told = []
    if unexpected:
        told.append(f"{len(unexpected)} of its keys have no place in the model ({', '.join(unexpected[:3])})")
    if missing:
        told.append(f"it lacks {len(missing)} of the adapter's weights ({', '.join(missing[:3])})")
    return AdapterError(
        f"Adapter {spec.name} from {path} does not fit: {' and '.join(told)}. Was it made for another model, or saved "
        "in another format?",
        phase="adapters",
        file=str(path),
        key=(unexpected + missing)[0] if unexpected or missing else None,
        expected="a key for every adapter parameter, and no other",
        got=f"{len(unexpected)} unexpected, {len(missing)} missing",
    )


def _existing(source: str | Path) -> Path:
    path = Path(source)
    if not path.exists():
        raise AdapterError(f"There is no adapter at {path}.", phase="adapters", file=str(path))
    return path


def _is_peft(path: Path) -> bool:
    return (path / PEFT_CONFIG).exists()


def _check_peft_file(path: Path) -> None:
    file = path / PEFT_FILE
    if not file.exists():
        pickled = (path / "adapter_model.bin").exists()
        hint = (
            "Its weights are pickled (adapter_model.bin), which can run code when they are loaded: convert them with "
            "torch.load(..., weights_only=True) and safetensors.torch.save_file."
            if pickled
            else "Fetch the folder again."
        )
        raise AdapterError(
            f"{path} has no {PEFT_FILE}. {hint}",
            phase="adapters",
            file=str(file),
            expected=PEFT_FILE,
            got="adapter_model.bin" if pickled else "not there",
        )


def is_diffusers(source: str | Path) -> bool:
    """Whether an existing adapter is a diffusers LoRA file, or a folder of one."""
    return not _is_peft(_existing(source))


def _diffusers_file(path: Path) -> Path:
    file = path / DIFFUSERS_FILE if path.is_dir() else path
    if not file.exists() or file.suffix != ".safetensors":
        raise AdapterError(
            f"{path} is no adapter: expected a folder with {PEFT_CONFIG} (peft) or {DIFFUSERS_FILE} (diffusers), or a "
            "safetensors file.",
            phase="adapters",
            file=str(path),
        )
    return file


def _metadata(file: Path) -> dict[str, Any] | None:
    """What diffusers notes down of the configs, by component, in the header of a LoRA file."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    from safetensors import safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            raw = (opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
    except Exception as error:  # safetensors raises an exception class of its own
        raise AdapterError(f"{file} cannot be read: {error}", phase="adapters", file=str(file)) from error
    found: dict[str, Any] | None = json.loads(raw) if raw else None
    return found


def _prefix(state: Mapping[str, Any], module: nn.Module, component: str | None, file: Path) -> str:
    """What stands before this component's keys in a diffusers file, with its dot; "" for a file of one component.

    Pipelines with a second expert save both under the first one's prefix, in a file each (Wan): `transformer_2` falls
    back to `transformer`.
    """
    roots = {name for name, _ in module.named_children()}
    candidates = [component, re.sub(r"_\d+$", "", component)] if component else list(_PREFIXES)
    for candidate in dict.fromkeys(candidates):
        inside = [key.removeprefix(f"{candidate}.") for key in state if key.startswith(f"{candidate}.")]
        # Without a component's name, the keys have to be of this model; with it, they have to fit (or are an error).
        if inside and (component or any(key.partition(".")[0] in roots for key in inside)):
            return f"{candidate}."
    first = {key.partition(".")[0] for key in state}
    if first & roots:
        return ""
    raise AdapterError(
        f"{file} holds no key of {component or type(module).__name__}; its keys begin with "
        f"{', '.join(sorted(first)[:6])}. A file of another trainer's format: load it once with the pipeline's "
        "load_lora_weights and save it with save_lora_adapter.",
        phase="adapters",
        file=str(file),
        expected=f"keys that begin with {candidates[0]}.",
        got=", ".join(sorted(first)[:6]),
    )
