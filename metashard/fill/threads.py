"""A few threads that work off a list together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_threads(
    items: Iterable[T],
    work: Callable[[T, int], None],
    *,
    threads: int,
    last: Callable[[int], None] = lambda number: None,
    name: str,
) -> None:
    """Call `work` with every item and the number of the thread that took it; the calling thread is number 0.

    Args:
        items: Taken one after the other, by whoever is free.
        work: What to do with one.
        threads: How many threads work, the calling one included.
        last: Called by each thread when no item is left.
        name: Of the threads, for debuggers and tests.

    Raises:
        The first error of any thread, once all have stopped.
    """
    left = iter(items)
    lock = threading.Lock()
    errors: list[BaseException] = []
    nothing = object()

    def run(number: int) -> None:
        try:
            while not errors:
                with lock:
                    item = next(left, nothing)
                if item is nothing:
                    break
                work(item, number)  # type: ignore[arg-type]
            last(number)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    workers = [threading.Thread(target=run, args=(n,), name=f"{name}-{n}") for n in range(1, threads)]
    try:
        for worker in workers:
            worker.start()
        run(0)
        for worker in workers:
            worker.join()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C outside of `run`, or a thread that cannot be started
        errors.append(error)
        while any(worker in threading.enumerate() for worker in workers):  # one half started cannot be joined
            time.sleep(0.001)
    if errors:
        raise errors[0]
