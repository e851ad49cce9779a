"""The report of a load: figures that add up, a table to read, JSON that comes back as it went."""

from __future__ import annotations

import json
import time
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

import metashard
from metashard.report import LoadReport, RankReport, Recorder, Span, anonymous_host_bytes
from tests import zoo
from tests.parity import cpu_mesh

REPORT = LoadReport(
    strategy="direct",
    reason="every rank sees the files",
    world_size=2,
    phases={"resolve": 0.25, "fill": 1.5},
    ranks=(
        RankReport(bytes_read=3 << 20, bytes_resident=5),
        RankReport(bytes_received=1536, peak_device_bytes=7 << 30),
    ),
    dtype_counts={"bfloat16": 58, "float32": 11},
    missing=("a", "b"),
    unexpected=tuple(f"key{n}" for n in range(7)),
    transport="broadcast",
    spans=(Span("resolve", 0.0, 0.25), Span("fill", 0.5, 2.0)),
)


def test_json_holds_all_of_it() -> None:
    values = json.loads(REPORT.to_json())
    assert values.keys() == asdict(REPORT).keys()
    back = LoadReport(
        **{
            **values,
            "ranks": tuple(RankReport(**rank) for rank in values["ranks"]),
            "missing": tuple(values["missing"]),
            "unexpected": tuple(values["unexpected"]),
            "spans": tuple(Span(**span) for span in values["spans"]),
        }
    )
    assert back == REPORT


def test_the_table_names_strategy_phases_ranks_dtypes_and_keys() -> None:
    lines = str(REPORT).splitlines()
    assert lines[0] == "metashard: direct on 2 ranks in 1.75 s: every rank sees the files"
    assert [line.split() for line in lines[1:4]] == [
        ["phase", "seconds"],
        ["resolve", "0.250"],
        ["fill", "1.500", "0.00", "GB/s"],
    ]
    assert lines[5].split() == ["0", "3.0", "MiB", "0", "B", "0", "B", "5", "B", "0", "B", "0", "B"]
    assert lines[6].split() == ["1", "0", "B", "0", "B", "1.5", "KiB", "0", "B", "0", "B", "7.0", "GiB"]
    assert lines[7].split(maxsplit=1) == ["dtypes", "58 bfloat16, 11 float32"]
    assert lines[8].split(maxsplit=1) == ["missing", "2: a, b"]
    assert lines[9].split(maxsplit=1) == ["unexpected", "7: key0, key1, key2, key3, key4, ..."]


def test_the_rate_counts_what_was_read_or_from_rank_0_sent() -> None:
    ranks = (RankReport(bytes_read=3_000_000_000, bytes_sent=1_000_000_000), RankReport(bytes_read=1_000_000_000))
    phases = {"build": 4.0, "fill": 2.0}
    assert LoadReport("direct", "", 2, phases, ranks).gbps == {"fill": 2.0}
    assert LoadReport("rank0", "", 2, phases, ranks).gbps == {"build": 1.0, "fill": 0.5}


def test_the_table_of_a_clean_load_speaks_of_no_missing_keys() -> None:
    text = str(LoadReport("rank0", "asked for", 1, {}, (RankReport(),), {"float32": 1}))
    assert "missing" not in text
    assert "unexpected" not in text


def test_reports_cannot_be_changed() -> None:
    for report in (REPORT, REPORT.ranks[0]):
        with pytest.raises(FrozenInstanceError):
            report.strategy = "other"  # type: ignore[misc, union-attr]


def test_phases_of_one_name_add_up_also_when_one_raises() -> None:
    with Recorder(torch.device("cpu")) as recorder:
        for fails in (False, True):
            try:
                with recorder.phase("fill"):
                    time.sleep(0.02)
                    if fails:
                        raise KeyError("inside")
            except KeyError:
                pass
        with recorder.phase("check"):
            pass
    assert list(recorder.phases) == ["fill", "check"]
    assert recorder.phases["fill"] >= 0.04  # two naps
    assert recorder.phases["check"] < recorder.phases["fill"]


def test_counts_add_up_and_the_end_does_not_change_them() -> None:
    with Recorder(torch.device("cpu")) as recorder:
        recorder.add(bytes_read=5, bytes_sent=1)
        recorder.add(bytes_read=2)
        first, again = recorder.finish(bytes_resident=9), recorder.finish(bytes_resident=9)
    assert asdict(first) | {"peak_host_bytes": 0} == {
        "bytes_read": 7,
        "bytes_sent": 1,
        "bytes_received": 0,
        "bytes_resident": 9,
        "peak_host_bytes": 0,
        "peak_device_bytes": 0,
    }
    assert again.bytes_read == 7
    with pytest.raises((AttributeError, TypeError)):
        recorder.add(bytes_guessed=1)


@pytest.mark.skipif(anonymous_host_bytes() == 0, reason="needs /proc/self/statm")
def test_the_peak_is_that_of_memory_which_is_free_again_at_the_end() -> None:
    size = 96 << 20
    with Recorder(torch.device("cpu")) as recorder:
        held = torch.ones(size, dtype=torch.uint8)
        time.sleep(0.15)
        del held
        peak = recorder.finish(bytes_resident=0).peak_host_bytes
    assert 0.9 * size < peak < 2 * size


@pytest.mark.skipif(anonymous_host_bytes() == 0, reason="needs /proc/self/statm")
def test_mapped_files_are_no_anonymous_memory(tmp_path) -> None:
    size = 64 << 20
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with Recorder(torch.device("cpu")) as recorder:
        mapped = torch.from_file(str(path), size=size // 8, dtype=torch.int64)
        assert int(mapped.sum()) == 0  # has read every page
        time.sleep(0.1)
        assert recorder.finish(bytes_resident=0).peak_host_bytes < size / 2


def test_the_sampling_thread_ends_with_the_load() -> None:
    with Recorder(torch.device("cpu")) as recorder:
        assert recorder._sampler is not None
        assert recorder._sampler.is_alive()
    assert not recorder._sampler.is_alive()


def test_a_phase_inside_of_itself_counts_once(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("metashard.report.time.perf_counter", lambda: float(next(clock)))
    recorder = Recorder(torch.device("cpu"))
    with recorder.phase("fill"), recorder.phase("fill"):
        pass
    with recorder.phase("fill"):
        pass
    assert recorder.phases == {"fill": 2.0}
    assert recorder.spans == [Span("fill", 1.0, 2.0), Span("fill", 3.0, 4.0)]  # the recorder was made at 0


def test_spans_say_when_a_phase_ran_and_add_up_to_its_seconds(monkeypatch):
    clock = iter((10.0, 10.5, 11.0, 12.0, 14.0, 20.0, 21.0))
    monkeypatch.setattr("metashard.report.time.perf_counter", lambda: next(clock))
    recorder = Recorder(torch.device("cpu"))
    with recorder.phase("build"), recorder.phase("fill"):
        pass
    with pytest.raises(KeyError), recorder.phase("fill"):
        raise KeyError("inside")
    assert recorder.spans == [Span("fill", 1.0, 2.0), Span("build", 0.5, 4.0), Span("fill", 10.0, 11.0)]
    assert recorder.phases == {"fill": 2.0, "build": 3.5}


def spans_of_a_load(folder):
    _, report = metashard.load_component(folder, mesh=cpu_mesh(), output_loading_info=True)
    return report


def test_every_rank_is_told_when_rank_0_was_in_which_phase(ranks2, tmp_path):
    zoo.CASES[zoo.CORE[0]].build().save_pretrained(tmp_path)
    first, second = ranks2.run(spans_of_a_load, tmp_path)
    assert first.spans == second.spans
    assert {span.name for span in first.spans} == set(first.phases)
    assert all(0 <= span.start <= span.end for span in first.spans)
    assert [span.end for span in first.spans] == sorted(span.end for span in first.spans)
    for name, seconds in first.phases.items():  # the slowest rank's, so never less than rank 0's
        assert sum(span.end - span.start for span in first.spans if span.name == name) <= seconds + 1e-9
