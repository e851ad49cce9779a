"""The one home of metashard's exceptions.

Every error raised because a load went wrong is a `LoadError`; its subclasses say which part was wrong. A save that went
wrong is a `SaveError`. All of them carry the same typed attributes and survive pickling, because the rank where a
failure happens sends the error itself to the others: every rank raises the same type with the same message (see
`metashard.agree`).
"""

from __future__ import annotations

from typing import Any, ClassVar


class MetaShardError(Exception):
    """Base of all errors of this package.

    Args:
        message: What is wrong and what to do about it, as a colleague would say it.
        rank: Rank (in the mesh) where it happened; None where there is no process group.
        phase: Step of the load: "resolve", "headers", "import", "build", "plan", "prepare", "adapters", "agree",
            "shard", "allocate", "fill", "buffers", "check", "verify"; of a save: "resolve", "agree", "layout",
            "write", "check", "commit".
        file: Path of the file concerned.
        key: Name of the tensor or parameter concerned.
        expected: What was expected, as a short text or value.
        got: What came.
        ranks: All ranks that failed in that phase (filled in by the agreement).
    """

    task, outcome = "call", "nothing was done"  # in the message about a lost rank
    outcomes: ClassVar[dict[str, str]] = {}  # of phases that have another one

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        file: str | None = None,
        key: str | None = None,
        expected: Any = None,
        got: Any = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.phase = phase
        self.file = None if file is None else str(file)
        self.key = key
        self.expected = expected
        self.got = got
        self.ranks = ranks

    def __str__(self) -> str:
        pairs = (("file", self.file), ("rank", self.rank), ("phase", self.phase))
        where = ", ".join(f"{name} {value}" for name, value in pairs if value is not None)
        text = f"{self.message} ({where})" if where else self.message
        # A name from a file, or of one, may hold what no log can be written in (halves of characters).
        return text.encode("utf-8", "backslashreplace").decode("utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[MetaShardError], message: str, state: dict[str, Any]) -> MetaShardError:
    error = cls.__new__(cls)  # not its __init__: a subclass may take other arguments
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class LoadError(MetaShardError):
    """A load failed; the subclasses say in which part. Also wraps errors that are not ours (I/O, a caller's hook)."""

    task, outcome = "load", "nothing was loaded on any rank"


class ComponentError(LoadError, ValueError):
    """The component cannot be resolved: unknown name, null component, unknown class, quantised weights, no weights."""


class CheckpointError(LoadError, ValueError):
    """A weight file or its index is not what it claims to be, or does not hold what the model needs."""


class LayoutError(LoadError, ValueError):
    """The ranks do not hold the same parameters in the same order, or a parameter is not where it should be."""


class ShardError(LoadError, ValueError):
    """The module cannot be sharded as asked: nothing to wrap, an unsupported placement, already sharded."""


class SaveError(MetaShardError):
    """A save failed, and what was in the folder before is still there. Also wraps errors that are not ours (I/O)."""

    task, outcome = "save", "nothing was saved, and the folder is as it was"
    outcomes: ClassVar[dict[str, str]] = {"commit": "the folder is the old one or the new one, whole"}


class AdapterError(LoadError, ValueError):
    """An adapter cannot be added: no module matches its targets, it is made for another model, or it comes too late."""


class LaunchError(LoadError, ValueError):
    """The processes are not as a load needs them: no launcher, another kind of sharding, a device too few or shared."""
