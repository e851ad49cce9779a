"""The options of a load and of a save, as frozen dataclasses that are validated when they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

STRATEGIES = ("auto", "direct", "stream", "rank0")
TRANSPORTS = ("scatter", "broadcast")
MISSING = ("error", "init")
VERIFY = ("basic", "full")

WrapRule = Iterable[str | type[nn.Module]] | Callable[[nn.Module], bool]


@dataclass(frozen=True)
class ShardPolicy:
    """How a module is cut into FSDP groups; everything but `wrap` goes to `fully_shard` as it is.

    Args:
        wrap: Which modules become an FSDP group of their own: class names and classes, or a predicate on a module. An
            empty tuple asks for one group only. None takes the class's `_no_split_modules`, else its
            `_repeated_blocks`, else the repeated blocks found in the module tree.
        mp_policy: Mixed precision.
        offload_policy: `CPUOffloadPolicy()` keeps parameters in host memory; buffers stay on the compute device.
        reshard_after_forward: As `fully_shard` takes it.
        shard_placement_fn: Parameter -> `Shard(dim)` or None.
        ignored_params: Parameters to keep replicated: by FQN, as a predicate on an FQN, or the objects themselves where
            they exist before the load (`wrap_model`). 0-d parameters always are. Their gradients are averaged over the
            mesh.
    """

    wrap: WrapRule | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool | int | None = None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    ignored_params: Iterable[str | nn.Parameter] | Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.wrap, (str, type)):
            raise ValueError(f"wrap={self.wrap!r}: expected an iterable of class names and classes, such as a tuple.")
        if self.wrap is not None and not callable(self.wrap):
            object.__setattr__(self, "wrap", tuple(self.wrap))
        if isinstance(self.ignored_params, str):
            raise ValueError(f"ignored_params={self.ignored_params!r}: expected an iterable of FQNs.")
        if self.ignored_params is not None and not callable(self.ignored_params):
            object.__setattr__(self, "ignored_params", tuple(self.ignored_params))

    def comparable(self) -> tuple[Any, ...]:
        """What ranks can compare of their policies: everything but functions and parameter objects."""
        ignored = self.ignored_params or ()
        names = "function" if callable(ignored) else sorted(item for item in ignored if isinstance(item, str))
        rule = self.wrap
        wrap = rule if rule is None else "function" if callable(rule) else [getattr(r, "__name__", r) for r in rule]
        return (wrap, self.mp_policy, repr(self.offload_policy), self.reshard_after_forward, names)


@dataclass(frozen=True)
class LoadPolicy:
    """How the bytes come in.

    Args:
        strategy: "auto", "direct", "stream" or "rank0"; the same on every rank.
        transport: For what leaves one rank: "scatter" sends each rank its shard, "broadcast" sends everyone everything.
        io_threads: Reading threads a rank.
        staging_bytes: Bytes of all staging buffers of a rank together.
        timeout: Seconds to wait for the slowest rank in a phase before giving it up.
        missing: What to do about weights that the checkpoint lacks: "error", or "init" for the module's own initial
            values (drawn on rank 0, through strategy `rank0`).
        progress: Show a progress bar on rank 0. None shows it on a terminal.
        allow_pickle: Also load pickled checkpoints (`.bin`), with `weights_only`, through rank 0.
        overlap: In `stream` and `rank0`, get the next bucket ready while one travels (async); False does one thing at
            a time.
        verify: What is checked after the load. "basic": nothing on meta, layout and ties, every byte written once.
            "full": every rank also reads its shards' bytes from the files again and compares them; what no file holds
            is compared from rank to rank. Refused where the library converts or unpickles what it loads.
    """

    strategy: str = "auto"
    transport: str = "scatter"
    io_threads: int = 4
    staging_bytes: int = 64 << 20
    timeout: float = 1800.0
    missing: str = "error"
    progress: bool | None = None
    allow_pickle: bool = False
    overlap: bool = True
    verify: str = "basic"

    def __post_init__(self) -> None:
        choices = {"strategy": STRATEGIES, "transport": TRANSPORTS, "missing": MISSING, "verify": VERIFY}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}.")
        _check_io(self.io_threads, self.staging_bytes, self.timeout)


@dataclass(frozen=True)
class SavePolicy:
    """How the bytes of a save go out.

    Args:
        io_threads: Writing threads a rank.
        staging_bytes: Bytes of all staging buffers of a rank together. Shards in host memory that are saved in their
            own dtype are written from where they are.
        timeout: Seconds to wait for the slowest rank in a phase before giving it up.
    """

    io_threads: int = 4
    staging_bytes: int = 64 << 20
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        _check_io(self.io_threads, self.staging_bytes, self.timeout)


def _check_io(io_threads: int, staging_bytes: int, timeout: float) -> None:
    if io_threads < 1:
        raise ValueError(f"io_threads={io_threads}: expected at least 1.")
    if staging_bytes < 1 << 16:
        raise ValueError(f"staging_bytes={staging_bytes}: expected at least 65536 (64 KiB).")
    if not 0 < timeout < 1e8:
        raise ValueError(f"timeout={timeout}: expected a positive number of seconds.")
