"""LoRA adapters for a component: a peft folder, and a file as diffusers' pipelines save one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoint_writer import TensorSpec, Written, write_file

from metashard.adapter_files import DIFFUSERS_FILE, PEFT_FILE
from metashard.verify_lora import ATTENTION


def write_lora(out: Path, shell: Any, component: str, *, rank: int, dtype: torch.dtype, seed: int) -> Written:
    """Writes `OUT/COMPONENT-peft/` and `OUT/COMPONENT-diffusers/`: one adapter of the attention projections, in both.

    Neither A nor B is zero, so that an adapter that is not loaded is seen.

    Args:
        out: Folder of the adapters.
        shell: The component's model on the meta device; it is given the adapter.
        component: Its name. A second expert's keys begin with that of the first, as Wan's pipelines save them.
        rank: Of the adapter.
        dtype: Of its weights.
        seed: Of its values.
    """
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION)
    model = get_peft_model(shell, config, low_cpu_mem_usage=True)
    state = get_peft_model_state_dict(model)
    peft_specs = [TensorSpec(key, dtype, tuple(tensor.shape)) for key, tensor in sorted(state.items())]
    scope = f"lora/{component}"

    peft_folder = out / f"{component}-peft"
    peft_folder.mkdir(parents=True, exist_ok=True)
    written = write_file(peft_folder / PEFT_FILE, peft_specs, seed=seed, scope=scope)
    config.inference_mode = True
    config.save_pretrained(str(peft_folder))

    prefix = component.removesuffix("_2")
    inside = "base_model.model."
    renamed = [
        TensorSpec(f"{prefix}.{spec.key.removeprefix(inside)}", dtype, spec.shape, drawn_as=spec.key)
        for spec in peft_specs
    ]
    fields = {"r": rank, "lora_alpha": rank, "target_modules": _adapted(state, inside)}
    metadata = {f"{prefix}.{name}": value for name, value in fields.items()}
    diffusers_folder = out / f"{component}-diffusers"
    diffusers_folder.mkdir(parents=True, exist_ok=True)
    return written + write_file(
        diffusers_folder / DIFFUSERS_FILE,
        renamed,
        seed=seed,
        scope=scope,
        metadata={LORA_ADAPTER_METADATA_KEY: json.dumps(metadata, sort_keys=True)},
    )


def _adapted(state: dict[str, Any], prefix: str) -> list[str]:
    return sorted({key.removeprefix(prefix).rpartition(".lora_")[0] for key in state})
