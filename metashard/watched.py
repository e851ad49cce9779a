"""Collectives that end in order when a rank fails in the middle, and can be left when one is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

_POLL_SECONDS = 0.25  # how often the waiting thread looks how the other ranks are
_LEAVE_SECONDS = 2.0  # what a collective is given to end by itself once a rank is lost


class Others(Protocol):
    """What the ranks tell each other while they are in a collective."""

    def over(self) -> bool:
        """Whether the collective will never end: a rank is lost."""

    def ask_to_stop(self) -> None:
        """Tell the others that this rank has failed."""

    def asked_to_stop(self) -> bool:
        """Whether some rank has failed."""


class LeftError(RuntimeError):
    """A collective was left because a rank that takes part in it is lost."""


def run_watched(work: Callable[[threading.Event], T], others: Others, device: torch.device) -> T:
    """Run collectives in a thread of their own, while this one waits for it, for Ctrl-C and for news of other ranks.

    A rank that has died closes its connections, but only those that talk to it notice: the others may wait for a rank
    that has given up. No backend calls back a collective on CPU, so its thread is left behind then; it ends with the
    process group's timeout or with the process.

    Args:
        work: What to run. It is given an event and should end in order, on all ranks, soon after it is set on any; it
            may set the event itself, to tell that this rank has failed.
        others: How the other ranks are.
        device: The current device for the thread.

    Raises:
        LeftError: A rank is lost.
        BaseException: What `work` raised, or what interrupted the waiting; the collective has ended in order then.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    stop = threading.Event()
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        try:
            with torch.inference_mode(inference):
                if device.type != "cpu":
                    torch.accelerator.set_device_index(device)
                results.append(work(stop))
                if device.type != "cpu":
                    torch.accelerator.current_stream(device).synchronize()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="metashard-exchange", daemon=True)
    try:
        thread.start()
        _wait(thread, stop, others)
    except LeftError:
        raise
    except BaseException:
        stop.set()
        if thread not in threading.enumerate() and thread.ident is None:  # interrupted before it was started
            thread.start()
        _wait(thread, stop, others)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _wait(thread: threading.Thread, stop: threading.Event, others: Others) -> None:
    told, leave_at = False, float("inf")
    while True:
        if thread.is_alive():
            thread.join(_POLL_SECONDS)
        elif thread in threading.enumerate():  # about to start: its start was interrupted
            time.sleep(0.001)
        if thread not in threading.enumerate():
            thread.join()  # it may have a last word with the interpreter, which must not be at its own end by then
            return
        if leave_at == float("inf") and others.over():
            leave_at = time.monotonic() + _LEAVE_SECONDS
        if time.monotonic() > leave_at:
            raise LeftError("A rank that takes part in the exchange is lost.")
        if stop.is_set() and not told:
            others.ask_to_stop()
            told = True
        if not stop.is_set() and others.asked_to_stop():
            stop.set()
            told = True
