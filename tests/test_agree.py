"""One failure, the same typed error on every rank: what is kept, what is chained, and that nobody waits for ever."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch.distributed as dist

from metashard import agree, errors
from metashard.agree import Agreement
from metashard.errors import CheckpointError, LayoutError, LoadError, MetaShardError, ShardError

from .ranks import Ranks

ATTRIBUTES = ("message", "rank", "phase", "file", "key", "expected", "got", "ranks")


class OtherError(CheckpointError):
    """A subclass with a constructor of its own, as a user or a later module may write one."""

    def __init__(self, path: str, key: str) -> None:
        super().__init__(f"{path} lacks {key}", file=path, key=key)


def agreement(timeout: float = 20) -> Agreement:
    """One over all ranks; another timeout is another control group, which a test may then leave out of step."""
    return Agreement(range(dist.get_world_size()), timeout=timeout)


def failing(where: tuple[int, ...], kind: str, timeout: float = 20) -> None:
    with agreement(timeout).phase("fill"):
        if dist.get_rank() in where:
            if kind == "typed":
                raise CheckpointError(
                    f"wrong on {dist.get_rank()}", file="a.safetensors", key="w", expected=(2, 3), got=(3, 2)
                )
            if kind == "chained":
                try:
                    raise KeyError("inner")
                except KeyError as error:
                    raise LayoutError("outer") from error
            if kind == "file":
                raise FileNotFoundError(2, "No such file", "b.safetensors")
            if kind == "other class":
                raise OtherError("c.safetensors", "w")
            if kind == "unpicklable":
                raise LayoutError("cannot travel", expected=lambda: None)
            if kind == "group":
                raise ExceptionGroup("several", [ValueError("one"), ValueError("two")])
            raise RuntimeError("boom")


def described(where: tuple[int, ...], kind: str) -> tuple[type, dict[str, Any], str, str | None]:
    """What a rank raised: class, attributes, text, and the class of what it chains."""
    try:
        failing(where, kind)
    except MetaShardError as error:
        cause = None if error.__cause__ is None else type(error.__cause__).__name__
        return type(error), {name: getattr(error, name) for name in ATTRIBUTES}, str(error), cause
    raise AssertionError("raised nothing")


@pytest.mark.parametrize("where", [0, 1])
def test_every_rank_raises_the_typed_error_of_the_rank_that_failed(ranks2: Ranks, where: int) -> None:
    told = ranks2.run(described, (where,), "typed")
    for cls, attributes, text, _ in told:
        assert cls is CheckpointError
        assert attributes == {
            "message": f"wrong on {where}",
            "rank": where,
            "phase": "fill",
            "file": "a.safetensors",
            "key": "w",
            "expected": (2, 3),
            "got": (3, 2),
            "ranks": (where,),
        }
        assert text == f"wrong on {where} (file a.safetensors, rank {where}, phase fill)"


@pytest.mark.parametrize("where", [0, 1])
def test_the_original_is_chained_where_it_happened(ranks2: Ranks, where: int) -> None:
    own = [told[3] for told in ranks2.run(described, (where,), "chained")]
    assert own == ["KeyError" if rank == where else None for rank in range(2)]
    foreign = ranks2.run(described, (where,), "foreign")
    assert [told[3] for told in foreign] == ["RuntimeError" if rank == where else None for rank in range(2)]


def test_an_exception_that_is_not_ours_becomes_a_load_error(ranks2: Ranks) -> None:
    for cls, attributes, _, _ in ranks2.run(described, (1,), "foreign"):
        assert cls is LoadError
        assert (attributes["message"], attributes["rank"], attributes["phase"]) == ("RuntimeError: boom", 1, "fill")
    for cls, attributes, _, _ in ranks2.run(described, (1,), "file"):
        assert cls is LoadError
        assert attributes["file"] == "b.safetensors"
        assert attributes["message"].startswith("FileNotFoundError: ")
    assert {told[0] for told in ranks2.run(described, (0,), "group")} == {LoadError}


def test_all_failing_ranks_are_listed_and_the_lowest_is_told(ranks4: Ranks) -> None:
    for _, attributes, _, _ in ranks4.run(described, (1, 3), "typed"):
        assert (attributes["message"], attributes["rank"], attributes["ranks"]) == ("wrong on 1", 1, (1, 3))
    told = ranks4.run(described, (2, 3), "foreign")
    assert [entry[1]["ranks"] for entry in told] == [(2, 3)] * 4
    assert [entry[3] for entry in told] == [None, None, "RuntimeError", "RuntimeError"]


def test_an_error_class_with_its_own_constructor_reaches_every_rank(ranks2: Ranks) -> None:
    for cls, attributes, _, _ in ranks2.run(described, (0,), "other class"):
        assert issubclass(cls, CheckpointError)
        assert (attributes["file"], attributes["key"]) == ("c.safetensors", "w")


def told_in_words() -> tuple[str, int | None, str]:
    try:
        failing((1,), "unpicklable", 5)
    except MetaShardError as error:
        return error.message, error.rank, type(error).__name__
    raise AssertionError("raised nothing")


def test_an_error_that_cannot_be_pickled_still_reaches_every_rank(ranks2: Ranks) -> None:
    assert ranks2.run(told_in_words) == [("cannot travel", 1, "LayoutError")] * 2


def two_phases() -> list[str]:
    """A failure in the first phase, then work goes on: the ranks are still in step."""
    run, seen = agreement(), []
    for phase, bad in (("headers", 0), ("plan", 1), ("fill", None)):
        try:
            with run.phase(phase):
                if dist.get_rank() == bad:
                    raise ShardError("no")
        except ShardError as error:
            seen.append(f"{error.phase} {error.rank}")
    return [*seen, *(str(value) for value in run.gather(run.rank * 10))]


def test_ranks_are_in_step_after_a_failure(ranks2: Ranks) -> None:
    assert ranks2.run(two_phases) == [["headers 0", "plan 1", "0", "10"]] * 2


def interrupted() -> str:
    try:
        with agreement().phase("build"):
            if dist.get_rank() == 1:
                raise KeyboardInterrupt
    except (KeyboardInterrupt, MetaShardError) as error:
        return f"{type(error).__name__} {getattr(error, 'rank', None)}"
    return "nothing"


def test_an_interrupt_goes_through_and_is_the_others_failure(ranks2: Ranks) -> None:
    assert ranks2.run(interrupted) == ["LoadError 1", "KeyboardInterrupt None"]


def made_on_leader(kind: str, timeout: float = 20) -> Any:
    calls: list[int] = []

    def make() -> Any:
        calls.append(dist.get_rank())
        if kind == "fails":
            raise CheckpointError("not here", file="x")
        return (lambda: None) if kind == "unpicklable" else {"answer": 42}

    return agreement(timeout).on_leader("headers", make), calls


def test_on_leader_makes_once_and_tells_all(ranks2: Ranks) -> None:
    assert ranks2.run(made_on_leader, "value") == [({"answer": 42}, [0]), ({"answer": 42}, [])]
    for raised in ranks2.run_expecting(CheckpointError, made_on_leader, "fails"):
        assert (raised.rank, raised.phase, raised.file) == (0, "headers", "x")


def test_a_value_of_the_leader_that_cannot_be_pickled_is_an_error_everywhere(ranks2: Ranks) -> None:
    """For instance a component whose class was made inside a function."""
    ranks2.run_expecting(MetaShardError, made_on_leader, "unpicklable", 6)


def reversed_leader() -> tuple[int, bool, int]:
    run = Agreement((1, 0), timeout=20)
    return run.rank, run.leader, run.from_leader(dist.get_rank())


def test_the_first_of_the_ranks_leads_whatever_its_number(ranks2: Ranks) -> None:
    assert ranks2.run(reversed_leader) == [(1, False, 1), (0, True, 1)]


def groups_made() -> list[int]:
    agreement()
    before = len(dist.distributed_c10d._world.pg_names)
    made = []
    for _ in range(3):
        with agreement().phase("resolve"):
            pass
        made.append(len(dist.distributed_c10d._world.pg_names) - before)
    return made


def test_process_groups_are_made_once_and_not_one_a_load(ranks2: Ranks) -> None:
    assert ranks2.run(groups_made) == [[0, 0, 0]] * 2


def agree_after_a_group_of_some_ranks() -> list[int]:
    dist.new_group([0])  # a trainer's group: one more on rank 0 than elsewhere
    return agreement(timeout=8).gather(dist.get_rank())


def test_ranks_agree_where_some_are_in_more_groups_than_others() -> None:
    with Ranks(2) as ranks:  # of their own: groups stay to the end of a process
        assert ranks.run(agree_after_a_group_of_some_ranks, timeout=30) == [[0, 1]] * 2


def late_rank() -> str:
    try:
        with agreement(timeout=1).phase("fill"):
            if dist.get_rank() == 1:
                time.sleep(3)
    except MetaShardError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_hangs_is_given_up_after_the_timeout(ranks2: Ranks) -> None:
    told = ranks2.run(late_rank, timeout=30)
    assert all("Rank 1 left the load: nothing was heard of it within 1 s" in text for text in told)


def late_then_again() -> list[Any]:
    """A timeout in one phase, then the same ranks with the same timeout: a phase, a value of each, another failure."""
    seen: list[Any] = [late_rank()]
    time.sleep(3 if dist.get_rank() == 0 else 0.5)  # both are out of it
    dist.barrier()
    run = agreement(timeout=1)
    with run.phase("plan"):
        pass
    seen.append(run.gather(run.rank))
    try:
        with run.phase("check"):
            if run.rank == 1:
                raise ShardError("again")
    except ShardError as error:
        seen.append((error.phase, error.rank))
    return seen


def test_ranks_agree_again_after_one_was_given_up(ranks2: Ranks) -> None:
    first, second = ranks2.run(late_then_again, timeout=60)
    assert first == second
    assert first[0].startswith("Rank 1 left the load")
    assert first[1:] == [[0, 1], ("check", 1)]


def outside_of_phases() -> tuple[str, int | None, str | None]:
    run = agreement()
    try:
        with run.told():
            with run.phase("plan"):
                pass
            if run.rank == 1:
                raise KeyError("between two phases")
            with run.phase("shard"):
                pass
    except LoadError as error:
        return error.message, error.rank, None if error.__cause__ is None else type(error.__cause__).__name__
    return "nothing", None, None


def test_an_error_between_two_phases_is_told_in_the_next_one(ranks2: Ranks) -> None:
    message = "KeyError: 'between two phases'"
    assert ranks2.run(outside_of_phases) == [(message, 1, None), (message, 1, "KeyError")]
    assert ranks2.run(two_phases) == [["headers 0", "plan 1", "0", "10"]] * 2  # still in step


@pytest.mark.parametrize("cls", [getattr(errors, name) for name in dir(errors) if name.endswith("Error")])
def test_errors_survive_pickling(cls: type[MetaShardError]) -> None:
    error = cls("what", rank=3, phase="plan", file="f", key="k", expected=(1,), got=[2], ranks=(3, 4))
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert {name: getattr(copy, name) for name in ATTRIBUTES} == {name: getattr(error, name) for name in ATTRIBUTES}
    assert (str(copy), copy.__notes__) == (str(error), ["a note"])


def test_users_can_catch_what_they_got_wrong_as_a_value_error() -> None:
    for cls in (errors.ComponentError, CheckpointError, LayoutError, ShardError):
        assert issubclass(cls, ValueError)
        assert issubclass(cls, LoadError)
    assert issubclass(LoadError, MetaShardError)


def test_no_process_group_is_a_clear_error() -> None:
    with pytest.raises(LoadError, match="init_process_group"):
        agree._control((0,), 1.0)
