"""Training on loaded shards: gradients and steps are a single process's, whatever the dtypes, meshes and options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import metashard
from metashard import _compat
from metashard.shard import pinned_names
from tests import zoo
from tests.parity import cpu_mesh, full
from tests.ranks import Ranks

BF16 = torch.bfloat16
WAN = "WanTransformer3DModel"
SD3 = "SD3Transformer2DModel"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {}
    for name in (WAN, SD3, "LlamaForCausalLM-tied"):
        made[name] = str(tmp_path_factory.mktemp(name))
        zoo.CASES[name].build().save_pretrained(made[name])
    return made


def lora_config(**kwargs: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["to_q", "to_k", "to_v"], **kwargs})


def inputs(name: str, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """The case's inputs with values of the rank's own: gradients that are not averaged show."""
    made = zoo.CASES[name].inputs(dtype)
    return {k: v + 0.25 * rank if v.is_floating_point() else v for k, v in made.items()}


def loss_of(module: nn.Module, name: str, rank: int, dtype: torch.dtype) -> torch.Tensor:
    output = module(**inputs(name, rank, dtype))
    return next(iter(output.values())).float().pow(2).mean()


def reference(name: str, folder: str, dtype: torch.dtype, lora: Any = None, seed: int = 3) -> nn.Module:
    from peft import get_peft_model

    module = zoo.CASES[name].load(folder, dtype)
    torch.manual_seed(seed)
    return module if lora is None else get_peft_model(module, copy.deepcopy(lora)).eval()


def load(name: str, folder: str, dtype: torch.dtype, mesh: Any, lora: Any = None, **kwargs: Any) -> nn.Module:
    torch.manual_seed(3 + dist.get_rank())  # only rank 0 draws
    policy = metashard.LoadPolicy(**{"timeout": 60, **kwargs.pop("load", {})})
    return metashard.load_component(folder, mesh=mesh, dtype=dtype, lora=lora, load=policy, **kwargs)


def optimizer_of(module: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, **kwargs)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.float(), want.float()
    return ((got - want).norm() / want.norm().clamp_min(1e-6)).item()


def worst_grads(module: nn.Module, ref: nn.Module) -> tuple[float, str]:
    """The largest relative difference of a gradient from the reference's, and whose it is."""
    wanted = {n: p.grad for n, p in ref.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())[:5]
    scale = max(g.float().norm().item() for g in wanted.values())
    errors = []
    for name, want in wanted.items():
        assert got[name].dtype == want.dtype, name
        difference = (full(got[name]).float() - want.float()).norm().item()
        # A gradient of rounding noise only (a bias before a softmax) is held against the largest one.
        errors.append((difference / max(want.float().norm().item(), 1e-3 * scale), name))
    return max(errors)


def step_like_reference(
    name: str,
    folder: str,
    dtype: torch.dtype,
    *,
    mesh_shape: tuple[int, ...] = (),
    lora: Any = None,
    accumulate: int = 1,
    clip: float | None = None,
    shard: dict[str, Any] | None = None,
    load_policy: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    prepare: Any = None,
    after: Any = None,
) -> dict[str, Any]:
    """One optimizer step on shards and in one process; runs on the ranks."""
    mesh = cpu_mesh(*mesh_shape)
    world, rank = dist.get_world_size(), dist.get_rank()
    policy = metashard.ShardPolicy(**(shard or {}))
    module = load(name, folder, dtype, mesh, lora, shard=policy, prepare=prepare, load=load_policy or {})
    optim = optimizer_of(module, **(optimizer or {}))  # right after the load
    if after is not None:
        after(module)
    before = {n: local(p).clone() for n, p in module.named_parameters() if p.requires_grad}
    ref = reference(name, folder, dtype, lora)
    ref_optim = optimizer_of(ref)
    for micro in range(accumulate):
        module.set_requires_gradient_sync(micro == accumulate - 1)
        (loss_of(module, name, rank + world * micro, dtype) / accumulate).backward()
    (sum(loss_of(ref, name, r, dtype) for r in range(world * accumulate)) / (world * accumulate)).backward()
    grads = worst_grads(module, ref)
    norms = None
    if clip is not None:
        norms = [full(nn.utils.clip_grad_norm_(m.parameters(), clip)).item() for m in (module, ref)]
    optim.step()
    ref_optim.step()
    wanted = dict(ref.named_parameters())
    values = max((error_of(full(p), wanted[n]), n) for n, p in module.named_parameters())
    moved = {n: not torch.equal(local(p), before[n]) for n, p in module.named_parameters() if n in before}
    empty = {n for n, p in module.named_parameters() if n in before and not local(p).numel()}
    optim.zero_grad()
    again = loss_of(module, name, 0, dtype).item(), loss_of(ref, name, 0, dtype).item()
    return {
        "grads": grads,
        "values": values,
        "norms": norms,
        "still": sorted(n for n, m in moved.items() if not m and n not in empty),
        "again": again,
        "groups": max(len(s) for s in fsdp_groups(module).values()),
    }


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def fsdp_groups(module: nn.Module) -> dict[str, list[Any]]:
    return {
        name: sub._get_fsdp_state()._fsdp_param_groups
        for name, sub in module.named_modules()
        if hasattr(sub, "_get_fsdp_state")
    }


def check_step(outcomes: list[dict[str, Any]], *, tolerance: float, step: float | None = None) -> None:
    for outcome in outcomes:
        assert outcome["grads"][0] < tolerance, outcome["grads"]
        # Adam's first step is the sign of the gradient: where that is rounding noise, a parameter may go the other way.
        assert outcome["values"][0] < (step or tolerance), outcome["values"]
        if outcome["norms"]:
            sharded, single = outcome["norms"]
            assert sharded == pytest.approx(single, rel=tolerance)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_lora_step_is_a_single_process_step(ranks_of: dict[int, Ranks], folders, world):
    outcomes = ranks_of[world].run(step_like_reference, SD3, folders[SD3], torch.float32, lora=lora_config(), clip=0.1)
    check_step(outcomes, tolerance=1e-4, step=5e-2)
    for outcome in outcomes:  # lora_A has no gradient while lora_B is zero
        assert not [n for n in outcome["still"] if "lora_B" in n]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_full_step_of_bf16_wan_with_fp32_pins_is_a_single_process_step(ranks_of: dict[int, Ranks], folders, world):
    outcomes = ranks_of[world].run(step_like_reference, WAN, folders[WAN], BF16, clip=0.1)
    check_step(outcomes, tolerance=5e-2)
    assert all(outcome["groups"] == 2 for outcome in outcomes)


def checkpointing(module: nn.Module) -> None:
    module.enable_gradient_checkpointing()


def compile_blocks(module: nn.Module) -> None:
    """Compile each block in place, as trainers do; graphs only, so that no compiler is needed."""
    for block in module.get_submodule("blocks"):
        block.compile(backend="aot_eager")


OPTIONS: dict[str, dict[str, Any]] = {
    "gradient checkpointing before": dict(prepare=checkpointing),
    "gradient checkpointing after": dict(after=checkpointing),
    "compiled blocks before": dict(prepare=compile_blocks),
    "compiled blocks after": dict(after=compile_blocks),
    "accumulation": dict(accumulate=3),
    "cpu offload": dict(shard=dict(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "foreach optimizer": dict(optimizer=dict(foreach=True)),
    "fused optimizer": dict(optimizer=dict(fused=True)),
    "no reshard after forward": dict(shard=dict(reshard_after_forward=False)),
    "stream": dict(load_policy=dict(strategy="stream")),
    "rank0": dict(load_policy=dict(strategy="rank0")),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_full_step_with(ranks2: Ranks, folders, option):
    """In the mixture of dtypes that is hardest: a bf16 Wan with fp32 pins, bare parameters among them."""
    check_step(ranks2.run(step_like_reference, WAN, folders[WAN], BF16, clip=1.0, **OPTIONS[option]), tolerance=5e-2)


@pytest.mark.parametrize(
    "option",
    [
        dict(prepare=checkpointing),
        dict(prepare=compile_blocks),
        dict(shard=dict(offload_policy=CPUOffloadPolicy(pin_memory=False))),
        dict(accumulate=2, optimizer=dict(fused=True)),
    ],
    ids=["gradient checkpointing", "compiled blocks", "cpu offload", "accumulation"],
)
def test_a_lora_step_with(ranks2: Ranks, folders, option):
    lora = lora_config(modules_to_save=["proj_out", "ffn"])  # a bf16 trainable copy beside fp32 adapters
    outcomes = ranks2.run(step_like_reference, WAN, folders[WAN], BF16, lora=lora, clip=1.0, **option)
    check_step(outcomes, tolerance=5e-2, step=0.3)
    assert all(outcome["groups"] == 2 for outcome in outcomes)
    for outcome in outcomes:
        assert not [n for n in outcome["still"] if "lora_B" in n or "modules_to_save" in n]


@pytest.mark.parametrize("lora", [None, dict(modules_to_save=["proj_out", "ffn"])], ids=["full", "lora"])
def test_a_step_on_two_replicas(ranks4: Ranks, folders, lora):
    lora = lora and lora_config(**lora)
    outcomes = ranks4.run(
        step_like_reference, WAN, folders[WAN], BF16, mesh_shape=(2, 2), accumulate=2, clip=1.0, lora=lora
    )
    check_step(outcomes, tolerance=5e-2, step=0.3)


def test_a_full_step_with_ties(ranks2: Ranks, folders):
    outcomes = ranks2.run(step_of_tied_llama, folders["LlamaForCausalLM-tied"])
    for error, name in outcomes:
        assert error < 1e-4, name


def step_of_tied_llama(folder: str) -> tuple[float, str]:
    name, rank = "LlamaForCausalLM-tied", dist.get_rank()
    ref = zoo.CASES[name].load(folder, torch.float32)
    module = load(name, folder, torch.float32, cpu_mesh())
    ids = [torch.randint(0, ref.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    module(input_ids=ids[rank], labels=ids[rank]).loss.backward()
    (sum(ref(input_ids=i, labels=i).loss for i in ids) / 2).backward()
    return worst_grads(module, ref)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "frozen base"])
def test_mixed_precision_computes_pinned_parameters_in_fp32(ranks2: Ranks, folders, lora):
    """A Wan in fp32 masters, computed in bf16: its pins, a block's bare parameter among them, stay fp32 in compute."""
    for seen, gradients in ranks2.run(dtypes_in_compute, folders[WAN], lora_config() if lora else None):
        assert {dtype for name, dtype in seen.items() if "scale_shift_table" in name} == {torch.float32}
        assert {dtype for name, dtype in seen.items() if "norm2" in name} == {torch.float32}
        assert {dtype for name, dtype in seen.items() if "attn1.to_q.base_layer" in name or "ffn" in name} == {BF16}
        assert gradients == {torch.float32}


def dtypes_in_compute(folder: str, lora: Any) -> tuple[dict[str, torch.dtype], set[torch.dtype]]:
    policy = metashard.ShardPolicy(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    module = load(WAN, folder, torch.float32, cpu_mesh(), lora, shard=policy)
    pins = pinned_names(module, BF16)
    assert any("scale_shift_table" in name for name in pins)
    seen: dict[str, torch.dtype] = {}

    def look(prefix: str):
        def hook(sub: nn.Module, *_: Any) -> None:
            seen.update({f"{prefix}.{n}": p.dtype for n, p in sub.named_parameters()})

        return hook

    base = module if lora is None else module.get_base_model()
    # After FSDP's own hook, so that the block's gathered parameters are seen.
    base.blocks[0].attn1.register_forward_pre_hook(look("blocks.0.attn1"))
    block = base.blocks[0]
    block.norm1.register_forward_pre_hook(lambda *_: look("blocks.0")(block))
    loss_of(module, WAN, dist.get_rank(), torch.float32).backward()
    return seen, {p.grad.dtype for p in module.parameters() if p.grad is not None}


def test_frozen_mixtures_stay_in_one_group(ranks2: Ranks, folders):
    assert ranks2.run(groups_of, folders[WAN], lora_config()) == [1, 1]


def groups_of(folder: str, lora: Any) -> int:
    module = load(WAN, folder, BF16, cpu_mesh(), lora)
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {BF16, torch.float32}
    return max(len(groups) for groups in fsdp_groups(module).values())


def test_hooks_set_before_the_load_still_fire(ranks2: Ranks, folders):
    assert ranks2.run(hooked, folders[SD3]) == [(3, 3)] * 2


def hooked(folder: str) -> tuple[int, int]:
    fired = {"forward": 0, "backward": 0}

    def prepare(module: nn.Module) -> None:
        for block in module.transformer_blocks:
            block.register_forward_hook(lambda *_: fired.update(forward=fired["forward"] + 1))
            block.register_full_backward_hook(lambda *_: fired.update(backward=fired["backward"] + 1))

    module = load(SD3, folder, torch.float32, cpu_mesh(), lora_config(), prepare=prepare)
    loss_of(module, SD3, 0, torch.float32).backward()
    return fired["forward"], fired["backward"]


def test_adapters_added_after_sharding_are_refused_in_the_next_forward(ranks2: Ranks, folders):
    for error in ranks2.run_expecting(metashard.AdapterError, train_with_late_adapter, folders[SD3]):
        assert "never averaged" in str(error)


def train_with_late_adapter(folder: str) -> None:
    module = load(SD3, folder, torch.float32, cpu_mesh())
    loss_of(module, SD3, 0, torch.float32)
    module.add_adapter(lora_config())
    loss_of(module, SD3, 0, torch.float32)


def test_wrap_model_trains_like_load_component(ranks2: Ranks, folders):
    for error, name in ranks2.run(step_of_wrapped, folders[WAN]):
        assert error < 5e-2, name


def step_of_wrapped(folder: str) -> tuple[float, str]:
    from diffusers import WanTransformer3DModel

    module = metashard.from_pretrained(WanTransformer3DModel, folder, torch_dtype=BF16)
    torch.manual_seed(3 + dist.get_rank())
    module = metashard.add_lora(module, lora_config())
    module = metashard.wrap_model(module, mesh=cpu_mesh(), load=metashard.LoadPolicy(timeout=60))
    ref = reference(WAN, folder, BF16, lora_config())
    loss_of(module, WAN, dist.get_rank(), BF16).backward()
    (sum(loss_of(ref, WAN, r, BF16) for r in range(2)) / 2).backward()
    return worst_grads(module, ref)


def test_private_names_of_fsdp_that_dtype_groups_lean_on():
    """Fails when torch moves them; see `metashard._compat`."""
    import inspect

    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert list(inspect.signature(_compat.ShardPlacementResult).parameters) == ["placement", "mesh_info"]
    assert "shard_mesh_dim" in inspect.signature(_compat.FSDPMeshInfo).parameters
    assert {"shard_mesh_dim", "replicate_mesh_dim"} <= set(inspect.signature(_compat.HSDPMeshInfo).parameters)
    assert "init_dtype_attrs(self.mp_policy)" in inspect.getsource(FSDPParamGroup._init_mp_dtypes)
