"""The command line: under a real torchrun once, else on ranks that are there already."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from metashard import cli
from metashard.fill.reader import Reader
from tests import zoo
from tests.ranks import Ranks


def torchrun(*args: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "metashard", *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


class Ran(NamedTuple):
    """What the command line did on one rank."""

    code: int
    stdout: str
    stderr: str


def run_cli(*args: str) -> Ran:
    """The command line in the process group that is there; runs on the ranks."""
    stdout, stderr = io.StringIO(), io.StringIO()
    rank = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        mock.patch.dict(os.environ, rank),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        code = cli.main(args)
    return Ran(code, stdout.getvalue(), stderr.getvalue())


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


def test_load_prints_json(pipeline: Path, ranks2: Ranks):
    first, other = ranks2.run(run_cli, "load", str(pipeline), "--component", "transformer", "--dtype", "bf16", "--json")
    report = json.loads(first.stdout)
    assert report["strategy"] == "direct"
    assert report["world_size"] == len(report["ranks"]) == 2
    assert set(report["dtype_counts"]) == {"bfloat16"}
    assert (first.code, other.code, other.stdout) == (0, 0, "")


def test_an_error_is_one_line_and_exit_code_2(pipeline):
    command = [sys.executable, "-m", "metashard", "load", str(pipeline), "--component", "transfomer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "ComponentError" in done.stderr
    assert "transformer" in done.stderr


def test_verify_compares_every_tensor_with_its_file(pipeline: Path, ranks2: Ranks):
    first, other = ranks2.run(run_cli, "verify", str(pipeline), "--component", "transformer", "--dtype", "bf16")
    assert (first.code, other.code, other.stdout) == (0, 0, "")
    tensors = len(zoo.CASES["SD3Transformer2DModel"].build().state_dict())
    (line,) = first.stdout.splitlines()
    assert line.startswith(f"metashard verify: {tensors} tensors, ")
    assert line.endswith(": 0 mismatches")


def flip_a_byte(*args: str) -> Ran:
    """The command line over a reader that changes one byte of a tensor."""
    read = Reader._read

    def flipping(self, stretch, number):
        read(self, stretch, number)
        if stretch.entry.key == "proj_out.bias" and stretch.start == 0:
            stretch.into.view(torch.uint8)[0] ^= 1

    with mock.patch.object(Reader, "_read", flipping):
        return run_cli(*args)


def test_verify_names_the_tensor_that_was_loaded_wrong(pipeline: Path, ranks1: Ranks):
    command = ["verify", str(pipeline), "--component", "transformer"]
    ((code, stdout, _),) = ranks1.run(flip_a_byte, *command, "--strategy", "stream")
    assert code == 1
    header, row, summary = stdout.splitlines()
    assert header.split()[:3] == ["tensor", "rank", "elements"]
    assert row.split()[:3] == ["proj_out.bias", "0", "1"]
    assert "diffusion_pytorch_model.safetensors at byte " in row
    assert summary.endswith(": 1 mismatches")
    ((code, stdout, _),) = ranks1.run(flip_a_byte, *command, "--json")
    assert code == 1
    (mismatch,) = json.loads(stdout)["mismatches"]
    assert (mismatch["name"], mismatch["key"], mismatch["rank"]) == ("proj_out.bias", "proj_out.bias", 0)


def test_verify_says_what_it_cannot_compare(pipeline: Path, ranks2: Ranks):
    first, other = ranks2.run(run_cli, "verify", str(pipeline / "nothing"), "--json")
    assert (first.code, other) == (2, Ran(2, "", ""))
    assert first.stdout == ""
    assert first.stderr.count("metashard: ") == 1  # rank 0 alone prints
