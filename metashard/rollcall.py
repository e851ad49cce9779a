"""Who has come to the end of a phase, who is still at work, and who will never come: told over the rendezvous store.

[Note: roll call]
At a call every rank writes a key of its own and waits for the verdict, one more key. Rank 0 writes it when all have
come. Whoever sees that a rank is lost writes it, too, and the first verdict counts, so that all ranks read the same
one, those that come late included. A key that is absent names the rank that is waited for; a collective could only say
that somebody is missing. And a store that is polled breaks nothing by waiting, where a collective that has run into
its timeout takes its process group with it.

A rank is lost when its process has ended (seen by the ranks of the same host, which find it gone from /proc), when it
is missing while others have lost their connection to somebody, or when it has not come within the timeout.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from metashard.errors import LoadError, MetaShardError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between two looks at the processes of this host
_FIRST_LOOK = 0.02  # seconds until the first of them: most calls are over by then
_LONGEST_NAP = 0.05  # seconds between two looks at the store; shorter where few ranks ask it:
_LOOKS = 1000  # what all ranks together may ask of it in a second
_GRACE = 5.0  # seconds that the others have to report their own failures once one has; more than to leave a collective
_SAY_AFTER = 30.0  # seconds of waiting until the log says who is waited for; then at twice that, and so on


class Host(NamedTuple):
    """A process as others on its host can see it."""

    host: str
    pid: int
    started: str


@dataclass(frozen=True)
class Verdict:
    """How a call ended, the same on every rank.

    Args:
        words: What each rank said, None for one that did not come.
        lost: The error that names the ranks that are lost; None if none is.
        cut_off: Whether any rank has lost a connection, so that process groups over these ranks may be broken.
    """

    words: tuple[bytes | None, ...]
    lost: MetaShardError | None = None
    cut_off: bool = False


class RollCall:
    """Calls over the store, one after another; every rank makes each of them.

    Args:
        store: A store that all ranks share, used by nobody else at the same time.
        prefix: Of all keys; the same on every rank and used once.
        rank: Index of this rank.
        size: Number of ranks.
        timeout: Seconds that a rank has to come to a call.
    """

    def __init__(self, store: Any, prefix: str, *, rank: int, size: int, timeout: float) -> None:
        self.store, self.prefix, self.rank, self.size, self.timeout = store, prefix, rank, size, timeout
        self.number = 0
        self.error: type[MetaShardError] = LoadError  # of what the ranks are at: says what a lost rank has left
        self._kept: dict[int, tuple[int | str, ...]] = {}  # number of a call -> its keys that this rank has to delete
        self._hosts: dict[int, Host] = {}

    def meet_neighbours(self) -> MetaShardError | None:
        """The first call: learn which ranks are processes of this host. Returns the error if some did not come."""
        me = this_process()
        verdict = self.call(pickle.dumps(me), phase="resolve")
        if verdict.lost is None:
            told = {rank: Host(*pickle.loads(word)) for rank, word in enumerate(verdict.words) if word}
            self._hosts = {r: h for r, h in told.items() if r != self.rank and me.host and h.host == me.host}
        return verdict.lost

    def call(self, word: bytes = b"", *, phase: str, failed: bool = False, cut_off: bool = False) -> Verdict:
        """Say `word` and wait for the verdict.

        Args:
            word: What the other ranks are to know of this one.
            phase: Step of the load, for the log and the error.
            failed: This rank has failed: the others are not waited for much longer.
            cut_off: It has failed because it lost its connection to some other rank.
        """
        start = time.monotonic()
        try:
            self.tell(word, failed=failed, cut_off=cut_off)
            verdict = self._wait(self.number - 1, phase, start)
            if None not in verdict.words:  # all have come here, so nobody is in an earlier call any more
                self._clear(before=self.number - 1)
            if self.rank == 0 and not any(verdict.words):  # nobody has raised an alarm
                self._kept[self.number - 1] = (self.rank, "verdict")
            return verdict
        except RuntimeError as error:  # torch has several classes for a store that does not answer, all of them these
            return self._without_store(phase, error)

    def tell(self, word: bytes, *, failed: bool, cut_off: bool = False) -> None:
        """Say `word` in the next call without waiting for its verdict: this rank goes elsewhere."""
        number, self.number = self.number, self.number + 1
        if failed:
            self.store.set(self._key(number, "cut off" if cut_off else "failed"), b"")
        self.store.set(self._key(number, self.rank), word)
        self._kept[number] = (self.rank, "verdict", "failed", "cut off", "stop") if self.rank == 0 else (self.rank,)

    def _clear(self, *, before: int) -> None:
        for number in [number for number in self._kept if number < before]:
            for name in self._kept.pop(number):
                self.store.delete_key(self._key(number, name))

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended."""
        try:
            return [rank for rank, host in self._hosts.items() if _started(host.pid) != host.started]
        except OSError:  # this process has no file descriptor left: that says nothing of the others
            return []

    def over(self) -> bool:
        """Whether the way to the next call may never end: a rank is lost, or the call was decided without this one."""
        try:
            return bool(self.gone()) or self._has("verdict") or self._has("cut off")
        except RuntimeError:
            return True  # no store

    def ask_to_stop(self) -> None:
        """Tell the others, on their way to the next call, that this rank has failed."""
        self.store.set(self._key(self.number, "stop"), b"")

    def asked_to_stop(self) -> bool:
        """Whether some rank has asked to stop on the way to the next call."""
        return self._has("stop")

    def _has(self, name: str) -> bool:
        return self.store.check([self._key(self.number, name)])

    def _key(self, number: int, name: int | str) -> str:
        return f"{self.prefix}/{number}/{name}"

    def _wait(self, number: int, phase: str, start: float) -> Verdict:
        verdict = self._key(number, "verdict")
        alarms = [self._key(number, "failed"), self._key(number, "cut off")]
        words = [self._key(number, rank) for rank in range(self.size)]
        deadline, look, say = start + self.timeout, start + _FIRST_LOOK, start + _SAY_AFTER
        nap, longest = 2e-4, min(_LONGEST_NAP, self.size / _LOOKS)
        hurry = False
        while not self.store.check([verdict]):
            now = time.monotonic()
            if (self.rank == 0 or hurry) and self.store.check(words):
                return self._decide(number, phase)
            if now >= look:
                look = now + _LOOK_SECONDS
                if gone := self.gone():
                    return self._decide(number, phase, ended=gone)
                if not hurry and any(self.store.check([key]) for key in alarms):
                    hurry, deadline = True, min(deadline, now + _GRACE)
                hurry = hurry or self.store.check([self._key(number + 1, "failed")])  # rank 0 may be on its way out
            if now >= deadline:
                return self._decide(number, phase)
            if now >= say:
                self._say(words, phase, now - start)
                say += now - start
            time.sleep(nap)
            nap = min(nap * 1.5, longest)
        return self._read(self.store.get(verdict))

    def _decide(self, number: int, phase: str, ended: Sequence[int] = ()) -> Verdict:
        """Write the verdict from what has been said so far, unless another rank was first."""
        words = [self._word(number, rank) for rank in range(self.size)]
        failed, cut_off = (self.store.check([self._key(number, name)]) for name in ("failed", "cut off"))
        missing = [rank for rank, word in enumerate(words) if word is None]
        lost = None
        if ended:
            lost = lost_error(self.error, ended, phase, "the process has ended. Was it killed, or out of memory?")
        elif missing and cut_off:
            lost = lost_error(self.error, missing, phase, "the connection is closed. Was it killed, or its host?")
        elif missing and not failed:
            why = f"nothing was heard of it within {self.timeout:g} s. Is it hanging?"
            lost = lost_error(self.error, missing, phase, why)
        mine = pickle.dumps(Verdict(tuple(words), lost, cut_off))
        return self._read(self.store.compare_set(self._key(number, "verdict"), "", mine))

    def _word(self, number: int, rank: int) -> bytes | None:
        key = self._key(number, rank)
        return self.store.get(key) if self.store.check([key]) else None

    @staticmethod
    def _read(verdict: bytes) -> Verdict:
        made: Verdict = pickle.loads(verdict)
        return made

    def _say(self, words: list[str], phase: str, seconds: float) -> None:
        missing = [rank for rank, key in enumerate(words) if not self.store.check([key])]
        if missing and (self.rank == 0 or missing[0] == 0):  # two voices are enough
            logger.warning("Phase %s: waiting for rank %s since %.0f s", phase, ", ".join(map(str, missing)), seconds)

    def _without_store(self, phase: str, error: RuntimeError) -> Verdict:
        """The store lives in a launcher's agent or in rank 0, which is then the one that left."""
        deadline = time.monotonic() + 2 * _LOOK_SECONDS
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(_LONGEST_NAP)
        if gone:
            lost = lost_error(self.error, gone, phase, "the process has ended. Was it killed, or out of memory?")
        else:
            why = "the rendezvous store, which it or its launcher hosts, does not answer."
            lost = lost_error(self.error, [0], phase, why)
        lost.__cause__ = error
        return Verdict((None,) * self.size, lost, cut_off=True)


def lost_error(error: type[MetaShardError], ranks: Sequence[int], phase: str, why: str) -> MetaShardError:
    """The error that names ranks that do not answer any more."""
    outcome = error.outcomes.get(phase, error.outcome)
    names = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
    return error(
        f"{names} left the {error.task}: {why} Look at the first error in its log; {outcome}.",
        rank=ranks[0],
        phase=phase,
        expected="every rank at the end of the phase",
        got=f"nothing from {len(ranks)}",
        ranks=tuple(ranks),
    )


def this_process() -> Host:
    """This process; without a host where the system does not tell (then nobody sees it end but by the timeout)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            host = f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"  # containers number their own processes
    except OSError:
        host = ""
    return Host(host, os.getpid(), _started(os.getpid()))


def _started(pid: int) -> str:
    """When a living process was started, in the kernel's ticks; "" if there is none (a zombie is none)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # the name before may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def shared_store(store: Any) -> Any:
    """A connection of its own to a store: other threads of a process may wait in theirs for minutes."""
    return store.clone()
