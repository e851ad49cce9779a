"""Host memory of a load, and what happens when files or reads go wrong in the middle of one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import metashard
from tools.make_checkpoint import write_pipeline

from .parity import cpu_mesh, differences
from .ranks import Ranks

FP32, BF16 = torch.float32, torch.bfloat16
MIB = 1 << 20
ALLOWED = 128 * MIB  # above what a rank holds in the end
WAYS: dict[str, dict[str, Any]] = {
    "direct": {"strategy": "direct"},
    "stream": {"strategy": "stream"},
    "stream, broadcast": {"strategy": "stream", "transport": "broadcast"},
    "rank0": {"strategy": "rank0"},
}
FROM_FILES = [way for way in WAYS if way != "rank0"]


# --- peak host memory, as the report tells it

# Wide and shallow: 9 tensors of 8 to 48 MiB in bf16 at 8 heads of 128, most bytes in few tensors.
SMALL = dict(num_layers=1, num_single_layers=1, num_attention_heads=9, attention_head_dim=128, joint_attention_dim=512)
LARGE = dict(SMALL, num_attention_heads=24)


def write_flux(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> tuple[str, int]:
    """A Flux transformer of one block of each kind; its folder, and the bytes of its weights."""
    wanted = {**config, "pooled_projection_dim": 256, "axes_dims_rope": (16, 56, 56)}
    written = write_pipeline(folder, "flux", dtype=dtype, config=wanted)
    return str(folder / "transformer"), written.weight_bytes


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, torch.dtype], tuple[str, int]]]:
    """(size, dtype) -> (folder, bytes)."""
    root = tmp_path_factory.mktemp("flux")
    made = {
        (size, dtype): write_flux(root / f"{size}-{str(dtype)[6:]}", config, dtype)
        for size, config, dtype in (("small", SMALL, BF16), ("large", LARGE, BF16), ("small", SMALL, FP32))
    }
    yield made
    for folder, _ in made.values():  # hundreds of MB: not left for pytest's own clearing up
        for path in Path(folder).glob("*.safetensors"):
            path.unlink()


def trim() -> None:
    """Give freed memory back, so that what the process had before is not reused unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peaks(folder: str, dtype: torch.dtype, way: str, staging_bytes: int) -> Any:
    trim()
    policy = metashard.LoadPolicy(timeout=60, staging_bytes=staging_bytes, **WAYS[way])
    module, report = metashard.load_component(
        folder, mesh=cpu_mesh(), dtype=dtype, load=policy, output_loading_info=True
    )
    meta = [fqn for fqn, p in module.named_parameters() if p.is_meta]
    del module
    trim()
    return report, meta


def excess(ranks: Ranks, folder: str, dtype: torch.dtype, way: str, staging_bytes: int = 64 * MIB) -> list[int]:
    """For each rank: its peak above the start, less what it holds in the end."""
    # The first load of a process imports the library and fills its pools; it is not what is measured.
    report, meta = ranks.run(peaks, folder, dtype, way, staging_bytes, timeout=120)[0]
    assert meta == []
    assert report.strategy == WAYS[way]["strategy"]
    for rank in report.ranks:
        assert rank.peak_host_bytes > 0.5 * rank.bytes_resident, "nothing was measured"
    return [rank.peak_host_bytes - rank.bytes_resident for rank in report.ranks]


@pytest.fixture(scope="module")
def warm(ranks2: Ranks, checkpoints: Any) -> Ranks:
    """Ranks that have imported what a load imports."""
    for way in ("direct", "rank0"):
        ranks2.run(peaks, checkpoints["small", BF16][0], BF16, way, 1 << 16, timeout=120)
    return ranks2


@pytest.mark.parametrize("way", FROM_FILES)
@pytest.mark.parametrize(
    ("stored", "wanted"), [(BF16, BF16), (FP32, BF16), (BF16, FP32)], ids=["as it is", "fp32 to bf16", "bf16 to fp32"]
)
def test_a_rank_holds_its_shard_and_little_more(
    warm: Ranks, checkpoints: Any, way: str, stored: torch.dtype, wanted: torch.dtype
) -> None:
    """The leader of `stream` included; with the staging that everyone has who asks for nothing."""
    folder, _ = checkpoints["small", stored]
    for rank, above in enumerate(excess(warm, folder, wanted, way)):
        assert above <= ALLOWED, f"rank {rank}: {above / MIB:.0f} MiB above its shard"


@pytest.mark.parametrize("way", FROM_FILES)
def test_memory_above_the_shard_does_not_grow_with_the_model(warm: Ranks, checkpoints: Any, way: str) -> None:
    small, large = checkpoints["small", BF16], checkpoints["large", BF16]
    assert large[1] > 6 * small[1]
    before = excess(warm, small[0], BF16, way, 16 * MIB)
    after = excess(warm, large[0], BF16, way, 16 * MIB)
    assert max(*before, *after) <= 64 * MIB
    assert max(after) - max(before) <= 24 * MIB  # of several hundred that the model has grown


def test_the_bound_can_say_no(warm: Ranks, checkpoints: Any) -> None:
    """`rank0` holds the model on its leader, by design, and is told from the others by the same figures.

    With a cast, as weights that are taken as they are stay mapped from the file, which is not anonymous memory.
    """
    folder, nbytes = checkpoints["large", BF16]
    leader, other = excess(warm, folder, FP32, "rank0", 16 * MIB)
    assert 2 * nbytes > 4 * ALLOWED
    assert leader > 2 * ALLOWED
    assert other <= 64 * MIB


# --- files that change between their headers and the reading


def save_small(folder: Path) -> None:
    """A small SD3 transformer in two files."""
    from . import zoo

    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) >= 2


def victim(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def change(path: Path, how: str) -> None:
    """What another process may do to a file that is being loaded."""
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    elif how == "grown":
        with path.open("ab") as file:
            file.write(b"abc")
    elif how == "replaced":  # by one of the same size with other values
        raw = bytearray(path.read_bytes())
        raw[-4:] = b"\x00\x00\x00\x00"
        path.with_suffix(".new").write_bytes(bytes(raw))
        os.replace(path.with_suffix(".new"), path)
    else:
        raise AssertionError(how)


def load_small(folder: str, way: str, **kwargs: Any) -> nn.Module:
    policy = metashard.LoadPolicy(timeout=20, **WAYS[way])
    return metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16, load=policy, **kwargs)


def outcome(folder: str, way: str, **kwargs: Any) -> dict[str, Any]:
    """How a load ends on this rank, and how long after the slowest rank has begun."""
    dist.barrier()
    start = time.monotonic()
    try:
        load_small(folder, way, **kwargs)
    except metashard.MetaShardError as error:
        told = {f: getattr(error, f) for f in ("file", "key", "rank", "phase")}
        told |= {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
        return told
    return {"kind": "loaded"}


def same_on_all(answers: list[dict[str, Any]]) -> dict[str, Any]:
    facts = [{k: v for k, v in answer.items() if k != "seconds"} for answer in answers]
    assert all(fact == facts[0] for fact in facts), answers
    return facts[0]


def loads_afterwards(ranks: Ranks, folder: Path, way: str) -> None:
    """The same process group is good for the next load."""
    starts = ranks.starts
    assert ranks.run(right, str(folder), way) == [[]] * ranks.world_size
    assert ranks.starts == starts


def right(folder: str, way: str) -> list[str]:
    from diffusers import SD3Transformer2DModel

    return differences(load_small(folder, way), SD3Transformer2DModel.from_pretrained(folder, torch_dtype=BF16))


def changing(folder: str, way: str, how: str) -> dict[str, Any]:
    def prepare(module: nn.Module) -> None:  # runs after the headers and before the reading
        if dist.get_rank() == 0:
            change(victim(Path(folder)), how)

    return outcome(folder, way, prepare=prepare)


@pytest.mark.parametrize("how", ["truncated", "removed", "grown", "replaced"])
@pytest.mark.parametrize("way", FROM_FILES)
def test_a_file_that_changes_before_it_is_read_is_one_error_on_every_rank(
    ranks2: Ranks, tmp_path: Path, way: str, how: str
) -> None:
    save_small(tmp_path / "model")
    save_small(tmp_path / "other")
    told = same_on_all(ranks2.run(changing, str(tmp_path / "model"), way, how))
    assert told["kind"] == ("LoadError" if how == "removed" else "CheckpointError"), told
    assert told["file"] == str(victim(tmp_path / "other")).replace("other", "model")
    assert told["phase"] == "fill"
    assert told["rank"] == 0  # the lowest that saw it
    loads_afterwards(ranks2, tmp_path / "other", way)


def changing_while_read(folder: str, way: str) -> dict[str, Any]:
    """The file of the last tensors shrinks when it is open and its size has been checked."""
    path, fstat = victim(Path(folder)), os.fstat

    def after_the_check(descriptor: int) -> os.stat_result:
        told = fstat(descriptor)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                os.truncate(path, 1000 + told.st_size // 2)
        return told

    if dist.get_rank() == 0:
        os.fstat = after_the_check
    try:
        return outcome(folder, way)
    finally:
        os.fstat = fstat


@pytest.mark.parametrize("way", FROM_FILES)
def test_a_file_that_shrinks_while_it_is_read_names_a_key_in_it(ranks2: Ranks, tmp_path: Path, way: str) -> None:
    save_small(tmp_path / "model")
    save_small(tmp_path / "other")
    told = same_on_all(ranks2.run(changing_while_read, str(tmp_path / "model"), way))
    assert told["kind"] == "CheckpointError", told
    assert told["file"] == str(victim(tmp_path / "model"))
    assert told["key"] in keys_of(victim(tmp_path / "other")) or "changed while" in told["text"]
    loads_afterwards(ranks2, tmp_path / "other", way)


def keys_of(path: Path) -> set[str]:
    with path.open("rb") as file:
        return set(json.loads(file.read(int.from_bytes(file.read(8), "little"))))


# --- a rank that cannot read


def unreadable(folder: str, way: str, failing: int, nth: int) -> dict[str, Any]:
    """Rank `failing`'s reads fail from the `nth` on, as on a disk that dies."""
    preadv, calls = os.preadv, [0]

    def broken(*args: Any) -> int:
        calls[0] += 1
        if calls[0] >= nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*args)

    if dist.get_rank() == failing:
        os.preadv = broken
    try:
        return outcome(folder, way)
    finally:
        os.preadv = preadv


@pytest.mark.parametrize(
    ("way", "failing"), [("direct", 0), ("direct", 1), ("stream", 0), ("stream, broadcast", 0)], ids=str
)
@pytest.mark.parametrize("nth", [1, 20])
def test_a_read_that_fails_on_one_rank_ends_the_load_on_all(
    ranks2: Ranks, tmp_path: Path, way: str, failing: int, nth: int
) -> None:
    """In `stream` the others are told with the next bucket; nobody waits for a timeout."""
    save_small(tmp_path)
    answers = ranks2.run(unreadable, str(tmp_path), way, failing, nth)
    told = same_on_all(answers)
    assert told["kind"] == "CheckpointError", told
    assert told["rank"] == failing
    assert told["phase"] == "fill"
    assert told["key"] in keys_of(Path(told["file"]))
    assert os.strerror(errno.EIO) in told["text"]
    assert max(answer["seconds"] for answer in answers) < 15
    loads_afterwards(ranks2, tmp_path, way)


def without_memory(folder: str, way: str, failing: int, what: str) -> dict[str, Any]:
    """Rank `failing` cannot allocate its staging, or the buckets that travel."""
    from metashard.fill import collective, staging

    module = {"staging": staging, "buckets": collective}[what]

    class NoMemory:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("not enough memory: you tried to allocate 123 bytes")

    if dist.get_rank() == failing:
        module.torch = NoMemory()  # type: ignore[assignment]
    try:
        return outcome(folder, way)
    finally:
        module.torch = torch


@pytest.mark.parametrize(
    ("way", "failing", "what"),
    [
        ("direct", 1, "staging"),
        ("stream", 0, "staging"),
        ("stream", 0, "buckets"),
        ("stream", 1, "buckets"),
        ("stream, broadcast", 0, "buckets"),
        ("stream, broadcast", 1, "buckets"),
        ("direct", 0, "buckets"),
        ("rank0", 1, "buckets"),
    ],
    ids=str,
)
def test_a_rank_without_memory_ends_the_load_on_all(
    ranks2: Ranks, tmp_path: Path, way: str, failing: int, what: str
) -> None:
    save_small(tmp_path)
    answers = ranks2.run(without_memory, str(tmp_path), way, failing, what, timeout=40)
    told = same_on_all(answers)
    assert told["kind"] == "LoadError", told
    assert told["rank"] == failing
    assert "not enough memory" in told["text"]
    assert max(answer["seconds"] for answer in answers) < 15
    loads_afterwards(ranks2, tmp_path, way)


def failing_and_opened(folder: str, way: str) -> tuple[list[str], int]:
    """Files that this rank has open, and threads it has more, after a load that failed."""
    import threading

    threads = threading.active_count()
    told = unreadable(folder, way, 0, 3)
    assert told["kind"] != "loaded"
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith(folder)], threading.active_count() - threads


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
@pytest.mark.parametrize("way", FROM_FILES)
def test_a_load_that_fails_leaves_no_open_file_and_no_thread(ranks2: Ranks, tmp_path: Path, way: str) -> None:
    save_small(tmp_path)
    ranks2.run(right, str(tmp_path), way)  # torch starts threads of its own on first use
    for opened, threads in ranks2.run(failing_and_opened, str(tmp_path), way):
        assert opened == []
        assert threads <= 0
