"""`metashard verify --lora`: what a load with a new adapter promises, checked on the loaded shards of every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from metashard.adapter_files import PEFT_PREFIX
from metashard.agree import Agreement, mesh_ranks
from metashard.fill.bytes import as_bytes, flat_local
from metashard.layout import named_slots
from metashard.load import load_component
from metashard.policy import LoadPolicy, ShardPolicy
from metashard.verify import digest_shards

# Attention projections by the names that diffusers and transformers give them.
ATTENTION = r".*\.(to_q|to_k|to_v|to_out\.0|q_proj|k_proj|v_proj|o_proj|out_proj|query|key|value|q|k|v|o)"


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Attributes:
        name: What is promised.
        faults: What is not so, over all ranks; empty if all is well.
    """

    name: str
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify_lora(
    checkpoint: str | Path,
    component: str | None = None,
    *,
    mesh: DeviceMesh,
    lora: Any = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    shard: ShardPolicy = ShardPolicy(),
    load: LoadPolicy = LoadPolicy(),
    **kwargs: Any,
) -> list[Check]:
    """Load a component without an adapter, then twice with a new one under one seed, and hold them against each other.

    Ranks seed their generators differently, as only rank 0's may count.

    Args:
        checkpoint: As in `load_component`.
        component: As in `load_component`.
        mesh: As in `load_component`.
        lora: The adapter; None takes rank 8 on the attention projections. Its initialisation must leave the base as it
            is and `lora_B` zero (not pissa, olora, loftq, orthogonal).
        seed: Seed of both runs.
        dtype: As in `load_component`.
        shard: As in `load_component`.
        load: As in `load_component`.
        **kwargs: As `load_component` takes them: `variant`, `revision`.

    Returns:
        The checks, the same on every rank.

    Memory:
        One loaded module at a time.
    """
    if lora is None:
        from peft import LoraConfig

        lora = LoraConfig(r=8, target_modules=ATTENTION)
    agreement = Agreement(mesh_ranks(mesh), timeout=load.timeout)

    def run(adapter: Any) -> nn.Module:
        state = torch.get_rng_state()
        torch.manual_seed(seed + agreement.rank)
        try:
            loaded: nn.Module = load_component(
                checkpoint, component, mesh=mesh, dtype=dtype, lora=adapter, shard=shard, load=load, **kwargs
            )
        finally:
            torch.set_rng_state(state)
        return loaded

    base = _hashes(run(None))
    module = run(lora)
    first, facts = digest_shards(module), _Facts(module)
    del module
    second = digest_shards(run(lora))

    everyone = agreement.gather((facts, base, first == second))
    ranks = [facts for facts, _, _ in everyone]
    nonzero = {name for facts in ranks for name in facts.nonzero}
    lora_a = sorted(name for name in facts.hashes if _is(name, "lora_A", "lora_embedding_B"))
    checks = {
        "nothing is left on the meta device": _each(ranks, lambda facts: facts.meta),
        "the adapter has parameters": [] if lora_a else ["no lora_A anywhere"],
        "lora_B is zero": _each(
            ranks, lambda facts: [n for n in facts.nonzero if _is(n, "lora_B", "lora_embedding_A")]
        ),
        "lora_A is finite": _each(ranks, lambda facts: facts.infinite),
        "lora_A is not zero": [name for name in lora_a if name not in nonzero],
        "buffers are equal on all ranks": _each(
            ranks, lambda facts: [n for n, sha in facts.buffers.items() if ranks[0].buffers.get(n) != sha]
        ),
        "base shards are those of a load without the adapter": [
            f"rank {rank}: {name}"
            for rank, (facts, base, _) in enumerate(everyone)
            for name in sorted(base.keys() ^ facts.base.keys() | {n for n in base if facts.base.get(n) != base[n]})
        ],
        "two runs with one seed have equal digests": [f"rank {r}" for r, (*_, same) in enumerate(everyone) if not same],
    }
    return [Check(name, tuple(faults)) for name, faults in checks.items()]


class _Facts:
    """What one rank tells of its shards."""

    def __init__(self, module: nn.Module) -> None:
        slots = named_slots(module)
        self.meta = [slot.fqn for slot, tensor in slots if tensor.is_meta]
        self.hashes = _hashes(module)
        self.base = {_plain(n): sha for n, sha in self.hashes.items() if not _is(n, "lora_", "modules_to_save")}
        self.buffers = {slot.fqn: _sha(tensor) for slot, tensor in slots if slot.kind == "buffer"}
        local = {slot.fqn: flat_local(t) for slot, t in slots if slot.kind == "parameter" and _is(slot.fqn, "lora_")}
        self.nonzero = [name for name, flat in local.items() if bool(flat.count_nonzero())]
        self.infinite = [name for name, flat in local.items() if not bool(flat.isfinite().all())]


def _each(ranks: list[_Facts], faults: Callable[[_Facts], list[str]]) -> list[str]:
    return [f"rank {rank}: {name}" for rank, facts in enumerate(ranks) for name in faults(facts)]


def _is(name: str, *marks: str) -> bool:
    return any(part.startswith(marks) for part in name.split("."))


def _plain(name: str) -> str:
    """A base parameter's name without what peft wraps around it."""
    wrapped = name.removeprefix(PEFT_PREFIX)
    return wrapped.replace(".base_layer.", ".").replace("original_module.", "")


def _hashes(module: nn.Module) -> dict[str, str]:
    """SHA-256 of this rank's part of every parameter."""
    return {slot.fqn: _sha(tensor) for slot, tensor in named_slots(module) if slot.kind == "parameter"}


def _sha(tensor: torch.Tensor) -> str:
    flat = flat_local(tensor).contiguous()
    return hashlib.sha256(as_bytes(flat).cpu().numpy()).hexdigest()  # type: ignore[arg-type]
