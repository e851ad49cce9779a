"""Who has come, who is waited for, who is lost: named on every rank that is left."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from metashard import rollcall
from metashard.agree import Agreement
from metashard.errors import LoadError

from .ranks import RankDiedError, Ranks


def agreement(timeout: float) -> Agreement:
    return Agreement(range(dist.get_world_size()), timeout=timeout)


def dies(kind: str) -> dict[str, Any] | str:
    """Rank 1 of 4 is killed in its phase, or on its way into a collective of the control group."""
    run = agreement(timeout=60)
    start = time.monotonic()
    try:
        if kind == "phase":
            with run.phase("build"):
                if run.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        else:
            if run.rank == 1:
                collective = dist.all_gather_object
                dist.all_gather_object = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
                assert collective is not dist.all_gather_object
            with run.phase("plan"):
                run.gather("x" * 100)
    except LoadError as error:
        return {"text": str(error), "rank": error.rank, "ranks": error.ranks, "soon": time.monotonic() - start < 20}
    return "nothing"


@pytest.mark.parametrize(("kind", "phase"), [("phase", "build"), ("gather", "plan")])
def test_a_rank_that_is_killed_is_named_on_every_other_long_before_the_timeout(kind: str, phase: str) -> None:
    with Ranks(4) as ranks:
        told = ranks.run(dies, kind, timeout=60, return_exceptions=True, deaths=True)
    assert isinstance(told.pop(1), RankDiedError)
    assert told[0] == told[1] == told[2]
    assert told[0]["text"].startswith("Rank 1 left the load: the process has ended")
    assert (told[0]["rank"], told[0]["ranks"], told[0]["soon"]) == (1, (1,), True)
    assert f"phase {phase}" in told[0]["text"]


def cut_off_from() -> tuple[str, int | None]:
    """Rank 2 ends where nobody can see its process: as on a host of its own."""
    run = agreement(timeout=40)
    run.control.calls._hosts = {}
    try:
        with run.phase("fill"):
            if run.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    except LoadError as error:
        return error.message, error.rank
    return "nothing", None


def test_a_rank_that_closed_its_connections_is_named_where_nobody_sees_its_process() -> None:
    with Ranks(3) as ranks:
        told = ranks.run(cut_off_from, timeout=60, return_exceptions=True, deaths=True)
    assert told[0] == told[1]
    assert told[0][0].startswith("Rank 2 left the load: the connection is closed")
    assert told[0][1] == 2


def slow_with_log() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("metashard").addHandler(handler)
    try:
        run = agreement(timeout=30)
        with mock.patch.object(rollcall, "_SAY_AFTER", 0.5), run.phase("build"):
            if run.rank == 0:
                time.sleep(3)
    finally:
        logging.getLogger("metashard").removeHandler(handler)
    return records


def test_the_log_says_who_is_waited_for_and_in_which_phase(ranks2: Ranks) -> None:
    told = ranks2.run(slow_with_log)
    assert told[0] == []
    assert 2 <= len(told[1]) <= 3  # after 0.5, 1 and 2 s
    assert told[1][0].startswith("Phase build: waiting for rank 0 since")


def keys_left() -> int:
    run = agreement(timeout=25)
    store = run.control.calls.store
    counts = []
    for _ in range(5):
        for _ in range(10):
            with run.phase("build"):
                pass
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts[-1] - counts[0]


def test_keys_in_the_store_do_not_pile_up(ranks2: Ranks) -> None:
    assert all(grown <= 4 for grown in ranks2.run(keys_left))


def store_dies() -> tuple[str, int | None, int]:
    """The store stops answering while a rank waits: what is left is the host of the store."""
    run = agreement(timeout=30)
    calls = run.control.calls

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("connection reset by peer")

    calls.store = Gone()
    try:
        with run.phase("build"):
            pass
    except LoadError as error:
        return error.message, error.rank, len(error.ranks)
    return "nothing", None, 0


def test_a_store_that_is_gone_is_an_error_on_every_rank() -> None:
    with Ranks(2) as ranks:
        for message, rank, count in ranks.run(store_dies, timeout=30):
            assert message.startswith("Rank 0 left the load: the rendezvous store")
            assert (rank, count) == (0, 1)


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    me = rollcall.this_process()
    assert rollcall._started(me.pid) == me.started != ""
    child = os.fork()
    if child == 0:
        os._exit(0)
    time.sleep(0.2)
    assert rollcall._started(child) == ""  # a zombie has ended
    os.waitpid(child, 0)
    assert rollcall._started(child) == ""


def test_a_process_without_file_descriptors_takes_nobody_for_dead(tmp_path: Path) -> None:
    """What it cannot look up is not gone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    calls = rollcall.RollCall(store, "p", rank=0, size=1, timeout=5)
    calls._hosts = {1: rollcall.this_process()}
    assert calls.gone() == []
    with mock.patch("builtins.open", side_effect=OSError(errno.EMFILE, "Too many open files")):
        assert calls.gone() == []
    calls._hosts = {1: rollcall.this_process()._replace(started="0")}
    assert calls.gone() == [1]
