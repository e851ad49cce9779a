"""One failure, the same error on every rank.

[Note: phases]
A load is a sequence of phases. Within a phase a rank works alone, or takes part in collectives that every rank reaches;
at its end the ranks exchange a status over a small CPU group of their own. If any rank failed, every rank raises the
same error: the typed error of the lowest failing rank, which names rank, phase, file and key. The rank where it
happened chains the original. So nobody goes on into a collective that a failed rank will never join.

The control group is gloo on CPU, made once for a set of ranks, with its own timeout: a slow rank 0 (a download, a slow
disk) never trips the timeout of the group that carries data.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from metashard._compat import named_by_members
from metashard.errors import LayoutError, LoadError, MetaShardError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Control groups by (default group, ranks, timeout): made once, as process groups are never freed before the end.
_groups: dict[tuple[int, tuple[int, ...], float], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of a mesh in row-major order; the first one is the leader ("rank 0") of every load on it."""
    return tuple(mesh.mesh.flatten().tolist())


class Agreement:
    """The ranks of one load, and how they come to one answer.

    Args:
        ranks: Global ranks that take part; all of them must construct the agreement.
        timeout: Seconds to wait for the slowest rank in a phase.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: float) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.group = _control_group(self.ranks, timeout)

    @property
    def leader(self) -> bool:
        """Whether this rank is the first of the load ("rank 0")."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Pickled: for small Python objects only."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        order = dist.get_process_group_ranks(self.group)  # ascending, which a mesh need not be
        return [values[order.index(rank)] for rank in self.ranks]

    def from_leader(self, value: T | None) -> T:
        """The leader's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        return box[0]  # type: ignore[return-value]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body, then agree on how it went. See [Note: phases].

        Raises:
            MetaShardError: On every rank, if the body raised on any. `KeyboardInterrupt` and `SystemExit` go through
                untouched on the rank that got them; the others see it as that rank's failure.
        """
        original: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - told to the other ranks, then raised
            original = error
        failure = None if original is None else _as_typed(original, self.rank, name)
        try:
            failures = [f for f in self.gather(failure) if f is not None]
        except RuntimeError as lost:
            _forget(self.group)  # a group that has lost a member answers nobody any more
            if original is not None:
                raise original  # noqa: B904 - the first failure is the one to tell
            raise LoadError(
                f"Another rank left or hung in phase {name}: {lost}. Look at the first error in the other ranks' logs.",
                rank=self.rank,
                phase=name,
            ) from lost
        if not failures:
            return
        if original is not None and not isinstance(original, Exception):
            raise original
        first = failures[0]
        first.ranks = tuple(sorted({f.rank for f in failures if f.rank is not None}))
        if isinstance(original, MetaShardError) and first.rank == self.rank:
            original.ranks = first.ranks
            raise original
        raise first from original

    def same(self, value: Any, *, what: str, phase: str) -> None:
        """Refuse values that differ between ranks.

        Raises:
            LayoutError: On every rank, naming the first rank that differs from rank 0 and where.
        """
        digest = hashlib.sha256(repr(value).encode()).hexdigest()
        if len(set(self.gather(digest))) == 1:
            return
        values = self.gather(repr(value))
        rank = next(r for r, theirs in enumerate(values) if theirs != values[0])
        at = next((i for i, (a, b) in enumerate(zip(values[0], values[rank], strict=False)) if a != b), 0)
        start = max(0, at - 60)
        expected, got = values[0][start : at + 60], values[rank][start : at + 60]
        raise LayoutError(
            f"Ranks differ in {what}: rank 0 has ...{expected}..., rank {rank} has ...{got}... Give every rank the "
            "same; look for code that branches on the rank.",
            rank=rank,
            phase=phase,
            expected=expected,
            got=got,
        )

    def on_leader(self, name: str, make: Callable[[], T]) -> T:
        """Run `make` on the leader alone, as phase `name`; its value, or its failure, on every rank."""
        packed = b""
        with self.phase(name):
            if self.leader:
                packed = pickle.dumps(make())  # here, so that what cannot be sent fails in this phase
        return pickle.loads(self.from_leader(packed))

    def node_leader(self) -> bool:
        """Whether this rank is the first of its host, as told by the host names of all ranks."""
        hosts = self.gather(socket.gethostname())
        return hosts.index(hosts[self.rank]) == self.rank


def _as_typed(error: BaseException, rank: int, phase: str) -> MetaShardError:
    """The error as it is told to the other ranks: one of ours, and fit to be sent."""
    if isinstance(error, MetaShardError):
        error.rank = rank if error.rank is None else error.rank
        error.phase = phase if error.phase is None else error.phase
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception:  # noqa: BLE001 - an attribute that cannot be sent travels as text
            kind = next(cls for cls in type(error).__mro__ if cls.__module__ == MetaShardError.__module__)
            return kind(
                error.message,
                rank=error.rank,
                phase=error.phase,
                file=error.file,
                key=error.key,
                expected=repr(error.expected),
                got=repr(error.got),
            )
    return LoadError(
        f"{type(error).__name__}: {error}",
        rank=rank,
        phase=phase,
        file=getattr(error, "filename", None),
    )


def _control_group(ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise LoadError("No process group. Call torch.distributed.init_process_group first (torchrun does not).")
    for stale in [key for key, (of, _) in _groups.items() if of is not world]:
        del _groups[stale]  # of a process group that was destroyed
    key = (id(world), ranks, timeout)
    if key not in _groups:
        try:
            group = new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise LoadError(
                f"Not all ranks of the mesh came to the load within {timeout:g} s: {error}. Every rank of the mesh has "
                "to call it.",
                rank=ranks.index(dist.get_rank()),
                phase="resolve",
            ) from error
        _groups[key] = (world, group)
    return _groups[key][1]


def _forget(group: dist.ProcessGroup) -> None:
    for key in [key for key, (_, held) in _groups.items() if held is group]:
        del _groups[key]


def new_group(ranks: Sequence[int], **kwargs: Any) -> dist.ProcessGroup:
    """A process group over `ranks`, made by these ranks alone if they are not the whole world."""
    if len(ranks) == dist.get_world_size():
        return dist.new_group(list(ranks), **kwargs)
    with named_by_members(tuple(sorted(ranks))):
        return dist.new_group(list(ranks), use_local_synchronization=True, **kwargs)
