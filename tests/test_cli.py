"""The command line, under a real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import zoo


def torchrun(*args: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "metashard", *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(folder / "transformer")
    index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_load_prints_the_report(pipeline):
    done = torchrun("load", str(pipeline), "--component", "transformer", "--strategy", "auto", "--digest")
    assert done.returncode == 0, done.stderr
    assert "metashard: direct on 2 ranks" in done.stdout
    assert done.stdout.count("metashard: ") == 1  # rank 0 alone prints
    assert "digest of rank 1: " in done.stdout


def test_load_prints_json(pipeline):
    done = torchrun("load", str(pipeline), "--component", "transformer", "--dtype", "bf16", "--json")
    report = json.loads(done.stdout)
    assert report["strategy"] == "direct"
    assert report["world_size"] == len(report["ranks"]) == 2
    assert set(report["dtype_counts"]) == {"bfloat16"}


def test_an_error_is_one_line_and_exit_code_2(pipeline):
    command = [sys.executable, "-m", "metashard", "load", str(pipeline), "--component", "transfomer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "ComponentError" in done.stderr
    assert "transformer" in done.stderr
