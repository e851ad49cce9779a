"""One failure, the same error on every rank.

[Note: phases]
A load is a sequence of phases. Within a phase a rank works alone, or takes part in collectives that every rank reaches;
at its end the ranks tell each other how it went (see `metashard.rollcall`). If any rank failed, every rank raises the
same error: the typed error of the lowest failing rank, which names rank, phase, file and key. The rank where it
happened chains the original. So nobody goes on into a collective that a failed rank will never join. A rank that does
not come (killed, hanging) is named in the same way.

Values that ranks exchange travel over a control group: gloo on CPU, made once for a set of ranks. A call comes before
each of its collectives, so that none of them waits long: a slow rank 0 (a download, a slow disk) trips the timeout of
no process group.
"""

from __future__ import annotations

import atexit
import hashlib
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from metashard._compat import default_store, named_by_members
from metashard.errors import LayoutError, LoadError, MetaShardError
from metashard.rollcall import RollCall, shared_store
from metashard.watched import LeftError, run_watched

T = TypeVar("T")


@dataclass(frozen=True)
class Control:
    """How a set of ranks talks: calls over the store, values over a gloo group of their own."""

    world: dist.ProcessGroup
    group: dist.ProcessGroup
    calls: RollCall


# By (default group, ranks, timeout): made once, as process groups are never freed before the end.
_controls: dict[tuple[int, tuple[int, ...], float], Control] = {}
_made: Counter[tuple[tuple[int, ...], float]] = Counter()
# Gloo's threads let go of the tensors of the last collective a moment after it is done, for which they need the
# interpreter; at its end they would take the process down. Groups that go before it wait for their threads.
atexit.register(_controls.clear)


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of a mesh in row-major order; the first one is the leader ("rank 0") of every load on it."""
    return tuple(mesh.mesh.flatten().tolist())


class Agreement:
    """The ranks of one load, and how they come to one answer.

    Args:
        ranks: Global ranks that take part; all of them must construct the agreement.
        timeout: Seconds to wait for the slowest rank in a phase.
        error: What errors that are not ours become, and lost ranks: `LoadError` or `SaveError`.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: float, error: type[MetaShardError] = LoadError) -> None:
        self.ranks = tuple(ranks)
        self.error = error
        self.rank = self.ranks.index(dist.get_rank())
        self.control = _control(self.ranks, timeout, error)
        self.group = self.control.group
        self.now = "resolve"  # the phase, as far as it is known
        self.broken = False  # set where a collective ends out of step: the others must be called back from it
        self._raised: BaseException | None = None  # what the other ranks know already

    @property
    def leader(self) -> bool:
        """Whether this rank is the first of the load ("rank 0")."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Pickled: for small Python objects only."""
        values: list[Any] = [None] * len(self.ranks)
        self._together(lambda: dist.all_gather_object(values, value, group=self.group))
        order = dist.get_process_group_ranks(self.group)  # ascending, which a mesh need not be
        return [values[order.index(rank)] for rank in self.ranks]

    def from_leader(self, value: T | None) -> T:
        """The leader's value on every rank."""
        box = [value]
        self._together(lambda: dist.broadcast_object_list(box, src=self.ranks[0], group=self.group))
        return box[0]  # type: ignore[return-value]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body, then agree on how it went. See [Note: phases].

        Raises:
            MetaShardError: On every rank, if the body raised on any. `KeyboardInterrupt` and `SystemExit` go through
                untouched on the rank that got them; the others see it as that rank's failure.
        """
        original: BaseException | None = None
        self.now = name
        try:
            yield
        except BaseException as error:  # told to the other ranks, then raised
            if error is self._raised:  # by a phase inside of this one: all ranks are on their way out
                raise
            original = error
        self._agree(name, original)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Whatever leaves the body by an error that the other ranks do not know yet is their error in the next call."""
        try:
            yield
        except BaseException as error:
            if error is self._raised:
                raise
            if isinstance(error, Exception):
                self._agree(self.now, error)  # raises
            with suppress(RuntimeError):  # no store: the others find out by themselves
                self.control.calls.tell(_word(_as_typed(error, self.rank, self.now, self.error)), failed=True)
            raise

    def _agree(self, name: str, original: BaseException | None) -> None:
        failure = None if original is None else _as_typed(original, self.rank, name, self.error)
        cut_off, self.broken = self.broken or (original is not None and _is_cut_off(original)), False
        self.control.calls.error = self.error
        verdict = self.control.calls.call(
            b"" if failure is None else _word(failure, follows=original is not None and _is_cut_off(original)),
            phase=name,
            failed=failure is not None,
            cut_off=cut_off,
        )
        if verdict.lost is not None or verdict.cut_off:
            _forget(self.control)  # a group that has lost a member answers nobody any more
        told = [pickle.loads(word) for word in verdict.words if word]
        failures: list[MetaShardError] = [f for follows, f in told if not follows] or [f for _, f in told]
        if not failures and verdict.lost is None:
            return
        if original is not None and not isinstance(original, Exception):
            self._raised = original
            raise original
        first = verdict.lost or failures[0]
        if verdict.lost is None:
            first.ranks = tuple(sorted({f.rank for f in failures if f.rank is not None}))
        if isinstance(original, MetaShardError) and first.rank == self.rank:
            original.ranks = first.ranks
            first = original
        self._raised = first
        if first is original:
            raise first
        raise first from (original or first.__cause__)

    def _together(self, collective: Callable[[], None]) -> None:
        """A collective of the control group, once all ranks are there."""
        self._agree(self.now, None)
        try:
            run_watched(lambda stop: collective(), self.control.calls, torch.device("cpu"))
        except RuntimeError as error:
            self._agree(self.now, error)
            raise  # not reached: a failure of this rank is one of the failures

    def same(self, value: Any, *, what: str, phase: str) -> None:
        """Refuse values that differ between ranks.

        Raises:
            LayoutError: On every rank, naming the first rank that differs from rank 0 and where. `SaveError` in a save.
        """
        digest = hashlib.sha256(repr(value).encode()).hexdigest()
        if len(set(self.gather(digest))) == 1:
            return
        values = self.gather(repr(value))
        rank = next(r for r, theirs in enumerate(values) if theirs != values[0])
        at = next((i for i, (a, b) in enumerate(zip(values[0], values[rank], strict=False)) if a != b), 0)
        start = max(0, at - 60)
        expected, got = values[0][start : at + 60], values[rank][start : at + 60]
        kind = LayoutError if issubclass(LayoutError, self.error) else self.error
        self._raised = kind(
            f"Ranks differ in {what}: rank 0 has ...{expected}..., rank {rank} has ...{got}... Give every rank the "
            "same; look for code that branches on the rank.",
            rank=rank,
            phase=phase,
            expected=expected,
            got=got,
        )
        raise self._raised

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


class Alone(Agreement):
    """The agreement of a process with itself, where there is no process group."""

    def __init__(self, *, error: type[MetaShardError] = LoadError) -> None:
        self.ranks, self.rank, self.now, self.error = (0,), 0, "resolve", error
        self.broken, self._raised = False, None

    def gather(self, value: T) -> list[T]:
        return [value]

    def from_leader(self, value: T | None) -> T:
        return value  # type: ignore[return-value]

    @contextmanager
    def told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if error is not self._raised:
                self._agree(self.now, error)
            raise

    def _agree(self, name: str, original: BaseException | None) -> None:
        if isinstance(original, Exception):
            self._raised = _as_typed(original, 0, name, self.error)
            if self._raised is original:  # with its own cause
                raise original
            raise self._raised from original
        if original is not None:
            raise original


def _as_typed(error: BaseException, rank: int, phase: str, wrap: type[MetaShardError]) -> MetaShardError:
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
    return wrap(
        f"{type(error).__name__}: {error}",
        rank=rank,
        phase=phase,
        file=getattr(error, "filename", None),
    )


def _word(failure: MetaShardError, *, follows: bool = False) -> bytes:
    """A failure as it is told; `follows` that of another rank, which is the one to raise."""
    return pickle.dumps((follows, failure))


def _is_cut_off(error: BaseException) -> bool:
    """Whether a rank lost its connection to another one, rather than failed by itself."""
    return isinstance(error, (dist.DistError, LeftError)) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _control(ranks: tuple[int, ...], timeout: float, error: type[MetaShardError] = LoadError) -> Control:
    world = dist.group.WORLD
    if world is None:
        raise error("No process group. Call torch.distributed.init_process_group first (torchrun does not).")
    for stale in [key for key, control in _controls.items() if control.world is not world]:
        del _controls[stale]  # of a process group that was destroyed
    key = (id(world), ranks, timeout)
    if key not in _controls:
        made, _made[ranks, timeout] = _made[ranks, timeout], _made[ranks, timeout] + 1
        prefix = f"metashard/{hashlib.sha256(repr((ranks, timeout, made)).encode()).hexdigest()[:24]}"
        rank = ranks.index(dist.get_rank())
        calls = RollCall(shared_store(default_store()), prefix, rank=rank, size=len(ranks), timeout=timeout)
        calls.error = error
        lost = calls.meet_neighbours()
        if lost is not None:
            raise error(
                f"{lost.message} Every rank of the mesh has to call the {error.task}.",
                rank=lost.rank,
                phase="resolve",
                ranks=lost.ranks,
            )
        group = new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout))
        _controls[key] = Control(world, group, calls)
    return _controls[key]


def _forget(control: Control) -> None:
    for key in [key for key, held in _controls.items() if held is control]:
        del _controls[key]


def new_group(ranks: Sequence[int], **kwargs: Any) -> dist.ProcessGroup:
    """A process group over `ranks`, made by these ranks alone if they are not the whole world."""
    if len(ranks) == dist.get_world_size():
        return dist.new_group(list(ranks), **kwargs)
    with named_by_members(tuple(sorted(ranks))):
        return dist.new_group(list(ranks), use_local_synchronization=True, **kwargs)
