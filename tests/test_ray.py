"""Ray: an actor's device is the one that Ray has given it, and actors load and train as ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import metashard
from metashard.integrations.ray import ActorFacts, address, facts, join, seats
from tests import zoo
from tests.parity import differences

SD3 = "SD3Transformer2DModel"


def actor(assigned: str | None, visible: str | None, node: str = "a") -> ActorFacts:
    return ActorFacts(node, () if assigned is None else tuple(assigned.split()), visible)


@pytest.mark.parametrize(
    ("told", "indices"),
    [
        ([actor("0", "0"), actor("3", "3")], [0, 0]),  # each its own
        ([actor("3", "0,1,2,3"), actor("0", "0,1,2,3")], [3, 0]),  # the node's list kept whole, in any order of ranks
        ([actor("5", "4, 5"), actor("4", "4, 5")], [1, 0]),  # a node that has a part of its machine
        ([actor("1", None), actor("0", None)], [1, 0]),  # no list at all
        ([actor("GPU-b", "GPU-a,GPU-b"), actor("GPU-a", "GPU-a")], [1, 0]),  # by UUID
        ([actor("0", "0", "a"), actor("0", "0", "b")], [0, 0]),  # the same id on two nodes is two devices
    ],
)
def test_the_device_is_the_one_that_ray_has_given(told: list[ActorFacts], indices: list[int]) -> None:
    assert [seat.device for seat in seats(told, device_type="cuda")] == [torch.device("cuda", i) for i in indices]


@pytest.mark.parametrize(
    ("told", "rank", "says"),
    [
        ([actor("0", "0"), actor(None, "0,1")], 1, r"rank 1 has no device.*num_gpus=1"),
        ([actor("0 1", "0,1")], 0, "rank 0 has 2 devices"),
        ([actor("0", "0"), actor("1", "1"), actor("0", "0")], 2, "Ranks 0 and 2 are on one device, 0 of node a"),
        ([actor("0", "0,1"), actor("0", None)], 1, "Ranks 0 and 1 are on one device"),
        ([actor("2", "0,1")], 0, "given device 2 to rank 0, which sees '0,1' only"),
        ([actor("0", "")], 0, "CUDA_VISIBLE_DEVICES to Ray"),
        ([actor("GPU-a", None)], 0, "given device GPU-a"),
    ],
)
def test_a_device_that_is_missing_or_shared_is_refused(told: list[ActorFacts], rank: int, says: str) -> None:
    with pytest.raises(metashard.LaunchError, match=says) as caught:
        seats(told, device_type="cuda")
    assert caught.value.rank == rank


def test_ranks_are_counted_on_their_nodes() -> None:
    made = seats([actor(None, None, node) for node in ("x", "y", "x", "y", "x")], device_type="cpu")
    assert [seat.local_rank for seat in made] == [0, 0, 1, 1, 2]
    assert [seat.local_world_size for seat in made] == [3, 2, 3, 2, 3]
    assert [seat.node_rank for seat in made] == [0, 1, 0, 1, 0]
    assert [seat.node_leader for seat in made] == [True, True, False, False, False]
    assert {seat.device for seat in made} == {torch.device("cpu")}


# Real actors


class Trainer:
    """What a user writes; made an actor by `ray.remote`."""

    def facts(self) -> ActorFacts:
        return facts("cuda")

    def address(self) -> str:
        return address()

    def join(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return join(*args, **kwargs), {
                name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            }
        except metashard.LaunchError as error:
            return str(error)

    def train(self, folder: str) -> dict[str, Any]:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module, report = metashard.load_component(folder, mesh=mesh, dtype=torch.bfloat16, output_loading_info=True)
        case = zoo.CASES[SD3]
        found = differences(module, case.load(folder, torch.bfloat16))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(**case.inputs(torch.bfloat16)).sample.float().pow(2).mean().backward()
        optimizer.step()
        changed = differences(module, case.load(folder, torch.bfloat16))
        dist.destroy_process_group()
        return {"found": found, "changed": len(changed), "report": report}


@pytest.fixture(scope="module")
def make_actor() -> Iterator[Any]:
    """Ray on this machine, which is told that it has two GPUs; the actors' processes start at once."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("GLOO_SOCKET_IFNAME", "lo")
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=1, num_gpus=2, object_store_memory=80 << 20, **settings)
    try:
        yield lambda **options: ray.remote(Trainer).options(num_cpus=0, **options).remote()
    finally:
        ray.shutdown()
        patch.undo()


@pytest.fixture(scope="module")
def pair(make_actor: Any) -> list[Any]:
    """Two actors with a half of the same device each."""
    return [make_actor(num_gpus=0.5), make_actor(num_gpus=0.5)]


def get(*calls: Any) -> list[Any]:
    return ray.get(list(calls), timeout=120)


def test_ray_says_what_the_device_is_made_from(make_actor: Any, pair: list[Any]) -> None:
    whole = make_actor(num_gpus=1, runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}})
    without = make_actor()
    first, second, third, fourth = get(*(a.facts.remote() for a in (*pair, whole, without)))
    assert first == second
    assert (first.assigned, first.visible) == (("0",), "0")
    assert (third.assigned, third.visible) == (("1",), None)
    assert fourth.assigned == ()
    assert [seat.device.index for seat in seats([third, first], device_type="cuda")] == [1, 0]
    for worker in (whole, without):
        ray.kill(worker)


def test_two_ranks_on_one_device_are_refused_on_both(pair: list[Any]) -> None:
    (meet,) = get(pair[0].address.remote())
    texts = get(*(a.join.remote(rank, 2, meet, device_type="cuda") for rank, a in enumerate(pair)))
    assert texts[0] == texts[1]
    assert "Ranks 0 and 1 are on one device" in texts[0]


def test_an_actor_that_does_not_come_is_named(pair: list[Any]) -> None:
    (meet,) = get(pair[0].address.remote())
    start = time.monotonic()
    (text,) = get(pair[0].join.remote(0, 2, meet, device_type="cpu", timeout=0.5))
    assert "The actor of rank 1 did not come" in text
    assert time.monotonic() - start < 30


def test_actors_load_train_and_report(pair: list[Any], tmp_path: Path) -> None:
    zoo.CASES[SD3].build().save_pretrained(tmp_path)
    (meet,) = get(pair[0].address.remote())
    joined = get(*(a.join.remote(rank, 2, meet, device_type="cpu") for rank, a in enumerate(pair)))
    assert [seat.rank for seat, _ in joined] == [0, 1]
    assert [seat.local_rank for seat, _ in joined] == [0, 1]
    assert joined[1][1] == {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for told in get(*(a.train.remote(str(tmp_path)) for a in pair)):
        assert told["found"] == []
        assert told["changed"]
        assert told["report"].strategy == "direct"
        assert len(told["report"].ranks) == 2
