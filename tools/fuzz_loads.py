"""Random valid checkpoints, loaded the real way on real ranks and held against the bytes that were written.

A model class whose parameters are told by its config is put beside diffusers' own, so that everything from
`model_index`-less folder to final check runs as it does for a real component.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Shard

import metashard
from tests.parity import cpu_mesh, differences

STEM = "diffusion_pytorch_model"
TRAINABLE = ("float32", "bfloat16", "float16", "float64")
FROZEN = (
    "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool",
    "complex64",
)  # fmt: skip
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 33)
LOADS: tuple[dict[str, Any], ...] = (
    {"strategy": "direct"},
    {"strategy": "stream", "transport": "scatter"},
    {"strategy": "stream", "transport": "broadcast"},
    {"strategy": "rank0", "transport": "scatter"},
    {"strategy": "rank0", "transport": "broadcast"},
)
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {1: ((1,),), 2: ((2,), (2, 1), (1, 2)), 4: ((4,), (2, 2))}


class FuzzBlock(nn.Module):
    """Holds what the model's config puts there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # FSDP groups are made of modules that are called
        return x


class FuzzModel(ModelMixin, ConfigMixin):
    """A model of the parameters and buffers that its config lists.

    Args:
        tensors: (name, dtype, shape, kind) of each; kind is "trained", "frozen" or "buffer".
        num_blocks: How many blocks there are (`blocks.0` ...).
    """

    _no_split_modules = ("FuzzBlock",)

    @register_to_config
    def __init__(self, tensors: list[list[Any]], num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FuzzBlock() for _ in range(num_blocks))
        self.head = FuzzBlock()
        for name, dtype, shape, kind in tensors:
            owner, _, own = name.rpartition(".")
            value = torch.zeros(shape, dtype=getattr(torch, dtype))
            if kind == "buffer":
                self.get_submodule(owner).register_buffer(own, value)
            else:
                self.get_submodule(owner).register_parameter(own, nn.Parameter(value, kind == "trained"))


def install() -> None:
    """Put the class where components are looked up."""
    diffusers.FuzzModel = FuzzModel


def values(name: str, dtype: str, shape: list[int], seed: int) -> torch.Tensor:
    """Random bytes as a tensor: NaNs, infinities and denormals included."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel() * kind.itemsize
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).reshape(shape)


def describe(seed: int, world: int) -> dict[str, Any]:
    """One case as plain data: tensors, files, mesh, placements."""
    rng = random.Random(seed)
    blocks = rng.randint(1, 3)
    owners = [f"blocks.{i}" for i in range(blocks)] + ["head"]
    trained = rng.choice(TRAINABLE)  # mixed ones have a test of their own; frozen ones of every dtype join here
    tensors: list[list[Any]] = []
    for owner in owners:
        for number in range(rng.randint(1, 4)):
            own = rng.choice(("w", "weight", "größe", "重み", "x" * 60)) + str(number)
            kind = rng.choices(("trained", "frozen", "buffer"), (5, 3, 2))[0]
            dtype = trained if kind == "trained" else rng.choice(TRAINABLE + FROZEN)
            shape = [rng.choice(SIZES) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3)))]
            if shape and rng.random() < 0.1:
                shape[rng.randrange(len(shape))] = 0
            tensors.append([f"{owner}.{own}", dtype, shape, kind])
    mesh = rng.choice(MESHES[world])
    files = rng.randint(1, 3)
    parameters = [name for name, *_, kind in tensors if kind != "buffer"]
    return {
        "seed": seed,
        "tensors": tensors,
        "blocks": blocks,
        "mesh": mesh,
        "files": {name: rng.randrange(files) for name, *_ in tensors},
        "split": files > 1,
        "second_dim": rng.random() < 0.5,
        "ignored": [name for name in parameters if rng.random() < 0.1],
        "one_group": rng.random() < 0.2,
        "staging_bytes": rng.choice((1 << 16, 1 << 20)),
        "io_threads": rng.choice((1, 3)),
    }


def write(case: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The case's checkpoint in `folder`, and its tensors by name."""
    made = {name: values(name, dtype, shape, case["seed"]) for name, dtype, shape, _ in case["tensors"]}
    config = {"_class_name": "FuzzModel", "tensors": case["tensors"], "num_blocks": case["blocks"]}
    (folder / "config.json").write_text(json.dumps(config))
    if not case["split"]:
        save_file(made, folder / f"{STEM}.safetensors")
        return made
    weight_map = {name: f"{STEM}-{file + 1:05}-of-00003.safetensors" for name, file in case["files"].items()}
    for file in sorted(set(weight_map.values())):
        save_file({name: value for name, value in made.items() if weight_map[name] == file}, folder / file)
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return made


def run_case(seed: int, folder: str, world: int, loads: tuple[dict[str, Any], ...]) -> list[str]:
    """Load one case every way on every rank; runs on the ranks.

    Returns:
        What is wrong, as text; empty if every byte is as written.
    """
    install()
    case = describe(seed, world)
    made = {name: values(name, dtype, shape, seed) for name, dtype, shape, _ in case["tensors"]}
    expected = FuzzModel(case["tensors"], case["blocks"])
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        tensor.data = made[name]
    mesh = cpu_mesh(*case["mesh"])
    shards = case["mesh"][-1]

    def placement(parameter: nn.Parameter) -> Shard | None:
        # torch wants it even, and cannot take an empty parameter on another dim than 0.
        even = parameter.ndim > 1 and parameter.numel() > 0 and parameter.shape[1] % shards == 0
        return Shard(1) if case["second_dim"] and even else None

    shard = metashard.ShardPolicy(
        wrap=() if case["one_group"] else None, shard_placement_fn=placement, ignored_params=case["ignored"]
    )
    found = []
    for load in loads:
        policy = metashard.LoadPolicy(
            timeout=60, staging_bytes=case["staging_bytes"], io_threads=case["io_threads"], **load
        )
        how = "/".join(load.values())
        try:
            loaded, report = metashard.load_component(
                folder, mesh=mesh, shard=shard, load=policy, output_loading_info=True
            )
        except Exception as error:  # noqa: BLE001 - told as a crash with the case's seed
            found.append(f"{how}: {type(error).__name__}: {error}")
            continue
        if report.strategy != load["strategy"]:
            found.append(f"{how}: went through {report.strategy} ({report.reason})")
        found += [f"{how}: {text}" for text in differences(loaded, expected)]
    return found
