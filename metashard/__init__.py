"""metashard: diffusion model components straight into FSDP2 shards and back to files, each byte moved once."""

from __future__ import annotations

from metashard.adapters import LoraSpec
from metashard.dry_run import plan_load
from metashard.errors import (
    AdapterError,
    CheckpointError,
    ComponentError,
    LaunchError,
    LayoutError,
    LoadError,
    MetaShardError,
    SaveError,
    ShardError,
)
from metashard.layout import sync_model_dtypes
from metashard.load import load_component, load_components, wrap_model
from metashard.load_plan import LoadPlan
from metashard.lora import add_lora
from metashard.policy import LoadPolicy, SavePolicy, ShardPolicy
from metashard.report import LoadReport, RankReport
from metashard.save import SaveReport, save_component, save_lora
from metashard.shell import from_pretrained, init_context
from metashard.verify import digest_shards

__version__ = "0.1.0.dev0"

__all__ = [
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
