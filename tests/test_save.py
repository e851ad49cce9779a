"""Saving: the folder is, byte for byte, what `save_pretrained` writes in a single process; or nothing happens."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import metashard
from metashard.checkpoint import Entry
from metashard.errors import SaveError
from metashard.save import commit, run, save_component
from metashard.save.write import Account, check_accounts
from metashard.shards import release

from . import zoo
from .parity import cpu_mesh, load_case
from .ranks import Ranks
from .test_memory import MIB, SMALL, trim, write_flux

FP32, BF16 = torch.float32, torch.bfloat16
SD3, WAN = "SD3Transformer2DModel", "WanTransformer3DModel"
POLICY = metashard.SavePolicy(timeout=60)


def different(folder: Path, expected: Path) -> list[str]:
    """Names of files that are not equal, or in one of the folders only."""
    names = sorted({*os.listdir(folder), *os.listdir(expected)})
    return [
        name
        for name in names
        if not (folder / name).is_file()
        or not (expected / name).is_file()
        or not filecmp.cmp(folder / name, expected / name, shallow=False)
    ]


# --- the folder of a single process


def saved_like_one_process(
    root: str, names: list[str], dtypes: list[torch.dtype], shape: tuple[int, ...], max_shard_size: str
) -> list[str]:
    """Load each case, save it from its shards, and compare with what one process loads and saves."""
    found = []
    mesh = cpu_mesh(*shape)
    for name in names:
        case, original = zoo.CASES[name], Path(root) / name
        for dtype in dtypes:
            out = Path(root) / f"{name}-{str(dtype)[6:]}-{'x'.join(map(str, shape)) or dist.get_world_size()}"
            module, _ = load_case(case, str(original), dtype, {}, mesh)
            before = metashard.digest_shards(module)
            report = save_component(module, out / "saved", max_shard_size=max_shard_size, save=POLICY)
            if metashard.digest_shards(module) != before:
                found.append(f"{name}: saving has changed the module")
            if dist.get_rank() == 0:
                case.load(original, dtype).save_pretrained(out / "expected", max_shard_size=max_shard_size)
                found += [f"{name} {dtype}: {line}" for line in different(out / "saved", out / "expected")]
                if set(os.listdir(out)) != {"saved", "expected"}:
                    found.append(f"{name}: left over: {os.listdir(out)}")
            dist.barrier()
            bytes_of_tensors = sum(t.nbytes for t in state_of(out / "saved").values())
            if sum(report.written) != bytes_of_tensors:
                found.append(f"{name}: {report.written} written, the files hold {bytes_of_tensors}")
    return found


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of each core case, by its name."""
    root = tmp_path_factory.mktemp("models")
    for name in (*zoo.CORE, MOE):
        zoo.CASES[name].build().save_pretrained(root / name)
    return str(root)


FEW = [SD3, WAN, "T5EncoderModel", "AutoencoderKL"]
MOE = "MixtralForCausalLM"  # transformers makes many tensors of one when it saves


@pytest.mark.parametrize(("names", "dtype"), [(zoo.CORE, BF16), ([*FEW, "LlamaForCausalLM-tied"], FP32)])
def test_two_ranks_save_what_one_process_saves(
    ranks2: Ranks, models: str, names: list[str], dtype: torch.dtype
) -> None:
    """Pins, ties, renamed keys, buffers; several files."""
    assert ranks2.run(saved_like_one_process, models, list(names), [dtype], (), "40KB", timeout=240) == [[], []]


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)], ids=["one rank", "four ranks", "HSDP"])
def test_other_meshes_save_the_same(ranks_of: dict[int, Ranks], models: str, shape: tuple[int, ...]) -> None:
    size = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    mesh = shape if len(shape) == 2 else ()
    found = ranks_of[size].run(saved_like_one_process, models, [*FEW, MOE], [BF16], mesh, "10GB", timeout=120)
    assert found == [[]] * size


def saved_in_another_dtype(folder: str, out: str) -> list[str]:
    module, _ = load_case(zoo.CASES[WAN], folder, FP32, {}, cpu_mesh())
    save_component(module, Path(out, "saved"), dtype=BF16, variant="bf16", save=POLICY)
    if dist.get_rank() == 0:
        zoo.CASES[WAN].load(folder, BF16).save_pretrained(Path(out, "expected"), variant="bf16")
        return different(Path(out, "saved"), Path(out, "expected"))
    return []


def test_a_cast_is_that_of_from_pretrained(ranks2: Ranks, models: str, tmp_path: Path) -> None:
    """fp32 shards saved in bf16, Wan's pins in fp32; the variant is in the names."""
    assert ranks2.run(saved_in_another_dtype, f"{models}/{WAN}", str(tmp_path)) == [[], []]


def saved_plainly(name: str, out: str) -> list[str]:
    module = zoo.CASES[name].build()
    save_component(module, Path(out, "saved"), save=POLICY)
    if not dist.is_initialized() or dist.get_rank() == 0:
        module.save_pretrained(Path(out, "expected"))
        return different(Path(out, "saved"), Path(out, "expected"))
    return []


def test_a_module_that_was_never_sharded_is_saved_plainly(ranks2: Ranks, tmp_path: Path) -> None:
    """On two ranks that share the work, and in a process without a process group."""
    assert ranks2.run(saved_plainly, "T5EncoderModel", str(tmp_path / "two")) == [[], []]
    assert saved_plainly("T5EncoderModel", str(tmp_path / "one")) == []


def grid_saved(folder: str, out: str, kind: str) -> list[str]:
    """Placements other than rows over all ranks: the same file of the same bytes."""
    from . import test_meshes as grids

    options: dict[str, Any] = {}
    mesh = cpu_mesh()
    if kind == "columns":
        place = partial(lambda parameter: Shard(1) if parameter.ndim > 1 else None)
        options["shard"] = metashard.ShardPolicy(shard_placement_fn=place)
    if kind == "replicated":
        options["shard"] = metashard.ShardPolicy(ignored_params=["blocks.1.up.weight", "norm.bias"])
    if kind == "tensor parallel":
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = whole["dp"]
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        options["prepare"] = lambda module: parallelize_module(module, whole["tp"], plan) and None
    module, _ = grids.load(folder, mesh, "direct", **options)
    save_component(module, Path(out, "saved"), save=POLICY)
    dist.barrier()
    expected = state_of(Path(folder))
    got = state_of(Path(out, "saved"))
    return sorted(got.keys() ^ expected.keys()) + [key for key in got if not torch.equal(got[key], expected[key])]


@pytest.mark.parametrize("kind", ["rows", "columns", "replicated", "tensor parallel"])
def test_any_placement_is_saved(ranks4: Ranks, tmp_path: Path, kind: str) -> None:
    """Strided runs of FSDP over tensor parallel, columns, uneven cuts and replicas, each byte once."""
    from .test_meshes import save_grid

    save_grid(tmp_path / "model", **(dict(width=8, inner=12) if kind == "columns" else {}))  # FSDP: no uneven columns
    assert ranks4.run(grid_saved, str(tmp_path / "model"), str(tmp_path), kind) == [[], [], [], []]


# --- ranks that do not see the folder


def saved_over_the_wire(folder: str, out: str, seeing: list[int], shape: tuple[int, ...]) -> tuple[list[str], Any]:
    module, _ = load_case(zoo.CASES[SD3], folder, BF16, {}, cpu_mesh(*shape))
    policy = metashard.SavePolicy(timeout=60, staging_bytes=1 << 16)
    with patch.object(run, "sees", lambda *args: dist.get_rank() in seeing):
        report = save_component(module, Path(out, "saved"), max_shard_size="40KB", save=policy)
    if dist.get_rank() == 0:
        zoo.CASES[SD3].load(folder, BF16).save_pretrained(Path(out, "expected"), max_shard_size="40KB")
        return different(Path(out, "saved"), Path(out, "expected")), report
    return [], report


@pytest.mark.parametrize(("seeing", "shape"), [([0], ()), ([0, 2], ()), ([0, 1], (2, 2)), ([0, 2], (2, 2))])
def test_what_is_held_where_the_folder_is_not_seen_travels(
    ranks4: Ranks, models: str, tmp_path: Path, seeing: list[int], shape: tuple[int, ...]
) -> None:
    told = ranks4.run(saved_over_the_wire, f"{models}/{SD3}", str(tmp_path), seeing, shape)
    assert [found for found, _ in told] == [[]] * 4
    report = told[0][1]
    nbytes = sum(tensor.nbytes for tensor in state_of(tmp_path / "saved").values())
    assert sum(report.written) == nbytes
    blind = [rank for rank in range(4) if rank not in seeing]
    assert all(report.written[rank] == 0 for rank in blind)
    sent = sum(report.ranks[rank].bytes_sent for rank in range(4))
    assert sent == report.ranks[0].bytes_received
    # Of two replicas the one that sees the folder writes; if only one half of each does, the other half travels.
    assert (sent == 0) == (shape == (2, 2) and seeing == [0, 1])


# --- memory


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Few large tensors: 150 MB in bf16."""
    root = tmp_path_factory.mktemp("wide")
    yield write_flux(root, SMALL, BF16)[0]
    shutil.rmtree(root)


def saving_peaks(folder: str, out: str, way: str) -> Any:
    module = metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16)
    policy = metashard.SavePolicy(timeout=60, staging_bytes=8 * MIB)
    seeing = [0] if way == "over the wire" else [0, 1]
    reports = []
    for number in range(2):  # the first save imports and fills pools
        trim()
        with patch.object(run, "sees", lambda *args: dist.get_rank() in seeing):
            report = save_component(module, f"{out}/{number}", dtype=FP32 if way == "cast" else None, save=policy)
        if dist.get_rank() == 0:
            shutil.rmtree(f"{out}/{number}")
        reports.append(report)
    return reports[1]


@pytest.mark.parametrize("way", ["as it is", "cast", "over the wire"])
def test_memory_stays_at_the_staging_and_little_more(ranks2: Ranks, wide: str, tmp_path: Path, way: str) -> None:
    """Far below a shard, whatever is done with it."""
    report = ranks2.run(saving_peaks, wide, str(tmp_path), way, timeout=120)[0]
    assert sum(report.written) > 140 * MIB
    for rank in report.ranks:
        assert rank.peak_host_bytes < 40 * MIB, str(report)


# --- all or nothing


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def filled(folder: Path) -> dict[str, bytes]:
    """A folder with an older, differently cut checkpoint of the model, another variant, and other files."""
    model = zoo.CASES[SD3].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(folder, max_shard_size="30KB")
    model.save_pretrained(folder, variant="fp16")
    (folder / "logs").mkdir()
    (folder / "logs" / "events").write_text("kept")
    (folder / "README.md").write_text("kept")
    return snapshot(folder)


def save_over(out: str, patches: dict[str, Any], **kwargs: Any) -> None:
    """Save SD3 in shards, with some functions replaced on the ranks that they are given for."""
    module, _ = load_case(zoo.CASES[SD3], kwargs.pop("folder"), BF16, {}, cpu_mesh())
    with ExitStack() as stack:
        for (where, name), (ranks, made) in patches.items():
            if dist.get_rank() in ranks:
                stack.enter_context(patch.object(where, name, made))
        save_component(module, out, save=metashard.SavePolicy(timeout=20, io_threads=1), **kwargs)


def no_exchange(*args: Any) -> bool:
    return False


def not_movable(*args: Any) -> bool:
    return False


PLACES: dict[str, dict[str, Any]] = {
    "exchanged": {},
    "file by file": {"_exchange": no_exchange},
    "inside of the folder": {"_can_move": not_movable},
}


def overwrites(folder: str, out: str, place: str) -> None:
    save_over(out, {(commit, name): ([0], made) for name, made in PLACES[place].items()}, folder=folder, overwrite=True)


@pytest.mark.parametrize("place", PLACES)
def test_overwriting_replaces_the_model_s_files_and_nothing_else(
    ranks2: Ranks, models: str, tmp_path: Path, place: str
) -> None:
    """No stale shard, no other index; other variants, files and folders stay; nothing is left over."""
    out = tmp_path / "out"
    before = filled(out)
    ranks2.run(overwrites, f"{models}/{SD3}", str(out), place)
    zoo.CASES[SD3].load(f"{models}/{SD3}", BF16).save_pretrained(tmp_path / "expected")
    expected = snapshot(tmp_path / "expected")
    kept = {name: value for name, value in before.items() if "fp16" in name or value == b"kept"}
    assert snapshot(out) == {**expected, **kept}
    assert os.listdir(tmp_path) == ["out", "expected"] or os.listdir(tmp_path) == ["expected", "out"]


class NthCall:
    """Calls the original, but raises (or kills the process) at the n-th call."""

    def __init__(self, original: Any, n: int, error: BaseException | None) -> None:
        self.original, self.left, self.error = original, n, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error
        return self.original(*args, **kwargs)


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")
FAULTS: dict[str, tuple[tuple[Any, str], int, int]] = {  # what fails, on which rank, at which call
    "a write on rank 0": ((os, "pwrite"), 0, 3),
    "a write on rank 1": ((os, "pwrite"), 1, 20),
    "flushing": ((os, "fsync"), 1, 1),
    "the check": ((run, "read_header"), 0, 1),
    "flushing the folder": ((os, "fsync"), 0, 4),
    "the exchange": ((commit, "_exchange"), 0, 1),
}


def fails_at(folder: str, out: str, fault: str, place: str) -> None:
    (where, name), rank, n = FAULTS[fault]
    patches = {(commit, key): ([0], made) for key, made in PLACES[place].items()}
    patches[where, name] = ([rank], NthCall(getattr(where, name), n, FULL_DISK))
    save_over(out, patches, folder=folder, overwrite=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_every_rank_s_and_leaves_the_folder_as_it_was(
    ranks2: Ranks, models: str, tmp_path: Path, fault: str
) -> None:
    before = filled(tmp_path / "out")
    told = ranks2.run_expecting(SaveError, fails_at, f"{models}/{SD3}", str(tmp_path / "out"), fault, "exchanged")
    assert "No space left on device" in str(told[0])
    assert {str(error) for error in told} == {str(told[0])}
    assert {error.rank for error in told} == {FAULTS[fault][1]}
    assert snapshot(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("place", PLACES)
def test_a_failed_rename_puts_everything_back(models: str, tmp_path: Path, place: str) -> None:
    """Each rename of a replacement fails in turn."""
    before = filled(tmp_path / "out")
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)
    for n in range(1, 100):
        with ExitStack() as stack:
            for name, made in PLACES[place].items():
                stack.enter_context(patch.object(commit, name, made))
            stack.enter_context(patch.object(os, "rename", NthCall(os.rename, n, FULL_DISK)))
            try:
                save_component(module, tmp_path / "out", overwrite=True)
            except SaveError:
                assert snapshot(tmp_path / "out") == before, f"rename {n}"
                assert os.listdir(tmp_path) == ["out"], f"rename {n}"
            else:
                break
    assert n > 3


def test_what_cannot_be_put_back_is_kept(models: str, tmp_path: Path) -> None:
    """A rename fails, and so do all that follow: nothing of the old folder is removed."""
    before = filled(tmp_path / "out")
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)
    rename, calls = os.rename, []

    def stuck(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise FULL_DISK
        rename(*args)

    with patch.object(os, "rename", stuck), pytest.raises(SaveError):
        save_component(module, tmp_path / "out", overwrite=True)
    everything = {Path(name).name: value for name, value in snapshot(tmp_path).items()}
    assert {Path(name).name for name in before} <= everything.keys()


def killed_at(folder: str, out: str, fault: str) -> None:
    (where, name), rank, n = FAULTS[fault]
    killing = {(where, name): ([rank], NthCall(getattr(where, name), n, None))}
    save_over(out, killing, folder=folder, overwrite=True)


@pytest.mark.parametrize("fault", ["a write on rank 0", "a write on rank 1"])
def test_a_killed_rank_leaves_the_folder_as_it_was(ranks2: Ranks, models: str, tmp_path: Path, fault: str) -> None:
    """The other rank raises within seconds; the old checkpoint loads; the next save clears up."""
    before = filled(tmp_path / "out")
    victim = FAULTS[fault][1]
    start = time.monotonic()
    told = ranks2.run(
        killed_at, f"{models}/{SD3}", str(tmp_path / "out"), fault, return_exceptions=True, deaths=True, timeout=60
    )
    assert isinstance(told[1 - victim], SaveError)
    assert f"Rank {victim} left the save: the process has ended" in str(told[1 - victim])
    assert time.monotonic() - start < 30
    assert snapshot(tmp_path / "out") == before
    zoo.CASES[SD3].load(tmp_path / "out", BF16)
    assert len(os.listdir(tmp_path)) == (2 if victim == 0 else 1)  # rank 0's stage, hidden beside the folder
    module = zoo.CASES[SD3].build()
    save_component(module, tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]


# --- bad input


def refused(folder: str, out: str, kind: str) -> None:
    module, _ = load_case(zoo.CASES[SD3], folder, BF16, {}, cpu_mesh())
    kwargs: dict[str, Any] = {}
    if kind == "meta" and dist.get_rank() == 1:
        release(module)
    if kind == "no save_pretrained":
        module = nn.Linear(2, 2)
    if kind == "other arguments":
        kwargs["max_shard_size"] = f"{1 + dist.get_rank()}GB"
    if kind == "unknown option":
        kwargs["lora"] = "fuse"
    nothing = type("Usage", (), {"free": 1000})
    with patch.object(shutil, "disk_usage", lambda path: nothing if kind == "no space" else None):
        save_component(module, out, save=POLICY, **kwargs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a full folder", "or pass overwrite=True"),
        ("a file", "is a file; expected a folder"),
        ("no permission", "cannot be written"),
        ("no space", "has room for 1000 B"),
        ("meta", "tensors are on the meta device"),
        ("no save_pretrained", "has no save_pretrained"),
        ("other arguments", "Ranks differ in arguments"),
        ("unknown option", "expected one of leave_out, merge"),
    ],
)
def test_every_rank_refuses_bad_input(ranks2: Ranks, models: str, tmp_path: Path, kind: str, message: str) -> None:
    out = tmp_path / "out"
    if kind == "a full folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    if kind == "a file":
        out.write_text("mine")
    before = snapshot(tmp_path)
    target = "/proc/metashard/out" if kind == "no permission" else str(out)
    errors = ranks2.run_expecting(metashard.MetaShardError, refused, f"{models}/{SD3}", target, kind)
    assert all(message in str(error) for error in errors), errors
    assert all(isinstance(error, SaveError) for error in errors) or kind == "other arguments"
    assert snapshot(tmp_path) == before
    assert [name for name in os.listdir(tmp_path) if name != "out"] == []


def test_a_tie_that_the_class_does_not_declare_is_refused(tmp_path: Path) -> None:
    """safetensors refuses it in one process, too: it would be stored twice, and loaded untied."""
    module = zoo.CASES[SD3].build()
    module.transformer_blocks[1].attn.to_q.weight = module.transformer_blocks[0].attn.to_q.weight
    with pytest.raises(SaveError, match="are tied"):
        save_component(module, tmp_path / "out")
    with pytest.raises(RuntimeError, match="share memory"):
        module.save_pretrained(tmp_path / "plain")


# --- the account of bytes


def test_the_account_sees_a_byte_too_few_and_one_twice() -> None:
    entry = Entry("w", "f", torch.uint8, (100,), 1000, 100)

    def account(*runs: tuple[int, int]) -> dict[str, tuple[int, int]]:
        made = Account()
        made.wrote(entry, runs)
        return made.figures

    check_accounts([account((1000, 30)), account((1030, 70))], [entry])
    check_accounts([account((1050, 50), (1000, 50)), {}], [entry])
    for wrong in (account((1000, 99)), account((1000, 60), (1050, 50)), account((1000, 50), (1040, 50)), {}):
        with pytest.raises(SaveError, match="w: "):
            check_accounts([wrong], [entry])
