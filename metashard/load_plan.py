"""What a load would do, as data: a `LoadPlan`, made by `plan_load`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from metashard.report import RankReport


@dataclass(frozen=True)
class RankPlan(RankReport):
    """What one rank will do: the figures of a `RankReport`, the peaks as upper bounds, and three more.

    Args:
        reads: Number of read calls.
        small_read_bytes: Bytes that are read in calls of less than 1 MiB.
        network_bytes: Over this rank's link, in the busier direction, if a broadcast passes it once.
    """

    reads: int = 0
    small_read_bytes: int = 0
    network_bytes: int = 0


@dataclass(frozen=True)
class GroupPlan:
    """One FSDP group.

    Args:
        name: Its module; "" is the root.
        parameters: Number of parameters.
        all_gather_bytes: Bytes of its unsharded parameters, as they are gathered for a forward.
    """

    name: str
    parameters: int
    all_gather_bytes: int


@dataclass(frozen=True)
class LoadPlan:
    """What a load would do, by strategy.

    Args:
        class_name: The component's model class.
        mesh_shape: (shard,) or (replicate, shard).
        device_type: Where shards are to live.
        transport: How tensors leave one rank.
        checkpoint_bytes: Weight bytes of the component's files.
        files: How many files.
        dtype_counts: Parameters and buffers by dtype.
        strategy: The one that was asked for, or what `auto` takes where every rank sees the files.
        reason: Why.
        ranks: Strategy -> one entry a rank, in row-major order of the mesh. Only the strategies that are possible.
        groups: The FSDP groups, in the order in which they are made.
        warnings: What deserves a thought, with its number.
    """

    class_name: str
    mesh_shape: tuple[int, ...]
    device_type: str
    transport: str
    checkpoint_bytes: int
    files: int
    dtype_counts: dict[str, int]
    strategy: str
    reason: str
    ranks: dict[str, tuple[RankPlan, ...]]
    groups: tuple[GroupPlan, ...]
    warnings: tuple[str, ...] = field(default=())

    def seconds(self, *, storage_gbps: float, network_gbps: float) -> dict[str, float]:
        """Estimated seconds of moving the bytes, by strategy; building and sharding the module come on top.

        Storage serves all ranks together, the network each rank on its own, and `direct` and `stream` do both at once.

        Args:
            storage_gbps: GB/s (1e9 bytes) that the storage delivers to all ranks together.
            network_gbps: GB/s that one rank sends or receives.
        """
        if not (0 < storage_gbps < math.inf and 0 < network_gbps < math.inf):
            raise ValueError(f"storage_gbps={storage_gbps}, network_gbps={network_gbps}: expected positive numbers.")
        found = {}
        for strategy, ranks in self.ranks.items():
            reading = sum(rank.bytes_read for rank in ranks) / storage_gbps
            moving = max(rank.network_bytes for rank in ranks) / network_gbps
            found[strategy] = (reading + moving if strategy == "rank0" else max(reading, moving)) / 1e9
        return found

    def to_json(self) -> str:
        """The plan as a JSON object."""
        return json.dumps(asdict(self), indent=2)
