"""The layout: what every rank must agree on before `fully_shard`, and how it comes to agree.

Names, order, shapes, dtypes, `requires_grad` and ties of parameters and buffers. Rank 0 is the authority for dtypes and
ties, which shells cannot know (fp32 pins, adapters in another dtype, ties broken by `init_empty_weights`); names, order
and shapes must already be equal, as FSDP's collectives pair parameters by position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from metashard.agree import Agreement
from metashard.errors import LayoutError

_OWN = frozenset(vars(nn.Module()))  # what nn.Module itself keeps in an instance
_SIMPLE = (str, bytes, int, float, bool, type(None))


class Slot(NamedTuple):
    """One place in a module that holds a tensor; a tuple, as thousands are made again after every change of a module.

    Args:
        fqn: Fully qualified name; for a plain attribute the path, such as ``pos_embed.pos_freqs`` or
            ``rope.tables[0]``.
        kind: "parameter", "buffer" or "attribute".
        shape: Shape of the full tensor.
        dtype: Its dtype.
        requires_grad: Whether it is trained.
        persistent: Whether a state dict holds it.
        tie: FQN of the first slot that holds the very same tensor (its own where it is the first).
        real: Whether its bytes are there (not on meta).
        trait: What else ranks must share of it: the placements of a DTensor; "" for a plain tensor.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool
    tie: str
    real: bool
    trait: str = ""


@dataclass(frozen=True)
class Plain:
    """A tensor that a module holds as a plain attribute, maybe inside lists, tuples or dicts."""

    path: str
    tensor: torch.Tensor


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules(remove_duplicate=False)`, without its cost of one generator a level."""
    stack = [("", module)]
    while stack:
        prefix, sub = stack.pop()
        yield prefix, sub
        start = f"{prefix}." if prefix else ""
        stack += [(start + name, child) for name, child in reversed(sub._modules.items()) if child is not None]


def plain_tensors(module: nn.Module) -> Iterator[Plain]:
    """All tensors held as plain attributes, in module order: what `parameters()` and `buffers()` never see.

    Without those that a forward pre-hook computes anew before every forward (weight_norm, spectral_norm).
    """
    modules: dict[int, tuple[str, nn.Module]] = {}
    seen: set[int] = set()
    for name, sub in _walk(module):
        modules.setdefault(id(sub), (name, sub))
        seen.update(id(t) for t in (*sub._parameters.values(), *sub._buffers.values()))
    seen.discard(id(None))
    for name, sub in modules.values():
        derived = {getattr(hook, "name", None) for hook in sub._forward_pre_hooks.values()}
        for attribute, value in vars(sub).items():
            if type(value) in _SIMPLE or attribute in _OWN or attribute in derived:
                continue
            if not attribute.startswith(("_fsdp", "__composable_api")):
                yield from _tensors_in(value, f"{name}.{attribute}" if name else attribute, seen, depth=0)


def _tensors_in(value: Any, path: str, seen: set[int], *, depth: int) -> Iterator[Plain]:
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield Plain(path, value)
        return
    if depth > 4 or isinstance(value, (*_SIMPLE, type, nn.Module)) or id(value) in seen:
        return
    if isinstance(value, dict):
        children: Iterable[tuple[str, Any]] = ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple)):
        children = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif type(value).__module__.partition(".")[0] not in ("torch", "builtins", "functools") and hasattr(
        value, "__dict__"
    ):
        children = ((f"{path}.{key}", item) for key, item in list(vars(value).items()))
    else:
        return
    seen.add(id(value))
    for child_path, item in children:
        yield from _tensors_in(item, child_path, seen, depth=depth + 1)


def named_slots(module: nn.Module, *, attributes: bool = True) -> list[tuple[Slot, torch.Tensor]]:
    """Every parameter and buffer in registration order, with ties; then, with `attributes`, the plain tensors."""
    found: list[tuple[Slot, torch.Tensor]] = []
    first: dict[int, str] = {}

    def add(fqn: str, kind: str, tensor: torch.Tensor, persistent: bool) -> None:
        trait = ""
        if isinstance(tensor, DTensor):  # of the mesh shape and names: each rank has its own row of a larger mesh
            trait = f"{tensor.placements} on {tensor.device_mesh.shape} {tensor.device_mesh.mesh_dim_names}"
        tie = first.setdefault(id(tensor), fqn)
        shape, real = tuple(tensor.shape), not tensor.is_meta
        found.append((Slot(fqn, kind, shape, tensor.dtype, tensor.requires_grad, persistent, tie, real, trait), tensor))

    for prefix, sub in _walk(module):
        start = f"{prefix}." if prefix else ""
        for name, parameter in sub._parameters.items():
            if parameter is not None:
                add(start + name, "parameter", parameter, True)
        for name, buffer in sub._buffers.items():
            if buffer is not None:
                add(start + name, "buffer", buffer, name not in sub._non_persistent_buffers_set)
    for plain in plain_tensors(module) if attributes else ():
        add(plain.path, "attribute", plain.tensor, False)
    return found


def set_tensor(module: nn.Module, fqn: str, tensor: torch.Tensor) -> None:
    """Register `tensor` as the parameter or buffer at `fqn`, keeping persistence."""
    owner_name, _, name = fqn.rpartition(".")
    owner = module.get_submodule(owner_name)
    store = owner._parameters if name in owner._parameters else owner._buffers
    store[name] = tensor  # type: ignore[assignment]


def retype(slots: Iterable[tuple[Slot, torch.Tensor]], dtype_of: Callable[[Slot], torch.dtype]) -> None:
    """Give tensors another dtype in place: on meta at no cost, real ones by a cast. Identity and ties stay."""
    for slot, tensor in slots:
        wanted = dtype_of(slot)
        if tensor.dtype != wanted and not isinstance(tensor, DTensor):
            if not (wanted.is_floating_point or wanted.is_complex):
                tensor.requires_grad_(False)
            tensor.data = tensor.detach().to(wanted)


def sync_model_dtypes(module: nn.Module, *, group: Any = None) -> None:
    """Give every parameter and buffer the dtype that rank 0's has, by name.

    Call it after adapters are injected: a shell gives them another dtype than a real base does. A tensor on meta is
    retyped at no cost; a real one is cast (a full copy of that tensor in host memory).

    Args:
        module: The module; its names must be those of rank 0's.
        group: Process group to talk over, or None for the default group. Names and dtypes are sent, no weights.

    Raises:
        LayoutError: On every rank, if a rank has other names than rank 0; it names the first difference.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    agreement = Agreement(ranks, timeout=600)
    with agreement.phase("agree"):
        _sync_dtypes(module, agreement)


def _sync_dtypes(module: nn.Module, agreement: Agreement) -> None:
    slots = _registered(module)
    wanted = agreement.from_leader({slot.fqn: slot.dtype for slot, _ in slots})
    _compare_names(list(wanted), [slot.fqn for slot, _ in slots])
    retype(slots, lambda slot: wanted[slot.fqn])


def agree_on_layout(module: nn.Module, agreement: Agreement) -> list[Slot]:
    """Bring dtypes, `requires_grad` and ties to rank 0's, then compare the whole layout across ranks.

    Returns:
        Rank 0's slots, in registration order, plain attributes included; `real` tells what rank 0 has bytes for.

    Raises:
        LayoutError: Names, order, kinds or shapes differ between ranks; the message names the first difference.
    """
    everything = agreement.from_leader([slot for slot, _ in named_slots(module)] if agreement.leader else None)
    # Plain attributes are no part of what FSDP pairs by position: a value cached on one rank is no difference.
    wanted = [slot for slot in everything if slot.kind != "attribute"]
    mine = _registered(module)
    _compare_names([slot.fqn for slot in wanted], [slot.fqn for slot, _ in mine])
    for want, (got, _) in zip(wanted, mine, strict=True):
        for field in ("kind", "shape", "persistent", "trait"):
            _compare_field(want, got, field)
        # A real DTensor is the caller's own, different from rank to rank on purpose.
        if want.trait and want.real != got.real:
            raise LayoutError(
                f"{got.fqn} is a DTensor, {'real' if want.real else 'on meta'} on rank 0 and not here. DTensors of "
                'a hook are filled from meta by strategies "direct" and "stream"; real ones must be so on every rank.',
                phase="agree",
                key=got.fqn,
                expected=want.real,
                got=got.real,
            )
    by_name = {slot.fqn: slot for slot in wanted}
    retype(mine, lambda slot: by_name[slot.fqn].dtype)
    _match_ties(module, wanted)
    for slot, tensor in _registered(module):
        if slot.kind == "parameter" and tensor.requires_grad != by_name[slot.fqn].requires_grad:
            tensor.requires_grad_(by_name[slot.fqn].requires_grad)
    for want, (got, _) in zip(wanted, _registered(module), strict=True):
        for field in ("dtype", "requires_grad", "tie"):
            _compare_field(want, got, field)
    return everything


def _registered(module: nn.Module) -> list[tuple[Slot, torch.Tensor]]:
    return named_slots(module, attributes=False)


def _compare_field(want: Slot, got: Slot, field: str) -> None:
    expected, came = getattr(want, field), getattr(got, field)
    if expected != came:
        raise LayoutError(
            f"{got.fqn}: rank 0 has {field} {expected}, this rank has {came}. Every rank must build the same module; "
            "look for code that branches on the rank or on real values.",
            phase="agree",
            key=got.fqn,
            expected=expected,
            got=came,
        )


def _compare_names(wanted: list[str], mine: list[str]) -> None:
    if wanted == mine:
        return
    if sorted(wanted) == sorted(mine):
        index = next(i for i, (a, b) in enumerate(zip(wanted, mine, strict=True)) if a != b)
        raise LayoutError(
            f"Parameters are registered in another order than on rank 0: place {index} is {wanted[index]} there and "
            f"{mine[index]} here. FSDP pairs parameters by position, so the values would be mixed up in silence; build "
            "the module in the same order on every rank.",
            phase="agree",
            key=mine[index],
            expected=wanted[index],
            got=mine[index],
        )
    missing, extra = sorted(set(wanted) - set(mine)), sorted(set(mine) - set(wanted))
    raise LayoutError(
        f"The module differs from rank 0's: {len(missing)} names are missing here "
        f"({', '.join(missing[:3]) or 'none'}), {len(extra)} are only here ({', '.join(extra[:3]) or 'none'}). "
        "Every rank must build the same module.",
        phase="agree",
        key=(missing + extra)[0],
        expected=f"{len(wanted)} parameters and buffers",
        got=f"{len(mine)}",
    )


def _match_ties(module: nn.Module, wanted: list[Slot]) -> None:
    """Make tensors shared where rank 0 shares them, and separate where it does not."""
    held = {slot.fqn: (slot, tensor) for slot, tensor in _registered(module)}
    for want in wanted:
        slot, tensor = held[want.fqn]
        if slot.tie == want.tie:
            continue
        if want.tie != want.fqn:  # tied on rank 0, not here
            set_tensor(module, want.fqn, held[want.tie][1])
        elif slot.real:
            _compare_field(want, slot, "tie")
        elif slot.kind == "parameter":
            set_tensor(module, want.fqn, nn.Parameter(torch.empty_like(tensor), requires_grad=tensor.requires_grad))
        else:
            set_tensor(module, want.fqn, torch.empty_like(tensor))
        held = {s.fqn: (s, t) for s, t in _registered(module)}


def take_real(module: nn.Module) -> dict[str, torch.Tensor]:
    """Put every real parameter on meta and return the real ones by the FQN of their tie group.

    On rank 0 they are what is sent; on other ranks they are dropped. The module is then the same on every rank, with
    contiguous parameters (FSDP takes no others), and whoever pops a tensor from the dictionary and drops it frees its
    memory.
    """
    taken: dict[str, torch.Tensor] = {}
    on_meta: dict[str, nn.Parameter] = {}
    for slot, tensor in _registered(module):
        if slot.kind != "parameter" or isinstance(tensor, DTensor) or (tensor.is_meta and tensor.is_contiguous()):
            continue
        if slot.tie not in on_meta:
            if not tensor.is_meta:
                taken[slot.tie] = tensor.detach()
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            on_meta[slot.tie] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        set_tensor(module, slot.fqn, on_meta[slot.tie])
    return taken


def check_shell(module: nn.Module, agreement: Agreement) -> None:
    """Refuse a module that was built for real on a rank other than 0: it "did not honor meta initialization".

    Small real parameters are fine, such as layers that a hook has added; more than half of the bytes is no shell.
    """
    unique = {slot.tie: tensor for slot, tensor in _registered(module) if slot.kind == "parameter"}
    real = {fqn: tensor for fqn, tensor in unique.items() if not tensor.is_meta and not isinstance(tensor, DTensor)}
    if not agreement.leader and 2 * sum(t.nbytes for t in real.values()) > sum(t.nbytes for t in unique.values()):
        names = sorted(real)
        raise LayoutError(
            f"The module did not honor meta initialization: {len(names)} of {len(unique)} parameters "
            f"({', '.join(names[:3])}, ...) are real on a rank other than 0, so every rank has already held the model. "
            "Build it under metashard.init_context() or with metashard.from_pretrained().",
            phase="agree",
            key=names[0],
            expected="parameters on the meta device",
            got="real parameters",
        )
