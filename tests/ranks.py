"""Real ranks for tests: persistent worker processes that share one gloo process group.

    def total(x):                       # a module-level function: workers import it by name
        t = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(t)
        return t.item()

    def test_total(ranks2):             # fixtures ranks1, ranks2, ranks4 live for the whole session
        assert ranks2.run(total, 1) == [3, 3]

A worker imports torch once and then serves many calls, so a multi-process test costs what it does and no more. What
goes wrong in a call never reaches the next one: a rank that raises, hangs or dies ends the call at once or within its
timeout, and workers whose process group may be out of step are replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT = 120.0  # seconds: importing torch in several processes on a busy machine
COLLECTIVE_TIMEOUT = 60.0  # seconds: the workers' process group, so that a mismatched collective ends by itself
GRACE = 5.0  # seconds: what the other ranks are given once one has raised
PRELOAD = ["tests.conftest", "diffusers", "transformers", "peft", "accelerate", "metashard.load", "metashard.lora"]
RESYNC_TIMEOUT = 20.0  # seconds: the check after a failed call that all ranks are still in step


class RanksError(RuntimeError):
    """The call did not end with an answer from every rank."""


class RanksTimeoutError(RanksError):
    """Some ranks did not answer in time; the message holds their stacks."""


class RankDiedError(RanksError):
    """A worker process ended while it was serving a call."""


class RankRaisedError(RanksError):
    """Stands for an exception, or a result, of a worker that could not be pickled."""


class Ranks:
    """A pool of `world_size` worker processes, one a rank. Starts at the first call, restarts after a broken one."""

    def __init__(self, world_size: int, *, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self.starts = 0
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._folder: Path | None = None
        self._call = 0
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"Ranks({self.world_size})"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no worker runs."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        return_exceptions: bool = False,
        deaths: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every rank and returns the results in rank order.

        Args:
            fn: A module-level function; it and its arguments are pickled.
            timeout: Seconds until every rank must have answered; past it all workers are killed.
            return_exceptions: Wait for every rank and return what it raised in place of its result. Without it the
                first exception is raised here, with the traceback of its rank as a note.
            deaths: Some rank is meant to die: wait for the others, and return a RankDiedError in its place.

        Raises:
            RanksTimeoutError: A rank did not answer in time.
            RankDiedError: A worker process ended.
        """
        self._start()
        self._call += 1
        healthy = False
        try:
            request = pickle.dumps((self._call, fn, args, kwargs))
            for connection in self._connections:
                connection.send_bytes(request)
            answers = self._gather(timeout, stop_at_exception=not return_exceptions, deaths=deaths)
            failures = [answer[2] for answer in answers.values() if not answer[1]]
            healthy = len(answers) == self.world_size and (not failures or self._in_step())
        finally:
            if not healthy:
                self._kill()
        if failures and not return_exceptions:
            raise failures[0]
        return [answers[rank][2] for rank in range(self.world_size)]

    def run_expecting(
        self,
        error: type[BaseException] | tuple[type[BaseException], ...],
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[BaseException]:
        """Calls `fn`, asserts that every rank raised `error`, and returns what they raised, in rank order."""
        outcomes = self.run(fn, *args, timeout=timeout, return_exceptions=True, **kwargs)
        for rank, outcome in enumerate(outcomes):
            if not isinstance(outcome, BaseException):
                raise AssertionError(f"rank {rank} raised nothing and returned {outcome!r}; outcomes: {outcomes!r}")
            if not isinstance(outcome, error):
                raise AssertionError(f"rank {rank} raised another error: {outcome!r}") from outcome
        return outcomes

    def close(self) -> None:
        """Ends the workers. A later call starts new ones."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self._kill()
        # Workers fork from a process that has imported the libraries once, before it has any threads or groups.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        # The store's server lives here, on a port the system chooses: nothing to race for, nothing left behind.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, self.backend, port, str(self._stacks(rank))),
                name=f"rank{rank}of{self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that a dead worker closes the pipe
            self._processes.append(process)
            self._connections.append(ours)
        self.starts += 1
        try:
            failures = [answer[2] for answer in self._gather(START_TIMEOUT).values() if not answer[1]]
        except BaseException:
            self._kill()
            raise
        if failures:
            self._kill()
            raise failures[0]

    def _gather(
        self, timeout: float, *, stop_at_exception: bool = True, deaths: bool = False
    ) -> dict[int, tuple[int, bool, Any]]:
        """Answers by rank: (call, ok, result or exception). Stops early, with fewer, after an exception and GRACE."""
        answers: dict[int, tuple[int, bool, Any]] = {}
        deadline = time.monotonic() + timeout
        raised = False
        while len(answers) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in answers]
            watched: dict[Any, int] = {self._connections[rank]: rank for rank in waiting}
            watched.update({self._processes[rank].sentinel: rank for rank in waiting})
            ready = wait(list(watched), max(0.0, deadline - time.monotonic()))
            if not ready:
                if raised:
                    break
                raise RanksTimeoutError(
                    f"no answer from rank(s) {waiting} of {self.world_size} within {timeout:g} s\n{self._dump(waiting)}"
                )
            for rank in sorted({watched[item] for item in ready}):
                try:
                    # An answer sent just before the process ended still counts, hence poll before the exit code.
                    if not self._connections[rank].poll():
                        raise EOFError
                    answers[rank] = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    died = RankDiedError(f"rank {rank} of {self.world_size} died (exit code {code})")
                    if not deaths:
                        raise died from None
                    answers[rank] = (self._call, False, died)
                if not answers[rank][1] and stop_at_exception and not raised:
                    raised = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _in_step(self) -> bool:
        """Whether all ranks agree on the number of calls and of groups made, over the process group itself."""
        try:
            request = pickle.dumps((self._call, _step, (self._call,), {}))
            for connection in self._connections:
                connection.send_bytes(request)
            answers = self._gather(RESYNC_TIMEOUT)
        except (RanksError, OSError):
            return False
        return len(answers) == self.world_size and all(ok and value for _, ok, value in answers.values())

    def _stacks(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"stacks{rank}.txt"

    def _dump(self, ranks: list[int]) -> str:
        """Python stacks of these ranks, as far as they still answer a signal."""
        for rank in ranks:
            with contextlib.suppress(OSError, TypeError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank}\n{self._stacks(rank).read_text(errors='replace')}" for rank in ranks)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10.0)
            if not process.is_alive():
                process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _set_environment(rank: int, world_size: int, port: int) -> None:
    """What torchrun would have set; one thread a rank, and loopback only."""
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        }
    )


def _serve(connection: Connection, rank: int, world_size: int, backend: str, port: int, stacks: str) -> None:
    """The life of a worker: joins the group, then answers calls until it is told to stop or its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives the tests, however they end
    _set_environment(rank, world_size, port)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the workers
    for category in (DeprecationWarning, FutureWarning):  # as pytest's own filters, which do not reach this process
        warnings.filterwarnings("error", category=category, module="metashard")
    faulthandler.enable()  # a crash in native code leaves every thread's stack in the test's output
    gc.freeze()  # what the libraries hold is not looked through again at each collection
    with open(stacks, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        torch.set_num_threads(1)

        def join_group() -> int:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT))
            limit = timedelta(seconds=COLLECTIVE_TIMEOUT)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
            dist.barrier()
            return os.getpid()

        connection.send_bytes(_answer(0, rank, join_group))
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                break
            if not request:
                break
            connection.send_bytes(_answer_request(request, rank))
            gc.collect()  # models and their groups do not pile up from test to test
            gc.freeze()  # what is left are modules that were imported: not to be looked through after every test
        # Other ranks may be gone already: no collective farewell. The process ends here, whatever threads are left.
        stack_file.flush()
    os._exit(0)


def _answer_request(request: bytes, rank: int) -> bytes:
    call = 0

    def work() -> Any:
        nonlocal call
        call, fn, args, kwargs = pickle.loads(request)
        torch.manual_seed(0)  # no test depends on which ones ran before it in this worker
        return fn(*args, **kwargs)

    return _answer(call, rank, work)


def _answer(call: int, rank: int, work: Callable[[], Any]) -> bytes:
    """The pickled (call, ok, result or exception)."""
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001  SystemExit and pytest's own outcomes included: all go to the parent
        text = "".join(traceback.format_exception(error))
        return pickle.dumps((call, False, _portable(error, f"raised on rank {rank}:\n{text}")))
    try:
        return pickle.dumps((call, True, value))
    except Exception as error:  # noqa: BLE001  whatever __reduce__ of a result may raise
        message = f"rank {rank} returned a {type(value).__name__} that cannot be pickled: {error}"
        return pickle.dumps((call, False, RankRaisedError(message)))


def _portable(error: BaseException, note: str) -> BaseException:
    """The error with `note`, or a RankRaisedError where it does not survive pickling."""
    error.add_note(note)
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            if note not in getattr(copy, "__notes__", ()):
                return RankRaisedError(f"{type(error).__name__} loses its notes in pickling\n{note}")
            return error
    except Exception:  # noqa: BLE001  an exception class may fail in any way here
        pass
    return RankRaisedError(note)


def _step(call: int) -> bool:
    """Whether every rank is at the same call and has made the same number of process groups."""
    mine = (call, dist.distributed_c10d._world.group_count)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return all(other == mine for other in everyone)
