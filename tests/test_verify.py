"""The checks after a load can say no: bytes that went missing, arrived twice or arrived wrong are errors everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn

import metashard
from metashard import fill, load
from metashard.checkpoint import read_checkpoint
from metashard.errors import CheckpointError, ComponentError, LoadError, MetaShardError
from metashard.fill import collective, direct, reader
from metashard.fill.ledger import Ledger
from metashard.layout import named_slots, set_tensor
from metashard.report import Mismatch
from metashard.verify_files import _blocks, _differing

from .parity import cpu_mesh
from .ranks import Ranks
from .test_fill import BF16, FP32, SMALLEST, WAYS, build_by_rank, filled, load_table, save

FILE = "diffusion_pytorch_model.safetensors"
LONG, TABLE = "larger_than_staging", "table"  # a parameter that is cut into shards, a buffer that all ranks hold


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(filled(), tmp_path_factory.mktemp("verified"))[0]


def told(call: Callable[[], Any]) -> tuple[str, str | None, int | None, str]:
    """What a rank raised: class, key, rank, text; or that it raised nothing."""
    try:
        call()
    except MetaShardError as error:
        return f"{type(error).__name__} in {error.phase}", error.key, error.rank, str(error)
    return "nothing", None, None, ""


def the_same(answers: list[tuple[str, str | None, int | None, str]]) -> tuple[str, str | None, int | None, str]:
    assert len(set(answers)) == 1, answers
    return answers[0]


# --- every byte once


def flat(numel: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def test_what_was_written_once_passes_in_any_order_and_pieces() -> None:
    ledger, a, b, empty = Ledger(), flat(10), flat(7, torch.uint8), flat(0)
    for view in (a[6:], b[:3], a[:2], b[3:], a[2:6]):
        ledger.wrote(view)
    ledger.check([("a", a), ("b", b), ("empty", empty)])


@pytest.mark.parametrize(
    ("views", "text"),
    [
        ([(0, 4), (6, 10)], "never written: [4, 6)"),
        ([(0, 10), (4, 6)], "written more than once: [4, 6)"),
        ([(0, 5), (0, 5)], "never written: [5, 10); written more than once: [0, 5)"),
        ([(0, 9)], "never written: [9, 10)"),
        ([(0, 10)] * 3, "written more than once: [0, 10)"),
        ([], "never written: [0, 10)"),
        ([(i, i + 1) for i in range(0, 10, 2)], "never written: [1, 2), [3, 4), [5, 6), [7, 8), ..."),
    ],
)
def test_what_is_missing_or_was_written_twice_is_named(views: list[tuple[int, int]], text: str) -> None:
    ledger, good, bad = Ledger(), flat(10), flat(10)
    ledger.wrote(good)
    for start, stop in views:
        ledger.wrote(bad[start:stop])
    with pytest.raises(LoadError) as caught:
        ledger.check([("good", good), ("bad", bad)])
    assert (caught.value.key, caught.value.got) == ("bad", text)


def test_tensors_that_share_memory_may_each_be_written() -> None:
    ledger, memory = Ledger(), flat(10)
    names = [("a", memory[:6]), ("b", memory[4:])]
    for _, view in names:
        ledger.wrote(view)
    ledger.check(names)
    ledger.wrote(memory[4:6])
    with pytest.raises(LoadError, match=r"written more than once: \[4, 6\)"):
        ledger.check(names)


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any], *, on: int | None = None) -> Iterator[None]:
    """`owner.name` replaced by `make(original)` on one rank, or on all."""
    if on is not None and dist.get_rank() != on:
        yield
        return
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def without_a_read(original: Any) -> Any:
    def reads_for(entry: Any, *args: Any, **kwargs: Any) -> Any:
        reads = list(original(entry, *args, **kwargs))
        return reads[:-1] if entry.key == LONG else reads

    return reads_for


def with_a_read_twice(original: Any) -> Any:
    def reads_for(entry: Any, *args: Any, **kwargs: Any) -> Any:
        reads = list(original(entry, *args, **kwargs))
        return reads + reads[:1] if entry.key == LONG else reads

    return reads_for


def overlapping_parts(original: Any) -> Any:
    def part(number: int, numel: int, *args: int) -> tuple[int, int]:
        start, stop = original(number, numel, *args)
        return (max(0, start - 2), stop) if numel == 333 * 1001 else (start, stop)

    return part


def without_a_view(original: Any) -> Any:
    def keep(*args: Any) -> Iterator[torch.Tensor]:
        yield from list(original(*args))[:-1]

    return keep


def without_a_tensor(original: Any) -> Any:
    def computed(*args: Any) -> list[torch.Tensor]:
        return original(*args)[:-1]

    return computed


DIRECT = WAYS["direct"]
SCATTER, BROADCAST = WAYS["stream, scatter"], WAYS["rank0, broadcast"]
# What goes wrong: how to load, what is patched on which rank, key of the error (None: whichever), what the error says
PLACING: dict[str, tuple[dict[str, Any], Any, str, Any, int | None, str | None, str]] = {
    "a read is left out": (DIRECT, direct, "reads_for", without_a_read, 1, LONG, "never written"),
    "a read is done twice": (DIRECT, direct, "reads_for", with_a_read_twice, 0, LONG, "written more than once"),
    "parts of a table overlap": (DIRECT, direct, "part_of", overlapping_parts, None, TABLE, "more than once: [166"),
    "a piece is not unpacked": (SCATTER, collective._Receiver, "_scattered", without_a_view, 1, None, "never written"),
    "a piece is not kept": (BROADCAST, collective, "_keep", without_a_view, 1, None, "never written"),
    "rank 0 keeps too little": (BROADCAST, collective, "_keep", without_a_view, 0, None, "never written"),
    "an attribute is not sent": (DIRECT, fill, "_computed_on_rank0", without_a_tensor, None, None, "never written"),
}


def load_patched(folder: str, case: str) -> Any:
    way, owner, name, make, on, _, _ = PLACING[case]
    with patched(owner, name, make, on=on):
        return told(lambda: load_table(folder, None, {**way, "staging_bytes": SMALLEST}))


@pytest.mark.parametrize("case", PLACING)
def test_bytes_that_are_not_placed_once_are_the_same_error_on_every_rank(ranks2: Ranks, saved: str, case: str) -> None:
    *_, on, key, text = PLACING[case]
    kind, got_key, rank, message = the_same(ranks2.run(load_patched, saved, case))
    assert kind == "LoadError in check"
    assert text in message
    assert rank == (on or 0)
    if key is not None:
        assert got_key == key


def without_replicas(original: Any) -> Any:
    def to_replicas(flats: list[torch.Tensor], *args: Any) -> None:
        original(flats[1:], *args)

    return to_replicas


def hsdp_patched(folder: str) -> Any:
    import diffusers

    from .test_fill import FillTable

    diffusers.FillTable = FillTable  # type: ignore[attr-defined]
    try:
        with patched(fill, "_to_replicas", without_replicas):
            return told(lambda: metashard.load_component(folder, mesh=cpu_mesh(2, 2)))
    finally:
        del diffusers.FillTable  # type: ignore[attr-defined]


def test_a_replica_that_was_sent_too_little_is_an_error_on_every_rank(ranks4: Ranks, saved: str) -> None:
    kind, _, rank, message = the_same(ranks4.run(hsdp_patched, saved))
    assert (kind, rank) == ("LoadError in check", 2)  # the first of the second replica
    assert "never written" in message


# --- the module as a whole


def on_meta(module: Any) -> None:
    set_tensor(module, "blocks.0.norm.weight", nn.Parameter(torch.empty(6, device="meta")))


def attribute_on_meta(module: Any) -> None:
    module.alone = torch.empty(2, 3, device="meta", dtype=torch.float64)


def deep_attribute_on_meta(module: Any) -> None:
    module.plain[1]["deep"] = (torch.empty((), device="meta", dtype=torch.int64),)


def in_other_memory(module: Any) -> None:
    module._buffers["table_bf16"] = module.table_bf16.clone()


def in_shared_memory(module: Any) -> None:
    module.blocks[0].norm.weight._local_tensor = module.blocks[0].norm.bias._local_tensor


def frozen(module: Any) -> None:
    module.rows_5.requires_grad_(False)


def of_another_dtype(module: Any) -> None:
    module._buffers["steps"] = module.steps.int()


def renamed(module: Any) -> None:
    module._parameters["rows_six"] = module._parameters.pop("rows_5")


def untied(module: Any) -> None:
    module.head.weight = nn.Parameter(module.embed.detach().clone())


BROKEN: dict[Callable[[Any], None], tuple[str, str]] = {
    on_meta: ("blocks.0.norm.weight", "still on the meta device"),
    attribute_on_meta: ("alone", "still on the meta device"),
    deep_attribute_on_meta: ("plain[1]['deep'][0]", "still on the meta device"),
    in_other_memory: ("table_bf16", "never written: [0, 39)"),
    in_shared_memory: ("blocks.0.norm.weight", "same memory"),
    frozen: ("rows_5", "requires_grad is False"),
    of_another_dtype: ("steps", "dtype is torch.int32"),
    renamed: ("rows_5", "agreed on rows_5"),
}


def broken_after(breaks: Callable[[Any], None]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def filled_and_broken(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            breaks(module)

        return filled_and_broken

    return make


def load_broken(folder: str, breaks: Callable[[Any], None]) -> Any:
    with patched(load.fill, "fill", broken_after(breaks), on=1):
        return told(lambda: load_table(folder, None, DIRECT))


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_a_module_that_is_not_what_was_agreed_on_is_the_same_error_on_every_rank(
    ranks2: Ranks, saved: str, breaks: Callable[[Any], None]
) -> None:
    kind, key, rank, message = the_same(ranks2.run(load_broken, saved, breaks))
    assert (kind, rank) == ("LoadError in check", 1)
    assert (key, BROKEN[breaks][1] in message) == (BROKEN[breaks][0], True), message


def wrap_untied() -> Any:
    module = build_by_rank()
    with patched(load.fill, "fill", broken_after(untied), on=1):
        return told(lambda: metashard.wrap_model(module, mesh=cpu_mesh(), load=metashard.LoadPolicy(timeout=30)))


def test_a_broken_tie_is_the_same_error_on_every_rank(ranks2: Ranks) -> None:
    kind, key, rank, message = the_same(ranks2.run(wrap_untied))
    assert (kind, key, rank) == ("LoadError in check", "head.weight", 1)
    assert "share memory with embed" in message


# --- verify="full": against the files


def verified(folder: str, ways: list[dict[str, Any]], dtype: torch.dtype | None) -> list[Any]:
    return [load_table(folder, dtype, {**way, "verify": "full"})[1].verified for way in ways]


@pytest.mark.parametrize("dtype", [None, BF16], ids=["as stored", "bf16"])
def test_a_right_load_by_any_way_is_equal_to_its_files(ranks2: Ranks, saved: str, dtype: torch.dtype | None) -> None:
    ways = [{**way, "staging_bytes": SMALLEST} for way in WAYS.values()]
    on_0, on_1 = ranks2.run(verified, saved, ways, dtype, timeout=120)
    assert on_0 == on_1
    stored, everything = filled().state_dict(), named_slots(filled())
    for compared in on_0:
        assert compared.tensors == len(stored)
        assert compared.between_ranks == len(everything) - len(stored)
        assert compared.mismatches == ()
    assert len({compared.nbytes for compared in on_0}) == 1


def flipping(key: str, element: int) -> Callable[[Any], Any]:
    """A reader that changes the lowest bit of one element, if it is among those of a read."""

    def make(original: Any) -> Any:
        def read(self: Any, stretch: Any, number: int) -> None:
            original(self, stretch, number)
            at = element - stretch.start
            if stretch.entry.key == key and 0 <= at < stretch.into.numel():
                stretch.into.view(torch.uint8)[at * stretch.into.element_size()] ^= 1

        return read

    return make


def load_flipped(folder: str, way: dict[str, Any], key: str, element: int, on: int | None) -> Any:
    """With the basic checks, then with the full ones; the mismatches of the latter."""
    outcomes: list[Any] = []
    with patched(reader.Reader, "_read", flipping(key, element), on=on):
        outcomes.append(told(lambda: load_table(folder, None, {**way, "staging_bytes": SMALLEST})))
        try:
            load_table(folder, None, {**way, "staging_bytes": SMALLEST, "verify": "full"})
        except LoadError as error:
            outcomes += [(error.phase, error.rank, error.key, error.file), error.got.mismatches, str(error)]
    return outcomes


@pytest.mark.parametrize("way", ["direct", "stream, scatter", "stream, broadcast"])
def test_one_wrong_bit_in_a_shard_is_found_with_file_and_byte(ranks2: Ranks, saved: str, way: str) -> None:
    entry = read_checkpoint(Path(saved), [FILE], None).entries[LONG]
    element = 2000 * 17 + 5  # of the second shard
    on = 1 if way == "direct" else 0  # who reads
    answers = ranks2.run(load_flipped, saved, WAYS[way], LONG, element, on)
    assert answers[0] == answers[1]
    basic, where, mismatches, message = answers[0]
    assert basic[0] == "nothing"
    assert where == ("verify", 1, LONG, FILE)
    (mismatch,) = mismatches
    assert (mismatch.name, mismatch.rank, mismatch.elements) == (LONG, 1, 1)
    assert mismatch.offset == entry.offset + element * 4
    assert mismatch.expected != mismatch.got
    assert f"{FILE} at byte {mismatch.offset}" in message


def test_a_wrong_bit_in_a_replicated_table_is_wrong_on_every_rank(ranks2: Ranks, saved: str) -> None:
    answers = ranks2.run(load_flipped, saved, DIRECT, TABLE, 333 * 1001 - 1, 1)
    assert answers[0] == answers[1]
    assert [(m.name, m.rank, m.elements) for m in answers[0][2]] == [(TABLE, 0, 1), (TABLE, 1, 1)]


def memory_of(original: Any) -> Any:
    def pack(self: Any, parcels: Any) -> None:
        original(self, parcels)
        for target, _, out in parcels:
            if target.fqn == "rows_5":
                out.view(torch.uint8)[0] ^= 1

    return pack


def load_rank0_flipped(folder: str, on: int) -> Any:
    with patched(fill.Memory, "pack", memory_of, on=on):
        return told(lambda: load_table(folder, None, {"strategy": "rank0", "verify": "full"}))


def test_a_wrong_bit_in_what_rank_0_sent_is_found(ranks2: Ranks, saved: str) -> None:
    kind, key, rank, message = the_same(ranks2.run(load_rank0_flipped, saved, 0))
    assert (kind, key, rank) == ("LoadError in verify", "rows_5", 0)
    assert FILE in message


def other_table(module: Any) -> None:
    module.table_computed[3, 4] += 1


def load_unequal(folder: str) -> Any:
    with patched(load.fill, "fill", broken_after(other_table), on=1):
        try:
            load_table(folder, None, {"strategy": "direct", "verify": "full"})
        except LoadError as error:
            return error.phase, error.rank, error.key, error.got.mismatches
    return None


def test_a_computed_buffer_that_differs_from_rank_to_rank_is_found(ranks2: Ranks, saved: str) -> None:
    answers = ranks2.run(load_unequal, saved)
    assert answers[0] == answers[1]
    assert answers[0][:3] == ("verify", 1, "table_computed")
    (mismatch,) = answers[0][3]
    assert isinstance(mismatch, Mismatch)
    assert mismatch.file is None


def truncating(original: Any) -> Any:
    def compare_load(*args: Any, folder: Path, **kwargs: Any) -> Any:
        path = folder / FILE
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 8)
        return original(*args, folder=folder, **kwargs)

    return compare_load


def load_truncated(folder: str) -> Any:
    with patched(load, "compare_load", truncating):
        return told(lambda: load_table(folder, None, {"strategy": "direct", "verify": "full"}))


def test_a_file_that_shrinks_before_it_is_read_again_is_the_same_error(ranks2: Ranks, tmp_path: Path) -> None:
    folder, _ = save(filled(), tmp_path)
    kind, _, _, message = the_same(ranks2.run(load_truncated, folder))
    assert kind == f"{CheckpointError.__name__} in verify"
    assert FILE in message


# --- verify="full": what it can compare, and what it refuses


def rank0_with(folder: str, what: str) -> tuple[Any, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("metashard").addHandler(handler)

    def prepare(module: Any) -> None:
        if not module.rows_5.is_meta and what == "hook":
            with torch.no_grad():
                module.rows_5.add_(1)

    lora = LoraConfig(r=2, target_modules=["inner"], init_lora_weights="pissa") if what == "pissa" else None
    try:
        policy = {"strategy": "rank0", "verify": "full"}
        report = load_table(folder, FP32, policy, prepare=prepare, lora=lora)[1]
    finally:
        logging.getLogger("metashard").removeHandler(handler)
    return report.verified, said


@pytest.mark.parametrize(("what", "changed"), [("hook", ["rows_5"]), ("pissa", ["blocks.0.inner.weight"] * 2)])
def test_what_was_changed_on_rank_0_after_it_was_loaded_is_named_and_not_compared(
    ranks2: Ranks, saved: str, what: str, changed: list[str]
) -> None:
    (verified_0, said), (verified_1, _) = ranks2.run(rank0_with, saved, what)
    assert verified_0 == verified_1
    assert verified_0.tensors == len(filled().state_dict()) - len(changed)
    assert verified_0.mismatches == ()
    (line,) = [line for line in said if line.startswith("verify: ")]
    assert f"{len(changed)} tensors were changed" in line
    assert changed[0] in line


def refused(kind: str, folder: str, empty: str) -> Any:
    policy = metashard.LoadPolicy(verify="full", timeout=30, allow_pickle=True, missing="init")
    if kind == "wrap_model":
        return told(lambda: metashard.wrap_model(build_by_rank(), mesh=cpu_mesh(), load=policy))
    if kind == "blind rank" and dist.get_rank() == 1:
        folder = empty
    way = {"verify": "full", "allow_pickle": True, "missing": "init"}
    return told(lambda: load_table(folder, None, way))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("wrap_model", "wrap_model knows of none"),
        ("pickle", "the weights are pickled"),
        ("missing", "1 missing tensors take their own init"),
        ("blind rank", "ranks [1] do not see"),
    ],
)
def test_what_cannot_be_read_again_is_refused_before_it_is_loaded(
    ranks2: Ranks, saved: str, tmp_path: Path, kind: str, text: str
) -> None:
    folder = saved
    if kind in ("pickle", "missing"):
        model, folder = filled(), str(tmp_path)
        state = {key: value.contiguous() for key, value in model.state_dict().items() if key != "rows_5"}
        model.save_config(tmp_path)
        if kind == "pickle":
            torch.save(state, tmp_path / "diffusion_pytorch_model.bin")
        else:
            from safetensors.torch import save_file

            save_file(state, tmp_path / FILE, metadata={"format": "pt"})
    empty = tmp_path / "nothing here"
    told_0, told_1 = ranks2.run(refused, kind, folder, str(empty))
    for outcome in (told_0, told_1):
        assert outcome[0] in (f"{ComponentError.__name__} in plan", f"{ComponentError.__name__} in resolve")
        assert text in outcome[3]


def test_only_basic_and_full_are_known() -> None:
    with pytest.raises(ValueError, match="expected one of basic, full"):
        metashard.LoadPolicy(verify="some")


# --- arithmetic


@pytest.mark.parametrize("most", [1, 3, 8, 1000])
@pytest.mark.parametrize(
    ("full", "offset", "held"),
    [
        ((), (), ()),
        ((7,), (2,), (4,)),
        ((5, 3), (1, 0), (3, 3)),
        ((4, 5, 6), (0, 2, 0), (4, 2, 6)),
        ((3, 4, 5), (1, 1, 2), (2, 2, 2)),
    ],
)
def test_blocks_tile_a_part_of_a_tensor(
    full: tuple[int, ...], offset: tuple[int, ...], held: tuple[int, ...], most: int
) -> None:
    values = torch.arange(torch.Size(full).numel())
    part = values.view(full)[tuple(slice(o, o + h) for o, h in zip(offset, held, strict=True))]
    times = torch.zeros(held, dtype=torch.int64)
    for start, index, block, cut in _blocks(full, offset, held, most):
        numel = torch.Size(block).numel()
        assert numel <= most
        assert torch.equal(values[start : start + numel].view(block)[cut], part[index])
        times[index] += 1
    assert bool((times == 1).all())


def test_only_in_a_cast_may_a_nan_have_other_bits() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int16).view(BF16) for bits in (0x7FC0, 0x7FFF))
    assert _differing(quiet, other, cast=True).tolist() == []
    assert _differing(quiet, other, cast=False).tolist() == [0]
    assert _differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), cast=True).tolist() == [0]
