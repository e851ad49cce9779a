"""The harness itself: a broken call is reported as what it was and never reaches the next one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from .ranks import RankDiedError, RankRaisedError, Ranks, RanksTimeoutError


class PicklesBadlyError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """A pool for the tests that break it: each leaves it working, or not started, for the next."""
    with Ranks(2) as ranks:
        yield ranks


def total(x: int) -> tuple[int, float]:
    t = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(t)
    return dist.get_rank(), t.item()


def raise_on(rank: int | None, others: str = "return") -> int:
    if rank is None or dist.get_rank() == rank:
        raise KeyError(f"from rank {dist.get_rank()}")
    if others == "hang":
        dist.barrier()
    return dist.get_rank()


def raise_badly() -> None:
    raise PicklesBadlyError(1, 2)


def return_lambda() -> object:
    return lambda: None


def hang(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def make_group_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.distributed_c10d._world.group_count += 1  # what a group made on one rank only leaves behind
    raise ValueError("after it")


def settings() -> tuple[int, str, str, float]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["RANK"], torch.rand(1).item()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(ranks_of: dict[int, Ranks], world_size: int) -> None:
    expected = float(sum(3 + rank for rank in range(world_size)))
    assert ranks_of[world_size].run(total, 3) == [(rank, expected) for rank in range(world_size)]


def test_workers_have_one_thread_and_a_seed_of_their_own_each_call(ranks2: Ranks) -> None:
    first, second = ranks2.run(settings), ranks2.run(settings)
    assert [s[:3] for s in first] == [(1, "1", "0"), (1, "1", "1")]
    assert first == second


def test_an_exception_is_raised_here_with_its_rank_and_traceback(ranks2: Ranks) -> None:
    with pytest.raises(KeyError, match="from rank 1") as info:
        ranks2.run(raise_on, 1)
    assert "raised on rank 1" in info.value.__notes__[0]
    assert "in raise_on" in info.value.__notes__[0]


def test_ranks_in_step_are_kept_after_an_exception(ranks2: Ranks) -> None:
    ranks2.run(total, 0)
    pids = ranks2.pids
    outcomes = ranks2.run(raise_on, 0, return_exceptions=True)
    assert isinstance(outcomes[0], KeyError)
    assert outcomes[1] == 1
    assert ranks2.run(total, 0) == [(0, 1.0), (1, 1.0)]
    assert ranks2.pids == pids


def test_run_expecting_wants_the_error_on_every_rank(ranks2: Ranks) -> None:
    errors = ranks2.run_expecting(KeyError, raise_on, None)
    assert [error.args[0] for error in errors] == ["from rank 0", "from rank 1"]
    with pytest.raises(AssertionError, match="rank 1 raised nothing"):
        ranks2.run_expecting(KeyError, raise_on, 0)
    with pytest.raises(AssertionError, match="rank 0 raised another error"):
        ranks2.run_expecting(ValueError, raise_on, None)


def test_what_cannot_be_pickled_is_described(ranks2: Ranks) -> None:
    with pytest.raises(RankRaisedError, match="PicklesBadlyError: 1 and 2"):
        ranks2.run(raise_badly)
    with pytest.raises(RankRaisedError, match=r"rank . returned a function that cannot be pickled"):
        ranks2.run(return_lambda)


def test_ranks_left_in_a_collective_are_replaced(pool: Ranks) -> None:
    pool.run(total, 0)
    before, starts = pool.pids, pool.starts
    start = time.monotonic()
    with pytest.raises(KeyError, match="from rank 0"):
        pool.run(raise_on, 0, "hang")
    assert time.monotonic() - start < 30
    assert not any(alive(pid) for pid in before)
    assert pool.run(total, 0) == [(0, 1.0), (1, 1.0)]
    assert pool.starts == starts + 1


def test_ranks_out_of_step_are_replaced(pool: Ranks) -> None:
    pool.run_expecting(ValueError, make_group_on, 1)
    assert pool.pids == []
    assert pool.run(total, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hang_ends_with_the_stack_of_the_rank_that_hangs(pool: Ranks) -> None:
    pool.run(total, 0)
    before = pool.pids
    with pytest.raises(RanksTimeoutError, match=r"(?s)rank\(s\) \[1\] of 2 within 1 s.*in hang"):
        pool.run(hang, 1, timeout=1)
    assert not any(alive(pid) for pid in before)
    assert pool.run(total, 0) == [(0, 1.0), (1, 1.0)]


def test_a_dead_rank_is_noticed_at_once_and_replaced(pool: Ranks) -> None:
    pool.run(total, 0)
    start = time.monotonic()
    with pytest.raises(RankDiedError, match=r"rank 1 of 2 died \(exit code -9\)"):
        pool.run(die, 1)
    assert time.monotonic() - start < 30  # and not when the other rank's barrier gives up
    pool.run(total, 0)
    os.kill(pool.pids[0], signal.SIGKILL)  # and one that dies between calls
    time.sleep(0.2)
    assert pool.run(total, 0) == [(0, 1.0), (1, 1.0)]


def test_close_leaves_no_process_and_a_later_call_starts_again(pool: Ranks) -> None:
    pool.run(total, 0)
    pids = pool.pids
    pool.close()
    assert not any(alive(pid) for pid in pids)
    assert pool.run(total, 0) == [(0, 1.0), (1, 1.0)]
