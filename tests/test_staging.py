"""The way from a file to memory, without a process group: staging buffers, casts, and the threads that read."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metashard.checkpoint import Checkpoint, Entry, read_checkpoint
from metashard.errors import CheckpointError, LoadError
from metashard.fill.bytes import as_bytes
from metashard.fill.reader import Files, Read, Reader, reads_for
from metashard.fill.staging import Staging
from metashard.plan import Box

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")

# (in the file, in the module): what from_pretrained may cast.
CASTS = [(a, b) for a in (FP64, FP32, FP16, BF16) for b in (FP32, FP16, BF16) if a != b]
CAST_IDS = [f"{str(a)[6:]} to {str(b)[6:]}" for a, b in CASTS]


def awkward(numel: int, dtype: torch.dtype, *, seed: int = 0, nan: bool = True) -> torch.Tensor:
    """Numbers of every magnitude that `dtype` has, ties of rounding, infinities, NaN, zeros of both signs.

    Without NaN where a cast is not of contiguous memory: torch then gives it other bits (0x7fc0 for 0xffff in bf16).
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-50, 50, (numel,), generator=generator, dtype=torch.int32)
    values = torch.ldexp(torch.randn(numel, generator=generator, dtype=FP64), exponents)
    special = [0.0, -0.0, float("inf"), -float("inf"), 65504.0, 65520.0, 65519.99, 1e-8, 6e-8, 1.00390625, 3e38]
    special += [float("nan")] if nan else []
    values[: min(numel, len(special))] = torch.tensor(special, dtype=FP64)[:numel]
    return values.to(dtype)


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def through(staging: Staging, values: torch.Tensor, into: torch.Tensor) -> None:
    """Bring `values` to `into` as a reading thread does, in pieces of what one buffer holds."""
    step = staging.nbytes // values.dtype.itemsize
    for start in range(0, values.numel(), step):
        stage(staging, values[start : start + step], into[start : start + step])
    staging.finish()


def stage(staging: Staging, values: torch.Tensor, into: torch.Tensor) -> None:
    staging.buffer()[: values.nbytes].copy_(as_bytes(values))
    staging.land(values.dtype, into, run=values.numel(), stride=values.numel())


# --- staging on CPU


@pytest.mark.parametrize(("stored", "wanted"), CASTS, ids=CAST_IDS)
@pytest.mark.parametrize("numel", [0, 1, 3, 511, 512, 513, 4099])
def test_a_staged_cast_equals_to_bit_for_bit(stored: torch.dtype, wanted: torch.dtype, numel: int) -> None:
    """One buffer of 4096 bytes, used over and over, with what the piece before left in it."""
    staging = Staging(CPU, 4096)
    values = awkward(numel, stored)
    into = torch.full((numel,), 7.0, dtype=wanted)
    through(staging, values, into)
    assert equal_bytes(into, values.to(wanted))


def test_one_staging_serves_every_dtype_in_turn() -> None:
    staging = Staging(CPU, 1000)
    before = staging.buffer().data_ptr()
    for turn, (stored, wanted) in enumerate(CASTS * 2):
        values = awkward(997 + turn, stored, seed=turn)
        into = torch.empty(values.numel(), dtype=wanted)
        through(staging, values, into)
        assert equal_bytes(into, values.to(wanted)), (stored, wanted)
    assert staging.buffer().data_ptr() == before
    assert sum(buffer.numel() for buffer in staging.ring) == 1000


def test_landing_writes_what_it_was_given_and_nothing_beside() -> None:
    memory = torch.full((10,), -1.0, dtype=BF16)
    staging = Staging(CPU, 64)
    through(staging, torch.arange(4.0), memory[3:7])
    assert memory.tolist() == [-1.0, -1.0, -1.0, 0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0]


RUNS = [(1, 1, 5), (1, 2, 5), (2, 3, 4), (3, 100, 3), (7, 7, 2), (5, 8, 1)]  # (run, stride, how many)


@pytest.mark.parametrize(("stored", "wanted"), [(BF16, BF16), (FP32, BF16), (BF16, FP32)])
@pytest.mark.parametrize(("run", "stride", "count"), RUNS)
def test_runs_at_equal_distances_land_without_what_is_between_them(
    run: int, stride: int, count: int, stored: torch.dtype, wanted: torch.dtype
) -> None:
    staging = Staging(CPU, 2048)
    values = awkward((count - 1) * stride + run, stored, nan=False)
    expected = torch.cat([values[k * stride : k * stride + run] for k in range(count)]).to(wanted)
    into = torch.full((count * run + 2,), 7.0, dtype=wanted)
    staging.buffer()[: values.nbytes].copy_(as_bytes(values))
    staging.land(stored, into[1:-1], run=run, stride=stride)
    assert equal_bytes(into[1:-1], expected)
    assert (into[0], into[-1]) == (7.0, 7.0)


# --- staging for an accelerator; written for any of them, skipped where there is none


def accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def allocated(device: torch.device) -> int:
    return int(torch.get_device_module(device.type).memory_allocated(device))


@pytest.mark.gpu
@pytest.mark.parametrize(("stored", "wanted"), [*CASTS, (BF16, BF16)], ids=[*CAST_IDS, "as it is"])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 100_003])
def test_an_accelerator_gets_what_the_cpu_gets(stored: torch.dtype, wanted: torch.dtype, numel: int) -> None:
    """NaNs aside, whose payload each device rounds in its own way."""
    device = accelerator()
    staging = Staging(device, 1024)
    values = awkward(numel, stored)
    into = torch.empty(numel, dtype=wanted, device=device)
    through(staging, values, into)
    got, expected = into.cpu(), values.to(wanted)
    number = ~expected.isnan()
    assert torch.equal(got.isnan(), expected.isnan())
    assert equal_bytes(got[number], expected[number])


@pytest.mark.gpu
def test_two_pinned_buffers_take_turns_and_share_the_bytes_they_were_given() -> None:
    staging = Staging(accelerator(), 4096)
    assert [buffer.numel() for buffer in staging.ring] == [2048, 2048]
    assert all(buffer.is_pinned() for buffer in staging.ring)
    into = torch.empty(8, dtype=FP32, device=staging.device)
    used = []
    for _ in range(4):
        used.append(staging.buffer().data_ptr())
        staging.land(FP32, into, run=8, stride=8)
    staging.finish()
    assert used[0] == used[2]
    assert used[1] == used[3]
    assert used[0] != used[1]


@pytest.mark.gpu
def test_a_buffer_is_not_handed_out_before_its_copy_is_done() -> None:
    """The stream is held up by work before each copy; a buffer given back too soon would be overwritten meanwhile."""
    device = accelerator()
    staging = Staging(device, 2 << 20)
    numel = staging.nbytes // 4
    pieces = [torch.full((numel,), float(i)) for i in range(8)]
    into = torch.empty(8, numel, device=device)
    load = torch.randn(2048, 2048, device=device)
    torch.accelerator.synchronize()
    for i, piece in enumerate(pieces):
        with staging.stream:
            for _ in range(20):
                load = torch.tanh(load @ load)
        stage(staging, piece, into[i])
    staging.finish()
    assert torch.equal(into.cpu(), torch.stack(pieces))


@pytest.mark.gpu
def test_the_buffer_on_the_device_is_not_overwritten_before_its_cast_is_done() -> None:
    """All casts share one buffer on the device: copy and cast must be on one stream, in order."""
    device = accelerator()
    staging = Staging(device, 2 << 20)
    numel = staging.nbytes // 4
    pieces = [torch.full((numel,), float(i)) for i in range(8)]
    into = torch.empty(8, numel, dtype=BF16, device=device)
    before = allocated(device)
    for i, piece in enumerate(pieces):
        stage(staging, piece, into[i])
    staging.finish()
    assert torch.equal(into.cpu(), torch.stack(pieces).to(BF16))
    assert allocated(device) - before <= staging.nbytes + (2 << 20)  # a cast makes no full copy


@pytest.mark.gpu
def test_the_default_stream_sees_all_bytes_once_finish_has_returned() -> None:
    device = accelerator()
    staging = Staging(device, 1 << 20)
    values = torch.arange(3_000_001, dtype=FP32)
    into = torch.zeros(values.numel(), device=device)
    through(staging, values, into)
    assert into.double().sum().item() == values.double().sum().item()


@pytest.mark.gpu
def test_threads_read_onto_an_accelerator(tmp_path: Path) -> None:
    stored = write(tmp_path / "x.safetensors", edge_tensors())
    device = accelerator()
    got = read_all(tmp_path, stored, threads=3, staging_bytes=1 << 16, device=device)
    for key, value in stored.items():
        assert equal_bytes(got[key].cpu(), value), key


# --- files


def write(path: Path, tensors: dict[str, torch.Tensor], *, odd: bool = True) -> dict[str, torch.Tensor]:
    """A safetensors file; with `odd` its tensors start at odd bytes, which the format allows and any file may do."""
    names = {v: k for k, v in _DTYPE_NAMES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors.items():
        header[key] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * ((odd - len(text)) % 2)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(as_bytes(tensor.contiguous()).numpy().tobytes())
    return tensors


_DTYPE_NAMES = {
    "F64": FP64, "F32": FP32, "F16": FP16, "BF16": BF16, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def edge_tensors() -> dict[str, torch.Tensor]:
    """One of every kind: odd sizes, 0-d, empty, one larger than the smallest staging, every dtype."""
    return {
        "one byte": torch.tensor([3], dtype=torch.uint8),
        "fp32": awkward(1001, FP32).reshape(7, 143),
        "bf16": awkward(333, BF16),
        "fp16": awkward(35, FP16).reshape(5, 7),
        "fp64": awkward(19, FP64),
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(-5, 6),
        "int8": torch.arange(-8, 5, dtype=torch.int8),
        "complex": torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3),
        "fp8": torch.arange(9.0).to(torch.float8_e4m3fn),
        "large": awkward(70_001, FP32),
    }


def headers_of(folder: Path) -> Checkpoint:
    return read_checkpoint(folder, sorted(p.name for p in folder.glob("*.safetensors")), None)


def reads_of(
    checkpoint: Checkpoint, reader: Reader, targets: dict[str, torch.Tensor], order: Callable[[list[Read]], None]
) -> list[Read]:
    reads = []
    for key, target in targets.items():
        entry: Entry = checkpoint.entries[key]
        reads += reads_for(entry, [(0, 0, target.numel())], target.reshape(-1), most=reader.most)
    order(reads)
    return reads


def read_all(
    folder: Path,
    like: dict[str, torch.Tensor],
    *,
    threads: int,
    staging_bytes: int = 1 << 16,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
) -> dict[str, torch.Tensor]:
    checkpoint = headers_of(folder)
    targets = {
        key: torch.empty(t.shape, dtype=dtype if dtype and t.is_floating_point() else t.dtype, device=device)
        for key, t in like.items()
    }
    with Files(folder, checkpoint, same_folder=True) as files:
        reader = Reader(files, threads=threads, staging_bytes=staging_bytes)
        landed: list[int] = []
        reader.run(reads_of(checkpoint, reader, targets, lambda reads: reads.reverse()), landed.append)
        assert files.bytes_read == checkpoint.nbytes
        assert sum(into.nbytes for into in landed) == sum(t.nbytes for t in targets.values())
        held = sum(b.numel() for s in reader.stagings.values() for b in s.ring)
        assert held <= staging_bytes
    return targets


@pytest.fixture
def nothing_left() -> Any:
    """Whatever a test does, it leaves no thread and no open file behind."""

    def opened() -> list[str]:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:  # the descriptor of the listing itself
                continue
        return sorted(link for link in links if "safetensors" in link)

    threads = threading.active_count()
    assert opened() == []
    yield
    assert threading.active_count() == threads
    assert opened() == []


pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")


@pytest.mark.parametrize("odd", [True, False], ids=["odd offsets", "even offsets"])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_kind_of_tensor_is_read_as_it_is(nothing_left: None, tmp_path: Path, threads: int, odd: bool) -> None:
    stored = write(tmp_path / "a.safetensors", edge_tensors(), odd=odd)
    write(tmp_path / "b.safetensors", {"other": awkward(501, BF16)}, odd=odd)
    entries = headers_of(tmp_path).entries
    assert entries["one byte"].offset % 2 == odd
    stored["other"] = awkward(501, BF16)
    got = read_all(tmp_path, stored, threads=threads)
    assert [key for key, value in stored.items() if not equal_bytes(got[key], value)] == []


@pytest.mark.parametrize("wanted", [FP32, BF16, FP16])
@pytest.mark.parametrize("threads", [1, 4])
def test_every_kind_of_tensor_is_cast_on_the_way(
    nothing_left: None, tmp_path: Path, threads: int, wanted: torch.dtype
) -> None:
    stored = write(tmp_path / "a.safetensors", edge_tensors())
    got = read_all(tmp_path, stored, threads=threads, dtype=wanted)
    for key, value in stored.items():
        assert equal_bytes(got[key], value.to(wanted) if value.is_floating_point() else value), key


SHAPES = [(6, 5), (1, 4), (3, 1), (7, 2, 3), (4, 6000), (2, 3, 9000), (300, 40)]


@pytest.mark.parametrize("wanted", [FP32, BF16])
@pytest.mark.parametrize("most", [100, 8192, 1 << 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_part_of_a_tensor_that_a_rank_holds_is_read_whatever_its_dim(
    nothing_left: None, tmp_path: Path, shape: tuple[int, ...], most: int, wanted: torch.dtype
) -> None:
    """Every dim cut in 1, 2 and 5 parts, some of them empty; no read is larger than it may be."""
    values = awkward(torch.Size(shape).numel(), FP32, nan=False).reshape(shape)
    write(tmp_path / "a.safetensors", {"x": values})
    checkpoint = headers_of(tmp_path)
    entry = checkpoint.entries["x"]
    with Files(tmp_path, checkpoint, same_folder=True) as files:
        reader = Reader(files, threads=1, staging_bytes=1 << 21)
        for dim, size in enumerate(shape):
            for parts in (1, 2, 5):
                step = -(-size // parts)
                for part in range(parts):
                    start, stop = min(size, part * step), min(size, (part + 1) * step)
                    expected = values.narrow(dim, start, stop - start).contiguous().to(wanted)
                    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
                    into = torch.full((expected.numel(),), 7.0, dtype=wanted)
                    reads = list(reads_for(entry, Box(shape, offset, expected.shape).runs(), into, most=most))
                    assert all(read.nbytes <= most for read in reads)
                    reader.run(reads)
                    assert equal_bytes(into, expected.reshape(-1)), (dim, parts, part)


def test_short_runs_are_read_together_and_long_ones_apart(tmp_path: Path) -> None:
    """A column of 8 bytes a row is read with the rows; a half of 32 KiB rows is read row by row, nothing twice."""
    write(tmp_path / "a.safetensors", {"rows": torch.zeros(1000, 4), "long": torch.zeros(10, 16384)})
    entries = headers_of(tmp_path).entries
    short = Box((1000, 4), (0, 2), (1000, 2))
    assert len(list(reads_for(entries["rows"], short.runs(), torch.empty(short.numel), most=1 << 20))) == 1
    long = Box((10, 16384), (0, 8192), (10, 8192))
    reads = list(reads_for(entries["long"], long.runs(), torch.empty(long.numel), most=1 << 20))
    assert sum(read.nbytes for read in reads) == long.numel * 4


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
def test_short_reads_are_read_on(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A network file system may give fewer bytes than it was asked for, as often as it likes."""
    stored = write(tmp_path / "a.safetensors", {k: v for k, v in edge_tensors().items() if k != "large"})
    preadv, asked = os.preadv, []

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(len(buffers[0]))
        return preadv(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    got = read_all(tmp_path, stored, threads=2)
    assert len(asked) >= sum(v.nbytes for v in stored.values()) // most
    assert [key for key, value in stored.items() if not equal_bytes(got[key], value)] == []


def failing(folder: Path, threads: int, *, between: Callable[[Files], Any] = lambda files: None) -> BaseException:
    """What a read of everything raises, with `between` called when the file is open."""
    checkpoint = headers_of(folder)
    targets = {key: torch.empty(e.shape, dtype=e.dtype) for key, e in checkpoint.entries.items()}
    with pytest.raises(Exception) as info, Files(folder, checkpoint, same_folder=True) as files:  # noqa: PT012
        between(files)
        reader = Reader(files, threads=threads, staging_bytes=1 << 16)
        reader.run(reads_of(checkpoint, reader, targets, lambda reads: None))
    return info.value


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_file_that_ends_inside_a_tensor_names_file_key_and_byte(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"whole": torch.arange(100.0), "cut": awkward(60_000, FP32)})
    cut = path.stat().st_size - 101

    fstat = os.fstat

    def after_the_check(descriptor: int) -> os.stat_result:
        told = fstat(descriptor)
        if path.name in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.truncate(path, cut)
        return told

    monkeypatch.setattr(os, "fstat", after_the_check)
    error = failing(tmp_path, threads)
    assert isinstance(error, CheckpointError), repr(error)
    assert error.file == str(path)
    assert error.key == "cut"
    assert error.phase == "fill"
    assert f"byte {cut}" in str(error)


@pytest.mark.parametrize("change", ["truncated", "grown", "gone", "another"])
def test_a_file_that_changed_since_its_header_was_read_is_told(nothing_left: None, tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.arange(1000.0)})

    def between(files: Files) -> None:
        if change == "truncated":
            os.truncate(path, 1000)
        elif change == "grown":
            path.write_bytes(path.read_bytes() + b"xyz")
        elif change == "gone":
            path.unlink()
        else:  # of the same size, put in its place by another process
            write(tmp_path / "new", {"x": -torch.arange(1000.0)})
            os.replace(tmp_path / "new", path)

    error = failing(tmp_path, 2, between=between)
    if change == "gone":  # becomes a LoadError where the ranks agree on it
        assert isinstance(error, FileNotFoundError), repr(error)
        assert error.filename == str(path)
        return
    assert isinstance(error, CheckpointError), repr(error)
    assert (error.file, error.phase) == (str(path), "fill")
    assert error.expected != error.got


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("bad", [0, 5])
def test_an_io_error_names_file_key_and_byte_and_stops_all_threads(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, bad: int
) -> None:
    """64 tensors; reading one of them fails, and the others are not read to the end."""
    path = tmp_path / "a.safetensors"
    write(path, {f"{i:02}": torch.full((500,), float(i)) for i in range(64)})
    entry = headers_of(tmp_path).entries[f"{bad:02}"]
    preadv, calls = os.preadv, []
    failed = threading.Event()

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if offset == entry.offset:
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if offset > entry.offset:
            failed.wait(10)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    error = failing(tmp_path, threads)
    # A thread that is past its last look at the others reads one more; none goes on to the end.
    assert len(calls) <= bad + 4 * threads < 64, "the other threads read on"
    assert isinstance(error, LoadError), repr(error)
    assert (error.file, error.key) == (str(path), f"{bad:02}")
    assert str(entry.offset) in str(error)
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_caller_stops_all_threads(nothing_left: None, tmp_path: Path, threads: int) -> None:
    write(tmp_path / "a.safetensors", {f"{i:02}": torch.full((500,), float(i)) for i in range(64)})
    checkpoint = headers_of(tmp_path)
    targets = {key: torch.empty(e.shape, dtype=e.dtype) for key, e in checkpoint.entries.items()}
    landed: list[int] = []

    def placed(into: torch.Tensor) -> None:
        landed.append(into.nbytes)
        if len(landed) >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Files(tmp_path, checkpoint, same_folder=True) as files:  # noqa: PT012
        reader = Reader(files, threads=threads, staging_bytes=1 << 16)
        reader.run(reads_of(checkpoint, reader, targets, lambda reads: None), placed)
    assert len(landed) < 64


@pytest.mark.parametrize("threads", [1, 4])
def test_no_memory_for_staging_is_told(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    write(tmp_path / "a.safetensors", {f"{i}": awkward(5000, FP32) for i in range(8)})
    checkpoint = headers_of(tmp_path)
    targets = {key: torch.empty(e.shape, dtype=BF16) for key, e in checkpoint.entries.items()}

    def no_memory(self: Staging, device: torch.device, nbytes: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Staging, "__init__", no_memory)
    with pytest.raises(RuntimeError, match="allocate"), Files(tmp_path, checkpoint, same_folder=True) as files:  # noqa: PT012
        reader = Reader(files, threads=threads, staging_bytes=1 << 16)
        reader.run(reads_of(checkpoint, reader, targets, lambda reads: None))


def test_a_reader_keeps_its_staging_from_call_to_call(nothing_left: None, tmp_path: Path) -> None:
    """`stream` calls it once a bucket."""
    stored = write(tmp_path / "a.safetensors", {str(i): awkward(3000 + i, FP32, seed=i) for i in range(6)})
    checkpoint = headers_of(tmp_path)
    rings = set()
    with Files(tmp_path, checkpoint, same_folder=True) as files:
        reader = Reader(files, threads=2, staging_bytes=1 << 16)
        for key, value in stored.items():
            into = torch.empty(value.numel(), dtype=BF16)
            reader.run(list(reads_for(checkpoint.entries[key], [(0, 0, value.numel())], into, most=reader.most)))
            assert equal_bytes(into, value.to(BF16)), key
            rings |= {buffer.data_ptr() for s in reader.stagings.values() for buffer in s.ring}
    assert len(rings) <= 2


def test_no_reads_are_no_work(nothing_left: None, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": torch.arange(3.0)})
    with Files(tmp_path, headers_of(tmp_path), same_folder=True) as files:
        Reader(files, threads=4, staging_bytes=1 << 16).run([])
        assert files.bytes_read == 0
        assert [link for link in map(_link, os.listdir("/proc/self/fd")) if "safetensors" in link] == []


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def test_a_fifo_in_a_file_s_place_is_not_waited_for(tmp_path: Path) -> None:
    """One that has come there since the headers were read: nobody may ever write to it."""
    os.mkfifo(tmp_path / "f")
    with (
        pytest.raises(CheckpointError, match="changed"),
        Files(tmp_path, Checkpoint({"f": 8}, {}), same_folder=False) as files,
    ):
        files._descriptor("f")
