"""saving_speed in its smallest form: bytes and files that agree, a verdict that can fail, bad input. No times."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import saving_speed
from tools.make_checkpoint import write_pipeline

# isort: split
# Found by what the benchmarks put on the path; the same objects that they use.
import preflight
import setting


def call(*arguments: Any) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = saving_speed.main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("sd3"), "sd3-small", layers=2, config=setting.TINY).path


def test_the_figures_agree_with_the_checkpoint(sd3: Path, tmp_path: Path) -> None:
    """Every byte written once, our files those of gather; the report and the JSON say the same; nothing is left."""
    (tmp_path / "work").mkdir()
    arguments = ["--model-path", sd3, "--component", "transformer", "--quick", "--workdir", tmp_path / "work"]
    code, out, err = call(*arguments, "--json", tmp_path / "all.json", "--markdown", tmp_path / "all.md")
    assert code == 0, err
    document = json.loads((tmp_path / "all.json").read_text())
    nbytes = 2 * setting.count_elements(preflight.check_weights(sd3, "transformer").paths)  # in bf16
    assert [one["flow"] for one in document["flows"]] == list(saving_speed.FLOWS)
    for one in document["flows"]:
        assert (one["nproc"], one["nbytes"], len(one["runs"])) == (2, nbytes, 1)
        assert one["median"] == one["runs"][0]["seconds"] >= one["before_flush"] > 0
        assert len(one["runs"][0]["peaks"]) == 2
        assert f"{one['median']:.2f}" in out
    written = document["flows"][0]["runs"][0]["written"]
    assert sum(written) == nbytes
    assert all(written)
    assert document["wrong"] == []
    assert (tmp_path / "all.md").read_text() in out
    assert list((tmp_path / "work").iterdir()) == []


def test_another_byte_or_file_is_a_difference(tmp_path: Path) -> None:
    for name in ("ours", "gather"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").write_bytes(b"same")
        (tmp_path / name / "b.safetensors").write_bytes(name[:4].encode())
        (tmp_path / name / "config.json").write_text(name)
    (tmp_path / "ours" / "model.index.json").write_text("{}")
    found = saving_speed.differences(tmp_path / "ours", tmp_path / "gather")
    assert found == ["b.safetensors", "model.index.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--layers", "-1"], "--layers must be at least 1, got -1"),
        (["--family", "sd9"], "unknown family 'sd9'"),
        (["--model-path", "nowhere"], "nowhere: no such folder"),
        (["--workdir", "/proc/version/work"], "/proc/version is a file"),
        (["--json", "/proc/version/all.json"], "expected the name of a file in a folder that exists"),
        (["--markdown", "/tmp"], "--markdown /tmp: expected the name of a file"),
        (["--device", "nope"], "--device nope: expected cpu"),
        (["--backend", "cpu:nope"], "torch has no 'nope' here"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    code, _, err = call(*arguments)
    assert code == preflight.BAD_INPUT
    assert message in err
    assert err.startswith("saving_speed: ")
    assert err.count("\n") == 1


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 1 << 20)
    code, _, err = call("--quick", "--workdir", tmp_path)
    assert code == preflight.BAD_INPUT
    assert "too little memory: all shards and what gather holds on rank 0 takes" in err
    assert list(tmp_path.iterdir()) == []
