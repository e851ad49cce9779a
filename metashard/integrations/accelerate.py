"""accelerate: a plugin whose accelerator trains what metashard has loaded.

    plugin = MetaShardPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    model = plugin.load_component(accelerator, "org/name", "transformer", lora=config)
    model.train()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Wrap classes, mixed precision, CPU offload, activation checkpointing, ignored modules and the mesh are accelerate's own
settings, from the plugin's arguments or from what `accelerate launch` has put into the environment.

[Note: prepare]
`Accelerator.prepare` takes a model that is an `FSDPModule` as it is, with no copy. Around that it does three things
that only fit a model which it shards itself: it looks up the wrap classes by name, and FSDP has renamed them; it puts
activation checkpointing around blocks, which has to come before sharding; and it finds the optimizer's parameters again
by the addresses of their memory, and shards without elements (a LoRA of rank 4 on 8 ranks) all have address 0. The
first thing that it calls is the plugin's `set_auto_wrap_policy`, where the three are put right.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.checkpoint import checkpoint as run_checkpointed

from metashard import _compat
from metashard.agree import mesh_ranks
from metashard.errors import LaunchError
from metashard.load import load_component
from metashard.policy import ShardPolicy, WrapRule


@dataclass
class MetaShardPlugin(FullyShardedDataParallelPlugin):
    """accelerate's FSDP2 plugin, which also loads: pass it as `Accelerator(fsdp_plugin=...)`.

    It takes the arguments of `FullyShardedDataParallelPlugin` and reads the same environment variables. Two defaults
    differ: `fsdp_version` is 2, and without any `auto_wrap_policy` the repeated blocks of the model are wrapped (see
    `ShardPolicy.wrap`) rather than nothing.

    Raises:
        LaunchError: The settings are for FSDP1.
    """

    fsdp_version: int = 2

    def __post_init__(self) -> None:
        told = os.environ.get("FSDP_VERSION", "2")
        if self.fsdp_version != 2 or told != "2":
            where = "fsdp_version" if self.fsdp_version != 2 else "FSDP_VERSION (`accelerate launch`)"
            raise LaunchError(
                f"{where} asks for FSDP1, which cannot take shards of FSDP2. Set `fsdp_version: 2` in accelerate's "
                "config, or pass --fsdp_version 2 to `accelerate launch`.",
                phase="resolve",
                expected=2,
                got=self.fsdp_version if self.fsdp_version != 2 else told,
            )
        asked = self.auto_wrap_policy or os.environ.get("FSDP_AUTO_WRAP_POLICY")
        super().__post_init__()
        self._one_group = asked is not None and self.auto_wrap_policy is None
        self._checkpointing: bool = self.activation_checkpointing
        self._mesh: tuple[Any, DeviceMesh] | None = None
        # `Accelerator` adds a CPU backend to the process group where these two say so; it asks the environment only.
        if isinstance(self.cpu_offload, CPUOffloadPolicy):
            os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
        if self.state_dict_type == StateDictType.FULL_STATE_DICT:
            os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"

    def load_component(
        self,
        accelerator: Accelerator,
        checkpoint: str | Path,
        component: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        lora: Any = None,
        prepare: Callable[[nn.Module], nn.Module | None] | None = None,
        wrap: WrapRule | None = None,
        **kwargs: Any,
    ) -> Any:
        """`metashard.load_component` with the accelerator's settings; call it on every process.

        Where mixed precision is on, trainable parameters are raised to fp32 after the load, as `Accelerator.prepare`
        does with a model that it shards itself; frozen ones keep `dtype`.

        Args:
            accelerator: Made with this plugin.
            checkpoint: As `metashard.load_component` takes it, like all that follow.
            component: Name of the component.
            dtype: Of the weights, as `from_pretrained` takes it.
            lora: Adapters to add.
            prepare: The hook before sharding. Activation checkpointing comes from the accelerator's settings: the
                library's own, around its own blocks.
            wrap: Wrap rule in place of the accelerator's, for components with other blocks than those it names.
            **kwargs: `load`, `variant`, `revision`, `output_loading_info`.

        Returns:
            As `metashard.load_component`: the sharded module in eval mode, or (module, LoadReport). Give it to
            `Accelerator.prepare` together with its optimizer if it is trained.

        Raises:
            LaunchError: The accelerator does not shard with this plugin, has one process, or a mesh of other ranks.
            MetaShardError: As `metashard.load_component`.
        """
        for name in {"mesh", "shard"} & kwargs.keys():
            raise LaunchError(
                f"{name}= comes from the accelerator: set parallelism_config, or the plugin's arguments; or call "
                "metashard.load_component for a load of your own settings.",
                phase="resolve",
            )
        self._check(accelerator)
        policy = ShardPolicy(
            wrap=wrap if wrap is not None else self._wrap_rule(),
            mp_policy=self.mixed_precision_policy,
            offload_policy=self.cpu_offload,
            # As accelerate: True for blocks, and for the root what torch chooses, which is to keep it.
            reshard_after_forward=None if self.reshard_after_forward else False,
            ignored_params=self._ignored(),
        )
        loaded = load_component(
            checkpoint,
            component,
            mesh=self._fsdp_mesh(accelerator),
            dtype=dtype,
            lora=lora,
            prepare=self._checkpointed(prepare) if self._checkpointing else prepare,
            shard=policy,
            **kwargs,
        )
        if accelerator.mixed_precision != "no":
            _raise_trainable(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Called by `Accelerator.prepare` before anything else; see [Note: prepare]."""
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        sharded = isinstance(model, FSDPModule)
        self.activation_checkpointing = self._checkpointing and not sharded
        if not sharded:
            super().set_auto_wrap_policy(model)
            return
        if self._checkpointing and not any(getattr(sub, "gradient_checkpointing", False) for sub in model.modules()):
            raise LaunchError(
                "activation_checkpointing is on, and the model was sharded without it. Load it with "
                "plugin.load_component, or enable it in the `prepare` hook of metashard.load_component.",
                phase="prepare",
            )
        _tell_empty_shards_apart(model)

    def _check(self, accelerator: Accelerator) -> None:
        kind = accelerator.distributed_type
        # Without an accelerator accelerate takes each of several processes for one of its own, but for --use_cpu.
        several = kind == DistributedType.NO and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if kind == DistributedType.MULTI_CPU or (several and not torch.accelerator.is_available()):
            text = "runs on CPU, where accelerate has no FSDP. Use metashard.load_component(mesh=...) and a plain "
            text += "training loop there"
        elif kind == DistributedType.NO:
            text = "runs on one process without a process group, so there is nothing to shard over. Start the script "
            text += "with `accelerate launch --num_processes N` or torchrun"
        elif kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
            text = f"uses {kind.value}, which shards by itself. Choose FSDP in `accelerate config`, and pass "
            text += "Accelerator(fsdp_plugin=MetaShardPlugin()) and no other plugin"
        elif kind != DistributedType.FSDP:
            text = f"uses {kind.value} without FSDP. Pass Accelerator(fsdp_plugin=plugin)"
        elif not accelerator.is_fsdp2:
            text = "was made with a plugin for FSDP1. Pass Accelerator(fsdp_plugin=MetaShardPlugin()), and set "
            text += "`fsdp_version: 2` in accelerate's config"
        elif accelerator.state.fsdp_plugin is not self:
            text = "was made with another FSDP plugin. Pass this one: Accelerator(fsdp_plugin=plugin)"
        else:
            return
        raise LaunchError(
            f"The accelerator {text}.", phase="resolve", expected="FSDP2 with this plugin", got=kind.value
        )

    def _fsdp_mesh(self, accelerator: Accelerator) -> DeviceMesh:
        """The mesh that accelerate would give to `fully_shard`; its default is one over all ranks."""
        whole, world = accelerator.torch_device_mesh, dist.get_world_size()
        if whole is None:
            if self._mesh is None or self._mesh[0] is not dist.group.WORLD:
                made = init_device_mesh(accelerator.device.type, (world,), mesh_dim_names=("dp_shard",))
                self._mesh = (dist.group.WORLD, made)
            return self._mesh[1]
        if sorted(mesh_ranks(whole)) != list(range(world)) or whole.device_type != accelerator.device.type:
            raise LaunchError(
                f"The accelerator's mesh is over {whole.size()} ranks of type {whole.device_type}, its process group "
                f"over {world} on {accelerator.device.type}. Let the sizes of parallelism_config multiply to {world}, "
                "and let it make the mesh.",
                phase="resolve",
                expected=world,
                got=whole.size(),
            )
        axes = tuple(accelerator.parallelism_config.fsdp_dim_names)
        try:
            return whole[axes]
        except KeyError as error:
            raise LaunchError(
                f"The accelerator's mesh has no axes {axes} to shard over: {error.args[0]} Set dp_shard_size in "
                "parallelism_config.",
                phase="resolve",
                expected=axes,
                got=whole.mesh_dim_names,
            ) from error

    def _wrap_rule(self) -> WrapRule | None:
        policy: Any = self.auto_wrap_policy
        keywords: dict[str, Any] = {}
        if isinstance(policy, functools.partial):
            policy, keywords = policy.func, policy.keywords
        if policy is None:
            return () if self._one_group else None
        if policy is transformer_auto_wrap_policy:
            return tuple(self.transformer_cls_names_to_wrap or keywords.get("transformer_layer_cls", ())) or None
        if policy is size_based_auto_wrap_policy:
            most = self.min_num_params or 0  # accelerate, too, takes 0 as none
            return (lambda module: sum(p.numel() for p in module.parameters()) > most) if most else ()
        raise LaunchError(
            f"auto_wrap_policy={policy!r} is a function of FSDP1's kind. Name classes in transformer_cls_names_to_wrap "
            'with auto_wrap_policy="transformer_based_wrap", or pass wrap= to load_component.',
            phase="resolve",
        )

    def _ignored(self) -> Callable[[str], bool] | None:
        """`ignored_modules` as a predicate on a parameter's FQN: the name of one of its modules matches."""
        if self.ignored_modules is None:
            return None
        if not isinstance(self.ignored_modules, str):
            raise LaunchError(
                "ignored_modules holds modules, and those of a component do not exist before it is loaded. Pass a "
                "string: a regular expression that matches their names in full.",
                phase="resolve",
                expected="str",
                got=type(self.ignored_modules).__name__,
            )
        pattern = re.compile(self.ignored_modules)

        def ignored(fqn: str) -> bool:
            parts = fqn.split(".")
            return any(pattern.fullmatch(".".join(parts[:depth])) for depth in range(len(parts)))

        return ignored

    def _checkpointed(
        self, prepare: Callable[[nn.Module], nn.Module | None] | None
    ) -> Callable[[nn.Module], nn.Module | None]:
        """The hook, and activation checkpointing after it.

        By the library itself: accelerate's wrappers would put a part of their own into every FQN, on which adapters
        and checkpoints go.
        """
        offload = self.activation_checkpointing_offload

        def hook(module: nn.Module) -> nn.Module | None:
            returned = prepare(module) if prepare is not None else module
            module = module if returned is None else returned
            enable: Any = getattr(module, "enable_gradient_checkpointing", None)  # diffusers
            if enable is not None:
                enable(_run_offloaded if offload else None)
            else:
                enable = module.activation_checkpointing_enable  # transformers
                enable(offload=offload)
            return returned

        return hook


def _run_offloaded(module: nn.Module, *args: Any) -> Any:
    with save_on_cpu(pin_memory=torch.accelerator.is_available()):
        return run_checkpointed(module, *args, use_reentrant=False)


def _raise_trainable(module: nn.Module) -> None:
    """Hold trainable parameters in fp32. FSDP looks at dtypes in the first forward, so it is not too late."""

    def raised(tensor: torch.Tensor) -> torch.Tensor:
        low = tensor.requires_grad and tensor.is_floating_point() and tensor.dtype != torch.float32
        return tensor.to(torch.float32) if low else tensor

    if any(p.requires_grad and p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        _compat.apply_to_tensors(module, raised)


def _tell_empty_shards_apart(model: nn.Module) -> None:
    """Give shards without elements addresses of their own until the first forward; see [Note: prepare]."""
    empty = [held for held in map(_compat.held_tensor, model.parameters()) if not held.numel()]
    for number, tensor in enumerate(empty):
        tensor.data_ptr = functools.partial(int, -1 - number)  # type: ignore[method-assign]

    def forget(*_: Any) -> None:
        handle.remove()
        for tensor in empty:
            tensor.__dict__.pop("data_ptr", None)

    handle = model.register_forward_pre_hook(forget, prepend=True)
