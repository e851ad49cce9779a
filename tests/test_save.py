"""Saving: the folder is, byte for byte, what `save_pretrained` writes in a single process; or nothing happens."""

from __future__ import annotations

import filecmp
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import metashard
from metashard.errors import SaveError
from metashard.save import save_component

from . import zoo
from .parity import cpu_mesh, load_case
from .ranks import Ranks

FP32, BF16 = torch.float32, torch.bfloat16
SD3, WAN = "SD3Transformer2DModel", "WanTransformer3DModel"
POLICY = metashard.SavePolicy(timeout=60)


def different(folder: Path, expected: Path) -> list[str]:
    """Names of files that are not equal, or in one of the folders only."""
    names = sorted({*os.listdir(folder), *os.listdir(expected)})
    return [
        name
        for name in names
        if not (folder / name).is_file()
        or not (expected / name).is_file()
        or not filecmp.cmp(folder / name, expected / name, shallow=False)
    ]


def same_folder(tmp: Path | None) -> Path:
    box = [str(tmp)]
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])


# --- the folder of a single process


def saved_like_one_process(
    root: str, names: list[str], dtypes: list[torch.dtype], shape: tuple[int, ...], max_shard_size: str
) -> list[str]:
    """Load each case, save it from its shards, and compare with what one process loads and saves."""
    found = []
    mesh = cpu_mesh(*shape)
    for name in names:
        case, original = zoo.CASES[name], Path(root) / name
        for dtype in dtypes:
            out = Path(root) / f"{name}-{str(dtype)[6:]}-{'x'.join(map(str, shape)) or dist.get_world_size()}"
            module, _ = load_case(case, str(original), dtype, {}, mesh)
            before = metashard.digest_shards(module)
            report = save_component(module, out / "saved", max_shard_size=max_shard_size, save=POLICY)
            if metashard.digest_shards(module) != before:
                found.append(f"{name}: saving has changed the module")
            if dist.get_rank() == 0:
                case.load(original, dtype).save_pretrained(out / "expected", max_shard_size=max_shard_size)
                found += [f"{name} {dtype}: {line}" for line in different(out / "saved", out / "expected")]
                if set(os.listdir(out)) != {"saved", "expected"}:
                    found.append(f"{name}: left over: {os.listdir(out)}")
            dist.barrier()
            bytes_of_tensors = sum(t.nbytes for t in state_of(out / "saved").values())
            if sum(report.written) != bytes_of_tensors:
                found.append(f"{name}: {report.written} written, the files hold {bytes_of_tensors}")
    return found


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of each core case, by its name."""
    root = tmp_path_factory.mktemp("models")
    for name in zoo.CORE:
        zoo.CASES[name].build().save_pretrained(root / name)
    return str(root)


def test_two_ranks_save_what_one_process_saves(ranks2: Ranks, models: str) -> None:
    """All core cases: pins, ties, renamed keys, buffers; several files."""
    found = ranks2.run(saved_like_one_process, models, list(zoo.CORE), [FP32, BF16], (), "40KB", timeout=240)
    assert found == [[], []]


FEW = [SD3, WAN, "T5EncoderModel", "AutoencoderKL"]


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)], ids=["one rank", "four ranks", "HSDP"])
def test_other_meshes_save_the_same(ranks_of: dict[int, Ranks], models: str, shape: tuple[int, ...]) -> None:
    size = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    mesh = shape if len(shape) == 2 else ()
    found = ranks_of[size].run(saved_like_one_process, models, FEW, [BF16], mesh, "10GB", timeout=120)
    assert found == [[]] * size
