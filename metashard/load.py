"""Load a component straight into FSDP2 shards: the way of the data, top to bottom."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from metashard import fill
from metashard.adapter_checks import watch_adapters
from metashard.checkpoint import Checkpoint, Entry, read_checkpoint
from metashard.component import Component, resolve_component
from metashard.errors import ComponentError, LayoutError
from metashard.fill.target import Job
from metashard.hook import prepared
from metashard.hub import fetch, find_commit
from metashard.layout import Slot, agree_on_layout, check_shell, named_slots, take_real
from metashard.mapping import Mapping as EntryMapping
from metashard.mapping import apply_library_rules, entries_by_identity
from metashard.policy import LoadPolicy, ShardPolicy
from metashard.report import Comparison, LoadReport, RankReport
from metashard.run import Run, uncollected
from metashard.shard import (
    asked_to_ignore,
    average_replicated_grads,
    choose_groups,
    replicated_names,
    shard_module,
)
from metashard.shards import allocate, release, resident_bytes
from metashard.shell import build_shell, generation_config, note_origin, take_generation_config
from metashard.strategy import as_dtype, build_dtype, check_verifiable, choose_strategy, load_on_leader, map_or_refuse
from metashard.verify import check_loaded
from metashard.verify_files import Originals, compare_load


def load_component(
    checkpoint: str | Path,
    component: str | None = None,
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    lora: Any = None,
    prepare: Callable[[nn.Module], nn.Module | None] | None = None,
    shard: ShardPolicy = ShardPolicy(),
    load: LoadPolicy = LoadPolicy(),
    variant: str | None = None,
    revision: str | None = None,
    output_loading_info: bool = False,
) -> Any:
    """Load one component of a checkpoint into FSDP2 shards; call it on every rank of `mesh`.

    The result equals ``from_pretrained(..., dtype)`` of the component's own class bit for bit: parameters, buffers,
    dtypes (fp32 pins too) and ties.

    Args:
        checkpoint: A pipeline folder with model_index.json, a folder that is one model, or a Hub id.
        component: Name of the component in it ("transformer"); None for a folder that is one model.
        mesh: One axis (FSDP) or two named ones (HSDP: replicate, shard). Its first rank is the load's rank 0.
        dtype: As `from_pretrained` takes it. None: diffusers' own default (fp32), transformers' config.
        lora: Adapters to add, see `LoraSpec`.
        prepare: Called with the module on every rank before adapters and sharding: gradient checkpointing, an attention
            backend, extra layers. Parameters are on meta on ranks other than 0 and, in `direct` and `stream`, on rank
            0; real parameters that it adds are taken from rank 0. May return another module.
        shard: How to cut the module into FSDP groups.
        load: How the bytes come in.
        variant: Weight variant, such as "fp16".
        revision: Hub revision.
        output_loading_info: Return (module, LoadReport) instead of the module.

    Returns:
        The sharded module in eval mode, or (module, LoadReport).

    Memory:
        `direct`, `stream`: a rank's shards and buffers plus `load.staging_bytes`. `rank0`: on rank 0 the full model
        too.

    Raises:
        MetaShardError: One of its subclasses, the same on every rank, naming rank, phase, file and key.
    """
    dtype = as_dtype(dtype)
    run = Run(mesh, shard, load)
    run.agreement.same((component, dtype, variant, revision), what="arguments", phase="resolve")
    with run.agreement.told(), run.recorder, run.prefetch, uncollected():
        found, folder = _resolve(run, checkpoint, component, variant=variant, revision=revision)
        headers = _read_headers(run, found)
        # On one host every byte will be read there. On several, a host reads its ranks' parts: nobody knows them yet.
        if headers is not None and run.agreement.leader and run.one_host:
            run.prefetch.start(folder, headers)
        with run.phase("import"):
            cls = found.cls
        with run.phase("build"), torch.random.fork_rng(devices=[]):
            module = build_shell(cls, found.config, library=found.library, dtype=build_dtype(found, headers, dtype))
            note_origin(module, found)
        if found.library == "transformers":
            take_generation_config(module, run.on_leader("build", lambda: generation_config(module, found)))
        mapping = run.on_leader("plan", lambda: map_or_refuse(module, found, headers, run.load))
        if mapping.reason is None:
            run.prefetch.narrow(mapping.sources.values())
        strategy, reason, crew = choose_strategy(run, found, headers, mapping, folder, lora)
        if run.load.verify == "full":
            check_verifiable(run, headers, mapping, folder)
        with run.phase("build"), torch.random.fork_rng(devices=[]):
            originals: Originals | None = None
            if strategy == "rank0":
                by_headers = mapping.sources
                module, mapping = load_on_leader(run, module, found, headers, mapping, dtype)
                entries: dict[int, Entry] = {}
                if run.load.verify == "full":
                    originals = Originals(module, by_headers)
            else:
                built_under = build_dtype(found, headers, dtype)
                apply_library_rules(module, mapping, library=found.library, dtype=built_under)
                entries = entries_by_identity(module, mapping)
        held = [tensor for _, tensor in named_slots(module, attributes=False)]  # `entries` goes by their identities
        with run.phase("prepare"):
            module = prepared(module, prepare, mapping.sources, from_files=strategy != "rank0")
        if lora is not None:
            from metashard.lora import inject

            with run.recorder.phase("adapters"):
                module = inject(module, lora, run.agreement, component=found.name, entries=entries)
        sources = _sources(module, entries, mapping)
        if originals is not None:
            sources = run.on_leader("plan", partial(originals.unchanged, module))
        del held, entries, originals
        report = _shard_and_fill(run, module, Supply(strategy, reason, mapping, sources, headers, folder, crew))
    return (module, report) if output_loading_info else module


def load_components(
    checkpoint: str | Path, names: Iterable[str], *, output_loading_info: bool = False, **kwargs: Any
) -> Any:
    """Load several components one after another, so that the peak is the largest of them and not their sum.

    Args:
        checkpoint: A pipeline folder or Hub id.
        names: Components, in the order to load them.
        output_loading_info: Return (modules, reports), both by name.
        **kwargs: As `load_component` takes them, the same for all.

    Returns:
        The modules by name.
    """
    loaded = {name: load_component(checkpoint, name, output_loading_info=True, **kwargs) for name in names}
    modules = {name: module for name, (module, _) in loaded.items()}
    return (modules, {name: report for name, (_, report) in loaded.items()}) if output_loading_info else modules


def wrap_model(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    shard: ShardPolicy = ShardPolicy(),
    load: LoadPolicy = LoadPolicy(),
    output_loading_info: bool = False,
) -> Any:
    """Shard a module that is real on rank 0 and a shell elsewhere: the wrap-model call of a trainer.

    Agrees on dtypes, ties and layout, shards on meta, allocates each shard once and fills it from rank 0. Rank 0's full
    tensors are freed one by one as they are sent, unless the caller holds them.

    Args:
        module: From `metashard.from_pretrained`, or built under `metashard.init_context`.
        mesh: As in `load_component`.
        shard: How to cut the module into FSDP groups.
        load: `transport`, `staging_bytes`, `timeout` and `progress` apply.
        output_loading_info: Return (module, LoadReport).

    Returns:
        The same module, sharded in place, or (module, LoadReport).

    Raises:
        MetaShardError: As `load_component` does.
    """
    run = Run(mesh, shard, load)
    if load.verify == "full":
        raise ComponentError(
            'verify="full" compares a load with its files, and wrap_model knows of none: use load_component, or '
            'verify="basic".',
            phase="resolve",
        )
    with run.agreement.told(), run.recorder, uncollected():
        report = _shard_and_fill(run, module, Supply("rank0", "a module built by the caller"))
    return (module, report) if output_loading_info else module


def _resolve(
    run: Run, checkpoint: str | Path, component: str | None, *, variant: str | None, revision: str | None
) -> tuple[Component, Path]:
    """The component, as rank 0 sees it, and this rank's folder of it (which may not exist on this rank)."""
    pickles = run.load.allow_pickle
    is_folder = run.on_leader("resolve", lambda: bool(str(checkpoint)) and Path(checkpoint).exists())
    root = Path(checkpoint)
    if not is_folder:
        commit = run.on_leader("resolve", lambda: find_commit(checkpoint, component, revision=revision))
        first = run.agreement.node_leader()
        for downloads in (True, False):  # one download a node, the others find it in the cache
            with run.phase("resolve"):
                if first is downloads:
                    root = fetch(
                        checkpoint,
                        component,
                        variant=variant,
                        revision=commit,
                        local_files_only=not downloads,
                        allow_pickle=pickles,
                    )

    def resolve() -> tuple[Component, Path]:
        made = resolve_component(root, component, variant=variant, allow_pickle=pickles)
        if made.quantization is not None:
            raise ComponentError(
                f"The component is quantised ({made.quantization}); its packed weights cannot be sharded as "
                f"plain tensors. Load the unquantised checkpoint, or quantise after sharding.",
                phase="resolve",
                expected="unquantised weights",
                got=made.quantization,
            )
        return made, made.folder.relative_to(root)

    found, inside = run.on_leader("resolve", resolve)
    return found, root / inside


def _read_headers(run: Run, found: Component) -> Checkpoint | None:
    """The headers, read on rank 0 and sent to all; None for pickled weights."""
    if found.format == "pickle":
        return None
    made: Checkpoint = run.on_leader("headers", lambda: read_checkpoint(found.folder, found.files, found.weight_map))
    return made


def _sources(module: nn.Module, entries: Mapping[int, Entry], mapping: EntryMapping) -> dict[str, Entry]:
    """Name -> entry, after hooks and adapters.

    A hook that makes DTensors of parameters (tensor parallelism) replaces the objects; those are known by name.
    """
    found: dict[str, Entry] = {}
    for slot, tensor in named_slots(module, attributes=False):
        entry = entries.get(id(tensor))
        if entry is None and tensor.is_meta and (isinstance(tensor, DTensor) or slot.kind == "buffer"):
            entry = mapping.sources.get(slot.fqn)  # `Module.to` makes new buffers, too
        if entry is not None:
            found[slot.tie] = entry
    return found


@dataclass(frozen=True)
class Supply:
    """Where the bytes of one load come from.

    Args:
        strategy: "direct", "stream" or "rank0".
        reason: Why this one.
        mapping: How the checkpoint's keys fit the module.
        sources: Name -> entry, of what comes from the files; in `rank0` of what can be compared with them.
        headers: The files' headers; None where there are none.
        folder: This rank's folder of them.
        crew: See `strategy.crew_of`; empty in `rank0`.
    """

    strategy: str
    reason: str
    mapping: EntryMapping = field(default_factory=EntryMapping)
    sources: Mapping[str, Entry] = field(default_factory=dict)
    headers: Checkpoint | None = None
    folder: Path | None = None
    crew: tuple[int, ...] = ()


def _shard_and_fill(run: Run, module: nn.Module, supply: Supply) -> LoadReport:
    """From a module that is a shell, or real on rank 0, to checked shards."""
    with run.phase("agree"):
        asked = asked_to_ignore(module, run.shard)
    with run.phase("agree"):
        slots = agree_on_layout(module, run.agreement)
        check_shell(module, run.agreement)
        from_files = {} if supply.strategy == "rank0" else supply.sources
        _check_sources(slots, from_files)
    with run.phase("shard"):
        ignored = replicated_names(slots, asked)
        blocks = choose_groups(module, run.shard)
    run.agreement.same(blocks, what="the modules that they wrap", phase="shard")
    with run.phase("shard"):  # from here on the caller's module is changed
        real = take_real(module)
        shard_module(module, blocks, run.mesh, run.shard, ignored)
        if not run.agreement.leader:
            real = {}
    placements = [(slot.fqn, slot.trait) for slot, _ in named_slots(module, attributes=False)]
    run.agreement.same(placements, what="the placements of parameters", phase="shard")
    with _whole_or_empty(module):
        with run.phase("allocate"):
            allocate(module, run.mesh, run.shard)
        with _progress(run, module) as advance:
            job = Job(run.mesh, run.device, run.agreement, run.load, run.recorder, supply.folder, supply.crew, advance)
            fill.fill(
                module, slots, job, strategy=supply.strategy, sources=from_files, headers=supply.headers, real=real
            )
        with run.phase("check"):
            check_loaded(module, slots)
            job.ledger.check(fill.to_fill(module, slots))
            average_replicated_grads(module, run.mesh, ignored)
            watch_adapters(module)
        verified = _compare(run, module, slots, supply) if run.load.verify == "full" else None
        return _report(run, module, supply, verified)


@contextmanager
def _whole_or_empty(module: nn.Module) -> Iterator[None]:
    """Leave no memory that is filled by half in a module that the caller, a hook or a traceback may still hold."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # a module that is out of order: what is wrong with it is on its way already
            release(module)
        raise


def _compare(run: Run, module: nn.Module, slots: list[Slot], supply: Supply) -> Comparison:
    """`verify="full"`: every shard against the files."""
    names = supply.sources if supply.strategy == "rank0" else fill.comes_from_files(slots, supply.sources)
    assert supply.folder is not None
    with run.recorder.phase("verify"):
        return compare_load(
            module,
            [name for name, _ in fill.to_fill(module, slots)],
            {name: supply.sources[name] for name in names},
            folder=supply.folder,
            agreement=run.agreement,
            staging_bytes=run.load.staging_bytes,
        )


def _check_sources(slots: list[Slot], sources: Mapping[str, Entry]) -> None:
    """Everything that is registered must come from an entry or from rank 0."""
    lost = [s.fqn for s in slots if s.kind != "attribute" and not s.real and s.tie not in sources]
    if lost:
        raise LayoutError(
            f"{len(lost)} tensors have no source: {', '.join(lost[:5])}. They are on the meta device on rank 0 "
            f"and no entry of the checkpoint is theirs; layers that a hook adds must be real on rank 0.",
            phase="agree",
            key=lost[0],
            expected="an entry of the checkpoint, or a real tensor on rank 0",
            got="neither",
        )


@contextmanager
def _progress(run: Run, module: nn.Module) -> Iterator[Callable[[int], None]]:
    wanted = run.load.progress if run.load.progress is not None else sys.stderr.isatty()
    if not (wanted and run.agreement.leader):
        yield lambda nbytes: None
        return
    from tqdm import tqdm

    with tqdm(
        total=resident_bytes(module), unit="B", unit_scale=True, unit_divisor=1024, desc="shards of rank 0"
    ) as bar:
        yield bar.update


def _report(run: Run, module: nn.Module, supply: Supply, verified: Comparison | None) -> LoadReport:
    mine: tuple[RankReport, dict[str, float]] = (run.recorder.finish(resident_bytes(module)), run.recorder.phases)
    gathered = run.agreement.gather(mine)
    slots = [slot for slot, _ in named_slots(module, attributes=False) if slot.tie == slot.fqn]
    counts = Counter(str(slot.dtype).removeprefix("torch.") for slot in slots)
    names = list(gathered[0][1])
    told = (supply.mapping.missing, supply.mapping.unexpected, tuple(run.recorder.spans))
    missing, unexpected, spans = run.agreement.from_leader(told)
    return LoadReport(
        strategy=supply.strategy,
        reason=supply.reason,
        world_size=len(gathered),
        phases={name: max(phases.get(name, 0.0) for _, phases in gathered) for name in names},
        ranks=tuple(rank for rank, _ in gathered),
        dtype_counts=dict(sorted(counts.items())),
        missing=missing,
        unexpected=unexpected,
        transport=run.load.transport,
        verified=verified,
        spans=spans,
    )
