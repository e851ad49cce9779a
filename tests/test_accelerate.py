"""accelerate: its own code trains, saves and resumes what the plugin has loaded, as it does a model it shards itself.

accelerate selects FSDP where there are accelerators. Here the kind of process group that it has found is set to that of
GPUs (`selected`); everything from there on is its own code, on gloo ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import metashard
from metashard.integrations import accelerate as integration
from metashard.integrations.accelerate import MetaShardPlugin
from tests import zoo
from tests.parity import cpu_mesh, differences, full
from tests.ranks import Ranks

BF16 = torch.bfloat16
SD3 = "SD3Transformer2DModel"
BLOCK = "JointTransformerBlock"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {}
    for name in (SD3, "LlamaForCausalLM-tied"):
        made[name] = str(tmp_path_factory.mktemp(name))
        zoo.CASES[name].build().save_pretrained(made[name])
    return made


@contextlib.contextmanager
def environment(env: dict[str, str] | None = None) -> Iterator[None]:
    """No trace of an accelerator before or after."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]
    os.environ.update(env or {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@contextlib.contextmanager
def selected(
    plugin: Any = MetaShardPlugin,
    env: dict[str, str] | None = None,
    accelerator: dict[str, Any] | None = None,
    *,
    on_cpu: bool = True,
    **options: Any,
) -> Iterator[tuple[Any, Accelerator]]:
    """A plugin and an accelerator that shards with it."""
    with environment(env):
        made = plugin(**options)
        PartialState(cpu=on_cpu)
        if on_cpu:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        yield made, Accelerator(fsdp_plugin=made, **(accelerator or {}))


def lora(rank: int = 4) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights="gaussian")


def loss_of(model: nn.Module, name: str, offset: torch.Tensor) -> torch.Tensor:
    made = {k: v.to(offset.device) for k, v in zoo.CASES[name].inputs(torch.float32).items()}
    made = {k: v + offset if v.is_floating_point() else v for k, v in made.items()}
    return next(iter(model(**made).values())).float().pow(2).mean()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p).clone() for name, p in sorted(model.named_parameters())}


def train(accelerator: Accelerator, model: nn.Module, name: str, folder: Path, *, steps: int = 2) -> dict[str, Any]:
    """Prepare, train, save, go on, load, go on again: what a script does, with everything that can be compared."""
    model.train()
    held = {n: p.to_local().data_ptr() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(torch.arange(4.0 * dist.get_world_size()) / 8, batch_size=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    same = all(held[n] == p.to_local().data_ptr() for n, p in model.named_parameters() if n in held)
    told: dict[str, Any] = {"losses": [], "norms": [], "copied": not same, "model": model, "optimizer": optimizer}

    def one_step(offset: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            loss = loss_of(model, name, offset)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                told["norms"].append(full(accelerator.clip_grad_norm_(model.parameters(), 0.5)).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        told["losses"].append(loss.item())

    def go_on() -> dict[str, torch.Tensor]:
        for offset in (0.3, 0.4):
            one_step(torch.tensor([offset], device=accelerator.device))
        return state_of(model)

    for _, offset in zip(range(steps), loader, strict=False):
        one_step(offset)
    told["trained"] = state_of(model)
    accelerator.save_state(folder)
    told["further"] = go_on()
    accelerator.load_state(folder)
    told["loaded"] = state_of(model)
    told["again"] = go_on()
    told["gathered"] = accelerator.get_state_dict(model)
    return told


def plain_name(name: str) -> str:
    return name.replace("._checkpoint_wrapped_module", "")


def unequal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:4]
    return [name for name in got if not torch.equal(got[name], want[name])]


def both_ways(
    name: str,
    folder: str,
    out: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    rank: int | None,
    on_cpu: bool = True,
) -> dict[str, Any]:
    """Train what the plugin has loaded, and what accelerate shards itself from `from_pretrained`; on the ranks."""
    dtype = options.pop("dtype", None)
    mesh = settings.pop("mesh", None)
    told = {}
    for way in ("ours", "theirs"):
        kwargs = dict(settings)
        if mesh is not None:
            kwargs["parallelism_config"] = ParallelismConfig(dp_replicate_size=mesh[0], dp_shard_size=mesh[1])
        kind = MetaShardPlugin if way == "ours" else partial(FullyShardedDataParallelPlugin, fsdp_version=2)
        with selected(kind, None, kwargs, auto_wrap_policy="transformer_based_wrap", **options) as (
            plugin,
            accelerator,
        ):
            plugin.transformer_cls_names_to_wrap = [BLOCK if name == SD3 else "LlamaDecoderLayer"]
            torch.manual_seed(3)
            config = None if rank is None else metashard.LoraSpec(lora(rank), style="inject")
            if way == "ours":
                model = plugin.load_component(accelerator, folder, dtype=dtype, lora=config)
            else:
                model = zoo.CASES[name].load(folder, dtype or torch.float32)
                if rank is not None:
                    model.requires_grad_(False)
                    model.add_adapter(lora(rank))
            told[way] = train(accelerator, model, name, Path(out) / way)
    ours, theirs = told["ours"], told["theirs"]
    gathered = [ours["gathered"].keys() == theirs["gathered"].keys()]
    gathered += [torch.equal(ours["gathered"][key], value) for key, value in theirs["gathered"].items()]
    return {
        "copied": ours["copied"],
        "losses": (ours["losses"], theirs["losses"]),
        "norms": (ours["norms"], theirs["norms"]),
        "trained": unequal(ours["trained"], {plain_name(k): v for k, v in theirs["trained"].items()}),
        "loaded": unequal(ours["loaded"], ours["trained"]),
        "again": unequal(ours["again"], ours["further"]),
        "moved": len(unequal(ours["further"], ours["trained"])),
        "gathered": all(gathered),
        "on_rank_0": bool(ours["gathered"]) == (dist.get_rank() == 0),
        "dtypes": sorted({str(p.dtype) for p in ours["model"].parameters() if p.requires_grad}),
        "optimizer": len({id(p) for group in ours["optimizer"].param_groups for p in group["params"]}),
        "trainable": sum(p.requires_grad for p in ours["model"].parameters()),
    }


WAYS = {
    "full": (2, SD3, {"state_dict_type": "FULL_STATE_DICT"}, {"gradient_accumulation_steps": 2}, None),
    "full-bf16-checkpointed": (
        2,
        SD3,
        {"dtype": BF16, "activation_checkpointing": True, "reshard_after_forward": False},
        {"mixed_precision": "bf16"},
        None,
    ),
    "lora-bf16": (2, SD3, {"dtype": BF16}, {"mixed_precision": "bf16"}, 4),
    # A LoRA of rank 1 leaves ranks without an element of lora_A.
    "lora-hsdp": (4, SD3, {}, {"mesh": (2, 2)}, 1),
    "tied": (2, "LlamaForCausalLM-tied", {"activation_checkpointing": True}, {}, None),
    "lora-offload": (2, SD3, {"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, {}, 1),
}


def check(got: dict[str, Any]) -> None:
    assert not got["copied"]
    ours, theirs = got["losses"]
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert got["norms"][0] == pytest.approx(got["norms"][1], rel=1e-5)
    assert got["trained"] == []
    assert got["loaded"] == []
    assert got["again"] == []
    assert got["moved"]
    assert got["gathered"]
    assert got["on_rank_0"]
    assert got["dtypes"] == ["torch.float32"]
    assert got["optimizer"] == got["trainable"]


@pytest.mark.parametrize("way", WAYS)
def test_trains_saves_and_resumes_as_accelerate_does_a_model_of_its_own(way, folders, ranks_of, tmp_path):
    world, name, options, settings, rank = WAYS[way]
    args = (name, folders[name], str(tmp_path), options, settings, rank)
    for got in ranks_of[world].run(both_ways, *args, timeout=120):
        check(got)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["lora-bf16", "full-bf16-checkpointed", "lora-offload"])
def test_on_an_accelerator_accelerate_selects_fsdp_by_itself(way, folders, tmp_path):
    _, name, options, settings, rank = WAYS[way]
    options = {"cpu_offload": True} if "cpu_offload" in options else options
    with Ranks(1, backend="cpu:gloo,cuda:nccl") as one:
        args = (name, folders[name], str(tmp_path), options, settings, rank)
        check(one.run(both_ways, *args, on_cpu=False, timeout=120)[0])


# Settings


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: JointTransformerBlock
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: FULL_STATE_DICT
"""


def launch_environment(config: Path) -> dict[str, str]:
    """What `accelerate launch --config_file` puts into the environment of a script, by its own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    made = prepare_multi_gpu_env(_validate_launch_command(args)[0])
    return {name: value for name, value in made.items() if name.startswith(("FSDP_", "ACCELERATE_"))}


def facts_of(model: nn.Module) -> dict[str, Any]:
    groups = {name: sub._get_fsdp_state() for name, sub in model.named_modules() if isinstance(sub, FSDPModule)}
    return {
        "groups": sorted(groups),
        "resharded": {name: bool(s._fsdp_param_group.post_forward_mesh_info) for name, s in groups.items()},
        "computed_in": {s._mp_policy.param_dtype for s in groups.values()},
        "plain": sorted(name for name, p in model.named_parameters() if not isinstance(p, DTensor)),
        "checkpointed": model.is_gradient_checkpointing,
        "mesh": {p.device_mesh.mesh_dim_names for p in model.parameters() if isinstance(p, DTensor)},
    }


def launched(folder: str, env: dict[str, str], options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    with selected(MetaShardPlugin, env, settings, **options) as (plugin, accelerator):
        model, report = plugin.load_component(accelerator, folder, output_loading_info=True)
        kept = plugin.state_dict_type.name, plugin.activation_checkpointing
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        return facts_of(model) | {"kept": kept, "strategy": report.strategy}


def test_what_accelerate_launch_says_is_what_the_load_does(folders, ranks2, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    env = launch_environment(config)
    assert env["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"  # its default, which the load has no use for
    for got in ranks2.run(launched, folders[SD3], env, {"ignored_modules": ".*norm_out|context_embedder"}, {}):
        blocks = [f"transformer_blocks.{i}" for i in range(3)]
        assert got["groups"] == ["", *blocks]
        assert got["resharded"] == dict.fromkeys(["", *blocks], False)
        assert got["computed_in"] == {BF16}
        assert got["checkpointed"]
        assert got["plain"] == [f"{m}.{n}" for m in ("context_embedder", "norm_out.linear") for n in ("bias", "weight")]
        assert got["mesh"] == {("dp_shard",)}
        assert got["kept"] == ("FULL_STATE_DICT", True)
        assert got["strategy"] == "direct"


def wrapped(folder: str, options: dict[str, Any], wrap: Any) -> list[str]:
    with selected(**options) as (plugin, accelerator):
        try:
            model = plugin.load_component(accelerator, folder, wrap=wrap)
        except metashard.LaunchError as error:
            return [str(error)]
        return [name for name, sub in model.named_modules() if isinstance(sub, FSDPModule)]


def fsdp1_rule() -> Any:
    from diffusers.models.attention import JointTransformerBlock
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    return partial(transformer_auto_wrap_policy, transformer_layer_cls={JointTransformerBlock})


ALL_BLOCKS = ["", "transformer_blocks.0", "transformer_blocks.1", "transformer_blocks.2"]


@pytest.mark.parametrize(
    ("options", "wrap", "expected"),
    [
        ({}, None, ALL_BLOCKS),
        ({"auto_wrap_policy": "no_wrap"}, None, [""]),
        ({"auto_wrap_policy": "transformer_based_wrap"}, None, ALL_BLOCKS),
        ({"auto_wrap_policy": fsdp1_rule()}, None, ALL_BLOCKS),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 0}, None, [""]),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 10_000}, None, ALL_BLOCKS),
        (
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["OtherBlock"]},
            ["PatchEmbed"],
            ["", "pos_embed"],
        ),
    ],
    ids=["unset", "no_wrap", "by model", "fsdp1", "size 0", "size", "by call"],
)
def test_wrap_classes_are_accelerates(options, wrap, expected, folders, ranks1):
    assert ranks1.run(wrapped, folders[SD3], options, wrap) == [expected]


def by_rank_0(folder: str, name: str) -> list[str]:
    with environment({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "LOCAL_RANK": "1"}):
        policy = metashard.LoadPolicy(strategy="rank0")
        model = metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16, load=policy)
    return differences(model, zoo.CASES[name].load(folder, BF16))


def test_rank_0_has_real_weights_where_transformers_is_told_to_load_none(folders, ranks2):
    """accelerate's RAM efficient loading, on by default: the first process of a host reads for the others."""
    name = "LlamaForCausalLM-tied"
    assert ranks2.run(by_rank_0, folders[name], name) == [[], []]


# Bad input


def refused(folder: str, kind: str) -> str:
    """The error's text."""
    options: dict[str, Any] = {}
    call: dict[str, Any] = {}
    if kind == "a wrap function":
        options["auto_wrap_policy"] = any_function
    elif kind == "modules to ignore":
        options["ignored_modules"] = [nn.Linear(1, 1)]
    elif kind in ("mesh", "shard"):
        call[kind] = None
    with selected(**options) as (plugin, accelerator):
        state = accelerator.state
        if kind.partition(",")[0] in DistributedType.__members__:
            state.distributed_type = DistributedType[kind.partition(",")[0]]
        elif kind == "FSDP1":
            state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        elif kind == "another plugin":
            state.fsdp_plugin = MetaShardPlugin()
        elif kind.startswith("a mesh"):
            state.parallelism_config = ParallelismConfig(dp_shard_size=2)
            one = DeviceMesh("cpu", [0], mesh_dim_names=("dp_shard",), _init_backend=False)
            state.device_mesh = one if kind == "a mesh of one rank" else cpu_mesh()
        elif kind == "late checkpointing":
            plugin._checkpointing = True
        processes = {"WORLD_SIZE": "1" if kind == "NO" else "2"}
        try:
            if kind == "late checkpointing":
                model = metashard.load_component(folder, mesh=cpu_mesh())
                accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            else:
                with environment(processes), mock.patch("torch.accelerator.is_available", return_value=False):
                    plugin.load_component(accelerator, folder, **call)
        except metashard.LaunchError as error:
            return str(error)
    return "loaded"


def any_function(*args: Any, **kwargs: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("kind", "says"),
    {
        "NO": "one process.*accelerate launch --num_processes",
        "NO, two processes": "runs on CPU, where accelerate has no FSDP",
        "DEEPSPEED": "uses DEEPSPEED, which shards by itself. Choose FSDP",
        "MEGATRON_LM": "shards by itself",
        "MULTI_CPU": "runs on CPU, where accelerate has no FSDP",
        "MULTI_GPU": r"without FSDP. Pass Accelerator\(fsdp_plugin=plugin\)",
        "FSDP1": "plugin for FSDP1.*fsdp_version: 2",
        "another plugin": "another FSDP plugin. Pass this one",
        "a mesh of one rank": "mesh is over 1 ranks of type cpu, its process group over 2",
        "a mesh with other axes": "no axes .'dp_shard_cp',. to shard over.*Set dp_shard_size",
        "a wrap function": "FSDP1's kind. Name classes in transformer_cls_names_to_wrap",
        "modules to ignore": "regular expression",
        "mesh": "mesh= comes from the accelerator",
        "shard": "shard= comes from the accelerator",
        "late checkpointing": "Load it with plugin.load_component",
    }.items(),
)
def test_every_rank_refuses_what_cannot_work_and_names_the_remedy(kind, says, folders, ranks2):
    for text in ranks2.run(refused, folders[SD3], kind):
        assert re.search(says, text), text


@pytest.mark.parametrize(("options", "env"), [({"fsdp_version": 1}, {}), ({}, {"FSDP_VERSION": "1"})])
def test_settings_for_fsdp1_are_refused(options, env):
    with environment(env), pytest.raises(metashard.LaunchError, match="--fsdp_version 2"):
        MetaShardPlugin(**options)


def test_the_process_group_gets_a_cpu_backend_where_accelerate_needs_one():
    """accelerate adds gloo to nccl if these two variables say so."""
    with environment():
        MetaShardPlugin(cpu_offload=True, state_dict_type="FULL_STATE_DICT")
        assert os.environ["FSDP_OFFLOAD_PARAMS"] == "true"
        assert os.environ["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"


def offloaded_activations(folder: str) -> tuple[bool, bool]:
    grads = []
    for offload in (False, True):
        options = {"activation_checkpointing": True, "activation_checkpointing_offload": offload}
        with selected(**options) as (plugin, accelerator):
            model = plugin.load_component(accelerator, folder).train()
            loss_of(model, SD3, torch.zeros(1)).backward()
            grads.append({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
            used = model._gradient_checkpointing_func is integration._run_offloaded
    return unequal(grads[0], grads[1]) == [], used


def test_activations_that_checkpoints_keep_go_to_host_memory(folders, ranks1):
    assert ranks1.run(offloaded_activations, folders[SD3]) == [(True, True)]
