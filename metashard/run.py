"""What every step of one load shares: the ranks, the options, the clock."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from metashard.agree import Agreement, mesh_ranks
from metashard.fill.prefetch import Prefetch
from metashard.policy import LoadPolicy, ShardPolicy
from metashard.report import Recorder
from metashard.shard import check_mesh, mesh_device

FIRST_TIMEOUT = 600.0  # seconds for all ranks to arrive at the load


@contextmanager
def uncollected() -> Iterator[None]:
    """Put off garbage collection: each looks through all that the libraries have on the heap, 0.2 s at a time.

    What a load lets go of is freed by its last reference.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Steps:
    """The steps of a load or a save: each is timed, and its end agreed on.

    Attributes:
        agreement: The ranks that take part.
        recorder: This rank's figures.
    """

    agreement: Agreement
    recorder: Recorder

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body and agree on how it went."""
        with self.recorder.phase(name), self.agreement.phase(name):
            yield

    def on_leader(self, name: str, make: Callable[[], Any]) -> Any:
        """A value made on rank 0, or its failure, on every rank."""
        with self.recorder.phase(name):
            return self.agreement.on_leader(name, make)


@dataclass
class Run(Steps):
    """One load on the ranks of a mesh; making it waits for all of them and compares their policies.

    Args:
        mesh: The FSDP mesh.
        shard: How to cut.
        load: How the bytes come in.
    """

    mesh: DeviceMesh
    shard: ShardPolicy
    load: LoadPolicy

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        self.device = mesh_device(self.mesh)
        self.recorder = Recorder(self.device)
        self.prefetch = Prefetch()
        # The comparison has a timeout of its own: ranks with other timeouts would make groups that never meet.
        first = Agreement(mesh_ranks(self.mesh), timeout=FIRST_TIMEOUT)
        with first.told():
            first.same((self.load, self.shard.comparable()), what="policies", phase="resolve")
            self.hosts = first.gather(socket.gethostname())
        self.agreement = Agreement(mesh_ranks(self.mesh), timeout=self.load.timeout)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host, as its name tells."""
        return len(set(self.hosts)) == 1
