"""A fixed number of the fuzzer's cases, and that the fuzzer sees what is wrong (tools/fuzz.py runs for longer)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from metashard import checkpoint, files
from tests.ranks import Ranks
from tools import fuzz, fuzz_loads

HEADERS, FOLDERS = 600, 120


def run(case: Callable[[int, Path, fuzz.Tally], None], folder: Path, count: int) -> fuzz.Tally:
    tally = fuzz.Tally()
    for seed in range(count):
        case(seed, folder, tally)
    return tally


def test_headers_are_refused_or_right(tmp_path: Path) -> None:
    tally = run(fuzz.header_case, tmp_path, HEADERS)
    assert (tally.crashes, tally.silent) == ([], [])
    assert HEADERS / 10 < tally.accepted < HEADERS / 2


def test_folders_are_refused_or_right(tmp_path: Path) -> None:
    tally = run(fuzz.index_case, tmp_path, FOLDERS)
    assert (tally.crashes, tally.silent) == ([], [])
    assert FOLDERS / 10 < tally.accepted < FOLDERS / 2


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (checkpoint, "_check_ranges", lambda *a, **k: None),
        (checkpoint, "_are_counts", lambda value: isinstance(value, list)),
        (checkpoint, "MAX_COUNT", 7),
        (checkpoint, "is_text", lambda name: True),
        (files, "_count", int),
        (files, "_no_number", float),
    ],
    ids=["ranges", "counts", "too strict", "text", "minus nothing", "constants"],
)
def test_a_spoilt_reader_is_seen(monkeypatch: Any, tmp_path: Path, module: Any, name: str, broken: Any) -> None:
    monkeypatch.setattr(module, name, broken)
    tally, seed = fuzz.Tally(), 0
    while not (tally.crashes or tally.silent):
        assert seed < 10 * HEADERS
        fuzz.header_case(seed, tmp_path, tally)
        seed += 1


@pytest.mark.parametrize("broken", ["check_file_name", "check_inside"])
def test_a_reader_that_leaves_the_folder_is_seen(monkeypatch: Any, tmp_path: Path, broken: str) -> None:
    for module in ("checkpoint", "component", "weight_files"):
        monkeypatch.setattr(f"metashard.{module}.{broken}", lambda *a, **k: None, raising=False)
    if broken == "check_file_name":  # the one behind it
        monkeypatch.setattr("metashard.component.check_inside", lambda *a, **k: None)
    tally, seed = fuzz.Tally(), 0
    while not any("lies outside" in text for text in tally.silent):
        assert seed < 10 * FOLDERS
        fuzz.index_case(seed, tmp_path, tally)
        seed += 1


def test_the_oracle_reads_what_safetensors_writes(tmp_path: Path) -> None:
    empty = torch.zeros(0, 2, dtype=torch.bfloat16)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True), "c": empty}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    raw = (tmp_path / "x.safetensors").read_bytes()
    found = fuzz.oracle(raw)
    assert found is not None
    kinds = {key: item[:2] for key, item in found.items()}
    assert kinds == {"a": ("F32", (2, 3)), "b": ("BOOL", ()), "c": ("BF16", (0, 2))}
    for key, tensor in tensors.items():
        assert raw[found[key][2] :][: found[key][3]] == bytes(tensor.untyped_storage())
    assert fuzz.oracle(raw[:-1]) is None
    assert fuzz.second_opinion(raw[:-1]) is None


@pytest.mark.parametrize(("world", "seeds"), [(2, range(2)), (4, range(2))])
def test_random_checkpoints_load_as_written(tmp_path: Path, request: Any, world: int, seeds: range) -> None:
    ranks = request.getfixturevalue(f"ranks{world}")
    tally = fuzz.Tally()
    for seed in seeds:
        fuzz.load_cases(seed, tmp_path, tally, ranks)
    assert tally.crashes == []
    assert tally.accepted == len(seeds)


def test_a_load_that_differs_by_a_byte_is_seen(tmp_path: Path, ranks1: Ranks) -> None:
    case = fuzz_loads.describe(1, 1)
    fuzz_loads.write(case, tmp_path)
    file = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    (found,) = ranks1.run(fuzz_loads.run_case, 1, str(tmp_path), 1, fuzz_loads.LOADS[:1])
    assert any("bytes differ" in text for text in found)


def test_cases_cover_what_they_should() -> None:
    cases = [fuzz_loads.describe(seed, world) for world in (1, 2, 4) for seed in range(60)]
    tensors = [tensor for case in cases for tensor in case["tensors"]]
    assert {dtype for _, dtype, _, _ in tensors} == {*fuzz_loads.TRAINABLE, *fuzz_loads.FROZEN}
    assert {kind for *_, kind in tensors} == {"trained", "frozen", "buffer"}
    assert any(shape == [] for _, _, shape, _ in tensors)
    assert any(0 in shape for _, _, shape, _ in tensors)
    assert {tuple(case["mesh"]) for case in cases} == {(1,), (2,), (2, 1), (1, 2), (4,), (2, 2)}
    for fact in ("split", "second_dim", "ignored", "one_group"):
        assert {bool(case[fact]) for case in cases} == {True, False}


def test_the_command_prints_one_closing_line_with_the_counts(capsys: Any, monkeypatch: Any) -> None:
    command = ["--minutes", "0.02", "--only", "headers"]
    assert fuzz.main(command) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"fuzz: \d+ cases \(\d+ headers; \d+ accepted and checked\), 0 crashes, 0 silent accepts", line)
    monkeypatch.setattr(checkpoint, "_check_ranges", lambda *a, **k: None)
    assert fuzz.main(command) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert not last.endswith(" 0 silent accepts"), json.dumps(last)
