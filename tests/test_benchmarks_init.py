"""init_latency and peak_memory in their smallest form: figures that agree with each other, verdicts, bad input."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks import init_latency, peak_memory
from tools import compare_digests
from tools.make_checkpoint import write_pipeline

# isort: split
# Found by what the benchmarks put on the path; the same objects that they use.
import charts
import held
import peers
import preflight
import setting
from adapter import Adapter
from memory import Memory
from phases import Stretch, phase, seconds_by_phase, take_marked

from tests import benchmark_flows

WAN = dict(num_attention_heads=2, attention_head_dim=16, text_dim=32, freq_dim=32, ffn_dim=64, rope_max_seq_len=32)
OURS = ["direct", "stream/scatter", "rank0/scatter"]
MOST_BYTES = 80_000  # of a picture


@dataclass(frozen=True)
class Outcome:
    """What a script left behind."""

    code: int
    stdout: str
    stderr: str
    out: Path

    def text(self, suffix: str) -> str:
        return self.file(suffix).read_text()

    def json(self) -> Any:
        return json.loads(self.text(".json"))

    def file(self, suffix: str) -> Path:
        (found,) = self.out.glob(f"*{suffix}")
        return found


def call(script: Any, out: Path, *arguments: Any) -> Outcome:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = script.main([*map(str, arguments), "--out", str(out)])
    return Outcome(code, stdout.getvalue(), stderr.getvalue(), out)


@pytest.fixture(scope="module")
def flows() -> Any:
    """With the flows among ours that load something else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("other_bytes", "other_adapter", "fails"):
            patch.setitem(peers.OURS, name, getattr(benchmark_flows, name))
        yield


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("sd3"), "sd3-small", layers=2, config=setting.TINY).path


@pytest.fixture(scope="module")
def plain(sd3: Path, flows: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Twice two strategies, a public flow and two that are wrong, on an install without matplotlib."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        arguments = ["--model-path", sd3, "--component", "transformer", "--nproc", 2, "--repeats", 1]
        arguments += ["--flows", *OURS, "dcp", "other_bytes"]
        return call(init_latency, tmp_path_factory.mktemp("plain"), *arguments)


@pytest.fixture(scope="module")
def lora(flows: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two experts, each with an adapter; one flow draws it from another seed."""
    experts = write_pipeline(tmp_path_factory.mktemp("wan"), "wan2.2-a14b", layers=1, config=WAN)
    arguments = ["--model-path", experts.path, "--component", *experts.components, "--nproc", 2, "--repeats", 1]
    arguments += ["--lora", "--rank", 4, "--flows", "direct", "rank0_broadcast", "other_adapter"]
    return call(init_latency, tmp_path_factory.mktemp("lora"), *arguments)


@pytest.fixture(scope="module")
def memory(sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    arguments = ["--model-path", sd3, "--component", "transformer", "--nproc", 2]
    return call(peak_memory, tmp_path_factory.mktemp("memory"), *arguments)


def promises(outcome: Outcome) -> dict[tuple[str, str], bool]:
    return {(check["flow"], check["promise"]): check["ok"] for check in outcome.json()["checks"]}


def test_a_flow_that_loads_other_bytes_differs_and_the_exit_code_says_so(plain):
    expected = dict.fromkeys(["before", *OURS, "dcp"], True) | {"other_bytes": False}
    assert promises(plain) == {(flow, "shards"): ok for flow, ok in expected.items()}
    assert plain.code == 1
    rows = {line.split("|")[1].strip(): line for line in plain.text(".md").splitlines() if line.startswith("| ")}
    assert {flow for flow in expected if "DIFFERS" in rows[flow]} == {"other_bytes"}


def test_digests_differ_only_where_bytes_do(plain):
    digests = {run["flow"]: [rank["digest"] for rank in run["ranks"]] for run in plain.json()["runs"]}
    right = digests["before"]
    assert len(set(right)) == 2  # a shard each
    assert all(digests[flow] == right for flow in (*OURS, "dcp"))
    assert digests["other_bytes"][0] == right[0]
    assert digests["other_bytes"][1] != right[1]


def test_results_can_be_held_against_each_other_later(plain):
    file = str(plain.file(".json"))
    assert compare_digests.main([file, file]) == 0
    assert compare_digests.main([file, file, "--across"]) == 1  # other_bytes is no way to load the same weights


def test_bytes_agree_with_the_checkpoint(plain, sd3):
    document = plain.json()
    files = sum(path.stat().st_size for path in (sd3 / "transformer").glob("*.safetensors"))
    assert document["checkpoint"]["gigabytes"] == round(files / 1e9, 3)
    assert document["left_in_cache"] <= preflight.EVICTED
    for run in document["runs"]:
        assert run["status"] == "ok"
        assert run["resident_fraction"] <= preflight.EVICTED
        assert {rank["resident_bytes"] for rank in run["ranks"]} == {
            rank["resident_bytes"] for rank in document["runs"][0]["ranks"]
        }
        for report in run["ranks"][0]["reports"]:
            read = sum(rank["bytes_read"] for rank in report["ranks"])
            assert 0.9 * files < read <= files
            assert [rank["bytes_resident"] for rank in report["ranks"]] == [r["resident_bytes"] for r in run["ranks"]]


def test_summaries_are_of_the_runs(plain):
    document = plain.json()
    runs = {run["flow"]: run for run in document["runs"]}
    assert len(document["summaries"]) == len(runs) == 6
    for summary in document["summaries"]:
        run = runs[summary["flow"]]
        assert summary["seconds"] == [run["seconds"]]
        assert summary["median"] == run["seconds"] == max(rank["seconds"] for rank in run["ranks"])
        for figure in ("peak_host_bytes", "peak_resident_bytes", "peak_device_bytes"):
            assert summary[figure] == max(rank[figure] for rank in run["ranks"])
        assert all(rank["peak_resident_bytes"] >= 0 for rank in run["ranks"])
        assert 0 < sum(summary["phases"].values()) < 1.05 * len(run["ranks"]) * run["seconds"]
    assert all("spans" in report for report in runs["direct"]["ranks"][0]["reports"])


def test_ratios_are_those_of_the_figures_beside_them(plain):
    medians = {summary["flow"]: summary["median"] for summary in plain.json()["summaries"]}
    table = [line for line in plain.text(".md").splitlines() if line.startswith("| ")]
    rows = {cells[1]: cells for cells in ([cell.strip() for cell in line.split("|")] for line in table[:7])}
    for flow, median in medians.items():
        assert rows[flow][2:4] == [f"{median:.2f}", f"{medians['before'] / median:.1f}x"]


def test_without_matplotlib_all_but_the_pictures_is_written(plain):
    assert [line for line in plain.stdout.splitlines() if "matplotlib" in line] == [
        "no PNG is drawn: matplotlib is not installed (pip install 'metashard[bench]')"
    ]
    assert sorted(path.suffix for path in plain.out.iterdir()) == [".json", ".md"]
    assert ".png" not in plain.text(".md")
    assert plain.text(".md").count("```mermaid") == 2  # seconds and host memory


def test_experts_with_adapters_equal_the_single_process(lora):
    for promise in ("shards", "base", "adapter"):
        found = {flow: ok for (flow, kind), ok in promises(lora).items() if kind == promise}
        wrong = {"other_adapter"} if promise != "base" else set()  # its base is right
        assert found == {flow: flow not in wrong for flow in ("before", "direct", "rank0_broadcast", "other_adapter")}
    assert lora.code == 1
    runs = {run["flow"]: run for run in lora.json()["runs"]}
    assert {len(run["ranks"][0]["reports"]) for run in runs.values()} == {0, 2}  # ours: one an expert
    assert len({rank["adapter_digest"] for run in runs.values() for rank in run["ranks"]}) == 2  # right and wrong


def test_the_picture_is_beside_the_report_and_small(lora):
    picture = lora.file(".png")
    assert f"({picture.name})" in lora.text(".md")
    check_picture(picture)


def check_picture(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    with Image.open(path) as image:
        image.load()
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)  # reads on light and dark pages
        assert len(image.convert("RGB").getcolors(1 << 16) or []) > 8


def test_memory_over_time_agrees_with_the_peaks(memory):
    assert memory.code == 0
    document = memory.json()
    rows = list(csv.DictReader(io.StringIO(memory.text(".csv"))))
    assert {row["flow"] for row in rows} == document["flows"].keys() == {"before", "direct"}
    for flow, figures in document["flows"].items():
        for rank in (0, 1):
            mine = [row for row in rows if row["flow"] == flow and row["rank"] == str(rank)]
            times = [float(row["seconds"]) for row in mine]
            assert times == sorted(times)
            assert len(times) > 2
            assert times[-1] >= figures["seconds"] - 0.05
            for kind in ("host", "resident"):
                peak = figures[f"peak_{kind}_bytes"][rank]
                assert max(int(row[f"{kind}_bytes"]) for row in mine) == peak >= 0
            assert all(int(row["device_bytes"]) == 0 for row in mine)
    check_picture(memory.file(".png"))


def test_phases_lie_within_the_timeline(memory):
    document = memory.json()
    names = {row["phase"] for row in csv.DictReader(io.StringIO(memory.text(".csv")))} - {""}
    assert "from_pretrained" in document["flows"]["before"]["phases"]
    assert "fill" in document["flows"]["direct"]["phases"]
    for figures in document["flows"].values():
        assert max(figures["phases"], key=figures["phases"].get) in names  # the longest was sampled
        for stretch in figures["stretches"]:
            assert 0 <= stretch["start"] <= stretch["end"] <= figures["seconds"] + 0.05
        spent = dict.fromkeys(figures["phases"], 0.0)
        for stretch in figures["stretches"]:
            spent[stretch["name"]] += stretch["end"] - stretch["start"]
        assert spent == pytest.approx(figures["phases"])
    assert names <= {name for figures in document["flows"].values() for name in figures["phases"]}


def test_a_flow_of_ours_that_fails_is_told_in_one_line(sd3, flows, tmp_path):
    arguments = ["--model-path", sd3 / "transformer", "--nproc", 1, "--repeats", 1, "--flows", "fails"]
    outcome = call(init_latency, tmp_path, *arguments)
    assert outcome.code == 1
    assert [line for line in outcome.stdout.splitlines() if "first line" in line]
    assert "second line" not in outcome.stdout
    assert {(run["flow"], run["status"]) for run in outcome.json()["runs"]} == {("before", "ok"), ("fails", "failed")}


BAD: dict[str, tuple[list[Any], str]] = {
    "no folder": (["--model-path", "{tmp}/none"], "no such folder"),
    "no subfolder": (["--model-path", "{sd3}", "--component", "unet"], "no subfolder 'unet'"),
    "no safetensors": (["--model-path", "{sd3}", "--component", "scheduler"], "no safetensors"),
    "no ranks": (["--nproc", "0"], "--nproc must be at least 1"),
    "no such flow": (["--flows", "fast"], "no flow 'fast'"),
    "no such family": (["--family", "sd9"], "unknown family 'sd9'"),
    "two depths": (["--family", "sd3-small", "--layers", "2", "--scale", "0.5"], "pass one of them"),
    "too deep": (["--family", "sd3-small", "--scale", "2"], "at most 1"),
    "no such device": (["--device", "nope"], "--device nope: expected cpu"),
    "no such backend": (["--backend", "nope"], "torch has no 'nope' here"),
    "no time": (["--limit", "nan"], "--limit must be at least"),
    "family and folder": (["--model-path", "{sd3}", "--family", "sd3-small"], "leave out --model-path"),
}


@pytest.mark.parametrize("script", [init_latency, peak_memory])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, script, sd3, tmp_path):
    arguments, reason = BAD[case]
    outcome = call(script, tmp_path / "out", *(a.format(tmp=tmp_path, sd3=sd3) for a in arguments))
    check_refused(outcome, script, reason)


@pytest.mark.parametrize("script", [init_latency, peak_memory])
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(script, sd3, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert script.main(["--model-path", str(sd3), "--component", "transformer", "--out", str(tmp_path / "file")]) == 2
    assert "is a file: expected a folder" in capsys.readouterr().err


def check_refused(outcome: Outcome, script: Any, reason: str) -> None:
    assert outcome.code == 2
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"{script.__name__.removeprefix('benchmarks.')}: ")
    assert reason in line
    assert not outcome.out.exists() or not list(outcome.out.iterdir())


def test_too_little_memory_or_disk_is_told_before_anything_is_written(monkeypatch, tmp_path):
    arguments = ["--family", "wan2.2-a14b", "--layers", 1, "--nproc", 2, "--workdir", tmp_path / "work"]
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "available_memory", lambda: 1_000_000_000)  # two experts take more
        check_refused(call(init_latency, tmp_path / "out", *arguments), init_latency, "too little memory")
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000_000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage)
    check_refused(call(init_latency, tmp_path / "out", *arguments), init_latency, "too little disk")
    assert not (tmp_path / "work").exists()


def test_files_that_cannot_be_evicted_are_refused(monkeypatch, sd3, tmp_path):
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 12345)
    access = preflight.os.access
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: mode != preflight.os.W_OK and access(path, mode))
    outcome = call(init_latency, tmp_path / "out", "--model-path", sd3, "--component", "transformer")
    check_refused(outcome, init_latency, "no permission to evict")


def test_scale_is_a_part_of_the_published_depth():
    assert setting.depth("qwen-image", None, 0.1) == 6  # of 60
    assert setting.depth("wan2.2-a14b", None, 0.001) == 1
    assert setting.depth("ltx-2", 3, None) == 3
    assert setting.depth("sd3.5-medium", None, None) is None


def test_memory_is_sampled_with_its_peak_and_above_the_start():
    size = 64 << 20
    before = torch.ones(size, dtype=torch.uint8)
    with Memory() as memory:
        grown = torch.ones(size, dtype=torch.uint8)
        assert sampled(memory)
        del grown
    assert 0.9 * size < memory.peak_host < 1.5 * size < memory.peak_host + before.nbytes
    assert memory.samples[0] == (0.0, 0, 0, 0)
    assert memory.peak_host == max(sample.host for sample in memory.samples)
    assert memory.samples[-1].host < 0.5 * size


def sampled(memory: Memory, seconds: float = 5.0) -> bool:
    """Until the sampling thread has seen some more."""
    wanted, end = len(memory.samples) + 3, time.monotonic() + seconds
    while len(memory.samples) < wanted and time.monotonic() < end:
        time.sleep(0.01)
    return len(memory.samples) >= wanted


def test_marked_phases_are_taken_once():
    take_marked()
    with phase("outer"), phase("inner"):
        pass
    with pytest.raises(KeyError), phase("outer"):
        raise KeyError
    taken = take_marked()
    assert [stretch.name for stretch in taken] == ["inner", "outer", "outer"]
    assert take_marked() == []
    total = seconds_by_phase(taken)
    assert list(total) == ["outer", "inner"]
    assert total["outer"] == pytest.approx(sum(s.end - s.start for s in taken if s.name == "outer"))


def test_the_innermost_phase_is_told():
    stretches = (Stretch("load", 0.0, 10.0), Stretch("read", 2.0, 4.0))
    assert [peak_memory.phase_at(stretches, at) for at in (-1, 0, 3, 4, 10)] == ["", "load", "read", "load", ""]


def test_thinning_keeps_peaks_and_order():
    curve = [(float(at), 0) for at in range(5000)]
    curve[1234] = (1234.0, 9)
    thin = charts.thinned(curve, most=100)
    assert len(thin) <= 100
    assert (1234.0, 9) in thin
    assert thin == sorted(thin)
    assert charts.thinned(curve[:50], most=100) == curve[:50]


def test_ratios_that_cannot_be_told_are_left_out():
    assert charts.ratio(3.0, 1.5) == "2.0x"
    assert charts.ratio(3.0, 0) == charts.ratio(math.nan, 1.0) == ""


def test_a_base_digest_is_that_of_the_model_without_its_adapter():
    torch.manual_seed(3)
    attention = torch.nn.ModuleDict({"to_q": torch.nn.Linear(4, 4)})
    model = torch.nn.ModuleDict({"attn": attention, "ff": torch.nn.Linear(4, 4)})
    without = held.digest(model)
    values = {}
    for seed in (0, 1):
        wrapped = Adapter(rank=2, seed=seed).add(model)
        assert held.base_digest(wrapped) == without != held.digest(wrapped)
        values[seed] = held.adapter_digest(wrapped)
        model = wrapped.unload()  # type: ignore[operator]
    assert values[0] != values[1]
