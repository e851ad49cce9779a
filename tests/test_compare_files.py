"""Two checkpoints, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from metashard import compare_files
from metashard.cli import main
from metashard.compare_files import compare_checkpoints

from . import zoo


def test_how_a_checkpoint_is_cut_into_files_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_files, "_PIECE_BYTES", 256)
    model = zoo.CASES["SD3Transformer2DModel"].build()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    found = compare_checkpoints(tmp_path / "one", tmp_path / "many")
    assert found.differences == ()
    assert found.nbytes == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert main(["verify", str(tmp_path / "one"), "--against", str(tmp_path / "many")]) == 0
    assert "0 differences" in capsys.readouterr().out


def test_every_difference_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = {
        "same": torch.arange(9.0),
        "not a number": torch.tensor([float("nan"), 1.0]),
        "values": torch.arange(9.0),
        "dtype": torch.zeros(2),
        "shape": torch.zeros(2, 3),
        "first": torch.zeros(1),
    }
    there = {**here, "dtype": torch.zeros(2).half(), "shape": torch.zeros(3, 2), "second": torch.zeros(1)}
    there["values"] = torch.tensor([0, 1, 2, 30, 4, 50, 6, 7, 8.0])
    del there["first"]
    for name, tensors in (("a", here), ("b", there)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "x.safetensors")
    found = {
        d.key: (d.what, d.here, d.there, d.elements)
        for d in compare_checkpoints(tmp_path / "a", tmp_path / "b").differences
    }
    assert found == {
        "dtype": ("dtype", "torch.float32", "torch.float16", 0),
        "first": ("only here", "", "", 0),
        "second": ("only there", "", "", 0),
        "shape": ("shape", "(2, 3)", "(3, 2)", 0),
        "values": ("values", "3.0", "30.0", 2),
    }
    assert main(["verify", str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 5


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (".", ".", "no safetensors files"),
        (".", "", "An empty path"),
        ("", ".", "An empty path"),
        (".", "absent", "absent does not exist"),
        ("absent", ".", "absent does not exist"),
        (".", "file", "file is a file"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one: str,
    other: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["verify", one, "--against", other]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


@pytest.mark.parametrize("option", [["--lora"], ["--dtype", "bf16"], ["--replicas", "2"], ["--strategy", "stream"]])
def test_what_only_a_load_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    assert main(["verify", str(tmp_path), "--against", str(tmp_path), *option]) == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err


def test_without_a_config_the_index_decides_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, name in ((one, "model-1.safetensors"), (other, "model.safetensors")):
        folder.mkdir()
        save_file({"x": torch.ones(2)}, folder / name)
    save_file({"x": torch.zeros(2)}, one / "stale.safetensors")
    (one / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-1.safetensors"}}))
    assert main(["verify", str(one), "--against", str(other)]) == 0
    assert "0 differences" in capsys.readouterr().out
    assert main(["verify", str(one), "--against", str(other), "--variant", "fp16"]) == 2
