"""One save, from a library's layout to the folder in its place: what all kinds of saves share, top to bottom."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from metashard import _compat
from metashard.agree import Agreement, Alone, mesh_ranks
from metashard.checkpoint import read_header
from metashard.errors import CheckpointError, SaveError
from metashard.fill.bytes import flat_local
from metashard.fill.target import Target, target
from metashard.layout import named_slots
from metashard.policy import SavePolicy
from metashard.report import Recorder
from metashard.run import FIRST_TIMEOUT, Steps
from metashard.save.commit import UNFINISHED
from metashard.save.layout import Layout, draw_up
from metashard.save.made import Recipe, converting, merging, write_made
from metashard.save.report import SaveReport
from metashard.save.share import Share, share_of
from metashard.save.stage import Stage, sees, stage_root
from metashard.save.travel import Lane, Receiver, Sender
from metashard.save.twin import Twin
from metashard.save.write import PART, Files, Piece, Writer, check_accounts, pieces_of
from metashard.shard import put_back_shards
from metashard.watched import run_watched


@dataclass
class SaveRun(Steps):
    """One save, and what its steps share.

    Args:
        module: The module; its shards tell which ranks take part.
        given: Where the checkpoint shall be.
        overwrite: Whether the folder may hold something.
        policy: How the bytes go out.
    """

    module: nn.Module
    given: str | Path
    overwrite: bool
    policy: SavePolicy
    agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.folder = _path(self.given)
        put_back_shards(self.module)
        tensors = [tensor for _, tensor in named_slots(self.module, attributes=False)]
        meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
        if dist.is_initialized():
            ranks = sorted({rank for mesh in meshes for rank in mesh_ranks(mesh)}) or range(dist.get_world_size())
            # As in a load: ranks with other timeouts would make groups that never meet.
            first = Agreement(ranks, timeout=FIRST_TIMEOUT, error=SaveError)
            with first.told():
                first.same(self.policy, what="policies", phase="resolve")
            self.agreement = Agreement(ranks, timeout=self.policy.timeout, error=SaveError)
        else:
            self.agreement = Alone(error=SaveError)
        groups = {id(g): g for mesh in meshes for g in (mesh.get_group(axis) for axis in range(mesh.ndim))}
        self.groups = list(groups.values())
        device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
        self.device = device or torch.device("cpu")
        self.recorder = Recorder(self.device)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Around all steps: errors are told to the other ranks, memory is sampled."""
        with self.agreement.told(), self.recorder:
            yield

    @property
    def me(self) -> int:
        """Global rank of this process."""
        return self.agreement.ranks[self.agreement.rank]

    def write(
        self,
        library: Callable[[Path], None],
        sources: Mapping[int, str],
        *,
        twin: Twin | None = None,
        stale: Callable[[str], bool] = lambda name: False,
    ) -> SaveReport:
        """Write what a library would into the folder, tensors from shards.

        Args:
            library: Writes into a folder; tensors that it gives to safetensors are known by `sources`.
            sources: id of a tensor -> name of the module's tensor whose bytes it stands for.
            twin: Knows what has to be made: layers to merge, tensors to convert.
            stale: Whether a file of this name in an old folder would be taken for a part of the new checkpoint.
        """
        stages: list[Stage] = []

        def prepare() -> tuple[str, bool, str]:
            if not isinstance(self.given, (str, os.PathLike)) or not str(self.given) or "\0" in str(self.given):
                raise SaveError(f"folder={self.given!r}: expected a path.", expected="a path", got=repr(self.given))
            stages.append(Stage(self.folder, overwrite=self.overwrite, stale=stale))
            return stages[0].name, stages[0].beside, stages[0].token

        def lay_out() -> Layout:
            layout = draw_up(library, stages[0].path, sources, *([twin.conversions] if twin else []))
            stages[0].reserve(layout.headers, layout.sizes)
            return layout

        try:
            name, beside, token = self.on_leader("resolve", prepare)
            layout: Layout = self.on_leader("layout", lay_out)
            root = stage_root(self.folder, name, beside=beside)
            path = root / UNFINISHED
            seeing = self.agreement.gather(sees(root, token))
            with Files(path) as files:
                self._write_tensors(files, layout, seeing, twin)
                with self.phase("flush"):
                    files.flush()
                accounts = self.agreement.gather(files.account.figures)
                self.on_leader("check", lambda: _check(path, layout, accounts))
                written = files.account.nbytes
            self.on_leader("commit", lambda: stages[0].commit())
        finally:
            for stage in stages:
                stage.close()
        told = self.agreement.gather((self.recorder.finish(0), written, self.recorder.phases))
        return SaveReport(
            folder=self.agreement.from_leader(str(self.folder)),
            files=layout.sizes,
            phases={name: max(phases.get(name, 0.0) for _, _, phases in told) for name in told[0][2]},
            ranks=tuple(rank for rank, _, _ in told),
            written=tuple(count for _, count, _ in told),
        )

    def _write_tensors(
        self,
        files: Files,
        layout: Layout,
        seeing: list[bool],
        twin: Twin | None,
    ) -> None:
        """Every rank its shares, then what has to travel, then what has to be made."""
        ranks = self.agreement.ranks
        see = {rank for rank, does in zip(ranks, seeing, strict=True) if does}
        tensors = {slot.fqn: tensor for slot, tensor in named_slots(self.module, attributes=False)}
        merged = twin.merged() if twin else {}
        replaced = set(merged.values())
        plain = [
            (number, entry, tensors[layout.sources[entry.key]])
            for number, entry in enumerate(layout.entries)
            if entry.key in layout.sources and layout.sources[entry.key] not in replaced
        ]
        writer = Writer(files, threads=self.policy.io_threads, staging_bytes=self.policy.staging_bytes)

        def shares(rank: int) -> Iterator[tuple[Share, Target]]:
            for number, entry, tensor in plain:
                held = target(entry.key, tensor)
                yield share_of(number, entry, held, rank, ranks, see), held

        with self.phase("write"):
            if self.me in see:
                writer.run(_pieces(shares(self.me), writer.most))
        blind = [rank for rank in ranks if rank not in see]
        if blind:
            self._travel(files, blind, shares)
        recipes = list(_recipes(twin, layout, tensors)) if twin else []
        if recipes:
            entries = {entry.key: (number, entry) for number, entry in enumerate(layout.entries)}
            places = {source: key for key, source in layout.sources.items()}

            def write_one(name: str, value: torch.Tensor) -> None:
                number, entry = entries[places[merged[name]] if name in merged else name]
                share = share_of(number, entry, target(name, value), self.me, ranks, see)
                writer.run(pieces_of(share, flat_local(value), most=writer.most))

            with self.phase("write"), _compat.patient_groups(self.groups, self.policy.timeout):
                self._together(partial(write_made, recipes, write_one))

    def _travel(self, files: Files, blind: list[int], shares: Callable[[int], Iterator[tuple[Share, Target]]]) -> None:
        """Let rank 0 write for those that do not see the folder."""
        group, leader = self.agreement.group, self.agreement.ranks[0]
        ends: list[Sender | Receiver] = []
        with self.phase("write"):  # plans and memory first: nobody fails in them while another waits
            half = self.policy.staging_bytes // 2
            if self.me in blind:
                mine = [(share, held.flat) for share, held in shares(self.me) if share.numel]
                lane = Lane(self.me, [share for share, _ in mine], half)
                flats = [flat for _, flat in mine]
                ends.append(Sender(lane, flats, dst=leader, group=group, timeout=self.policy.timeout))
            if self.agreement.leader:
                lanes = [Lane(rank, [share for share, _ in shares(rank) if share.numel], half) for rank in blind]
                ends.append(Receiver(lanes, files, group=group, timeout=self.policy.timeout))
        with self.phase("write"):
            for end in ends:
                self._together(end.run)
                if isinstance(end, Receiver):
                    self.recorder.add(bytes_received=end.received)
                else:
                    self.recorder.add(bytes_sent=sum(s.numel * s.entry.dtype.itemsize for s in end.lane.shares))

    def _together(self, work: Callable[[Any], Exception | None]) -> None:
        """Run what waits for other ranks so that it ends when one is lost, see `metashard.watched`."""
        if isinstance(self.agreement, Alone):
            failure = work(threading.Event())
        else:
            try:
                failure = run_watched(work, self.agreement.control.calls, self.device)
            except Exception:
                self.agreement.broken = True
                raise
        if failure is not None:
            raise failure


def _path(given: Any) -> Path:
    """The folder; for what is no path the current one: rank 0 refuses that, where all other ranks hear of it."""
    try:
        return Path(given)
    except TypeError:
        return Path()


def _pieces(shares: Iterator[tuple[Share, Target]], most: int) -> Iterator[Piece]:
    for share, held in shares:
        yield from pieces_of(share, held.flat, most=most)


def _recipes(twin: Twin, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Iterator[Recipe]:
    """What no shard holds as it is saved."""
    for name, layer in twin.adapted.items():
        yield merging(name, layer)
    state = twin.root.state_dict() if layout.converted else {}
    for name, keys in layout.converted.items():
        yield converting(tensors[twin.sources[id(state[name])]], keys, partial(twin.convert, name))


def _check(folder: Path, layout: Layout, accounts: list[dict[str, tuple[int, int]]]) -> None:
    """Hold the written files against the layout: their sizes and headers as a loader reads them, every byte once."""
    check_accounts(accounts, layout.entries)
    for name, size in layout.sizes.items():
        part, cause = folder / (name + PART), None
        try:
            got, entries = read_header(part, name=name)
            wrong = "" if got == size else f"it has {got} bytes in place of {size}"
            if tuple(entries.values()) != tuple(entry for entry in layout.entries if entry.file == name):
                wrong = wrong or "its header is another one"
        except CheckpointError as error:
            got, wrong, cause = error.got, "it cannot be read back", error
        if wrong:
            raise SaveError(
                f"{name} is not what was written: {wrong}. Has something else changed it? Save again.",
                phase="check",
                file=str(part),
                expected=size,
                got=got,
            ) from cause
