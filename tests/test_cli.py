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


def test_verify_compares_every_tensor_with_its_file(pipeline):
    done = torchrun("verify", str(pipeline), "--component", "transformer", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    tensors = len(zoo.CASES["SD3Transformer2DModel"].build().state_dict())
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"metashard verify: {tensors} tensors, ")
    assert line.endswith(": 0 mismatches")


FLIPS_A_BYTE = """
import sys
import torch
from metashard.cli import main
from metashard.fill.reader import Reader

read = Reader._read

def flipping(self, stretch, number):
    read(self, stretch, number)
    if stretch.entry.key == "proj_out.bias" and stretch.start == 0:
        stretch.into.view(torch.uint8)[0] ^= 1

Reader._read = flipping
sys.exit(main(sys.argv[1:]))
"""


def test_verify_names_the_tensor_that_was_loaded_wrong(pipeline):
    command = [sys.executable, "-c", FLIPS_A_BYTE, "verify", str(pipeline), "--component", "transformer"]
    for options in (["--strategy", "stream"], ["--json"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stderr
        if options != ["--json"]:
            header, row, summary = done.stdout.splitlines()
            assert header.split()[:3] == ["tensor", "rank", "elements"]
            assert row.split()[:3] == ["proj_out.bias", "0", "1"]
            assert "diffusion_pytorch_model.safetensors at byte " in row
            assert summary.endswith(": 1 mismatches")
        else:
            (mismatch,) = json.loads(done.stdout)["mismatches"]
            assert (mismatch["name"], mismatch["key"], mismatch["rank"]) == ("proj_out.bias", "proj_out.bias", 0)


def test_verify_says_what_it_cannot_compare(pipeline):
    done = torchrun("verify", str(pipeline / "nothing"), "--json")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("metashard: ") == 1  # rank 0 alone prints
