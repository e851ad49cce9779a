"""The weight benchmarks in their smallest form: figures that agree with each other, checksums, bad input. No times."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks import weight_loading, weight_loading_comparison

from .ranks import Ranks

# isort: split
# Found by what the benchmarks put on the path; the same objects that they use.
import preflight
import weight_cli
from weight_modes import DIRECT, INDEPENDENT, Held, Mode, touch

ROOT = Path(__file__).resolve().parents[1]
WHOLE = ["independent", "broadcast", "broadcast/async"]
# Every dtype and shape that is odd somewhere: 0-d, empty, rows fewer than ranks, fp8, bool, starts off 8 bytes.
TENSORS = {
    "a.matrix": torch.arange(15, dtype=torch.float32).reshape(5, 3),
    "a.scalar": torch.tensor(3.5),
    "b.empty": torch.empty(0, 4),
    "b.row": torch.arange(7, dtype=torch.float32).reshape(1, 7).bfloat16(),
    "c.bytes": torch.arange(3, dtype=torch.uint8),
    "c.mask": torch.tensor([True, False, True, True, False]),
    "d.int": torch.arange(12).reshape(4, 3),
    "d.fp8": torch.arange(9, dtype=torch.float32).reshape(3, 3).to(torch.float8_e4m3fn),
    "e.half": torch.arange(2 * 3 * 5, dtype=torch.float16).reshape(2, 3, 5),
}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())
Outcome = tuple[int, str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a subfolder of two weight files and no config: the benchmarks need none."""
    root = tmp_path_factory.mktemp("model")
    (root / "unit").mkdir()
    names = sorted(TENSORS)
    for number, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: TENSORS[name] for name in part}, root / "unit" / f"model-0000{number}-of-00002.safetensors")
    return root


def call(script: str, arguments: list[str]) -> Outcome:
    """(exit code, stdout, stderr) of a benchmark's `main` in this process; runs on the ranks."""
    main = {"weight_loading": weight_loading, "weight_loading_comparison": weight_loading_comparison}[script].main
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def quick(model: Path, *flags: str) -> list[str]:
    return ["--model-path", str(model), "--subfolder", "unit", "--warmup", "0", "--repeats", "2", *flags]


def check_figures(document: dict[str, Any], world: int) -> None:
    """What holds between the figures of a results file, whatever the times."""
    assert document["world_size"] == world
    assert document["checksums_agree"] is True
    for mode in document["modes"]:
        assert len(mode["seconds"]) == document["repeats"] == 2
        assert mode["tensors"] == len(TENSORS)
        assert mode["checkpoint_bytes"] == NBYTES
        assert len(mode["rank_bytes"]) == len(mode["digests"]) == world
        assert mode["best_seconds"] == min(mode["seconds"]) <= mode["average_seconds"]
        assert mode["average_seconds"] == pytest.approx(sum(mode["seconds"]) / 2)
        assert mode["checkpoint_gbps"] == pytest.approx(NBYTES / mode["average_seconds"] / 1e9)
        assert mode["rank_gbps"] == pytest.approx(max(mode["rank_bytes"]) / mode["average_seconds"] / 1e9)


def test_the_comparison_on_two_ranks(ranks2: Ranks, model: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    outcomes = ranks2.run(call, "weight_loading_comparison", quick(model, "--json", str(results)))
    assert [(code, err) for code, _, err in outcomes] == [(0, "")] * 2
    assert outcomes[1][1] == ""  # rank 0 alone prints
    document = json.loads(results.read_text())
    check_figures(document, 2)
    modes = {mode["mode"]: mode for mode in document["modes"]}
    assert list(modes) == [*WHOLE, "scatter", "direct"]

    # Every rank has all, or every row is on one rank (and what has no rows on both).
    scalar = TENSORS["a.scalar"].nbytes
    for name, mode in modes.items():
        assert mode["whole"] is (name in WHOLE)
        assert sum(mode["rank_bytes"]) == (2 * NBYTES if mode["whole"] else NBYTES + scalar)
        expected = [{"0", "1"}, {"0", "1"}] if mode["whole"] else [{"0"}, {"1"}]
        assert [set(mine) for mine in mode["digests"]] == expected
    parts = {digest for mode in modes.values() for mine in mode["digests"] for digest in mine.items()}
    assert len(parts) == 2

    for baseline in ("independent", "broadcast"):
        base = modes[baseline]["average_seconds"]
        rows = {row["mode"]: row for row in document["speedups"][baseline]}
        assert set(rows) == set(modes) - {baseline}
        for name, row in rows.items():
            assert row["speedup"] == pytest.approx(base / modes[name]["average_seconds"])
            assert row["seconds_saved"] == pytest.approx(base - modes[name]["average_seconds"])
    printed = outcomes[0][1]
    for wanted in ("checkpoint GB/s", "rank GB/s", "average s", "best s", "seconds saved", "against broadcast"):
        assert wanted in printed


def test_weight_loading_in_one_process_from_a_cold_cache(model: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    code, out, err = call("weight_loading", quick(model, "--cold", "--json", str(results)))
    assert (code, err) == (0, "")
    assert not dist.is_initialized()
    document = json.loads(results.read_text())
    check_figures(document, 1)
    assert document["cache"] == "cold"
    assert [(mode["mode"], mode["rank_bytes"]) for mode in document["modes"]] == [
        ("cpu", [NBYTES]),
        ("broadcast", [NBYTES]),
    ]
    assert "Checksums agree" in out


def test_every_byte_is_touched() -> None:
    """Wherever a tensor starts in its file, another value of any byte is another sum."""
    flat = torch.arange(64, dtype=torch.uint8)
    for start, stop in ((0, 64), (8, 56), (3, 61), (1, 6), (7, 8)):
        view = flat[start:stop]
        before = touch(view)
        for index in range(stop - start):
            view[index] += 1
            assert touch(view) != before
            view[index] -= 1
    assert touch(torch.empty(0, 3)) == 0


# ---- what is wrong is seen ------------------------------------------------------------------------------------------


def spoiled(mode: Mode, key: str) -> Mode:
    """A mode that ends with one wrong byte on the last rank."""

    def prepare(setting: Any) -> Any:
        load = mode.prepare(setting)

        def run() -> Held:
            held = load()
            if setting.rank == dist.get_world_size() - 1:
                held[key].reshape(-1)[-1:] += 1
            return held

        return run

    return replace(mode, name=f"spoiled {mode.name}", prepare=prepare)


def compare_spoiled(model: str, key: str) -> list[tuple[int, str]]:
    """(exit code, stdout) with a whole mode and with a sharded mode spoiled; runs on the ranks."""
    args = weight_cli.parser("").parse_args(quick(Path(model)))
    told = []
    for mode in (INDEPENDENT, DIRECT):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = weight_cli.run(args, (INDEPENDENT, spoiled(mode, key)))
        told.append((code, out.getvalue()))
    return told


def test_one_wrong_byte_on_one_rank_is_exit_code_1_on_all(ranks2: Ranks, model: Path) -> None:
    """The last row of a matrix: part 1 is wrong where rank 1 has all, and where it has its shard."""
    leader, other = ranks2.run(compare_spoiled, str(model), "a.matrix")
    assert [code for code, _ in leader] == [code for code, _ in other] == [1, 1]
    for (_, out), name in zip(leader, ("spoiled independent", "spoiled direct"), strict=True):
        assert f"{name} on rank 1: part 1 differs from that of independent on rank 0" in out
        assert "on rank 0: part" not in out
        assert "part 0 differs" not in out


# ---- bad input ------------------------------------------------------------------------------------------------------


def bad_models(root: Path) -> None:
    """Folders that cannot be loaded, by what is wrong with them."""
    for name in ("nothing", "truncated", "no bytes", "pointer"):
        (root / name).mkdir()
    save_file({"x": torch.zeros(8)}, root / "truncated" / "model.safetensors")
    with open(root / "truncated" / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 1)
    save_file({"x": torch.zeros(0)}, root / "no bytes" / "model.safetensors")
    (root / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (root / "index").mkdir()
    (root / "index" / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("script", ["weight_loading", "weight_loading_comparison"])
def test_bad_input_is_one_line_and_exit_code_2(script: str, model: Path, tmp_path: Path) -> None:
    bad_models(tmp_path)
    unit = ["--model-path", str(model), "--subfolder", "unit"]
    calls = [
        (["--model-path", str(tmp_path / "gone")], "no such folder"),
        (["--model-path", str(tmp_path / "truncated" / "model.safetensors")], "is a file"),
        (["--model-path", str(model), "--subfolder", "vae"], "no subfolder 'vae'; there are weights in: unit"),
        (["--model-path", str(model)], "has no safetensors files; there are weights in: unit"),
        (["--model-path", str(tmp_path / "nothing")], "has no safetensors files"),
        (["--model-path", str(tmp_path / "truncated")], "truncated"),
        (["--model-path", str(tmp_path / "no bytes")], "hold no bytes"),
        (["--model-path", str(tmp_path / "pointer")], "git-lfs"),
        (["--model-path", str(tmp_path / "index")], "model-00001-of-00001.safetensors"),
        ([*unit, "--repeats", "0"], "--repeats must be at least 1, got 0"),
        ([*unit, "--warmup", "-1"], "--warmup must be at least 0, got -1"),
        ([*unit, "--json", str(tmp_path / "gone" / "results.json")], "in a folder that exists"),
    ]
    for arguments, says in calls:
        code, out, err = call(script, arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), (arguments, err)
        assert err.startswith(f"{script}: ")
        assert says in err


def test_too_little_memory_and_no_permission_to_evict(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(preflight, "available_memory", lambda: 8 * NBYTES - 1)
    code, _, err = call("weight_loading", quick(model))
    assert (code, err.count("\n")) == (2, 1)
    assert "too little memory: every rank loading all of it takes 8 x" in err
    monkeypatch.setattr(preflight, "available_memory", lambda: 8 * NBYTES)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK)
    code, _, err = call("weight_loading", quick(model, "--cold"))
    assert (code, err.count("\n")) == (2, 1)
    assert "no permission to evict" in err


def test_files_that_stay_in_the_cache_are_no_cold_run() -> None:
    files = [Path("model/x.safetensors")]
    preflight.check_evicted(math.nan, files)  # nobody can tell
    preflight.check_evicted(0.0, files)
    with pytest.raises(preflight.UsageError, match="40% of the files in model stay in the page cache"):
        preflight.check_evicted(0.4, files)


def on_one_rank(model: str) -> Outcome:
    """A folder that rank 1 alone does not see; runs on the ranks."""
    return call("weight_loading_comparison", ["--model-path", model if dist.get_rank() == 0 else f"{model}/gone"])


def test_what_one_rank_cannot_do_is_the_same_line_on_all(ranks2: Ranks, model: Path) -> None:
    outcomes = ranks2.run(on_one_rank, f"{model}/unit")
    assert outcomes[0] == outcomes[1]
    code, out, err = outcomes[0]
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith("no such folder; pass the folder of a model (rank 1)\n")


def test_under_torchrun_every_rank_leaves_with_the_line_and_exit_code_2(model: Path) -> None:
    script = ROOT / "benchmarks" / "weight_loading.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    finished = subprocess.run(
        [*command, "--model-path", str(model), "--subfolder", "vae"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    lines = finished.stderr.splitlines()
    ours = [line for line in lines if line.startswith("weight_loading: ")]
    assert len(ours) == 2
    assert len(set(ours)) == 1
    assert sum("exitcode  : 2" in line for line in lines) == 2
    assert not any('weight_loading.py", line' in line for line in lines)  # torchrun has a traceback of its own


# ---- what is checked before anything is written or loaded -----------------------------------------------------------


def test_disk_is_checked_where_the_folder_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    preflight.check_disk(tmp_path / "not" / "yet", 0)
    with pytest.raises(preflight.UsageError, match="is a file"):
        preflight.check_disk(tmp_path / "file" / "below", 0)
    with pytest.raises(preflight.UsageError, match="too little disk"):
        preflight.check_disk(tmp_path / "not" / "yet", 1 << 60)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(preflight.UsageError, match="no permission to write"):
        preflight.check_disk(tmp_path, 0)


def test_memory_is_checked_for_all_ranks_of_the_host_together() -> None:
    available = preflight.available_memory()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    preflight.check_memory(available // 100, 4)
    with pytest.raises(preflight.UsageError, match="takes 4 x"):
        preflight.check_memory(available, 4)
