"""What has to be filled, and with what: one `Target` a tensor, one `Job` a load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from metashard import _compat
from metashard.agree import Agreement
from metashard.fill.bytes import flat_local
from metashard.fill.ledger import Ledger
from metashard.plan import Box, Sharding, whole
from metashard.policy import LoadPolicy
from metashard.report import Recorder
from metashard.shards import local_box, sharding_of
from metashard.watched import run_watched


@dataclass(frozen=True)
class Target:
    """One tensor to fill.

    Args:
        fqn: Its name.
        shape: Shape of the full tensor.
        flat: This rank's part, a 1-D view of the memory that the module owns.
        box: Which part that is.
        sharding: How the tensor is laid over `mesh`; no axes for a replicated one.
        mesh: The mesh of its DTensor, None for a replicated tensor.
    """

    fqn: str
    shape: tuple[int, ...]
    flat: torch.Tensor
    box: Box
    sharding: Sharding
    mesh: DeviceMesh | None

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def replicated(self) -> bool:
        return not self.sharding.axes

    def box_of(self, rank: int) -> Box:
        """The part that global rank `rank` holds."""
        if self.mesh is None:
            return whole(self.shape)
        coordinate = (self.mesh.mesh == rank).nonzero()[0].tolist()
        return self.sharding.box(self.shape, self.mesh.shape, coordinate)


def target(fqn: str, tensor: torch.Tensor) -> Target:
    """The target for a parameter (maybe a DTensor), buffer or attribute that has its memory."""
    sharding, mesh = sharding_of(tensor)
    return Target(fqn, tuple(tensor.shape), flat_local(tensor), local_box(tensor), sharding, mesh)


@dataclass(frozen=True)
class Job:
    """The surroundings of one fill.

    Args:
        mesh: The FSDP mesh, (shard,) or (replicate, shard).
        device: Device that collectives run on.
        agreement: All ranks of the load.
        policy: The load's options.
        recorder: Where bytes are counted.
        folder: This rank's folder of the component's files; None if there is none.
        crew: Ranks of this rank's shard group that get what comes from files through one of them, the first: all of
            the group, or in `stream` those of one host where every host has a rank that sees the files.
        advance: Called with the number of bytes that came into place, for the progress bar.
        ledger: Which bytes have come into place.
    """

    mesh: DeviceMesh
    device: torch.device
    agreement: Agreement
    policy: LoadPolicy
    recorder: Recorder
    folder: Path | None
    crew: tuple[int, ...]
    advance: Callable[[int], None]
    ledger: Ledger = field(default_factory=Ledger)

    def placed(self, view: torch.Tensor) -> None:
        """Note that all of `view`, contiguous memory of a target, has its values; called by any thread."""
        self.ledger.wrote(view)
        self.advance(view.nbytes)

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait for what travels as long as the load may take; point-to-point ones take no other timeout of a group."""
        for work in works:
            work.wait(timedelta(seconds=self.policy.timeout))

    def together(self, collectives: Callable[[threading.Event], Exception | None]) -> None:
        """Run collectives of the load's data groups, see `metashard.watched`.

        Args:
            collectives: Returns the failure of a rank that has kept in step with the others to the end. What it raises
                has broken off the collectives: the other ranks are called back from them.
        """
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]

        def run(stop: threading.Event) -> Exception | None:
            try:
                return collectives(stop)
            except Exception:
                self.agreement.broken = True
                raise

        with _compat.patient_groups(groups, self.policy.timeout):
            failure = run_watched(run, self.agreement.control.calls, self.device)
        if failure is not None:
            raise failure

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Group along the shard axis, within one replica."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def shard_ranks(self) -> list[int]:
        """Global ranks of `shard_group`, in order of their coordinate."""
        return dist.get_process_group_ranks(self.shard_group)

    @property
    def reads(self) -> bool:
        """Whether this rank is in the replica that gets its bytes first (always, without a replicate axis)."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return self.mesh.ndim == 1 or coordinate[0] == 0
