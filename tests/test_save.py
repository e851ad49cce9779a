"""Saving: the folder is, byte for byte, what `save_pretrained` writes in a single process; or nothing happens."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import metashard
from metashard.checkpoint import Entry
from metashard.component import resolve_component
from metashard.errors import CheckpointError, SaveError
from metashard.save import commit, run, save_component, stage
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


class BrokenOffError(Exception):
    """By which a test leaves a forward."""


def saved_after_a_broken_forward(folder: str, out: str) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    module = metashard.load_component(
        folder, mesh=cpu_mesh(), dtype=FP32, shard=metashard.ShardPolicy(mp_policy=policy)
    )
    before = metashard.digest_shards(module)

    def break_off(*args: Any) -> None:
        raise BrokenOffError

    module.transformer_blocks[1].register_forward_pre_hook(break_off)
    with suppress(BrokenOffError):
        zoo.run_forward(zoo.CASES[SD3], module, BF16)
    gathered = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    assert "proj_out.weight" in gathered  # else this test shows nothing
    save_component(module, Path(out, "saved"), save=POLICY)
    dist.barrier()
    found = different(Path(out, "saved"), Path(folder))
    found.remove("config.json")  # names its folder
    return found if metashard.digest_shards(module) == before else [*found, "digest"]


def test_a_save_after_a_forward_that_was_broken_off_is_of_the_shards(
    ranks2: Ranks, models: str, tmp_path: Path
) -> None:
    """FSDP leaves parameters gathered then, in the dtype of the compute."""
    assert ranks2.run(saved_after_a_broken_forward, f"{models}/{SD3}", str(tmp_path)) == [[], []]


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
    (folder / "latest").symlink_to("logs/events")
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


def no_links(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


PLACES: dict[str, dict[tuple[Any, str], Any]] = {
    "exchanged": {},
    "file by file": {(commit, "_exchange"): no_exchange},
    "without hard links": {(os, "link"): no_links},
    "inside of the folder": {(stage, "_can_move"): not_movable},
}


def placed(place: str) -> ExitStack:
    """As if the system or the folder were of a kind."""
    stack = ExitStack()
    for (where, name), made in PLACES[place].items():
        stack.enter_context(patch.object(where, name, made))
    return stack


def overwrites(folder: str, out: str, place: str) -> None:
    with placed(place):
        save_over(out, {}, folder=folder, overwrite=True)


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
    assert (out / "latest").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["expected", "out"]


class NthCall:
    """Calls the original, but raises (or kills the process) at the n-th call, in its place or right after it."""

    def __init__(self, original: Any, n: int, error: BaseException | None, *, after: bool = False) -> None:
        self.original, self.left, self.error, self.after = original, n, error, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            if self.after:
                self.original(*args, **kwargs)
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


def fails_at(folder: str, out: str, fault: str) -> None:
    (where, name), rank, n = FAULTS[fault]
    save_over(
        out, {(where, name): ([rank], NthCall(getattr(where, name), n, FULL_DISK))}, folder=folder, overwrite=True
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_every_rank_s_and_leaves_the_folder_as_it_was(
    ranks2: Ranks, models: str, tmp_path: Path, fault: str
) -> None:
    before = filled(tmp_path / "out")
    told = ranks2.run_expecting(SaveError, fails_at, f"{models}/{SD3}", str(tmp_path / "out"), fault)
    assert "No space left on device" in str(told[0])
    assert {str(error) for error in told} == {str(told[0])}
    assert {error.rank for error in told} == {FAULTS[fault][1]}
    assert snapshot(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


STEPS = [(os, "rename"), (os, "link"), (commit, "_exchange"), (commit, "_look_like")]  # of taking the place


@pytest.mark.parametrize("place", [place for place in PLACES if place != "without hard links"])
@pytest.mark.parametrize(("error", "after"), [(FULL_DISK, False), (KeyboardInterrupt(), True)], ids=["full", "Ctrl-C"])
def test_a_step_that_fails_puts_everything_back(
    models: str, tmp_path: Path, place: str, error: BaseException, after: bool
) -> None:
    """Each step in turn. Ctrl-C comes right after it, before the next line: it is known by then what was done."""
    out = tmp_path / "out"
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)
    stopped = 0
    for where, name in STEPS:
        before = filled(out)
        for n in range(1, 100):
            with placed(place), patch.object(where, name, NthCall(getattr(where, name), n, error, after=after)):
                try:
                    save_component(module, out, overwrite=True)
                except (SaveError, KeyboardInterrupt):
                    stopped += 1
                    assert snapshot(out) == before, f"{name} {n}"
                    assert os.listdir(tmp_path) == ["out"], f"{name} {n}"
                else:
                    break  # it takes fewer of these steps
        shutil.rmtree(out)
    assert stopped > 3


def states(parent: Path, copies: Path, save: Callable[[], Any]) -> list[Path]:
    """Copies of a folder as it is before each change that a save makes in it: what a kill at that point leaves."""
    changes = [(os, n) for n in ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "pwrite", "fsync")]
    busy = []

    def watched(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not busy:
                busy.append(True)
                shutil.copytree(parent, copies / f"{len(os.listdir(copies)):03}", symlinks=True)
                busy.clear()
            return original(*args, **kwargs)

        return call

    copies.mkdir()
    with ExitStack() as stack:
        for where, name in [*changes, (commit, "_exchange")]:
            stack.enter_context(patch.object(where, name, watched(getattr(where, name))))
        save()
    return sorted(copies.iterdir())


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_point_leaves_the_old_folder_or_the_new_one(models: str, tmp_path: Path, place: str) -> None:
    """With all else that was in it. Where files are renamed one by one, the next save puts it in order first.

    What is left beside or in it is no checkpoint that somebody could take for one, and the next save removes it.
    """
    out = tmp_path / "place" / "out"
    old = filled(out)
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)
    policy = metashard.SavePolicy(io_threads=1)
    with placed(place):
        found = states(
            out.parent, tmp_path / "states", lambda: save_component(module, out, overwrite=True, save=policy)
        )
    new = snapshot(out)
    seen = {"old": 0, "new": 0, "between": 0}
    for state in found:
        here = state / "out"
        held = {name: value for name, value in snapshot(here).items() if not name.startswith(commit.PREFIX)}
        kind = "old" if held == old else "new" if held == new else "between"
        seen[kind] += 1
        for root in stage.left_stages(here):
            assert set(os.listdir(root)) <= {commit.OPEN, commit.UNFINISHED, commit.COMPLETE, commit.REPLACED}
            for weights in root.glob("unfinished/*.safetensors"):  # what can be read is whole
                assert weights.read_bytes() in (old.get(weights.name), new.get(weights.name))
        if kind == "between":
            with pytest.raises(metashard.MetaShardError, match="was interrupted while it renamed files"):
                resolve_component(here)
        stage.Stage(here, overwrite=True).close()  # as the next save begins
        assert snapshot(here) == {"old": old, "new": new}.get(kind) or kind == "between"
        assert snapshot(here) in (old, new)
        # An empty directory may stay: nobody knows whether it is a stage that has just been made.
        assert all(left == here or not os.listdir(left) for left in state.iterdir())
        resolve_component(here)
    assert seen["old"] > 10
    assert seen["new"] > 3
    assert (seen["between"] > 3) == (place != "exchanged")


def test_files_of_others_that_come_during_the_exchange_are_kept(models: str, tmp_path: Path) -> None:
    """Written, or replaced, between the links and the exchange."""
    out, exchange = tmp_path / "out", commit._exchange
    filled(out)

    def others_go_on(*args: Any) -> bool:
        (out / "logs" / "later").write_text("kept")
        (out / "README.new").write_text("kept, too")
        os.replace(out / "README.new", out / "README.md")
        (out / "model_index.json").write_text("{}")
        return exchange(*args)

    with patch.object(commit, "_exchange", others_go_on):
        save_component(zoo.CASES[SD3].load(f"{models}/{SD3}", BF16), out, overwrite=True)
    assert (out / "logs" / "later").read_text() == "kept"
    assert (out / "README.md").read_text() == "kept, too"
    assert (out / "model_index.json").read_text() == "{}"
    assert os.listdir(tmp_path) == ["out"]


def test_what_comes_into_the_folder_during_the_save_is_not_overwritten(models: str, tmp_path: Path) -> None:
    """Two jobs that save to one new folder: the second one is refused, as if it had come later."""
    out = tmp_path / "out"
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)

    def check(*args: Any) -> None:
        filled(out)

    with patch.object(run, "_check", check), pytest.raises(SaveError, match="or pass overwrite=True") as raised:
        save_component(module, out)
    assert raised.value.phase == "commit"
    kept = snapshot(out)
    shutil.rmtree(out)
    assert kept == filled(out)
    assert os.listdir(tmp_path) == ["out"]


def test_the_current_folder_stays_the_current_folder(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not exchanged: a process would be left behind in the one that is removed."""
    (tmp_path / "logs").write_text("kept")
    monkeypatch.chdir(tmp_path)
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)
    for _ in range(2):
        save_component(module, ".", overwrite=True)
        assert sorted(os.listdir(".")) == ["config.json", "diffusion_pytorch_model.safetensors", "logs"]
        assert Path.cwd() == tmp_path


def test_a_folder_may_have_the_longest_name(models: str, tmp_path: Path) -> None:
    save_component(zoo.CASES[SD3].load(f"{models}/{SD3}", BF16), tmp_path / ("ü" * 127))
    assert os.listdir(tmp_path) == ["ü" * 127]


def test_what_cannot_be_put_back_is_kept_for_the_next_save(models: str, tmp_path: Path) -> None:
    """A rename fails, and so do all that follow."""
    before = filled(tmp_path / "out")
    module = zoo.CASES[SD3].load(f"{models}/{SD3}", BF16)
    rename, calls = os.rename, []

    def stuck(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 4:
            raise FULL_DISK
        rename(*args)

    with placed("file by file"), patch.object(os, "rename", stuck), pytest.raises(SaveError):
        save_component(module, tmp_path / "out", overwrite=True)
    assert len(os.listdir(tmp_path)) == 2
    assert snapshot(tmp_path / "out") != before
    with pytest.raises(SaveError, match="or pass overwrite=True"):
        save_component(module, tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_is_put_in_order_over_other_files(models: str, tmp_path: Path) -> None:
    """After a kill within the renames somebody has put a file there: both are kept."""
    out, left = tmp_path / "out", tmp_path / f"{commit.PREFIX}out-{'0' * 16}"
    (left / commit.REPLACED).mkdir(parents=True)
    (left / commit.UNFINISHED).mkdir()
    (left / commit.OPEN).write_text("0" * 16)
    (left / commit.REPLACED / "config.json").write_text("old")
    out.mkdir()
    (out / "config.json").write_text("of another tool")
    save_component(zoo.CASES[SD3].load(f"{models}/{SD3}", BF16), out, overwrite=True)
    assert (left / commit.REPLACED / "config.json").read_text() == "old"
    assert sorted(os.listdir(out)) == ["config.json", "diffusion_pytorch_model.safetensors"]


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


def killed_after_the_exchange(folder: str, out: str) -> None:
    killing = {(commit, "_exchange"): ([0], NthCall(commit._exchange, 1, None, after=True))}
    save_over(out, killing, folder=folder, overwrite=True)


def test_a_kill_right_after_the_exchange_leaves_the_new_folder_with_all_else(
    ranks2: Ranks, models: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kept = {name: value for name, value in filled(out).items() if "fp16" in name or value == b"kept"}
    args = (killed_after_the_exchange, f"{models}/{SD3}", str(out))
    told = ranks2.run(*args, return_exceptions=True, deaths=True, timeout=60)
    assert "the folder is the old one or the new one, whole" in str(told[1])
    zoo.CASES[SD3].load(f"{models}/{SD3}", BF16).save_pretrained(tmp_path / "expected")
    assert snapshot(out) == {**snapshot(tmp_path / "expected"), **kept}
    assert len(stage.left_stages(out)) == 1
    stage.Stage(out, overwrite=True).close()  # as the next save begins
    assert sorted(os.listdir(tmp_path)) == ["expected", "out"]


# --- bad input


@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model-00001-of-00002.safetensors"])
def test_a_folder_with_the_name_of_a_file_is_not_removed(models: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / "notes").write_text("mine")
    with pytest.raises(SaveError, match=f"{name} is a folder") as raised:
        save_component(zoo.CASES[SD3].load(f"{models}/{SD3}", BF16), tmp_path / "out", overwrite=True)
    assert raised.value.file == str(tmp_path / "out" / name)
    assert snapshot(tmp_path) == {f"out/{name}/notes": b"mine"}


CHECK = run._check


def damaged(path: Path, *args: Any) -> None:
    os.truncate(next(path.glob("*.safetensors.part")), 1000)
    CHECK(path, *args)


def saved_with_damage(folder: str, out: str) -> None:
    save_over(out, {(run, "_check"): ([0], damaged)}, folder=folder)


def test_a_file_that_is_damaged_before_it_takes_its_place_is_a_failed_save(
    ranks2: Ranks, models: str, tmp_path: Path
) -> None:
    for error in ranks2.run_expecting(SaveError, saved_with_damage, f"{models}/{SD3}", str(tmp_path / "out")):
        assert "diffusion_pytorch_model.safetensors is not what was written" in str(error)
        assert error.file.endswith("diffusion_pytorch_model.safetensors.part")
        assert error.phase == "check"
    with patch.object(run, "_check", damaged), pytest.raises(SaveError) as raised:
        save_component(zoo.CASES[SD3].build(), tmp_path / "out")
    assert isinstance(raised.value.__cause__, CheckpointError)
    assert os.listdir(tmp_path) == []


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
    if kind == "a path in the variant":
        kwargs["variant"] = "../fp16"
    nothing = type("Usage", (), {"free": 1000})
    with patch.object(shutil, "disk_usage", lambda path: nothing if kind == "no space" else None):
        save_component(module, out, save=POLICY, **kwargs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a full folder", "or pass overwrite=True"),
        ("a file", "is a file; expected a folder"),
        ("an empty path", "expected a path"),
        ("a link to itself", "is a link that leads to itself"),
        ("no permission", "cannot be written"),
        ("no space", "has room for 1000 B"),
        ("meta", "tensors are on the meta device"),
        ("no save_pretrained", "has no save_pretrained"),
        ("other arguments", "Ranks differ in arguments"),
        ("unknown option", "expected one of leave_out, merge"),
        ("a path in the variant", "expected a part of a file name"),
    ],
)
def test_every_rank_refuses_bad_input(ranks2: Ranks, models: str, tmp_path: Path, kind: str, message: str) -> None:
    out = tmp_path / "out"
    if kind == "a full folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    if kind == "a file":
        out.write_text("mine")
    if kind == "a link to itself":
        out.symlink_to("out")
    before = snapshot(tmp_path)
    target = {"no permission": "/proc/metashard/out", "an empty path": ""}.get(kind, str(out))
    errors = ranks2.run_expecting(metashard.MetaShardError, refused, f"{models}/{SD3}", target, kind)
    assert all(message in str(error) for error in errors), errors
    assert all(isinstance(error, SaveError) for error in errors)
    assert snapshot(tmp_path) == before
    assert [name for name in os.listdir(tmp_path) if name != "out"] == []


def test_a_plain_tensor_with_gaps_is_saved(tmp_path: Path) -> None:
    """transformers saves such a buffer; the writers take contiguous memory."""
    module = zoo.CASES["T5EncoderModel"].build()
    module.register_buffer("gaps", torch.arange(12.0)[::3])
    module.register_buffer("turned", torch.arange(12.0).view(3, 4).t())
    save_component(module, tmp_path / "saved")
    module.save_pretrained(tmp_path / "expected")
    assert different(tmp_path / "saved", tmp_path / "expected") == []


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


def saved_to_no_path_on_one_rank(folder: str, out: str) -> None:
    module, _ = load_case(zoo.CASES[SD3], folder, BF16, {}, cpu_mesh())
    save_component(module, None if dist.get_rank() else out, save=POLICY)  # type: ignore[arg-type]


def test_a_folder_that_is_no_path_on_one_rank_is_an_error_on_all(ranks2: Ranks, models: str, tmp_path: Path) -> None:
    errors = ranks2.run_expecting(SaveError, saved_to_no_path_on_one_rank, f"{models}/{SD3}", str(tmp_path / "out"))
    assert all("Ranks differ in arguments" in str(error) for error in errors)


def saved_by_wrong_calls(folder: str, out: str, calls: list[dict[str, Any]]) -> list[str]:
    module, _ = load_case(zoo.CASES[SD3], folder, BF16, {}, cpu_mesh())
    told = []
    for call in calls:
        with pytest.raises(SaveError) as caught:
            save_component(module, **{"folder": out, "save": POLICY, **call})
        told.append(str(caught.value))
    save_component(module, Path(out, "named"), dtype="bfloat16", save=POLICY)  # type: ignore[arg-type]
    return told


def test_wrong_calls_name_the_argument(ranks1: Ranks, models: str, tmp_path: Path) -> None:
    wrong = {
        "folder": [None, 3, "", "a\0b"],
        "max_shard_size": [0, -1, "0GB", "-5GB", "5XB", "", float("nan"), True, None],
        "variant": ["", "a b", "a/b", 3, "x\0"],
        "dtype": ["bf17", 3],
    }
    calls = [{name: value} for name, values in wrong.items() for value in values]
    (told,) = ranks1.run(saved_by_wrong_calls, f"{models}/{SD3}", str(tmp_path / "out"), calls)
    for ((name, value),), text in zip((call.items() for call in calls), told, strict=True):
        assert f"{name}={value!r}: expected" in text
    assert os.listdir(tmp_path / "out") == ["named"]
