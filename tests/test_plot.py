"""The picture of a load: what it shows, and a clear word where it cannot be drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from metashard import cli, plot
from metashard.report import LoadReport, RankReport, Span
from tests import zoo

pytest.importorskip("matplotlib")

REPORT = LoadReport(
    strategy="direct",
    reason="every rank sees the files",
    world_size=2,
    phases={"resolve": 0.25, "fill": 1.5},
    ranks=(
        RankReport(bytes_read=3_000_000_000, bytes_resident=1_500_000_000, peak_host_bytes=2_000_000_000),
        RankReport(bytes_read=1_000_000_000, bytes_resident=1_400_000_000, peak_device_bytes=2_500_000_000),
    ),
    spans=(Span("resolve", 0.0, 0.25), Span("fill", 0.5, 1.0), Span("fill", 1.5, 2.5)),
)


def panels(report: LoadReport, monkeypatch: pytest.MonkeyPatch, path: Path):
    """The axes of the figure that is drawn."""
    made = []

    def kept(*size: float):
        made.append(figure(*size))
        return made[-1]

    figure = plot.figure
    monkeypatch.setattr(plot, "figure", kept)
    report.plot(path)
    return made[0].axes


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_file_of_that_kind_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"load.{suffix}"
    REPORT.plot(str(path))
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_phases_lie_where_they_ran(monkeypatch, tmp_path) -> None:
    phases, _ = panels(REPORT, monkeypatch, tmp_path / "load.png")
    assert [label.get_text() for label in phases.get_yticklabels()] == ["resolve", "fill"]
    bars = [[box.get_extents() for box in row.get_paths()] for row in phases.collections]
    assert [[(box.x0, box.x1) for box in row] for row in bars] == [[(0.0, 0.25)], [(0.5, 1.0), (1.5, 2.5)]]
    assert [text.get_text() for text in phases.texts] == ["0.25 s", "1.50 s"]  # both stretches of fill


def test_memory_is_that_of_every_rank(monkeypatch, tmp_path) -> None:
    _, memory = panels(REPORT, monkeypatch, tmp_path / "load.png")
    shown = {bars.get_label(): [bar.get_height() for bar in bars] for bars in memory.containers}
    assert shown == {"held at the end": [1.5, 1.4], "peak of host memory": [2.0, 0], "peak of device memory": [0, 2.5]}


def test_many_ranks_and_a_report_without_spans_are_drawn(monkeypatch, tmp_path) -> None:
    report = LoadReport("rank0", "asked for", 100, {}, (RankReport(bytes_resident=1),) * 100)
    phases, memory = panels(report, monkeypatch, tmp_path / "load.png")
    assert not phases.collections
    assert len(memory.get_xticks()) < 20
    assert [bars.get_label() for bars in memory.containers] == ["held at the end"]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'metashard\[plot\]'"):
        REPORT.plot(tmp_path / "load.png")
    assert not list(tmp_path.iterdir())


def test_a_suffix_or_a_folder_that_cannot_be_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"load\.txt: expected a file name that ends in one of .*png"):
        REPORT.plot(tmp_path / "load.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        REPORT.plot(tmp_path / "nowhere" / "load.png")


def test_the_command_line_refuses_before_it_loads(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(cli, "_load_and_digest", lambda *_: pytest.fail("loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["load", "anything", "--plot", str(tmp_path / "load.png")]) == 2
    assert "pip install 'metashard[plot]'" in capsys.readouterr().err


def test_the_command_line_draws(tmp_path) -> None:
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "metashard", "load", str(tmp_path / "model"), "--plot", str(tmp_path / "load.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
