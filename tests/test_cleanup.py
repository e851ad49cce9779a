"""Ctrl-C, a hook that raises, memory that cannot be had: everything is put back, and the next load is as the first."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import metashard
from metashard.fill import collective, reader
from metashard.fill.staging import Staging
from metashard.layout import named_slots
from tests import zoo
from tests.parity import cpu_mesh, differences, reference
from tests.ranks import Ranks
from tools.fault_matrix import put_in, state_of_process

NAME = "SD3Transformer2DModel"
BF16 = torch.bfloat16
WAYS: dict[str, dict[str, str]] = {
    "direct": {"strategy": "direct"},
    "stream": {"strategy": "stream", "transport": "scatter"},
    "rank0": {"strategy": "rank0", "transport": "broadcast"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In fp32, so that a load in bf16 needs staging."""
    folder = tmp_path_factory.mktemp("model")
    zoo.CASES[NAME].build().save_pretrained(folder)
    return str(folder)


def load(folder: str, way: str, **kwargs: Any) -> nn.Module:
    policy = metashard.LoadPolicy(**WAYS[way], staging_bytes=1 << 16, timeout=30)  # type: ignore[arg-type]
    return metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16, load=policy, **kwargs)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ranks leave Ctrl-C to their parent; here they take it as a script does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ctrl_c_once() -> Callable[..., Any]:
    """Sends this process what Ctrl-C sends, from whatever thread comes first, and then goes on with the work."""
    fired: list[bool] = []

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not fired:
            fired.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return original(*args, **kwargs)

    return call


def staging_alive() -> int:
    gc.collect()
    return sum(type(item) is Staging for item in gc.get_objects())


def outcome(folder: str, way: str, patches: list[Any], **kwargs: Any) -> dict[str, Any]:
    """What a load with these patches raised, what it left behind, and whether the next one is right."""
    expected = reference(zoo.CASES[NAME], Path(folder), BF16)
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        if "prepare" in kwargs:
            kwargs["prepare"](module)

    with interruptible():
        cpu_mesh()
        staging, before = staging_alive(), state_of_process()
        told: dict[str, Any] = {"raised": None}
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            try:
                load(folder, way, prepare=hook)
            except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt included
                told |= {"raised": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
        after = state_of_process()
        told["left"] = [name for name in before if before[name] != after[name]]
        told["staging"] = staging_alive() - staging
        told["held"] = [
            slot.fqn
            for module in seen
            for slot, tensor in named_slots(module, attributes=False)
            if isinstance(tensor, DTensor) and not tensor.is_meta
        ]
    told["next"] = differences(load(folder, way), expected)
    return told


def clean(told: dict[str, Any]) -> bool:
    return (told["left"], told["staging"], told["held"], told["next"]) == ([], 0, [], [])


# --- Ctrl-C


def interrupted_at(folder: str, way: str, rank: int, target: str) -> dict[str, Any]:
    return outcome(folder, way, [put_in(ctrl_c_once(), target)] if dist.get_rank() == rank else [])


@pytest.mark.parametrize(
    ("way", "rank", "target"),
    [
        ("direct", 0, "metashard.fill.reader:os.preadv"),
        ("direct", 1, "metashard.fill.reader:os.preadv"),
        ("stream", 0, "metashard.fill.reader:os.preadv"),
        ("stream", 1, "metashard.fill.collective:_Receiver._unpack"),
        ("rank0", 0, "metashard.fill.collective:_Sender._pack"),
        ("rank0", 1, "metashard.load:allocate"),
        ("direct", 1, "metashard.load:build_shell"),
        ("direct", 1, "metashard.fill:_from_rank0"),
        ("direct", 0, "metashard.load:_sources"),
    ],
)
def test_ctrl_c_leaves_nothing_behind(ranks2: Ranks, saved: str, way: str, rank: int, target: str) -> None:
    starts = max(ranks2.starts, 1)
    told = ranks2.run(interrupted_at, saved, way, rank, target, timeout=90)
    assert told[rank]["raised"] == "KeyboardInterrupt"
    assert (told[1 - rank]["raised"], told[1 - rank]["rank"]) == ("LoadError", rank)
    assert "KeyboardInterrupt" in told[1 - rank]["text"]
    assert all(clean(entry) for entry in told), told
    assert ranks2.starts == starts


def interrupted_while_waiting(folder: str) -> dict[str, Any]:
    """Rank 1 is at the end of the hook's phase, and rank 0 is not; Ctrl-C comes to rank 1."""

    def hook(module: nn.Module) -> None:
        if dist.get_rank() == 0:
            time.sleep(3)
        else:
            timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()

    return outcome(folder, "direct", [], prepare=hook)


def test_ctrl_c_reaches_a_rank_that_waits_for_another(ranks2: Ranks, saved: str) -> None:
    told = ranks2.run(interrupted_while_waiting, saved, timeout=90)
    assert [entry["raised"] for entry in told] == ["LoadError", "KeyboardInterrupt"]
    assert told[0]["rank"] == 1
    assert all(clean(entry) for entry in told), told


# --- errors


def failing_hook(folder: str, way: str, rank: int) -> dict[str, Any]:
    def hook(module: nn.Module) -> None:
        if dist.get_rank() == rank:
            raise ValueError("no such backend")

    return outcome(folder, way, [], prepare=hook)


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_raises_leaves_nothing_behind(ranks2: Ranks, saved: str, way: str) -> None:
    for told in ranks2.run(failing_hook, saved, way, 1, timeout=90):
        assert (told["raised"], told["rank"]) == ("LoadError", 1)
        assert clean(told), told


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory for staging")


def without_memory(folder: str, way: str, rank: int, what: str) -> dict[str, Any]:
    patches = {
        "staging": lambda: mock.patch.object(reader.Staging, "__init__", no_memory),
        "second staging": lambda: mock.patch.object(reader, "Staging", second_fails()),
        "buckets": lambda: mock.patch.object(collective, "fill_buckets", no_memory),
    }
    return outcome(folder, way, [patches[what]()] if dist.get_rank() == rank else [])


def second_fails() -> Callable[..., Staging]:
    """The second thread that wants a buffer gets none; the first one waits for it, or might have read everything."""
    turns = itertools.count()
    asked = threading.Event()

    def make(*args: Any, **kwargs: Any) -> Staging:
        if next(turns) == 1:
            asked.set()
            return no_memory()
        asked.wait(10)
        return Staging(*args, **kwargs)

    return make


@pytest.mark.parametrize(
    ("way", "rank", "what"),
    [
        ("direct", 0, "staging"),
        ("direct", 1, "second staging"),
        ("stream", 0, "staging"),
        ("stream", 1, "buckets"),
        ("rank0", 0, "buckets"),
    ],
)
def test_staging_that_cannot_be_had_leaves_nothing_behind(
    ranks2: Ranks, saved: str, way: str, rank: int, what: str
) -> None:
    for told in ranks2.run(without_memory, saved, way, rank, what, timeout=90):
        assert (told["raised"], told["rank"]) == ("LoadError", rank)
        assert "MemoryError: no memory for staging" in told["text"]
        assert clean(told), told


def failing_constructor(folder: str, way: str, rank: int) -> dict[str, Any]:
    """Under the default dtype that the library builds in."""
    return outcome(folder, way, [failing_part()] if dist.get_rank() == rank else [])


def failing_part() -> Any:
    """The constructor of the model's first part has no memory."""
    return mock.patch("diffusers.models.transformers.transformer_sd3.PatchEmbed", no_memory)


@pytest.mark.parametrize(("way", "rank"), [("direct", 1), ("rank0", 0)])
def test_a_constructor_that_raises_leaves_nothing_behind(ranks2: Ranks, saved: str, way: str, rank: int) -> None:
    for told in ranks2.run(failing_constructor, saved, way, rank, timeout=90):
        assert (told["raised"], told["rank"]) == ("LoadError", rank)
        assert clean(told), told


def failing_from_pretrained(folder: str) -> tuple[str, list[str], list[str]]:
    """The class with pins, the patched base class, accelerate's patch: all on the rank that builds a shell."""
    cls = diffusers.SD3Transformer2DModel
    before = state_of_process()
    register = nn.Module.register_parameter
    raised = "nothing"
    with (
        mock.patch.object(cls, "_keep_in_fp32_modules", ["norm"], create=True),
        failing_part(),
    ):
        try:
            metashard.from_pretrained(cls, folder, torch_dtype=BF16)
        except MemoryError as error:
            raised = str(error)
        pins = cls._keep_in_fp32_modules
    after = state_of_process()
    left = [name for name in before if before[name] != after[name]]
    return raised, pins, left + (["register_parameter"] if nn.Module.register_parameter is not register else [])


def test_a_from_pretrained_that_raises_puts_pins_and_patches_back(ranks2: Ranks, saved: str) -> None:
    assert ranks2.run(failing_from_pretrained, saved) == [("no memory for staging", ["norm"], [])] * 2


def wrapped_by_half(folder: str, target: str) -> tuple[str, list[str]]:
    """The caller holds the module that `wrap_model` changes in place."""
    module = metashard.from_pretrained(diffusers.SD3Transformer2DModel, folder, torch_dtype=BF16)
    raised = "nothing"
    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(put_in(no_memory, target))
        try:
            metashard.wrap_model(module, mesh=cpu_mesh(), load=metashard.LoadPolicy(timeout=30))
        except metashard.LoadError as error:
            raised = error.message
    return raised, [slot.fqn for slot, tensor in named_slots(module, attributes=False) if not tensor.is_meta]


@pytest.mark.parametrize("target", ["metashard.fill.collective:_Receiver._unpack", "metashard.load:check_loaded"])
def test_a_module_filled_by_half_is_left_empty(ranks2: Ranks, saved: str, target: str) -> None:
    for raised, real in ranks2.run(wrapped_by_half, saved, target):
        assert raised == "MemoryError: no memory for staging"
        assert real == []


def timed_out(folder: str) -> tuple[Any, list[str]]:
    """Rank 1 stays in the hook for longer than the load's timeout; then the same load again."""
    expected = reference(zoo.CASES[NAME], Path(folder), BF16)
    policy = metashard.LoadPolicy(strategy="direct", timeout=3)

    def hook(module: nn.Module) -> None:
        if dist.get_rank() == 1:
            time.sleep(5)

    raised: Any = None
    try:
        metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16, load=policy, prepare=hook)
    except metashard.LoadError as error:
        raised = error.message, error.rank, error.phase
    dist.barrier()
    return raised, differences(metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16, load=policy), expected)


def test_the_same_ranks_load_again_after_a_timeout(ranks2: Ranks, saved: str) -> None:
    starts = max(ranks2.starts, 1)
    first, second = ranks2.run(timed_out, saved, timeout=90)
    assert first == second
    (message, *where), found = first
    assert message.startswith("Rank 1 left the load: nothing was heard of it within 3 s")
    assert (where, found) == ([1, "prepare"], [])
    assert ranks2.starts == starts


# --- what a hook may do


def writing_hook(folder: str, strategy: str, how: str) -> tuple[str, str | None]:
    def hook(module: nn.Module) -> None:
        weight = module.proj_out.weight
        with torch.no_grad():
            if how == "in place":
                weight.zero_()
            elif how == "through data":
                weight.data.normal_()
            elif how == "a view":
                weight[1:].fill_(1.0)
            elif how == "init":
                nn.init.ones_(weight)
            elif how == "foreach":
                torch._foreach_mul_([weight], 2.0)
            elif how == "buffer":
                module.pos_embed.pos_embed.mul_(2)
            else:
                weight.sum()

    try:
        load(folder, strategy, prepare=hook)
    except metashard.LayoutError as error:
        return str(error.phase), error.key
    return "loaded", None


@pytest.mark.parametrize("how", ["in place", "through data", "a view", "init", "foreach", "buffer"])
@pytest.mark.parametrize("strategy", ["direct", "stream"])
def test_a_hook_that_writes_what_comes_from_the_files_is_refused(
    ranks2: Ranks, saved: str, strategy: str, how: str
) -> None:
    key = "pos_embed.pos_embed" if how == "buffer" else "proj_out.weight"
    assert ranks2.run(writing_hook, saved, strategy, how) == [("prepare", key)] * 2


def test_a_hook_may_read_and_with_rank0_write(ranks2: Ranks, saved: str) -> None:
    assert ranks2.run(writing_hook, saved, "direct", "read") == [("loaded", None)] * 2
    assert ranks2.run(writing_hook, saved, "rank0", "in place") == [("loaded", None)] * 2


def compiling_hook(folder: str, way: str) -> tuple[str, list[str], bool]:
    """The hook returns `torch.compile(module)`, as trainers write it."""
    case = zoo.CASES[NAME]
    expected = reference(case, Path(folder), BF16)
    module = load(folder, way, prepare=lambda module: torch.compile(module, backend="eager"))
    inner = module._orig_mod
    outputs, wanted = zoo.run_forward(case, module, BF16), zoo.run_forward(case, expected, BF16)
    same = all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    return type(module).__name__, differences(inner, expected), same


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_may_return_the_compiled_module(ranks2: Ranks, saved: str, way: str) -> None:
    for name, found, same in ranks2.run(compiling_hook, saved, way, timeout=180):
        assert found == []
        assert same
        assert "OptimizedModule" in name


def collecting(folder: str, way: str) -> tuple[list[bool], bool]:
    seen: list[bool] = []
    load(folder, way, prepare=lambda module: seen.append(gc.isenabled()))
    return seen, gc.isenabled()


@pytest.mark.parametrize("way", WAYS)
def test_a_load_puts_off_garbage_collection(ranks2: Ranks, saved: str, way: str) -> None:
    """With all libraries on the heap one takes 0.2 s. After failures it is on again, too: see `state_of_process`."""
    assert ranks2.run(collecting, saved, way) == [([False], True)] * 2
