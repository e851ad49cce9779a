"""Headers: what a safetensors file holds, and that every damaged one is refused before a weight byte is read."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from metashard.checkpoint import Entry, read_checkpoint, read_header
from metashard.errors import CheckpointError
from metashard.files import check_file_name

FILE = "model.safetensors"


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file: header as an object or as raw bytes, then `data`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def item(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = pack({"a": item(), "b": item("BF16", [1, 2], [8, 12])}, bytes(12))
HUGE = 2**62

# name: (bytes of the file, what the message must say, key named in the error or None)
DAMAGED: dict[str, tuple[bytes, str, str | None]] = {
    "truncated by 3 bytes": (GOOD[:-3], "truncated", None),
    "3 bytes appended": (GOOD + b"abc", "belong to no tensor", None),
    "empty file": (b"", "has 0 bytes", None),
    "shorter than the length": (b"\x08\0\0", "has 3 bytes", None),
    "length only": (pack(b"", length=2), "claims a header of 2 bytes", None),
    "no header": (pack(b""), "not JSON", None),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull", None),
    "garbage length": (b"\xff" * 64, "claims a header of 18446744073709551615", None),
    "length beyond the file": (pack(b"{}", length=3), "claims a header of 3 bytes", None),
    "length above the bound": (pack(b"{}", length=100_000_001), "claims a header", None),
    "a pickle renamed": (b"PK\x03\x04" + bytes(60), "torch pickle", None),
    "header cut": (pack({"a": item()}, bytes(8))[:30], "claims a header", None),
    "not JSON": (pack(b"{a: 1}"), "not JSON", None),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not JSON in UTF-8", None),
    "two JSON values": (pack(b"{}{}"), "not JSON", None),
    "nesting bomb": (pack(b"[" * 200_000), "nested too deeply", None),
    "nesting bomb of objects": (pack(b'{"a":' * 200_000), "nested too deeply", None),
    "a number of many digits": (pack(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON", None),
    "a list": (pack([1]), "not a JSON object", None),
    "null": (pack(None), "not a JSON object", None),
    "nested deeper than any header": (pack(b'{"a":%s0%s}' % (b"[" * 64, b"]" * 64)), "nested too deeply", None),
    "deep inside an unterminated string": (pack(b'{"a":"' + b'\\"[' * 100_000), "not JSON", None),
    "NaN in what nobody reads": (
        pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"note":NaN}}', bytes(8)),
        "no JSON number",
        None,
    ),
    "a number beyond a double": (
        pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"note":-1e999}}', bytes(8)),
        "no JSON number",
        None,
    ),
    "minus nothing": (pack(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "no JSON number", None),
    "lone surrogate in metadata": (pack(b'{"__metadata__":{"a":"\\udfff"}}'), "not valid UTF-8", None),
    "lone surrogate in what nobody reads": (
        pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"\\ud800":1}}', bytes(8)),
        "not valid UTF-8",
        None,
    ),
    "control characters in a name": (pack({"a\x1b[2J\n": item("X")}, bytes(8)), "a\\x1b[2J\\n: dtype", "a\\x1b[2J\\n"),
    "duplicate key": (
        pack(b'{"a":%s,"a":%s}' % (json.dumps(item()).encode(), json.dumps(item(offsets=[8, 16])).encode()), bytes(16)),
        "given twice",
        "a",
    ),
    "duplicate field": (
        pack(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "given twice",
        "dtype",
    ),
    "lone surrogate in a name": (
        pack(b'{"\\ud800":%s}' % json.dumps(item()).encode(), bytes(8)),
        "not valid UTF-8",
        "\\ud800",
    ),
    "metadata not strings": (pack({"__metadata__": {"a": 1}}), "__metadata__", None),
    "metadata a list": (pack({"__metadata__": []}), "__metadata__", None),
    "item not an object": (pack({"a": [1]}), "header item", "a"),
    "item lacks a field": (pack({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "header item", "a"),
    "dtype unknown": (pack({"a": item("F33")}, bytes(8)), "dtype 'F33' is unknown", "a"),
    "dtype in small letters": (pack({"a": item("f32")}, bytes(8)), "is unknown", "a"),
    "dtype not text": (pack({"a": item(["F32"])}, bytes(8)), "is unknown", "a"),
    "dtype below a byte": (pack({"a": item("F4", [2], [0, 1])}, b"\0"), "not supported", "a"),
    "dtype of six bits": (pack({"a": item("F6_E2M3", [4], [0, 3])}, bytes(3)), "not supported", "a"),
    "shape not a list": (pack({"a": item(shape=2)}, bytes(8)), "not a list of sizes", "a"),
    "shape null": (pack({"a": item(shape=None)}, bytes(8)), "not a list of sizes", "a"),
    "shape of floats": (pack({"a": item(shape=[2.0])}, bytes(8)), "not a list of sizes", "a"),
    "shape of bools": (pack({"a": item(shape=[True, 2])}, bytes(8)), "not a list of sizes", "a"),
    "shape negative": (pack({"a": item(shape=[-2])}, bytes(8)), "not a list of sizes", "a"),
    "shape negative twice": (pack({"a": item(shape=[-1, -2])}, bytes(8)), "not a list of sizes", "a"),
    "shape beyond int64": (pack({"a": item(shape=[2**64 + 2])}, bytes(8)), "not a list of sizes", "a"),
    "shape that wraps around": (pack({"a": item(shape=[HUGE, 4, 2])}, bytes(8)), "too large", "a"),
    "empty, but no tensor": (pack({"a": item(shape=[0, HUGE, 4], offsets=[0, 0])}), "too large", "a"),
    "too many dims": (pack({"a": item(shape=[1] * 65, offsets=[0, 4])}, bytes(4)), "too large", "a"),
    "size is not shape times dtype": (pack({"a": item(shape=[3])}, bytes(8)), "takes 12 bytes", "a"),
    "offsets bools": (pack({"a": item(shape=[], offsets=[False, 4])}, bytes(4)), "not a byte range", "a"),
    "offsets floats": (pack({"a": item(offsets=[0, 8.0])}, bytes(8)), "not a byte range", "a"),
    "offsets reversed": (pack({"a": item(offsets=[8, 0])}, bytes(8)), "not a byte range", "a"),
    "offsets of one": (pack({"a": item(offsets=[8])}, bytes(8)), "not a byte range", "a"),
    "offsets of three": (pack({"a": item(offsets=[0, 4, 8])}, bytes(8)), "not a byte range", "a"),
    "offset negative": (pack({"a": item(offsets=[-8, 0])}, bytes(8)), "not a byte range", "a"),
    "offset infinite": (pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}'), "no JSON number", None),
    "out of range": (pack({"a": item(shape=[4], offsets=[0, 16])}, bytes(8)), "truncated", None),
    "far out of range": (pack({"a": item(shape=[HUGE], dtype="U8", offsets=[0, HUGE])}), "truncated", None),
    "overlap": (pack({"a": item(), "b": item(offsets=[4, 12])}, bytes(12)), "overlaps", "b"),
    "same range twice": (pack({"a": item(), "b": item()}, bytes(8)), "overlaps", "b"),
    "hole": (pack({"a": item(), "b": item(offsets=[12, 20])}, bytes(20)), "hole", "b"),
    "hole at the start": (pack({"a": item(offsets=[4, 12])}, bytes(12)), "hole", "a"),
    "data and no tensor": (pack({}, b"x"), "belong to no tensor", None),
}


def read(folder: Path, files: list[str] | None = None, weight_map: dict[str, str] | None = None) -> Any:
    return read_checkpoint(folder, files or [FILE], weight_map)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_typed_error(tmp_path: Path, name: str) -> None:
    data, message, key = DAMAGED[name]
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read(tmp_path)
    error = caught.value
    assert error.file == str(tmp_path / FILE)
    assert error.phase == "headers"
    assert error.key == key
    assert error.expected is not None
    assert error.got is not None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert len(str(error)) < 1000


# Values that files in the wild have, and every dtype of the format.
EDGES = {
    "f64": torch.zeros(3, dtype=torch.float64),
    "f32": torch.zeros(2, 3),
    "f16": torch.zeros(5, dtype=torch.float16),
    "bf16": torch.zeros(1, 7, dtype=torch.bfloat16),
    "e4m3": torch.zeros(3, dtype=torch.float8_e4m3fn),
    "e5m2": torch.zeros(3, dtype=torch.float8_e5m2),
    "e4m3fnuz": torch.zeros(3, dtype=torch.float8_e4m3fnuz),
    "e5m2fnuz": torch.zeros(3, dtype=torch.float8_e5m2fnuz),
    "c64": torch.zeros(2, dtype=torch.complex64),
    "bool": torch.zeros(3, dtype=torch.bool),
    **{
        f"{kind}{bits}": torch.zeros(3, dtype=getattr(torch, f"{kind}{bits}"))
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    "0-d": torch.tensor(1.0),
    "empty": torch.zeros(0),
    "empty matrix": torch.zeros(4, 0, 3, dtype=torch.int64),
    "naïve.キー": torch.zeros(1),
}


def check(folder: Path, tensors: dict[str, torch.Tensor], weight_map: dict[str, str] | None = None) -> None:
    """Entries say of every tensor what it is, and their bytes in the file are its bytes."""
    names = sorted(set(weight_map.values())) if weight_map else [FILE]
    checkpoint = read(folder, names, weight_map)
    assert list(checkpoint.entries) == sorted(tensors)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.sizes == {name: (folder / name).stat().st_size for name in names}
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
    for key, tensor in tensors.items():
        entry = checkpoint.entries[key]
        assert (entry.key, entry.dtype, entry.shape, entry.nbytes) == (key, tensor.dtype, tensor.shape, tensor.nbytes)
        stored = (folder / entry.file).read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert stored == (tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")


def test_every_dtype_and_edge_shape(tmp_path: Path) -> None:
    save_file(EDGES, tmp_path / FILE, metadata={"format": "pt"})
    check(tmp_path, EDGES)


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu")
def test_scales_of_one_exponent_byte(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(pack({"s": item("F8_E8M0", [3], [0, 3])}, bytes(3)))
    assert read(tmp_path).entries["s"].dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize(
    "data",
    [
        pack({}),
        pack({"__metadata__": {"format": "pt"}}),
        pack({"__metadata__": None}),
        pack({"a": {**item(), "note": 1}}, bytes(8)),
        pack(b"  " + json.dumps({"a": item()}).encode() + b"   ", bytes(8)),
        pack({"z": item(shape=[0], offsets=[8, 8]), "a": item(), "y": item(shape=[0], offsets=[0, 0])}, bytes(8)),
    ],
)
def test_what_safetensors_reads_is_read(tmp_path: Path, data: bytes) -> None:
    from safetensors import safe_open

    (tmp_path / FILE).write_bytes(data)
    with safe_open(tmp_path / FILE, "pt") as file:
        assert sorted(file.keys()) == list(read(tmp_path).entries)


KINDS = ["directory", "socket", "fifo", "missing", "dangling link", "device"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    path = tmp_path / FILE
    if kind == "directory":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # a socket's path has at most about 100 characters
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(FILE)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to("gone.safetensors")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    word = {"missing": "not there", "dangling link": "a link to a file that is not there", "fifo": "FIFO"}.get(
        kind, kind
    )
    with pytest.raises(CheckpointError, match=word) as caught:
        read(tmp_path)
    assert caught.value.file == str(path)


def test_header_only_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    """16 GiB that take no disk: were the data read or allocated, this would take minutes."""
    size = 2**34
    with open(tmp_path / FILE, "wb") as file:
        header = pack({"w": item("U8", [size], [0, size])})
        file.write(header)
        file.truncate(len(header) + size)
    assert read(tmp_path).nbytes == size


def test_a_file_that_no_path_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not accessible"):
        read_header(tmp_path / "a\0b", name="x")


def test_every_error_can_be_printed(tmp_path: Path) -> None:
    """An index may promise keys that no file can hold and no log can show."""
    save_file({"a": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="does not hold it") as caught:
        read(tmp_path, [FILE], {"\ud800": FILE})
    assert str(caught.value).encode("utf-8")
    assert str(CheckpointError("m", file="\udcff")).encode("utf-8").endswith(b"\\udcff)")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\\b",
        "C:x",
        "x\0y",
        "a/../../x",
        "\ud800",
        "x" * 256,
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="not a plain file name"):
        check_file_name(name, source="index")
    with pytest.raises(CheckpointError, match="not a plain file name"):
        read(tmp_path, [name], {"a": name})


class TestIndex:
    """The index is the authority."""

    A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def two(self, folder: Path) -> None:
        save_file({"a": torch.zeros(2), "c": torch.ones(1)}, folder / self.A)
        save_file({"b": torch.zeros(3), "d": torch.ones(4)}, folder / self.B)

    def test_files_and_map_agree(self, tmp_path: Path) -> None:
        self.two(tmp_path)
        tensors = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.ones(1), "d": torch.ones(4)}
        check(tmp_path, tensors, {"a": self.A, "c": self.A, "b": self.B, "d": self.B})

    def test_a_stale_value_is_ignored_with_a_warning(self, tmp_path: Path, caplog: Any) -> None:
        save_file({"a": torch.zeros(2)}, tmp_path / self.A)
        save_file({"a": torch.ones(5), "b": torch.zeros(3)}, tmp_path / self.B)
        with caplog.at_level(logging.WARNING):
            checkpoint = read(tmp_path, [self.A, self.B], {"a": self.A, "b": self.B})
        assert checkpoint.entries["a"].file == self.A
        assert checkpoint.entries["a"].shape == (2,)
        assert self.B in caplog.text
        assert " a " in caplog.text

    def test_a_file_it_does_not_name_is_never_opened(self, tmp_path: Path, caplog: Any) -> None:
        self.two(tmp_path)
        (tmp_path / "stale.safetensors").write_bytes(b"garbage")
        weight_map = {"a": self.A, "c": self.A, "b": self.B, "d": self.B}
        checkpoint = read(tmp_path, [self.A, self.B, "stale.safetensors"], weight_map)
        assert set(checkpoint.sizes) == {self.A, self.B}
        assert "stale.safetensors" in caplog.text

    def test_a_promised_key_must_be_there(self, tmp_path: Path) -> None:
        self.two(tmp_path)
        with pytest.raises(CheckpointError, match="does not hold it") as caught:
            read(tmp_path, [self.A, self.B], {"a": self.A, "b": self.A})
        assert caught.value.key == "b"
        assert caught.value.file == str(tmp_path / self.A)

    def test_a_file_it_names_must_be_there(self, tmp_path: Path) -> None:
        self.two(tmp_path)
        (tmp_path / self.B).unlink()
        with pytest.raises(CheckpointError, match="not there") as caught:
            read(tmp_path, [self.A, self.B], {"a": self.A, "b": self.B})
        assert caught.value.file == str(tmp_path / self.B)

    def test_without_it_a_key_in_two_files_is_an_error(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(2)}, tmp_path / self.A)
        save_file({"a": torch.zeros(2)}, tmp_path / self.B)
        with pytest.raises(CheckpointError, match="stored twice") as caught:
            read(tmp_path, [self.A, self.B])
        assert caught.value.key == "a"


DTYPES = st.sampled_from(sorted({tensor.dtype for tensor in EDGES.values()}, key=str))
SHAPES = st.lists(st.integers(0, 4), max_size=4)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter("__metadata__".__ne__)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(spec=st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES, st.integers(0, 2)), max_size=8), data=st.data())
def test_any_valid_checkpoint_round_trips(tmp_path: Path, spec: dict[str, Any], data: Any) -> None:
    """Random names, dtypes, shapes and splits over files, written by safetensors."""
    tensors, files = {}, {}
    for index, (key, (dtype, shape, file)) in enumerate(spec.items()):
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.arange(index, index + count, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251)
        tensors[key] = raw.to(torch.uint8).view(dtype).reshape(shape)
        files[key] = f"part{file}.safetensors"
    for name in set(files.values()):
        save_file({key: tensor for key, tensor in tensors.items() if files[key] == name}, tmp_path / name)
    save_file(tensors, tmp_path / FILE)
    check(tmp_path, tensors)
    if files:
        check(tmp_path, tensors, files)


@QUICK
@given(flips=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_bytes_are_refused_or_still_describe_the_file(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    mutated = bytearray(GOOD)
    for position, value in flips:
        mutated[position] = value
    (tmp_path / FILE).write_bytes(mutated)
    accepted_is_sound(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
ITEMS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "X"]) | JSON,
        "shape": SHAPES | JSON,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | JSON,
    }
)


@QUICK
@given(header=st.dictionaries(NAMES, ITEMS | JSON, max_size=4) | JSON, data=st.binary(max_size=16))
def test_random_headers_are_refused_or_describe_the_file(tmp_path: Path, header: Any, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(pack(header, data))
    accepted_is_sound(tmp_path)


def accepted_is_sound(folder: Path) -> None:
    """A file is refused with our error, or its entries tile its data exactly."""
    try:
        checkpoint = read(folder)
    except CheckpointError:
        return
    size = (folder / FILE).stat().st_size
    entries: list[Entry] = sorted(checkpoint.entries.values(), key=lambda entry: (entry.offset, entry.nbytes))
    ends = [entry.offset + entry.nbytes for entry in entries]
    if entries:
        assert [entry.offset for entry in entries[1:]] == ends[:-1]
        assert ends[-1] == size
    for entry in entries:
        assert torch.empty(entry.shape, dtype=entry.dtype, device="meta").nbytes == entry.nbytes
