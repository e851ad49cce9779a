"""Adapters: real on rank 0, on meta elsewhere, always by peft's own code.

[Note: stand-ins]
In `direct` and `stream` the base is on meta on rank 0 as well, and peft puts an adapter where its base layer is. While
peft works on rank 0, each meta parameter of the base is replaced by a zero-stride CPU tensor of its shape and dtype
(one element of memory). peft then makes real adapters of the right dtype and draws from the generator exactly as it
does on a real base; afterwards the very same base parameters are put back. What looks at base *values* cannot be served
so and goes through strategy `rank0` (see `needs_base_weights`).

[Note: who adds what]
Rank 0 adds an adapter for real, reads its file if it has one, and tells the others its config and, where the library
goes by them, the keys of the file. The others add the same modules on meta with initialisation switched off. Dtypes and
`requires_grad` follow in `agree_on_layout`, values in the fill. So a failure on rank 0 (no such target, another shape)
is the same error on every rank, and only one rank ever draws a value or reads a file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from metashard.adapter_checks import check_kind, no_match, refuse_sharded, warn_of_idle_targets
from metashard.adapter_files import add_existing, is_diffusers, read_config
from metashard.adapters import Added, LoraSpec, add_module, as_specs, config_of
from metashard.agree import Agreement
from metashard.errors import AdapterError, LayoutError

_VALUE_FREE_INITS = (True, False, "gaussian", "orthogonal")  # they look at the base's shapes and dtypes only
# LoraConfig's fields that make a variant whose parameters are computed from base values, or may be.
_VALUE_VARIANTS = ("use_dora", "use_qalora", "velora_config", "monteclora_config", "arrow_config", "kasa_config")


def needs_base_weights(lora: Any) -> str | None:
    """Why adding these adapters needs real base weights on rank 0; None if it does not. Reads configs, no weights."""
    for spec in as_specs(lora):
        config = read_config(spec.source) if spec.exists else spec.source
        if config is None:
            continue
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            return f"adapter {spec.name} is of kind {kind}, which may look at the base weights"
        init = config.init_lora_weights
        if init not in _VALUE_FREE_INITS:
            return f"adapter {spec.name} is initialised from the base weights (init_lora_weights={init!r})"
        if config.trainable_token_indices is not None:
            return f"adapter {spec.name} trains tokens, which start as the base's (trainable_token_indices)"
        for field in _VALUE_VARIANTS if not spec.exists else ():  # an existing adapter brings its own values
            if getattr(config, field, None):
                what = "DoRA, whose magnitude is" if field == "use_dora" else f"{field}, which may be"
                return f"adapter {spec.name} uses {what} computed from the base weights"
    return None


def add_lora(module: nn.Module, lora: Any) -> nn.Module:
    """Add adapters to a module before `wrap_model`: real on rank 0, on meta elsewhere.

    New adapters are bitwise what peft gives in one process, and draw from the CPU generator of rank 0 only.

    Args:
        module: From `metashard.from_pretrained` or `init_context`: real on rank 0, a shell elsewhere.
        lora: A `LoraSpec`, a bare `PeftConfig`, a path, or a list of `LoraSpec`; the same on every rank.

    Returns:
        The module, wrapped in a `PeftModel` in style "peft", else changed in place.

    Raises:
        AdapterError: On every rank: the module is sharded already, no module matches the targets (the message lists
            near names), the adapter does not fit the model, or its kind is not supported.
    """
    if not dist.is_initialized():
        return inject(module, lora, None)
    return inject(module, lora, Agreement(range(dist.get_world_size()), timeout=600))


def inject(
    module: nn.Module,
    lora: Any,
    agreement: Agreement | None,
    *,
    component: str | None = None,
    entries: dict[int, Any] | None = None,
) -> nn.Module:
    """`add_lora` over the ranks of `agreement` (None: this process alone).

    Args:
        module: Real on the leader or on meta there too, see [Note: stand-ins]; on meta elsewhere.
        lora: As in `add_lora`.
        agreement: The ranks of the load.
        component: Name of the component, by which a diffusers LoRA file tells its keys apart.
        entries: id of a parameter or buffer -> where its bytes come from. Copies that peft makes of meta modules
            (`modules_to_save`) are added to it under their originals' value.
    """
    phase: Callable[[str], Any] = agreement.phase if agreement else lambda name: nullcontext()
    specs: list[LoraSpec] = []
    with phase("adapters"):
        refuse_sharded(module)
        specs = as_specs(lora)
    if agreement:
        _same_everywhere(specs, agreement)
    resolve = partial(_with_styles, specs)
    specs = agreement.on_leader("adapters", resolve) if agreement else resolve()
    leader = agreement is None or agreement.leader
    was_training, added = module.training, []
    for spec in specs:
        made: list[nn.Module] = []

        def on_leader(module: nn.Module = module, spec: LoraSpec = spec, made: list[nn.Module] = made) -> Added:
            with _stand_ins(module):
                wrapped, told = _add_real(module, spec, component)
            made.append(wrapped)
            return told

        told = agreement.on_leader("adapters", on_leader) if agreement else on_leader()
        with phase("adapters"):
            module = made[0] if leader else _add_on_meta(module, told)
            _adopt_copies(module, told, entries if entries is not None else {})
        added.append(told)
    with phase("adapters"):
        _activate(module, specs, added)
        if not was_training:
            module.eval()
    return module


def _with_styles(specs: list[LoraSpec]) -> list[LoraSpec]:
    """The specs with their style filled in: one for all, as the two cannot be mixed in one module.

    What a spec asks for, or a diffusers file implies, decides for those that leave it open; else it is "peft".
    """
    asked = {spec.style or ("inject" if spec.exists and is_diffusers(spec.source) else None) for spec in specs} - {None}
    if len(asked) > 1:
        raise AdapterError(
            f"Adapters {', '.join(spec.name for spec in specs)} ask for both styles, which cannot be mixed in one "
            'module. Give all of them style="inject", or all style="peft": a diffusers file takes either ("inject" is '
            "its default).",
            phase="adapters",
            expected="one style",
            got=sorted(str(style) for style in asked),
        )
    style = next(iter(asked), "peft")
    return [replace(spec, style=style) for spec in specs]


def _same_everywhere(specs: list[LoraSpec], agreement: Agreement) -> None:
    """Refuse ranks that were given other adapters than rank 0: they would train something else than what they think."""
    mine = [(repr(_plain(spec.source)), spec.name, spec.style, spec.trainable, spec.active) for spec in specs]
    everyone = agreement.gather(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise LayoutError(
                f"Ranks were given different adapters: rank 0 {everyone[0]}, rank {rank} {theirs}.",
                rank=rank,
                phase="adapters",
                expected=everyone[0],
                got=theirs,
            )


def _plain(source: Any) -> Any:
    """A value with one text on every rank: sets are unordered, paths and strings name the same adapter."""
    if isinstance(source, (str, Path)):
        return Path(source).name  # folders may be mounted elsewhere on other hosts; only rank 0 reads
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    if isinstance(source, dict):
        return {str(key): _plain(value) for key, value in source.items()}
    if isinstance(source, (set, frozenset)):
        return sorted(map(str, source))
    return [_plain(item) for item in source] if isinstance(source, (list, tuple)) else str(source)


@contextmanager
def _stand_ins(module: nn.Module) -> Iterator[None]:
    """Replace meta parameters for the time of the context, see [Note: stand-ins]; `requires_grad` changes stay."""
    stands: dict[int, nn.Parameter] = {}  # by the id of what it stands in for: ties stay ties
    originals: dict[int, nn.Parameter] = {}

    def swap(tree: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
        for sub in tree.modules():
            for name, parameter in sub._parameters.items():
                if isinstance(parameter, nn.Parameter) and (other := replace(parameter)) is not None:
                    sub._parameters[name] = other

    def stand_in(parameter: nn.Parameter) -> nn.Parameter | None:
        if not parameter.is_meta:
            return None
        if id(parameter) not in stands:
            empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            stands[id(parameter)] = stand = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            originals[id(stand)] = parameter
        return stands[id(parameter)]

    def original(parameter: nn.Parameter) -> nn.Parameter | None:
        held = originals.get(id(parameter))
        if held is not None:
            held.requires_grad = parameter.requires_grad
        return held

    swap(module, stand_in)
    try:
        yield
    finally:
        # peft keeps the tree it was given inside what it returns, so the stand-ins are all still below `module`.
        swap(module, original)


def _add_real(module: nn.Module, spec: LoraSpec, component: str | None) -> tuple[nn.Module, Added]:
    """Add an adapter on rank 0."""
    if spec.exists:
        return add_existing(module, spec, component)
    config = copy.deepcopy(spec.source)
    style = spec.style or "peft"
    check_kind(config)
    try:
        module = add_module(module, config, spec.name, style, on_meta=False)
    except ValueError as error:  # peft's NoMatchingPeftModuleError is one
        if "target" not in str(error).lower() and "excluded" not in str(error):
            raise
        raise no_match(module, config, spec.name, error) from error
    warn_of_idle_targets(module, getattr(spec.source, "target_modules", None), spec.name)
    return module, Added(spec.name, style, config_of(module, spec.name))


def _add_on_meta(module: nn.Module, told: Added) -> nn.Module:
    """Add the modules of an adapter on a rank other than 0, drawing and computing nothing."""
    config = copy.deepcopy(told.config)
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, (str, bool)) and init != "mica":  # a variant of the layer, not only values
        config.init_lora_weights = False
    with torch.random.fork_rng(devices=[]):
        module = add_module(module, config, told.name, told.style, on_meta=True, keys=told.keys)
    made = config_of(module, told.name)
    if init is not None:
        made.init_lora_weights = init
    return module


def _adopt_copies(module: nn.Module, told: Added, entries: dict[int, Any]) -> None:
    """Let copies of meta modules (`modules_to_save`) take their bytes from where their originals do.

    On rank 0 such a copy holds what a stand-in held; it goes back to meta. Copies of an existing adapter are real
    there, from its file.
    """
    from peft.utils import ModulesToSaveWrapper

    if told.exists:
        return
    for wrapper in module.modules():
        if not isinstance(wrapper, ModulesToSaveWrapper) or told.name not in wrapper.modules_to_save:
            continue
        twin = wrapper.modules_to_save[told.name]
        for path, sub in wrapper.original_module.named_modules():
            other = twin.get_submodule(path)
            for name, parameter in sub._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                made = other._parameters[name]
                assert made is not None
                if not made.is_meta:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    other._parameters[name] = made = nn.Parameter(empty, requires_grad=made.requires_grad)
                if id(parameter) in entries:
                    entries[id(made)] = entries[id(parameter)]
            for name, buffer in sub._buffers.items():
                if buffer is not None and id(buffer) in entries:
                    entries[id(other._buffers[name])] = entries[id(buffer)]


def _activate(module: nn.Module, specs: list[LoraSpec], added: list[Added]) -> None:
    """Make the adapters active that the specs ask for, and freeze those that are not to be trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers = [sub for sub in module.modules() if isinstance(sub, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if any(spec.active is not None for spec in specs):
        names = [spec.name for spec in specs if spec.active]
        base: Any = getattr(module, "base_model", module) if added[0].style == "peft" else module
        if hasattr(base, "set_adapter") and names:
            base.set_adapter(names)
        else:
            for layer in layers:
                layer.set_adapter(names)
    for spec in specs:
        if spec.exists and not spec.trainable:
            for layer in layers:
                layer.set_requires_grad(spec.name, False)
