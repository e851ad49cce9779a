"""Shells: modules whose parameters are on the meta device and whose computed state is real.

[Note: two ways to a shell]
Under accelerate's `init_empty_weights(include_buffers=False)` a parameter goes to meta when it is registered; buffers
and plain tensor attributes are computed for real, persistent tables that the checkpoint overwrites included. Under
`torch.device("meta")` nothing is computed, which is much quicker, but what is computed and not stored (non-persistent
buffers, RoPE tables held as plain attributes) stays on meta. `build_shell` takes the second way where it leaves
nothing of that kind on meta, and else the first.

A shell never reads weight bytes: only the config is read. The libraries' own `low_cpu_mem_usage=False` path reads the
whole checkpoint even if the parameters are on meta, so for the time of `init_context` their base classes'
`from_pretrained` is replaced by one that stops after building.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from metashard import _compat
from metashard.component import Component
from metashard.errors import ComponentError
from metashard.files import check_inside, read_json, short
from metashard.layout import named_slots, take_real
from metashard.weight_files import CONFIG, GENERATION_CONFIG

# What `from_pretrained` takes besides the config's own keywords; a shell has no use for them.
_WEIGHT_KWARGS = (
    "ignore_mismatched_sizes", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict", "variant",
    "use_safetensors", "disable_mmap", "use_flashpack", "flashpack_kwargs", "parallel_config", "weights_only",
    "key_mapping", "adapter_kwargs", "adapter_name", "trust_remote_code", "tqdm_class", "_from_pipeline", "_from_auto",
    "offload_buffers", "_commit_hash", "allow_all_kernels", "use_kernels", "kernel_config",
    "mirror", "_fast_init", "from_tf", "from_flax", "resume_download", "use_auth_token", "code_revision",
)  # fmt: skip
_HUB_KWARGS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_REFUSED_KWARGS = (
    "device_map", "quantization_config", "state_dict", "gguf_file", "tp_plan", "tp_size", "device_mesh",
    "distributed_config", "fusion_config",
)  # fmt: skip


def is_real_rank() -> bool:
    """Whether this rank builds and loads for real: global rank 0, or any process without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def init_context() -> Iterator[None]:
    """Real on rank 0, shells elsewhere: for code that builds a module itself, before `wrap_model`.

    On ranks other than 0, parameters registered inside the context go to the meta device, buffers are computed for
    real, and `from_pretrained` of any diffusers or transformers class reads its config but no weight byte.

    Example:
        >>> with metashard.init_context():
        ...     model = MyTransformer(config)
        >>> model = metashard.wrap_model(model, mesh=mesh)
    """
    with nullcontext() if is_real_rank() else shell_context():
        yield


@contextmanager
def shell_context() -> Iterator[None]:
    """`init_context` as ranks other than 0 see it."""
    from accelerate import init_empty_weights
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    replacements: dict[type, Callable[..., Any]] = {
        ModelMixin: _diffusers_shell,
        PreTrainedModel: _transformers_shell,
    }
    with init_empty_weights(include_buffers=False), _compat.library_from_pretrained(replacements):
        yield


def from_pretrained(cls: type[Any], checkpoint: str, **kwargs: Any) -> nn.Module:
    """`cls.from_pretrained(checkpoint, **kwargs)` on rank 0, a shell of the same class elsewhere.

    Ranks other than 0 call it under `init_empty_weights(include_buffers=False)` with ``low_cpu_mem_usage=False`` and
    the class's fp32 pins cleared for this call, and read no weight bytes. Follow it with `wrap_model`, which sends
    rank 0's dtypes, ties and values.

    Args:
        cls: A diffusers or transformers model class (or any class with a `from_pretrained` that builds a module).
        checkpoint: What the class's `from_pretrained` takes: a folder or a Hub id.
        **kwargs: Passed on, for example `subfolder`, `torch_dtype`, `variant`, `revision`.

    Returns:
        The module: on rank 0 as the library gives it (full weights in host memory), elsewhere with all parameters on
        meta.
    """
    if is_real_rank():
        with _compat.default_dtype(None):  # put back what a failing constructor would leave behind
            return cls.from_pretrained(checkpoint, **kwargs)
    with shell_context(), pins_cleared(cls):
        built = cls.from_pretrained(checkpoint, **{**kwargs, "low_cpu_mem_usage": False})
    retie(built[0] if isinstance(built, tuple) else built)
    return built


@contextmanager
def pins_cleared(cls: type[Any]) -> Iterator[None]:
    """Clear `cls._keep_in_fp32_modules` inside the context: diffusers refuses ``low_cpu_mem_usage=False`` with pins."""
    name = "_keep_in_fp32_modules"
    own = name in vars(cls)
    pins = getattr(cls, name, None)
    if pins is None:
        yield
        return
    setattr(cls, name, None)
    try:
        yield
    finally:
        if own:
            setattr(cls, name, pins)
        else:
            delattr(cls, name)


def build_shell(cls: type[Any], config: dict[str, Any], *, library: str, dtype: torch.dtype | None) -> nn.Module:
    """The quickest right shell of a component, see [Note: two ways to a shell]. Reads no file.

    Args:
        cls: Model class of `library`.
        config: The component's parsed config.json.
        library: "diffusers" or "transformers".
        dtype: Default dtype to build under, as `from_pretrained` does; None leaves it to the library.

    Returns:
        The module in eval mode: parameters on meta, non-persistent buffers and plain tensor attributes real,
        persistent buffers either.
    """
    from accelerate import init_empty_weights

    def build() -> nn.Module:
        return _from_config(cls, config, library=library, dtype=dtype)

    try:
        with torch.device("meta"):
            module = build()
        computed_on_meta = _computed_on_meta(module)
    except Exception:  # noqa: BLE001 - a class that computes with values while it is built; the other way decides
        computed_on_meta = True
    if computed_on_meta:
        with init_empty_weights(include_buffers=False):
            module = build()
    take_real(module)  # `torch.Tensor([...])` ignores both ways
    retie(module)
    return module.eval()


def note_origin(module: nn.Module, found: Component) -> None:
    """Write into a shell's config where it comes from: peft notes it down, and `save_pretrained` with it."""
    if found.library == "transformers":
        module.name_or_path = module.config.name_or_path = str(found.folder)  # type: ignore[union-attr,assignment]
    else:
        module.register_to_config(_name_or_path=str(found.folder))  # type: ignore[operator]


def generation_config(module: nn.Module, found: Component) -> Any:
    """What `from_pretrained` takes from generation_config.json, or, without one, from config.json.

    Returns:
        A `transformers.GenerationConfig`; None for a model that does not generate. Bytes read: that one file.

    Raises:
        ComponentError: The file is no JSON object.
        CheckpointError: The file is a link that leads out of the folder.
    """
    if not module.can_generate():  # type: ignore[operator]
        return None
    from transformers import GenerationConfig

    path = found.folder / GENERATION_CONFIG
    if not os.path.lexists(path):
        return GenerationConfig.from_model_config(copy.deepcopy(found.config))
    check_inside(path, root=found.folder)
    read_json(path, what="generation config", phase="build", error=ComponentError)
    return GenerationConfig.from_pretrained(str(found.folder), local_files_only=True)


def take_generation_config(module: nn.Module, settings: Any) -> None:
    """Give a module the result of `generation_config`."""
    if settings is not None:
        module.generation_config = settings


def retie(module: nn.Module) -> None:
    """Tie again what `init_empty_weights` has untied: it makes a new parameter of every one that is registered."""
    if hasattr(module, "tie_weights") and hasattr(module, "all_tied_weights_keys"):
        module.tie_weights()  # type: ignore[operator]


def _computed_on_meta(module: nn.Module) -> bool:
    """Whether anything that no state dict holds was left on meta."""
    return any(tensor.is_meta for slot, tensor in named_slots(module) if not slot.persistent)


def _from_config(cls: type[Any], config: dict[str, Any], *, library: str, dtype: torch.dtype | None) -> nn.Module:
    if library == "diffusers":
        with _compat.default_dtype(dtype):
            return cls.from_config(dict(config))
    # Not a plain dict any more after this: the config class resolves nested configs.
    parsed = cls.config_class.from_dict(dict(own_config(cls, config)))
    return _compat.transformers_from_config(cls, parsed, dtype=dtype)


def own_config(cls: type[Any], config: dict[str, Any]) -> dict[str, Any]:
    """The part of a transformers config that is about `cls`: a CLIPTextModel may lie in the folder of a whole CLIP.

    As `PreTrainedConfig.from_pretrained` finds it, which reads a file and so is of no use to ranks that do not see it.

    Raises:
        ComponentError: The part is there, but is no JSON object.
    """
    kind = cls.config_class
    key = getattr(kind, "base_config_key", "")
    config = config.get(key, config) if key else config
    if not isinstance(config, dict):
        raise ComponentError(
            f"{CONFIG} has {key} = {short(config)}, where {cls.__name__} looks for its own part. Fetch the file again.",
            phase="build",
            key=key,
            expected="a JSON object",
            got=short(config),
        )
    if config.get("model_type", kind.model_type) != kind.model_type:
        parts = [part for part in config.values() if isinstance(part, dict)]
        config = next((part for part in reversed(parts) if part.get("model_type") == kind.model_type), config)
    return config


def _refuse(kwargs: dict[str, Any], cls: type[Any]) -> None:
    asked = [name for name in _REFUSED_KWARGS if kwargs.pop(name, None) is not None]
    if asked:
        raise ComponentError(
            f"{cls.__name__}.from_pretrained was called with {', '.join(asked)}, which cannot be sharded by metashard. "
            "Leave it out: placement comes from the mesh given to wrap_model.",
            phase="build",
        )


def _diffusers_shell(cls: Any, checkpoint: Any, **kwargs: Any) -> Any:
    """`ModelMixin.from_pretrained` without its second half."""
    _refuse(kwargs, cls)
    dtype = kwargs.pop("torch_dtype", None)
    dtype = kwargs.pop("dtype", None) or dtype
    with_info = kwargs.pop("output_loading_info", False)
    for name in _WEIGHT_KWARGS:
        kwargs.pop(name, None)
    config, unused = cls.load_config(checkpoint, return_unused_kwargs=True, **kwargs)
    if dict(config).get("quantization_config") is not None:
        _refuse({"quantization_config": True}, cls)
    with _compat.default_dtype(dtype):
        module = cls.from_config(config, **unused)
    module.register_to_config(_name_or_path=checkpoint)
    module.eval()
    return (module, {}) if with_info else module


def _transformers_shell(cls: Any, checkpoint: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """`PreTrainedModel.from_pretrained` without its second half."""
    from transformers import GenerationConfig, PreTrainedConfig

    _refuse(kwargs, cls)
    generation = kwargs.pop("generation_config", None)
    dtype = kwargs.pop("torch_dtype", None)
    dtype = kwargs.pop("dtype", None) or dtype
    with_info = kwargs.pop("output_loading_info", False)
    for name in _WEIGHT_KWARGS:
        kwargs.pop(name, None)
    hub = {name: kwargs.pop(name) for name in _HUB_KWARGS if name in kwargs}
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        source = config if config is not None else checkpoint
        config, kwargs = cls.config_class.from_pretrained(source, return_unused_kwargs=True, **hub, **kwargs)
    if getattr(config, "quantization_config", None) is not None:
        _refuse({"quantization_config": True}, cls)
    config.name_or_path = str(checkpoint)
    if dtype in (None, "auto"):
        dtype = config.dtype
    module = _compat.transformers_from_config(cls, config, dtype=dtype, **kwargs)
    module.eval()
    if cls.can_generate():
        if generation is None:
            with suppress(OSError):  # no generation_config.json: the one from the model's config stays
                generation = GenerationConfig.from_pretrained(checkpoint, **hub)
        take_generation_config(module, generation)
    return (module, {}) if with_info else module
