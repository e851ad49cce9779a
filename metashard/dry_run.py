"""What a load would do, told before it is done: no process group, no weights, any number of ranks.

[Note: figures a rank]
Every figure is a vector over the ranks of one replica, as tensors of a model differ in shape but not in how they are
cut: a dim of size d over n ranks gives shards of at most three sizes. So the plan of 4,096 ranks costs what that of 4
does. The rules are those of the engine (`metashard.fill`); a test holds them against the report of a real load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from metashard.checkpoint import Entry, read_checkpoint
from metashard.component import Component, resolve_component
from metashard.errors import ComponentError, ShardError
from metashard.fill.direct import part_of
from metashard.fill.reader import READ_BYTES, reads_for
from metashard.layout import Slot, named_slots
from metashard.load_plan import GroupPlan, LoadPlan, RankPlan
from metashard.mapping import apply_library_rules, entries_by_identity, library_reads
from metashard.plan import Sharding
from metashard.policy import LoadPolicy, ShardPolicy
from metashard.shard import asked_to_ignore, choose_groups, group_of, pinned_names, replicated_names
from metashard.shell import build_shell
from metashard.strategy import ASKED_FOR, as_dtype, build_dtype, map_or_refuse

# Of a plan, which keeps figures for every rank: on one axis so many take a minute and 1 GB, where 4,096 take a second.
MOST_RANKS = 1 << 16
SMALL_READ_BYTES = 1 << 20  # shorter reads cost the storage more than their bytes


def plan_load(
    checkpoint: str | Path,
    component: str | None = None,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    lora: Any = None,
    shard: ShardPolicy = ShardPolicy(),
    load: LoadPolicy = LoadPolicy(),
    variant: str | None = None,
    device_type: str = "cpu",
) -> LoadPlan:
    """Plan a load on any number of ranks, in this process alone: reads config and headers, no weights.

    Args:
        checkpoint: A pipeline folder, or a folder that is one model.
        component: Name of the component in it; None for a folder that is one model.
        world_size: Number of ranks on one axis (FSDP), at most 65,536; or give `mesh_shape`.
        mesh_shape: (shard,), or (replicate, shard) for HSDP; at most 65,536 ranks in all.
        dtype: As `load_component` takes it.
        lora: As `load_component` takes it.
        shard: How to cut the module into FSDP groups.
        load: `staging_bytes`, `io_threads`, `transport`, `missing` and `allow_pickle` apply.
        variant: Weight variant, such as "fp16".
        device_type: Where the shards are to live: "cpu", "cuda", ...

    Returns:
        The plan. Adapters are made for real, in host memory.

    Raises:
        ValueError: No such number of ranks, mesh or device type.
        MetaShardError: As `load_component` does, where it shows without loading.
    """
    shape = _mesh_shape(world_size, mesh_shape)
    _check_device_type(device_type)
    root = Path(checkpoint)
    if not str(checkpoint) or not root.exists():
        raise ComponentError(
            f"{str(checkpoint) or 'An empty path'} is no folder. "
            "A plan needs the checkpoint's config and headers on disk.",
            phase="resolve",
            file=str(checkpoint),
            expected="a folder",
            got="nothing there",
        )
    found = resolve_component(root, component, variant=variant, allow_pickle=load.allow_pickle)
    headers = None if found.format == "pickle" else read_checkpoint(found.folder, found.files, found.weight_map)
    built_under = build_dtype(found, headers, as_dtype(dtype))
    with torch.random.fork_rng(devices=[]):
        module = build_shell(found.cls, found.config, library=found.library, dtype=built_under)
        mapping = map_or_refuse(module, found, headers, load)
        apply_library_rules(module, mapping, library=found.library, dtype=built_under)
        entries = entries_by_identity(module, mapping)
        obstacle = mapping.reason
        if lora is not None:
            from metashard.lora import inject, needs_base_weights

            obstacle = obstacle or needs_base_weights(lora)
            module = inject(module, lora, None, component=found.name, entries=entries)
    targets = _targets(module, shard, shape, entries)
    groups = _groups(module, shard, {target.slot.fqn for target in targets if target.dim is None})
    attributes = [_whole(slot, shape[-1]) for slot, _ in named_slots(module) if slot.kind == "attribute" and slot.real]
    total = headers.nbytes if headers is not None else sum((found.folder / name).stat().st_size for name in found.files)
    taken = total if headers is None else library_reads(mapping, headers, library=found.library)
    figures = {"rank0": _from_memory(targets + attributes, shape, taken, load)}
    if obstacle is None:
        everything = targets + attributes
        figures = {"direct": _direct(everything, shape, load), "stream": _stream(everything, shape, load), **figures}
    strategies = {name: _rank_plans(name, it, targets, shape, load, device_type) for name, it in figures.items()}
    chosen = load.strategy if load.strategy != "auto" else next(iter(strategies))
    if chosen not in strategies:
        raise ComponentError(f'Strategy "{chosen}" cannot load this: {obstacle}.', phase="plan", got=obstacle)
    easy = "every parameter is one entry; every rank has to see the files (else stream)"
    return LoadPlan(
        class_name=found.class_name,
        mesh_shape=shape,
        device_type=device_type,
        transport=load.transport,
        checkpoint_bytes=total,
        files=len(found.files),
        dtype_counts=dict(sorted(Counter(str(t.slot.dtype).removeprefix("torch.") for t in targets).items())),
        strategy=chosen,
        reason=ASKED_FOR if load.strategy != "auto" else obstacle or easy,
        ranks=strategies,
        groups=groups,
        warnings=_warnings(found, strategies, groups, shape),
    )


def _mesh_shape(world_size: int | None, mesh_shape: Sequence[int] | None) -> tuple[int, ...]:
    if (world_size is None) == (mesh_shape is None):
        raise ValueError("Give either world_size or mesh_shape.")
    shape: tuple[Any, ...] = (world_size,) if mesh_shape is None else tuple(mesh_shape)
    given = f"world_size={world_size}" if mesh_shape is None else f"mesh_shape={shape}"
    sane = len(shape) in (1, 2) and all(type(size) is int and size >= 1 for size in shape)
    if not sane or math.prod(shape) > MOST_RANKS:
        wanted = "1" if mesh_shape is None else "(shard,) or (replicate, shard), in all 1"
        raise ValueError(f"{given}: expected {wanted} to {MOST_RANKS:,} ranks.")
    return shape


def _check_device_type(name: str) -> None:
    with suppress(RuntimeError, TypeError):
        if torch.device(name).type == name != "meta":
            return
    raise ValueError(f'device_type={name!r}: expected a type alone, of a device that holds bytes, such as "cuda".')


@dataclass(frozen=True)
class _Target:
    """One tensor to fill: its slot, the dim it is cut on (None: replicated), its entry (None: from rank 0)."""

    slot: Slot
    dim: int | None
    entry: Entry | None
    counts: torch.Tensor  # elements on each rank of one replica, int64

    @property
    def numel(self) -> int:
        return math.prod(self.slot.shape)

    @property
    def size(self) -> int:
        return self.slot.dtype.itemsize


def _targets(
    module: nn.Module, policy: ShardPolicy, shape: tuple[int, ...], entries: dict[int, Entry]
) -> list[_Target]:
    """Everything that is registered, once, and how it is cut."""
    slots = named_slots(module, attributes=False)
    replicated = replicated_names([slot for slot, _ in slots], asked_to_ignore(module, policy))
    ranks = shape[-1]
    found: list[_Target] = []
    for slot, tensor in slots:
        if slot.tie != slot.fqn:
            continue
        entry = entries.get(id(tensor)) if slot.persistent and not (slot.kind == "parameter" and slot.real) else None
        dim: int | None = None
        if slot.kind == "parameter" and slot.fqn not in replicated:
            placement = policy.shard_placement_fn(tensor) if policy.shard_placement_fn else None  # type: ignore[arg-type]
            if placement is not None and not isinstance(placement, Shard):
                raise ShardError(f"{slot.fqn}: a plan knows Shard(dim), not {placement}.", phase="plan", key=slot.fqn)
            dim = 0 if placement is None else placement.dim % len(slot.shape)
        if dim is None:
            found.append(_whole(slot, ranks, entry))
            continue
        size = slot.shape[dim]
        step = -(-size // ranks)
        held = (size - step * torch.arange(ranks)).clamp(0, step)
        found.append(_Target(slot, dim, entry, held * (math.prod(slot.shape) // size if size else 0)))
    return found


def _whole(slot: Slot, ranks: int, entry: Entry | None = None) -> _Target:
    return _Target(slot, None, entry, torch.full((ranks,), math.prod(slot.shape), dtype=torch.int64))


class _Figures:
    """Vectors over the ranks of one replica, by the names of `RankPlan`; and what replicas are sent."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.of = {name: torch.zeros(ranks, dtype=torch.int64) for name in RankPlan.__dataclass_fields__}
        self.to_replicas = torch.zeros(ranks, dtype=torch.int64)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.of[name] += value

    def first(self, value: int) -> torch.Tensor:
        """`value` on the first rank, 0 elsewhere."""
        vector = torch.zeros(self.ranks, dtype=torch.int64)
        vector[0] = value
        return vector


def _reads(figures: _Figures, target: _Target, most: int, rank: int, runs: list[tuple[int, int, int]]) -> None:
    """Count the reads of some runs of a target by one rank, with the engine's own cut into reads."""
    assert target.entry is not None
    into = torch.empty(sum(count for _, _, count in runs), dtype=target.slot.dtype, device="meta")
    for read in reads_for(target.entry, runs, into, most=most):
        small = read.nbytes if read.nbytes < SMALL_READ_BYTES else 0
        figures.of["bytes_read"][rank] += read.nbytes
        figures.of["reads"][rank] += 1
        figures.of["small_read_bytes"][rank] += small


def _read_shards(figures: _Figures, target: _Target, most: int) -> None:
    """Every rank reads its own shard of a target. Shards of one size are read in one way."""
    assert target.dim is not None
    sharding = Sharding(((0, target.dim),))
    for count in target.counts.unique_consecutive().tolist():
        if not count:
            continue
        mine = target.counts == count
        one = _Figures(1)
        box = sharding.box(target.slot.shape, (figures.ranks,), (int(mine.nonzero()[0]),))
        _reads(one, target, most, 0, list(box.runs()))
        figures.add(**{name: mine * int(one.of[name]) for name in ("bytes_read", "reads", "small_read_bytes")})


def _most(load: LoadPolicy, staging: int) -> int:
    return min(READ_BYTES, staging // (2 * load.io_threads))


def _direct(targets: list[_Target], shape: tuple[int, ...], load: LoadPolicy) -> _Figures:
    figures = _Figures(shape[-1])
    most = _most(load, load.staging_bytes)
    number = -1
    for target in targets:
        if target.entry is None:
            _from_rank0(figures, target, load.transport)
            continue
        number += 1
        if target.dim is not None:
            _read_shards(figures, target, most)
        else:
            for owner in range(figures.ranks) if target.numel else ():
                start, stop = part_of(number, target.numel, target.numel * target.size, owner, figures.ranks)
                if stop > start:
                    _reads(figures, target, most, owner, [(start, 0, stop - start)])
                    sent = (stop - start) * target.size
                    figures.of["bytes_sent"][owner] += sent * (figures.ranks - 1)
                    figures.of["bytes_received"][owner] -= sent
            whole = target.numel * target.size
            figures.add(bytes_received=whole, network_bytes=whole if figures.ranks > 1 else 0)
        figures.to_replicas += target.counts * target.size
    return figures


def _stream(targets: list[_Target], shape: tuple[int, ...], load: LoadPolicy) -> _Figures:
    figures = _Figures(shape[-1])
    most = _most(load, load.staging_bytes // 2)
    for target in targets:
        _from_rank0(figures, target, load.transport)
        if target.entry is not None:
            # Read once, by the leader, each rank's part for itself; buckets may cut the reads further.
            if target.dim is not None and load.transport == "scatter":
                parts = _Figures(figures.ranks)
                _read_shards(parts, target, most)
                for name in ("bytes_read", "reads", "small_read_bytes"):
                    figures.of[name][0] += parts.of[name].sum()
            elif target.numel:
                _reads(figures, target, most, 0, [(0, 0, target.numel)])
    return figures


def _from_memory(targets: list[_Target], shape: tuple[int, ...], total: int, load: LoadPolicy) -> _Figures:
    figures = _Figures(shape[-1])
    for target in targets:
        _from_rank0(figures, target, load.transport)
    figures.add(bytes_read=figures.first(total))
    return figures


def _from_rank0(figures: _Figures, target: _Target, transport: str) -> None:
    """A target goes from the first rank to the others of its replica."""
    whole, ranks = target.numel * target.size, figures.ranks
    held = target.counts * target.size
    if target.dim is not None and transport == "scatter":
        sent, received = figures.first(int(held[1:].sum())), held - figures.first(int(held[0]))
        figures.add(bytes_sent=sent, bytes_received=received, network_bytes=sent + received)
    elif ranks > 1:
        sent, received = figures.first(whole * (ranks - 1)), whole - figures.first(whole)
        figures.add(bytes_sent=sent, bytes_received=received, network_bytes=whole)
    figures.to_replicas += held


def _rank_plans(
    strategy: str, figures: _Figures, targets: list[_Target], shape: tuple[int, ...], load: LoadPolicy, device: str
) -> tuple[RankPlan, ...]:
    """The ranks of the first replica, by `figures`, then of the others, which receive what the first one has."""
    whole = sum(t.numel * t.size for t in targets) if strategy == "rank0" else 0
    first = _with_peaks(figures, targets, load, device, whole)
    if len(shape) == 1:
        return first
    sent, others = figures.to_replicas.tolist(), shape[0] - 1
    first = tuple(
        replace(plan, bytes_sent=plan.bytes_sent + n * others, network_bytes=plan.network_bytes + n * (others > 0))
        for plan, n in zip(first, sent, strict=True)
    )
    plain = _with_peaks(_Figures(figures.ranks), targets, load, device, 0)
    rest = tuple(replace(plan, bytes_received=n, network_bytes=n) for plan, n in zip(plain, sent, strict=True))
    return first + rest * others


def _with_peaks(
    figures: _Figures, targets: list[_Target], load: LoadPolicy, device: str, whole: int
) -> tuple[RankPlan, ...]:
    """Resident bytes and peaks added; `whole` bytes are on the first rank at first, freed as shards fill."""
    for target in targets:
        figures.add(bytes_resident=target.counts * target.size)
    resident = figures.of["bytes_resident"]
    host = torch.full_like(resident, load.staging_bytes) + figures.first(whole)
    if device == "cpu":
        host += resident
    else:
        figures.add(peak_device_bytes=resident + load.staging_bytes)
    figures.add(peak_host_bytes=host)
    columns = {name: vector.tolist() for name, vector in figures.of.items()}
    return tuple(RankPlan(**{name: columns[name][rank] for name in columns}) for rank in range(figures.ranks))


def _groups(module: nn.Module, policy: ShardPolicy, replicated: set[str]) -> tuple[GroupPlan, ...]:
    """The FSDP groups; parameters of the classes' fp32 pins are gathered in fp32."""
    blocks = choose_groups(module, policy)
    compute = policy.mp_policy.param_dtype if policy.mp_policy is not None else None
    pinned = pinned_names(module, compute)
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for slot, _ in named_slots(module, attributes=False):
        if slot.kind != "parameter" or slot.tie != slot.fqn or slot.fqn in replicated:
            continue
        name = group_of(slot.fqn.rpartition(".")[0], set(blocks))
        dtype = torch.float32 if slot.fqn in pinned else compute or slot.dtype
        numbers[name] += 1
        sizes[name] += math.prod(slot.shape) * dtype.itemsize
    return tuple(GroupPlan(name, numbers[name], sizes[name]) for name in [*blocks, ""] if numbers[name])


def _warnings(
    found: Component, strategies: dict[str, tuple[RankPlan, ...]], groups: tuple[GroupPlan, ...], shape: tuple[int, ...]
) -> tuple[str, ...]:
    warnings = []
    if "direct" in strategies:
        ranks = strategies["direct"][: shape[-1]]
        small, read = sum(r.small_read_bytes for r in ranks), sum(r.bytes_read for r in ranks)
        if read and small > read / 2:
            mean = read / max(1, sum(r.reads for r in ranks))
            warnings.append(
                f"direct: {small / read:.0%} of the bytes are read in calls of less than 1 MiB ({mean / 1024:.0f} KiB "
                f"on average): {shape[-1]} shards are many for tensors of this size. Consider HSDP, or stream."
            )
    resident = max(rank.bytes_resident for ranks in strategies.values() for rank in ranks)
    largest = max(groups, key=lambda group: group.all_gather_bytes, default=None)
    if largest is not None and len(groups) > 1 and largest.all_gather_bytes > 4 * max(1, resident):
        warnings.append(
            f"FSDP group {largest.name or '(root)'} gathers {largest.all_gather_bytes} bytes, "
            f"{largest.all_gather_bytes / max(1, resident):.1f} times what a rank of {found.class_name} holds."
        )
    return tuple(warnings)
