"""Loads that follow each other in one process leave nothing behind; tools/soak.py is the long form."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from metashard import shard
from tools.soak import Held, growth, save_component, soak

from .ranks import Ranks

NONE = Held(0, 0, 0, 0, 0, 0)


def test_memory_threads_files_and_groups_do_not_grow(ranks2: Ranks, tmp_path: Path) -> None:
    """Also where the caller makes a mesh for every load."""
    save_component(tmp_path)
    strategies = ["direct", "rank0"]
    for told in ranks2.run(soak, str(tmp_path), strategies, 8, timeout=240):
        assert {strategy: held.grew for strategy, held in told.items()} == {strategy: [] for strategy in strategies}


def twins() -> tuple[bool, bool, int]:
    meshes = [init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)) for _ in range(2)]
    before = len(dist.distributed_c10d._world.pg_map)
    first, again = (shard._own_mesh(mesh, (False, 7)) for mesh in meshes)
    other = shard._own_mesh(meshes[0], (False, 8))
    return first is again, first is other, len(dist.distributed_c10d._world.pg_map) - before


def test_equal_meshes_share_the_groups_of_further_dtypes(ranks2: Ranks) -> None:
    assert ranks2.run(twins) == [(True, False, 2)] * 2


def test_growth_is_told_apart_from_a_start_and_from_noise() -> None:
    steady = [Held(100 + n % 2, 1, 5, 9, 3, 3) for n in range(20)]
    assert growth(steady).grew == []
    leaks = [Held(n << 20, 1, 5 + n, 9 + n, 3 + n, 3 + n) for n in range(20)]
    assert growth(leaks).grew == ["memory", "threads", "files", "groups", "groups_made"]
    assert growth([leaks[0], *[leaks[5]] * 19]) == NONE
