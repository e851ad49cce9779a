"""The twin of a sharded module: the same tree of the libraries' own classes, on meta, for their own code to save.

[Note: twin]
Names, order, files, index and config of a checkpoint are the library's business: `save_pretrained` decides which name
of a tie is kept, which keys are renamed, where a file ends. So it is asked, with a module that has no bytes. The twin
has the classes from before `fully_shard`, full-shape meta tensors in place of shards, and base layers in place of the
wrappers that peft has put around them. Who finds one of its tensors in what `save_pretrained` would write knows which
shard's bytes belong there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from metashard import _compat
from metashard.errors import SaveError
from metashard.layout import Slot, named_slots, retype
from metashard.shard import pinned_names

ADAPTERS = ("leave_out", "merge")


class Twin:
    """A module without bytes, and where they are.

    Args:
        module: The module, sharded or not; stays as it is.
        dtype: Floating tensors become of this dtype, as `from_pretrained(dtype)` would have it; None keeps theirs.
        lora: "leave_out" or "merge": what is taken of modules that adapters train beside the base's.

    Attributes:
        root: The twin, a plain module of the library's class.
        sources: id of a parameter or buffer of the twin -> name of the tensor in the module (the first of its ties).
        adapted: Names, in the twin, of the modules that have an active adapter -> the layer that adapts them.
    """

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None, lora: str) -> None:
        self._merges = lora == "merge"
        self._names = {id(tensor): slot.tie for slot, tensor in named_slots(module, attributes=False)}
        self._made: dict[int, Any] = {}  # id of a module or tensor -> its twin
        self.sources: dict[int, str] = {}
        self.adapted: dict[str, nn.Module] = {}
        self._layers: set[int] = set()  # ids of those
        self.root = self._module(base_model(module), "")
        if not hasattr(self.root, "save_pretrained"):
            raise SaveError(
                f"{type(self.root).__name__} has no save_pretrained: expected a model of diffusers or transformers. "
                "Save other modules with torch.distributed.checkpoint.",
                phase="resolve",
                expected="a model with save_pretrained",
                got=type(self.root).__name__,
            )
        if getattr(self.root, "hf_quantizer", None) is not None:
            raise SaveError("The module is quantised; only plain weights can be saved from shards.", phase="resolve")
        self._refuse_two_in_one()
        if hasattr(self.root, "config") and not hasattr(type(self.root), "config"):
            self.root.config = copy.deepcopy(self.root.config)  # transformers writes into it
        if dtype is not None:
            self._cast(dtype)
        # `state_dict` detaches; what it gives has to be known again.
        self.root.__dict__["state_dict"] = partial(nn.Module.state_dict, self.root, keep_vars=True)

    def _module(self, module: nn.Module, name: str) -> nn.Module:
        base = self._without_adapters(module, name)
        if id(base) not in self._made:
            made = self._made[id(base)] = hollow_copy(base, self._tensor)
            for key in ("_hf_peft_config_loaded", "peft_config"):
                made.__dict__.pop(key, None)
            start = f"{name}." if name else ""
            for n, child in base._modules.items():
                made._modules[n] = None if child is None else self._module(child, start + n)
        twin: nn.Module = self._made[id(base)]
        return twin

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = made
            self.sources[id(made)] = self._names[id(tensor)]
        found: torch.Tensor = self._made[id(tensor)]
        return found

    def _without_adapters(self, module: nn.Module, name: str) -> nn.Module:
        """The base's own module below what peft has wrapped around it; notes down what is to be merged."""
        if not _is_wrapper(module):
            return module
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper

        if isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters if self._merges else []
            trained = [module.modules_to_save[key] for key in active if key in module.modules_to_save]
            return self._without_adapters(trained[0] if trained else module.original_module, name)
        if not isinstance(module, BaseTunerLayer) or hasattr(module, "unload_and_optionally_merge_module"):
            raise SaveError(
                f"{name}: an adapter of class {type(module).__name__} cannot be taken off. Save the adapter alone, "
                "with save_lora or peft.",
                phase="resolve",
                key=name,
                got=type(module).__name__,
            )
        if self._merges:
            if id(module) not in self._layers:  # a layer in two places is one layer
                self.adapted[name] = module
                self._layers.add(id(module))
        elif module.merged:
            raise SaveError(
                f"{name}: adapter {', '.join(module.merged_adapters)} is merged into the base weight, so that it "
                'cannot be left out. Unmerge it, or pass lora="merge".',
                phase="resolve",
                key=name,
            )
        return module.get_base_layer()

    def _refuse_two_in_one(self) -> None:
        """One weight cannot hold what adapters add to it in two layers that are tied."""
        seen: dict[str, str] = {}
        for name, source in self.merged().items():
            other = seen.setdefault(source, name)
            if other != name:
                layers = " and ".join(full.rpartition(".")[0] for full in (other, name))
                raise SaveError(
                    f"{layers} share one weight ({source}), and each of them has an active adapter: no one weight is "
                    "right for both once they are merged. Save the adapter alone (save_lora) and load it beside the "
                    "base, or untie the layers before the training (tie_word_embeddings=False).",
                    phase="resolve",
                    key=source,
                    expected="at most one adapter for a tied weight",
                    got=layers,
                )

    def _cast(self, dtype: torch.dtype) -> None:
        """As the library's loader casts: pins to fp32, persistent buffers in diffusers alone."""
        if not dtype.is_floating_point:
            raise SaveError(f"dtype={dtype}: expected a floating dtype, such as torch.bfloat16.", phase="resolve")
        pinned = pinned_names(self.root, dtype)
        with_buffers = hasattr(self.root, "save_config")  # diffusers

        def wanted(slot: Slot) -> torch.dtype:
            if not slot.dtype.is_floating_point or not (slot.kind == "parameter" or (slot.persistent and with_buffers)):
                return slot.dtype
            return torch.float32 if slot.fqn in pinned else dtype

        retype(named_slots(self.root, attributes=False), wanted)

    def merged(self) -> dict[str, str]:
        """Name of each tensor that comes of merging -> name of the module's tensor in whose place it goes."""
        found = {}
        for name in self.adapted:
            for slot, tensor in named_slots(self.root.get_submodule(name), attributes=False):
                if slot.persistent:
                    found[f"{name}.{slot.fqn}"] = self.sources[id(tensor)]
        return found

    def conversions(self, keys: set[str], as_they_are: set[str]) -> dict[str, tuple[str, ...]]:
        """Name -> those of `keys` that transformers makes of that tensor when it saves (the experts of some models).

        Args:
            keys: What is made of some tensor.
            as_they_are: Names of the tensors that are saved as they are.
        """
        found: dict[str, tuple[str, ...]] = {}
        for name, tensor in self.root.state_dict().items():
            made = () if self.sources[id(tensor)] in as_they_are else tuple(self.convert(name, tensor))
            if made and keys.issuperset(made):
                found[name] = made
        return found

    def convert(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """What transformers makes of one tensor when it saves."""
        return _compat.transformers_converted_back(self.root, {name: value})

    def facts(self) -> Iterator[tuple[Any, ...]]:
        """What all ranks must have the same of: names, shapes, dtypes."""
        for slot, _ in named_slots(self.root, attributes=False):
            if slot.persistent:
                yield slot.fqn, slot.shape, slot.dtype, slot.tie
        yield tuple(self.adapted)


def hollow_copy(module: nn.Module, tensor_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy of a module without children, of its class before `fully_shard`, with other tensors and no hooks.

    Hooks, FSDP's and the trainer's, know the module itself; they have no part in what is saved of it.
    """
    made: nn.Module = object.__new__(plain_class(module))
    state = {key: copy.copy(value) if type(value) in (dict, list) else value for key, value in vars(module).items()}
    for key in [key for key in state if key.endswith("_hooks")]:
        state[key] = type(state[key])()
    for key in ("_parameters", "_buffers"):
        state[key] = {n: None if tensor is None else tensor_of(tensor) for n, tensor in state[key].items()}
    state["_modules"] = {}
    made.__dict__ = state
    return made


def plain_class(module: nn.Module) -> type:
    """The class that a module had before `fully_shard` put FSDP's before it."""
    return type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)


def base_model(module: nn.Module) -> nn.Module:
    """The model inside a `PeftModel`."""
    return module.get_base_model() if _is_wrapper(module) else module  # type: ignore[operator]


def _is_wrapper(module: nn.Module) -> bool:
    """Whether peft has put this module around another one; without peft there is none."""
    return any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def check_real(module: nn.Module) -> None:
    """Refuse a module with parameters or persistent buffers that have no bytes."""
    lacking = [slot.fqn for slot, _ in named_slots(module, attributes=False) if slot.persistent and not slot.real]
    if lacking:
        raise SaveError(
            f"{len(lacking)} tensors are on the meta device: {', '.join(lacking[:5])}. There is nothing to save; load "
            "the module first.",
            phase="resolve",
            key=lacking[0],
            expected="no tensor on the meta device",
            got=f"{len(lacking)}",
        )
