"""Ray: actors as the ranks of a load, each on the device that Ray has given it.

    @ray.remote(num_gpus=1)
    class Trainer:
        def address(self):
            return metashard.integrations.ray.address()                 # on the actor of rank 0

        def set_up(self, rank, world_size, address):
            seat = metashard.integrations.ray.join(rank, world_size, address)
            self.mesh = init_device_mesh(seat.device.type, (world_size,))

[Note: devices]
Ray shows an actor its own devices only (CUDA_VISIBLE_DEVICES="3", which is then device 0), or, with
RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, the node's list whole, in which the actor's is one of many. The device is
the place of the id that Ray has assigned in the list that the actor sees: right in both cases, and never made from the
rank.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import ray
import ray.util
import torch
import torch.distributed as dist

from metashard.errors import LaunchError

# By device type, the variable that says which devices a process sees, and in which order.
_VISIBLE = {"cuda": "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
_TYPES = ("cpu", *_VISIBLE)

_hosted: dict[str, dist.TCPStore] = {}  # by address; lives as long as the process


@dataclass(frozen=True)
class ActorFacts:
    """What one actor knows of itself.

    Args:
        node: Ray's id of its node.
        assigned: Ids of the devices that Ray has given it.
        visible: The list of devices that it sees, as the environment has it; None for all of the node.
    """

    node: str
    assigned: tuple[str, ...]
    visible: str | None


@dataclass(frozen=True)
class Seat:
    """The place of one rank.

    Args:
        rank: Its rank.
        world_size: Number of ranks.
        local_rank: Number of ranks before it on its node.
        local_world_size: Number of ranks on its node.
        node_rank: Number of its node, in the order of their first ranks.
        device: Its device, by the index it has in this process.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device

    @property
    def node_leader(self) -> bool:
        """Whether it is the first rank of its node: the one that downloads, say."""
        return self.local_rank == 0


def facts(device_type: str) -> ActorFacts:
    """What this actor is told by Ray; call it in an actor."""
    context = ray.get_runtime_context()
    assigned = tuple(context.get_accelerator_ids().get("GPU", ())) if device_type != "cpu" else ()
    return ActorFacts(context.get_node_id(), assigned, os.environ.get(_VISIBLE.get(device_type, "")))


def seats(told: Sequence[ActorFacts], *, device_type: str) -> tuple[Seat, ...]:
    """The places of all ranks, from what each of them has told; a pure function, with the same outcome on every rank.

    Raises:
        LaunchError: A rank has no device or several, does not see the one it was given, or shares it with another.
    """
    nodes = list(dict.fromkeys(fact.node for fact in told))
    on_node = Counter(fact.node for fact in told)
    seen: Counter[str] = Counter()
    users: dict[tuple[str, str], int] = {}
    made = []
    for rank, fact in enumerate(told):
        device = torch.device("cpu")
        if device_type != "cpu":
            device = torch.device(device_type, _index(fact, rank, device_type))
            first = users.setdefault((fact.node, fact.assigned[0]), rank)
            if first != rank:
                raise LaunchError(
                    f"Ranks {first} and {rank} are on one device, {fact.assigned[0]} of node {fact.node}. Give each "
                    "rank a device of its own: num_gpus=1 for each actor, no fraction of one.",
                    rank=rank,
                    phase="resolve",
                    expected="one rank a device",
                    got=fact.assigned[0],
                )
        node = nodes.index(fact.node)
        made.append(Seat(rank, len(told), seen[fact.node], on_node[fact.node], node, device))
        seen[fact.node] += 1
    return tuple(made)


def _index(fact: ActorFacts, rank: int, device_type: str) -> int:
    """Of the device that Ray has assigned, among those that the actor sees; see [Note: devices]."""
    if len(fact.assigned) != 1:
        has = f"{len(fact.assigned)} devices" if fact.assigned else "no device"
        raise LaunchError(
            f"The actor of rank {rank} has {has}; a rank works on one. Create it with num_gpus=1: "
            'Trainer.options(num_gpus=1).remote(); or join with device_type="cpu".',
            rank=rank,
            phase="resolve",
            expected=f"one device of type {device_type}",
            got=list(fact.assigned),
        )
    (assigned,) = fact.assigned
    if fact.visible is None and assigned.isdecimal():
        return int(assigned)
    visible = [] if fact.visible is None else [item.strip() for item in fact.visible.split(",")]
    if assigned not in visible:
        raise LaunchError(
            f"Ray has given device {assigned} to rank {rank}, which sees {fact.visible!r} only. Leave "
            f"{_VISIBLE[device_type]} to Ray: do not set it in runtime_env or in the actor.",
            rank=rank,
            phase="resolve",
            expected=assigned,
            got=fact.visible,
        )
    return visible.index(assigned)


def address() -> str:
    """Open the meeting point of all ranks on this actor, that of rank 0; give what it returns to every `join`."""
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    made = f"{host}:{store.port}"
    _hosted[made] = store
    return made


def join(rank: int, world_size: int, address: str, *, device_type: str | None = None, timeout: float = 600.0) -> Seat:
    """Make this actor a rank: its device current, torchrun's environment variables set, the process group initialised.

    Call it on all actors at once. `torch.distributed.destroy_process_group` ends it.

    Args:
        rank: Of this actor, from 0.
        world_size: Number of actors.
        address: From `address`, on the actor of rank 0.
        device_type: "cuda", "xpu" or "cpu"; None takes the one that torch was built for. On CPU the backend is gloo.
        timeout: Seconds to wait for the other actors.

    Returns:
        Rank, node and device of this actor.

    Raises:
        LaunchError: On every rank: a rank has no device, shares its device, or does not come in time.
    """
    if device_type is None:
        built_for = torch.accelerator.current_accelerator(check_available=False)
        device_type = "cpu" if built_for is None else built_for.type
    if device_type not in _TYPES:
        raise LaunchError(f"device_type={device_type!r}: expected one of {', '.join(_TYPES)}.", phase="resolve")
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=timeout)
    store = _hosted.get(address) or dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    seat = seats(_exchange(store, rank, world_size, device_type, limit), device_type=device_type)[rank]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(seat.local_rank),
        LOCAL_WORLD_SIZE=str(seat.local_world_size),
        GROUP_RANK=str(seat.node_rank),
        MASTER_ADDR=host,
        MASTER_PORT=port,
        ACCELERATE_TORCH_DEVICE=str(seat.device),  # accelerate would make a device of LOCAL_RANK
    )
    if device_type != "cpu":
        torch.accelerator.set_device_index(seat.device.index)
    dist.init_process_group(
        dist.get_default_backend_for_device(device_type), store=store, rank=rank, world_size=world_size, timeout=limit
    )
    return seat


def _exchange(store: dist.Store, rank: int, world_size: int, device_type: str, limit: timedelta) -> list[ActorFacts]:
    """What every actor knows of itself, in rank order."""
    store.set(f"metashard/seat/{rank}", pickle.dumps(facts(device_type)).hex())
    told = []
    for other in range(world_size):
        try:
            store.wait([f"metashard/seat/{other}"], limit)
        except RuntimeError as error:
            raise LaunchError(
                f"The actor of rank {other} did not come within {limit.total_seconds():g} s. Call join on all actors "
                "before waiting for any of them, and look whether Ray could place it (`ray status`).",
                rank=other,
                phase="resolve",
            ) from error
        told.append(pickle.loads(bytes.fromhex(store.get(f"metashard/seat/{other}").decode())))
    return told
