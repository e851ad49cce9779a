"""The caller's hook, and what it may not do: write what the files are going to overwrite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from metashard._compat import TorchDispatchMode
from metashard.errors import LayoutError
from metashard.layout import named_slots

Prepare = Callable[[nn.Module], nn.Module | None]


def prepared(module: nn.Module, prepare: Prepare | None, sources: Mapping[str, Any], *, from_files: bool) -> nn.Module:
    """The module after the caller's hook.

    Args:
        module: The module, on meta where its values come from the files.
        prepare: The hook.
        sources: FQN -> where its bytes come from.
        from_files: Whether they come after the hook.

    Returns:
        What the hook returned, or the module that it was given.

    Raises:
        LayoutError: The hook has written or cast what is filled from the files after it: the change would be lost.
        TypeError: It returned something else than a module.
    """
    if prepare is None:
        return module
    known = {s.fqn: (t, t.dtype) for s, t in named_slots(module, attributes=False) if s.tie in sources and from_files}
    written = _Written({fqn: tensor for fqn, (tensor, _) in known.items()})
    with written:
        made = prepare(module)
    if made is not None and not isinstance(made, nn.Module):
        raise TypeError(f"prepare returned {type(made).__name__}: expected a module, or None.")
    after = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for fqn, (before, dtype) in known.items():
        now = after.get(fqn)
        if now is None or not now.is_meta or now.shape != before.shape:
            continue
        done = "cast" if now.dtype != dtype else "written" if now is before and fqn in written.names else None
        if done is not None:
            raise LayoutError(
                f"prepare has {done} {fqn}, which gets its values from the files only afterwards. Do it after the load "
                '(or give dtype=), or load with strategy="rank0", where the hook sees real values on rank 0.',
                phase="prepare",
                key=fqn,
            )
    return module if made is None else made


class _Written(TorchDispatchMode):
    """Notes which tensors are written in place, by whatever alias: `parameter.data` counts its own versions."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._by_memory = {_memory(tensor): fqn for fqn, tensor in tensors.items() if tensor.is_meta}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                        name = self._by_memory.get(_memory(tensor))
                        self.names |= set() if name is None else {name}
        return func(*args, **kwargs)


def _memory(tensor: torch.Tensor) -> int:
    """Which storage a tensor has: the same for all views and aliases, on meta too."""
    return tensor.untyped_storage()._cdata
