"""The public surface: names and signatures that others write scripts against, and an import that stays light."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import metashard

NAMES = [
    "AdapterError",
    "CheckpointError",
    "ComponentError",
    "LaunchError",
    "LayoutError",
    "LoadError",
    "LoadPlan",
    "LoadPolicy",
    "LoadReport",
    "LoraSpec",
    "MetaShardError",
    "RankReport",
    "SaveError",
    "SavePolicy",
    "SaveReport",
    "ShardError",
    "ShardPolicy",
    "add_lora",
    "digest_shards",
    "from_pretrained",
    "init_context",
    "load_component",
    "load_components",
    "plan_load",
    "save_component",
    "save_lora",
    "sync_model_dtypes",
    "wrap_model",
]

SIGNATURES = {
    "load_component": (
        "(checkpoint, component=None, *, mesh, dtype=None, lora=None, prepare=None, shard=ShardPolicy(), "
        "load=LoadPolicy(), variant=None, revision=None, output_loading_info=False)"
    ),
    "plan_load": (
        "(checkpoint, component=None, *, world_size=None, mesh_shape=None, dtype=None, lora=None, shard=ShardPolicy(), "
        "load=LoadPolicy(), variant=None, device_type='cpu')"
    ),
    "load_components": "(checkpoint, names, *, output_loading_info=False, **kwargs)",
    "from_pretrained": "(cls, checkpoint, **kwargs)",
    "init_context": "()",
    "sync_model_dtypes": "(module, *, group=None)",
    "add_lora": "(module, lora)",
    "wrap_model": "(module, *, mesh, shard=ShardPolicy(), load=LoadPolicy(), output_loading_info=False)",
    "digest_shards": "(module)",
    "save_component": (
        "(module, folder, *, max_shard_size='5GB', dtype=None, variant=None, lora='leave_out', overwrite=False, "
        "save=SavePolicy())"
    ),
    "save_lora": (
        "(module, folder, *, format='diffusers', adapter=None, component=None, overwrite=False, save=SavePolicy())"
    ),
    "SavePolicy": "(io_threads=4, staging_bytes=67108864, timeout=1800.0)",
    "LoraSpec": "(source, name='default', style=None, trainable=True, active=None)",
    "ShardPolicy": (
        "(wrap=None, mp_policy=None, offload_policy=None, reshard_after_forward=None, shard_placement_fn=None, "
        "ignored_params=None)"
    ),
    "LoadPolicy": (
        "(strategy='auto', transport='scatter', io_threads=4, staging_bytes=67108864, timeout=1800.0, missing='error', "
        "progress=None, allow_pickle=False, overlap=True, verify='basic')"
    ),
}

_FRESH = """
import json, sys
import metashard
import torch
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"diffusers", "transformers", "peft", "accelerate"})
print(json.dumps({"heavy": heavy, "cuda": torch.cuda.is_initialized(), "unused": metashard.LoadPolicy().strategy}))
"""


def plain_signature(value: object) -> str:
    """Names, kinds and defaults; a default policy by its class, as it is written."""
    parameters = []
    for parameter in inspect.signature(value).parameters.values():  # type: ignore[arg-type]
        if isinstance(parameter.default, (metashard.ShardPolicy, metashard.LoadPolicy, metashard.SavePolicy)):
            assert parameter.default == type(parameter.default)()
            parameter = parameter.replace(default=_Written(f"{type(parameter.default).__name__}()"))
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
    return str(inspect.Signature(parameters))


class _Written:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def test_the_names_are_these() -> None:
    assert sorted(metashard.__all__) == NAMES
    assert all(hasattr(metashard, name) for name in NAMES)


def test_the_signatures_are_these() -> None:
    assert {name: plain_signature(getattr(metashard, name)) for name in SIGNATURES} == SIGNATURES


def test_every_name_has_a_docstring() -> None:
    assert [name for name in NAMES if not inspect.getdoc(getattr(metashard, name))] == []


def test_importing_adds_little_to_torch() -> None:
    """Modules rather than seconds, which a busy machine blurs: they stand for the limit of 0.3 s above torch."""
    script = (
        "import sys, torch, torch.distributed.fsdp; before = set(sys.modules); import metashard; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    added = done.stdout.split()
    assert [name for name in added if name.partition(".")[0] not in ("metashard", *sys.stdlib_module_names)] == []
    assert len(added) < 100, added  # 57 when this was written, in 0.1 s


def test_importing_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == {"heavy": [], "cuda": False, "unused": "auto"}
