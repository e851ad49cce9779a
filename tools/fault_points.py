"""Where and how a rank can fail in a load, as a table: what `tools/fault_matrix.py` and `tests/test_faults.py` run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

WORLD = 3
LAST = WORLD - 1

WAYS: dict[str, dict[str, str]] = {
    "direct": {"strategy": "direct"},
    "stream/scatter": {"strategy": "stream", "transport": "scatter"},
    "stream/broadcast": {"strategy": "stream", "transport": "broadcast"},
    "rank0/scatter": {"strategy": "rank0", "transport": "scatter"},
    "rank0/broadcast": {"strategy": "rank0", "transport": "broadcast"},
}
KINDS = ("exception", "wrong", "slow", "killed")
DIRECT, STREAM, RANK0 = ("direct",), ("stream/scatter", "stream/broadcast"), ("rank0/scatter", "rank0/broadcast")
EXCHANGES = (*STREAM, *RANK0)


@dataclass(frozen=True)
class Point:
    """A place in the load where a rank can fail.

    Args:
        target: The function there, as "module:attribute"; the caller's hook for "hook".
        phase: The phase that the error must name.
        where: Ranks that come there: "all", "leader" or "others".
        ways: Strategies and transports that come there.
        wrong: Called in place of the function (with it, and its arguments) to give wrong data. None where no data
            could be told from right ones.
        wrong_phase: The phase in which wrong data are found.
        key: Whether the error about wrong data names a key.
        in_step: Whether a rank that raises there leaves the ranks good for another load in the same process group. A
            collective that is broken off in the middle takes its group with it.
    """

    target: str
    phase: str
    where: str = "all"
    ways: tuple[str, ...] = tuple(WAYS)
    wrong: Callable[..., Any] | None = None
    wrong_phase: str = ""
    key: bool = False
    in_step: bool = True


def _other_shape(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = original(*args, **kwargs)
    key = "proj_out.weight"
    entry = made.entries[key]
    return replace(made, entries={**made.entries, key: replace(entry, shape=(entry.shape[0] + 1, *entry.shape[1:]))})


def _one_more_layer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = original(*args, **kwargs)
    made.only_here = torch.nn.Linear(2, 2, device="meta")
    return made


def _no_source(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = original(*args, **kwargs)
    return replace(made, sources={fqn: e for fqn, e in made.sources.items() if fqn != "proj_out.weight"})


def _hook_adds(original: Callable[..., Any], module: Any) -> None:
    original(module)
    module.only_here = torch.nn.Linear(2, 2)


def _other_adapter(original: Callable[..., Any], specs: list[Any], agreement: Any) -> Any:
    return original([replace(spec, name="other") for spec in specs], agreement)


def _fewer_blocks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)[1:]


def _other_order(original: Callable[..., Any], module: Any, agreement: Any) -> Any:
    many = next(sub for sub in module.modules() if len(sub._modules) > 2)  # an adapter has wrapped the module
    many._modules = dict(reversed(many._modules.items()))
    return original(module, agreement)


def _left_on_meta(original: Callable[..., Any], module: Any, ties: Any) -> Any:
    module.proj_out.register_buffer("only_here", torch.empty(1, device="meta"))
    return original(module, ties)


def _ends_early(original: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    return 0


POINTS: dict[str, Point] = {
    "resolve": Point("metashard.load:resolve_component", "resolve", "leader"),
    "headers": Point(
        "metashard.load:read_checkpoint", "headers", "leader", wrong=_other_shape, wrong_phase="plan", key=True
    ),
    "import": Point("metashard.component:Component.cls", "import"),
    "build": Point("metashard.load:build_shell", "build", wrong=_one_more_layer),
    "weights": Point("metashard.load:load_on_leader", "build", ways=RANK0),
    "plan": Point("metashard.load:map_or_refuse", "plan", "leader"),
    "sources": Point("metashard.load:apply_library_rules", "build", ways=(*DIRECT, *STREAM)),
    "hook": Point("hook", "prepare", wrong=_hook_adds, wrong_phase="agree", key=True),
    "adapter": Point("metashard.lora:_same_everywhere", "adapters", wrong=_other_adapter, wrong_phase="adapters"),
    "adapters": Point("metashard.lora:_activate", "adapters"),
    "agree": Point("metashard.load:agree_on_layout", "agree", wrong=_other_order, wrong_phase="agree", key=True),
    "dtypes": Point("metashard.layout:retype", "agree"),
    "shard": Point("metashard.load:choose_groups", "shard", wrong=_fewer_blocks, wrong_phase="shard"),
    "wrap": Point("metashard.load:shard_module", "shard"),
    "allocate": Point("metashard.load:allocate", "allocate"),
    "read": Point(
        "metashard.fill.reader:os.preadv", "fill", ways=DIRECT, wrong=_ends_early, wrong_phase="fill", key=True
    ),
    "read for others": Point(
        "metashard.fill.reader:os.preadv", "fill", "leader", STREAM, wrong=_ends_early, wrong_phase="fill", key=True
    ),
    "pack": Point("metashard.fill.collective:_Sender._pack", "fill", "leader", EXCHANGES),
    "send": Point("metashard.fill.collective:_Sender._send", "fill", "leader", EXCHANGES, in_step=False),
    "share": Point("metashard.fill.direct:broadcast_in_place", "fill", ways=DIRECT, in_step=False),
    "receive": Point("metashard.fill.collective:_Receiver._receive", "fill", "others", EXCHANGES, in_step=False),
    "unpack": Point("metashard.fill.collective:_Receiver._unpack", "fill", "others", EXCHANGES),
    "buffers": Point("metashard.fill:broadcast_in_place", "buffers", in_step=False),
    "computed": Point("metashard.fill:_computed_on_rank0", "buffers"),
    "check": Point("metashard.load:check_loaded", "check", wrong=_left_on_meta, wrong_phase="check", key=True),
}
# A layer more on rank 0 is found when the files do not hold it, on another rank when layouts are compared.
BUILD_WRONG_PHASE = {0: "plan", LAST: "agree"}


@dataclass(frozen=True)
class Cell:
    """One load with one fault."""

    point: str
    rank: int
    way: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.point}, rank {self.rank}, {self.way}, {self.kind}"

    @property
    def in_step(self) -> bool:
        """Whether the ranks are good for another load afterwards."""
        return self.kind != "killed" and (self.kind != "exception" or POINTS[self.point].in_step)


def all_cells() -> Iterator[tuple[Cell, bool]]:
    """Every combination, and whether there is such a place."""
    for name, point in POINTS.items():
        for rank in (0, LAST):
            for way in WAYS:
                for kind in KINDS:
                    comes = point.where == "all" or (point.where == "leader") == (rank == 0)
                    if point is POINTS["build"] and kind == "wrong" and rank == 0 and way in RANK0:
                        comes = False  # rank 0's shell is thrown away there
                    yield (
                        Cell(name, rank, way, kind),
                        comes and way in point.ways and (kind != "wrong" or bool(point.wrong)),
                    )
