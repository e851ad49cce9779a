#!/usr/bin/env python3
"""Fuzzes what reads a checkpoint, and loads random valid ones.

    python tools/fuzz.py --minutes 5
    python tools/fuzz.py --minutes 5 --seed 7 --only headers index

Three kinds of cases, each told by its seed alone:

- headers: valid, mutated (in structure and byte by byte) and random safetensors files;
- index: model folders whose config, index and files are mutated, and files that are none;
- loads: random valid checkpoints (see fuzz_loads.py) on 1, 2 and 4 ranks, every strategy, against the bytes written.

A reader may accept or raise CheckpointError or ComponentError. What it accepts is held against an oracle written from
the format's description, and against safetensors' own reader: anything that one of them refuses or reads otherwise is a
silent accept. Any other exception, an error that cannot be printed or sent, a valid file that is refused, and a load
that fails or differs by a byte is a crash. The last line has the counts; the exit code is 1 if there is a crash or a
silent accept.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import pickle
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # workers import this by its name

from safetensors import SafetensorError, deserialize

import tests.conftest  # noqa: F401  the environment of the ranks, before the libraries are imported
from metashard.checkpoint import Entry, read_checkpoint, read_header
from metashard.component import resolve_component
from metashard.errors import CheckpointError, ComponentError
from tools.fuzz_inputs import SIZES, mutated_bytes, mutated_object, packed, valid_file, write_folder

# Kind of case -> its part of the time: a load takes a hundred times as long as a header.
WEIGHT = {"headers": 1, "index": 1, "loads": 3}


@dataclass
class Tally:
    """What came of the cases so far."""

    cases: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    crashes: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    def line(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.cases.items())
        return (
            f"fuzz: {sum(self.cases.values())} cases ({kinds}; {self.accepted} accepted and checked), "
            f"{len(self.crashes)} crashes, {len(self.silent)} silent accepts"
        )


def oracle(data: bytes) -> dict[str, tuple[str, tuple[int, ...], int, int]] | None:
    """What a safetensors file holds: key -> (dtype, shape, first byte, bytes); None if it is not one.

    Written from https://github.com/huggingface/safetensors#format; shares no code with the package.
    """

    def refuse(*_: Any) -> Any:
        raise ValueError

    def once(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(items) if len({key for key, _ in items}) == len(items) else refuse()

    def natural(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64

    if len(data) < 8:
        return None
    length = int.from_bytes(data[:8], "little")
    if length > 100_000_000 or 8 + length > len(data):
        return None
    try:
        header = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=once, parse_constant=refuse)
        json.dumps(header, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    notes = header.pop("__metadata__", None) or {}
    if not isinstance(notes, dict) or any(not isinstance(note, str) for note in notes.values()):
        return None
    found, taken = {}, []
    for key, item in header.items():
        if not isinstance(item, dict) or not isinstance(item.get("dtype"), str) or item["dtype"] not in SIZES:
            return None
        shape, offsets = item.get("shape"), item.get("data_offsets")
        if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
            return None
        if not all(map(natural, shape)) or not all(map(natural, offsets)):
            return None
        nbytes = SIZES[item["dtype"]] * math.prod(shape)
        if offsets[1] - offsets[0] != nbytes:
            return None
        found[key] = (item["dtype"], tuple(shape), 8 + length + offsets[0], nbytes)
        taken.append((offsets[0], offsets[1]))
    position = 0
    for begin, end in sorted(taken):
        if begin != position:
            return None
        position = end
    return found if 8 + length + position == len(data) else None


def second_opinion(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """The same by safetensors itself, with the bytes; None if it refuses."""
    try:
        return {key: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for key, item in deserialize(data)}
    except SafetensorError:
        return None


def header_case(seed: int, folder: Path, tally: Tally) -> None:
    """One file through the header reader, the oracle and safetensors."""
    rng = random.Random(seed)
    header, data = valid_file(rng)
    kind = rng.choices(("valid", "object", "bytes", "both", "random"), (2, 5, 5, 2, 1))[0]
    if kind in ("object", "both"):
        for _ in range(rng.choice((1, 1, 2))):
            header = mutated_object(rng, header)
    raw = packed(rng, header, data)
    if kind in ("bytes", "both"):
        raw = mutated_bytes(rng, raw)
    if kind == "random":
        raw = struct.pack("<Q", rng.choice((2, 8, 30))) * rng.randint(0, 1) + rng.randbytes(rng.randrange(60))
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    label = f"headers seed {seed} ({kind})"
    found = guarded(lambda: read_header(path, name=path.name)[1], label, tally, required=kind == "valid")
    if found is not None:
        compare(found, raw, label, tally)


def compare(found: dict[str, Entry], raw: bytes, label: str, tally: Tally) -> None:
    """Hold accepted entries against the oracle and against safetensors."""
    tally.accepted += 1
    wanted, second = oracle(raw), second_opinion(raw)
    got = {key: (e.shape, e.dtype.itemsize, e.offset, e.nbytes) for key, e in found.items()}
    if wanted is None or second is None:
        who = " and ".join(name for name, view in (("the oracle", wanted), ("safetensors", second)) if view is None)
        tally.silent.append(f"{label}: accepted, {who} refuses: {raw[:300]!r}")
    elif got != {key: (shape, SIZES[dtype], at, n) for key, (dtype, shape, at, n) in wanted.items()}:
        tally.silent.append(f"{label}: read as {got}, the oracle says {wanted}")
    elif {k: (v[1], raw[v[2] : v[2] + v[3]]) for k, v in wanted.items()} != {k: v[1:] for k, v in second.items()}:
        tally.silent.append(f"{label}: safetensors reads other values")


def guarded(read: Callable[[], Any], label: str, tally: Tally, *, required: bool = False) -> Any:
    """The reader's answer, or None where it refuses as it may; all else is noted."""
    try:
        return read()
    except (CheckpointError, ComponentError) as error:
        try:
            text = str(error)
            text.encode("utf-8")
            sent = str(pickle.loads(pickle.dumps(error))) == text
        except Exception as fault:  # noqa: BLE001 - an error that cannot be told is a crash on some rank
            tally.crashes.append(f"{label}: the error cannot be told: {type(fault).__name__}: {fault}")
            return None
        if not sent or len(text) > 3000 or error.file is None:
            tally.crashes.append(f"{label}: an error of {len(text)} characters, sent {sent}, file {error.file}")
        if required:
            tally.crashes.append(f"{label}: a valid one is refused: {error}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.crashes.append(f"{label}: {type(error).__name__}: {error}")
    return None


def index_case(seed: int, root: Path, tally: Tally) -> None:
    """One folder through the resolver and the header reader."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        folder = Path(scratch) / "m"
        component, intact = write_folder(rng, folder)
        label = f"index seed {seed}"

        def read() -> Any:
            found = resolve_component(folder, component)
            return found, found.quantization, read_checkpoint(found.folder, found.files, found.weight_map)

        answer = guarded(read, label, tally, required=intact)
        if answer is not None:
            found, _, checkpoint = answer
            check_folder(found.folder, found.files, found.weight_map, checkpoint.entries, label, tally)


def check_folder(
    folder: Path, files: Any, weight_map: dict[str, str] | None, entries: dict[str, Entry], label: str, tally: Tally
) -> None:
    """Hold an accepted folder against its own index and files, read independently."""
    tally.accepted += 1
    faults: list[str] = []
    root = os.path.realpath(folder)
    for name in files:
        real = os.path.realpath(folder / name)
        if os.path.dirname(real) != root:
            faults.append(f"{name} lies outside, at {real}")
    held = {name: oracle((folder / name).read_bytes()) for name in files}
    faults += [f"{name} is no safetensors file" for name, what in held.items() if what is None]
    if weight_map is None:
        expected = {key: name for name, what in held.items() for key in what or ()}
    else:
        indexes = [path for path in folder.glob("*.index*.json") if path.is_file()]
        readable = [json.loads(path.read_bytes()) for path in indexes]
        expected = next((i["weight_map"] for i in readable if i.get("weight_map") == weight_map), {})
    if {key: entry.file for key, entry in entries.items()} != expected:
        faults.append(f"read {len(entries)} keys, expected {len(expected)}")
    for key, entry in entries.items():
        _, shape, at, nbytes = (held.get(entry.file) or {}).get(key, ("", (), -1, -1))
        if (entry.shape, entry.offset, entry.nbytes) != (shape, at, nbytes):
            faults.append(f"{key} is read as {entry}")
    tally.silent += [f"{label}: {fault}" for fault in faults]


def load_cases(seed: int, root: Path, tally: Tally, pool: Any) -> None:
    """One random valid checkpoint on the ranks of a pool (`tests.ranks.Ranks`), every way."""
    from tools import fuzz_loads

    world = pool.world_size
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        fuzz_loads.write(fuzz_loads.describe(seed, world), Path(scratch))
        try:
            answers = pool.run(fuzz_loads.run_case, seed, scratch, world, fuzz_loads.LOADS, timeout=120)
        except Exception as error:  # noqa: BLE001 - a rank that died, hung or raised
            answers = [[f"{type(error).__name__}: {error}"]]
    tally.crashes += [f"loads seed {seed} on {world}, rank {rank}: {t}" for rank, a in enumerate(answers) for t in a]
    tally.accepted += not any(answers)


def seeds(first: int, until: float) -> Iterator[int]:
    while time.monotonic() < until:
        yield first
        first += 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long, all kinds of cases together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case of each kind")
    parser.add_argument("--only", nargs="+", choices=WEIGHT, default=list(WEIGHT), help="kinds of cases (default: all)")
    args = parser.parse_args(argv)
    tally = Tally()
    share = {kind: 60 * args.minutes * WEIGHT[kind] / sum(WEIGHT[k] for k in args.only) for kind in args.only}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch, ExitStack() as stack:
        root = Path(scratch)
        cases: dict[str, Callable[[int], None]] = {
            "headers": lambda seed: header_case(seed, root, tally),
            "index": lambda seed: index_case(seed, root, tally),
        }
        if "loads" in args.only:
            from tests.ranks import Ranks

            pools = [stack.enter_context(Ranks(world)) for world in (1, 2, 4)]
            cases["loads"] = lambda seed: load_cases(seed, root, tally, pools[seed % len(pools)])
        for kind in args.only:
            for seed in seeds(args.seed, time.monotonic() + share[kind]):
                cases[kind](seed)
                tally.cases[kind] = tally.cases.get(kind, 0) + 1
    for text in (tally.silent + tally.crashes)[:20]:
        print(text[:1000].encode("utf-8", "backslashreplace").decode())
    print(tally.line())
    return 1 if tally.silent or tally.crashes else 0


if __name__ == "__main__":
    from tools import fuzz

    logging.getLogger("metashard").setLevel(logging.ERROR)  # spoilt folders are warned of by the thousand
    sys.exit(fuzz.main())
