"""Cutting a module into FSDP groups: what is wrapped, in which dtype it trains, and whose memory it is in the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import metashard
from metashard.errors import ShardError
from metashard.layout import named_slots
from metashard.policy import ShardPolicy
from metashard.shard import find_blocks
from metashard.shards import local_box, sharding_of

from . import zoo
from .parity import cpu_mesh, differences, full, reference, storage_faults
from .ranks import Ranks
from .zoo.base import _collect

BF16 = torch.bfloat16
LOAD = metashard.LoadPolicy(timeout=30)


# --- what is wrapped

# Class -> (wrapped class -> how many), in the zoo's small configs; nothing else is wrapped.
WRAPPED = {
    "SD3Transformer2DModel": {"JointTransformerBlock": 3},
    "FluxTransformer2DModel": {"FluxTransformerBlock": 2, "FluxSingleTransformerBlock": 3},
    "WanTransformer3DModel": {"WanTransformerBlock": 3},
    "LTX2VideoTransformer3DModel": {"LTX2VideoTransformerBlock": 3},
    "T5EncoderModel": {"T5Block": 3},
    "CLIPTextModel": {"CLIPTextEmbeddings": 1, "CLIPEncoderLayer": 3},
    "BertModel": {"BertEmbeddings": 1, "BertLayer": 3},
    "LlamaForCausalLM-tied": {"LlamaDecoderLayer": 3},
    "UNet2DConditionModel": {
        "BasicTransformerBlock": 12,
        "ResnetBlock2D": 12,
        "CrossAttnUpBlock2D": 1,
        "UpBlock2D": 1,
    },
    "AutoencoderKL": {"ResnetBlock2D": 19},
}


def wrapped_classes(module: nn.Module, wrap: Any = None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in find_blocks(module, wrap):
        cls = type(module.get_submodule(name)).__name__
        counts[cls] = counts.get(cls, 0) + 1
    return counts


@pytest.mark.parametrize("name", WRAPPED)
def test_the_rule_finds_the_repeated_blocks(name: str) -> None:
    assert wrapped_classes(zoo.CASES[name].build()) == WRAPPED[name]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.inner(x))


class Stack(nn.Module):
    """Blocks in a list, a 0-d and a 1-d parameter, a buffer."""

    def __init__(self, count: int = 3, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.linspace(0, 1, width))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (None, BLOCKS),
        (("Block",), BLOCKS),
        ((Block,), BLOCKS),
        ({"Block"}, BLOCKS),
        (("Linear",), [f"{name}.inner" for name in BLOCKS]),
        (("Block", nn.Linear), [f"{name}.inner" for name in BLOCKS] + BLOCKS),  # children before parents
        (lambda sub: isinstance(sub, Block), BLOCKS),
        (lambda sub: getattr(sub, "in_features", 0) == 4, [f"{name}.inner" for name in BLOCKS]),
        ((), []),
    ],
)
def test_the_caller_may_name_classes_or_give_a_predicate(wrap: Any, found: list[str]) -> None:
    assert sorted(find_blocks(Stack(), ShardPolicy(wrap=wrap).wrap)) == sorted(found)
    depth = [name.count(".") for name in find_blocks(Stack(), ShardPolicy(wrap=wrap).wrap)]
    assert depth == sorted(depth, reverse=True)


def test_a_rule_of_the_class_comes_before_the_search() -> None:
    model = Stack()
    model._repeated_blocks = ["Linear"]
    assert wrapped_classes(model) == {"Linear": 3}
    model._no_split_modules = ["Block"]
    assert wrapped_classes(model) == {"Block": 3}
    model._no_split_modules, model._repeated_blocks = ["Gone"], None
    assert wrapped_classes(model) == {"Block": 3}


def test_a_rule_that_matches_nothing_says_what_to_pass() -> None:
    for wrap, words in (
        (("Blok",), "The wrap rule ('Blok',) matches no module of Stack"),
        (lambda sub: False, "matches no module of Stack"),
    ):
        with pytest.raises(ShardError, match=re.escape(words)) as info:
            find_blocks(Stack(), wrap)
        assert "ShardPolicy(wrap=" in str(info.value)
        assert "Block (3)" in str(info.value)
        assert info.value.phase == "shard"
    with pytest.raises(
        ShardError, match="Found no repeated blocks to wrap of Linear; as one single FSDP group"
    ) as info:
        find_blocks(nn.Linear(2, 2), None)
    assert "wrap=()" in str(info.value)


@pytest.mark.parametrize("wrap", ["Block", Block])
def test_a_rule_that_is_no_iterable_is_refused_when_it_is_made(wrap: Any) -> None:
    with pytest.raises(ValueError, match="iterable"):
        ShardPolicy(wrap=wrap)


def test_blocks_tied_across_groups_are_not_wrapped() -> None:
    model = Stack()
    model.blocks[2].inner.weight = model.blocks[1].inner.weight
    assert find_blocks(model, None) == ["blocks.0"]
    model = Stack()
    model.head = nn.Linear(4, 4)
    model.head.weight = model.blocks[0].inner.weight
    assert sorted(find_blocks(model, None)) == ["blocks.1", "blocks.2"]
    inside = Stack()
    inside.blocks[0].other = nn.Linear(4, 4)
    inside.blocks[0].other.weight = inside.blocks[0].inner.weight
    assert sorted(find_blocks(inside, None)) == BLOCKS


_ORDER = """
from tests.test_shard import Stack, find_blocks
print(find_blocks(Stack(12), ("Block", "Linear")))
"""


def test_the_order_of_the_groups_is_the_same_in_every_process() -> None:
    """Python hashes strings differently from process to process."""
    told = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", _ORDER], env=env, capture_output=True, text=True, check=True)
        told.add(done.stdout)
    assert len(told) == 1


# --- training


def loss_of(case: zoo.Case, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    _collect(model(**case.inputs(dtype)), tensors)
    return sum(tensor.float().square().mean() for tensor in tensors)


def gradient_faults(name: str, folder: str, mesh_shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Every rank takes the same batch, so that the averaged gradient is the single process's."""
    case, mesh = zoo.CASES[name], cpu_mesh(*mesh_shape)
    model = metashard.load_component(folder, mesh=mesh, dtype=dtype, load=LOAD)
    expected = reference(case, Path(folder), dtype)
    for module in (model, expected):  # in eval mode: no dropout
        loss_of(case, module, dtype).backward()
    found, dtypes = [], {}
    held = dict(model.named_parameters())
    for fqn, parameter in expected.named_parameters():
        dtypes[str(parameter.dtype)] = dtypes.get(str(parameter.dtype), 0) + 1
        if held[fqn].dtype != parameter.dtype:
            found.append(f"{fqn}: {held[fqn].dtype}, expected {parameter.dtype}")
        elif (held[fqn].grad is None) != (parameter.grad is None):
            found.append(f"{fqn}: one gradient is None")
        elif parameter.grad is not None:
            # FSDP's hooks change the order in which autograd adds up what several blocks send back: a rounding or two.
            worst = (full(held[fqn].grad) - parameter.grad).abs().max().item()
            if worst > 2 * torch.finfo(parameter.dtype).eps * parameter.grad.abs().max().item():
                found.append(f"{fqn}: gradient differs by {worst}")
    return {"found": found, "dtypes": dtypes, "groups": sum(isinstance(m, FSDPModule) for m in model.modules())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def save(name: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        zoo.CASES[name].build().save_pretrained(folder)
        return str(folder)

    return save


@pytest.mark.parametrize("mesh_shape", [(2,), (1, 2), (2, 1)])
def test_wan_in_bf16_with_fp32_pins_trains_as_in_one_process(
    ranks2: Ranks, saved: Any, mesh_shape: tuple[int, ...]
) -> None:
    for told in ranks2.run(gradient_faults, "WanTransformer3DModel", saved("WanTransformer3DModel"), mesh_shape, BF16):
        assert told["found"] == []
        assert told["dtypes"].keys() == {"torch.bfloat16", "torch.float32"}
        assert told["groups"] == 4


@pytest.mark.parametrize("name", ["LlamaForCausalLM-tied", "T5EncoderModel"])
def test_tied_weights_get_the_gradient_of_both_uses(ranks2: Ranks, saved: Any, name: str) -> None:
    for told in ranks2.run(gradient_faults, name, saved(name), (2,), torch.float32):
        assert told["found"] == []


def wrapped_stack(ignored: str, shape: tuple[int, ...], **policy: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded stack and the same one unsharded; real on rank 0 only."""
    torch.manual_seed(0)
    expected = Stack(width=policy.pop("width", 4))
    torch.manual_seed(0)
    with metashard.init_context():
        model = Stack(width=expected.shift.numel())
    names: list[Any] = []
    if ignored == "name":
        names = ["shift", "blocks.1.inner.bias"]
    elif ignored == "object":
        names = [model.shift, model.blocks[1].inner.bias]
    asked: Any = (lambda fqn: fqn in ("shift", "blocks.1.inner.bias")) if ignored == "predicate" else names or None
    shard = ShardPolicy(ignored_params=asked, **policy)
    return metashard.wrap_model(model, mesh=cpu_mesh(*shape), shard=shard, load=LOAD), expected


def replicated_gradients(ignored: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Another batch on every rank; two backward passes that add up, as with gradient accumulation."""
    model, expected = wrapped_stack(ignored, shape)
    world = dist.get_world_size()
    batches = torch.randn(2, world, 6, 4, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        model(batches[step, dist.get_rank()]).square().mean().backward()
        for rank in range(world):
            (expected(batches[step, rank]).square().mean() / world).backward()
    held = dict(model.named_parameters())
    return {
        "plain": sorted(fqn for fqn, parameter in held.items() if not isinstance(parameter, DTensor)),
        "wrong": [
            fqn
            for fqn, parameter in expected.named_parameters()
            if not torch.allclose(full(held[fqn].grad), parameter.grad, rtol=1e-5, atol=1e-7)
        ],
        "different": differences(model, expected),
    }


@pytest.mark.parametrize(
    ("ignored", "plain"),
    [
        ("none", ["scale"]),
        ("name", ["blocks.1.inner.bias", "scale", "shift"]),
        ("object", ["blocks.1.inner.bias", "scale", "shift"]),
        ("predicate", ["blocks.1.inner.bias", "scale", "shift"]),
    ],
)
def test_0d_and_ignored_parameters_stay_replicated_and_their_gradients_are_averaged(
    ranks2: Ranks, ignored: str, plain: list[str]
) -> None:
    for told in ranks2.run(replicated_gradients, ignored, (2,)):
        assert told == {"plain": plain, "wrong": [], "different": []}


def test_replicated_gradients_are_averaged_over_both_axes_of_hsdp(ranks4: Ranks) -> None:
    for told in ranks4.run(replicated_gradients, "name", (2, 2)):
        assert told == {"plain": ["blocks.1.inner.bias", "scale", "shift"], "wrong": [], "different": []}


def ignore_unknown() -> None:
    with metashard.init_context():
        model = Stack()
    metashard.wrap_model(model, mesh=cpu_mesh(), shard=ShardPolicy(ignored_params=["shfit"]), load=LOAD)


def test_an_unknown_ignored_parameter_is_refused_on_every_rank(ranks2: Ranks) -> None:
    for error in ranks2.run_expecting(ShardError, ignore_unknown):
        assert error.key == "shfit"
        assert "shfit" in str(error)


# --- memory


def memory_of(width: int, offload: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    with metashard.init_context():
        model = Stack(width=width)
        model.blocks[0].twin = nn.Linear(width, width)
        model.blocks[0].twin.weight = model.blocks[0].inner.weight
        model.table = nn.Buffer(torch.arange(3.0), persistent=False)
    buffer, values = model.table, torch.arange(3.0)
    policy = ShardPolicy(offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None)
    metashard.wrap_model(model, mesh=cpu_mesh(), shard=policy, load=LOAD)
    weight, twin = model.blocks[0].inner.weight, model.blocks[0].twin.weight
    return {
        "faults": storage_faults(model),
        "tied": weight is twin and weight.to_local().data_ptr() == twin.to_local().data_ptr(),
        "buffer": model.table is buffer and torch.equal(buffer, values),
        "held": sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)),
        "meta": [slot.fqn for slot, tensor in named_slots(model) if tensor.is_meta],
        "all": sum(p.numel() for p in model.parameters() if isinstance(p, DTensor)),
    }


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_shards_have_memory_of_their_own_size_ties_hold_and_buffers_are_left_alone(
    ranks2: Ranks, width: int, offload: bool
) -> None:
    told = ranks2.run(memory_of, width, offload)
    for rank in told:
        assert (rank["faults"], rank["meta"], rank["tied"], rank["buffer"]) == ([], [], True, True)
    assert sum(rank["held"] for rank in told) == told[0]["all"]


def wrap_twice() -> list[str]:
    model, expected = wrapped_stack("name", ())
    try:
        metashard.wrap_model(model, mesh=cpu_mesh(), load=LOAD)
    except ShardError as error:
        return differences(model, expected) if "already sharded" in error.message else [error.message]
    return ["wrapped twice"]


def test_a_sharded_module_is_refused_and_left_as_it_was(ranks2: Ranks) -> None:
    assert ranks2.run(wrap_twice) == [[], []]


def wrap_again_after_refusal() -> list[str]:
    torch.manual_seed(0)
    expected = Stack()
    torch.manual_seed(0)
    with metashard.init_context():
        model = Stack()
    try:
        metashard.wrap_model(model, mesh=cpu_mesh(), shard=ShardPolicy(wrap=("Blok",)), load=LOAD)
    except ShardError:
        return differences(metashard.wrap_model(model, mesh=cpu_mesh(), load=LOAD), expected)
    return ["not refused"]


def test_a_caller_may_follow_the_advice_of_a_refusal_and_try_again(ranks2: Ranks) -> None:
    assert ranks2.run(wrap_again_after_refusal) == [[], []]


# --- placements as data


def placed(kind: str) -> list[str]:
    """Where the box of a real DTensor differs from what it holds."""
    faults = []
    for rows, columns in ((5, 6), (8, 4), (3, 4), (1, 8), (2, 2)):
        numbers = torch.arange(float(rows * columns)).reshape(rows, columns)
        if kind.startswith("tp"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            layer = nn.Linear(columns, rows, bias=False)
            split = distribute_tensor(numbers, mesh["tp"], [Shard(int(kind[-1]))])
            layer.weight = nn.Parameter(split)
            fully_shard(layer, mesh=mesh["dp"])
            tensor: torch.Tensor = layer.weight
        else:
            mesh, placements = {
                "hsdp": (cpu_mesh(2, 2), [Replicate(), Shard(0)]),
                "shard 1": (cpu_mesh(4), [Shard(1)]),
                "both": (cpu_mesh(2, 2), [Shard(0), Shard(0)]),
                "crossed": (cpu_mesh(2, 2), [Shard(1), Shard(0)]),
            }[kind]
            tensor = distribute_tensor(numbers, mesh, placements)
        box = local_box(tensor)
        held = [float(e) for first, _, count in box.runs() for e in range(first, first + count)]
        if held != tensor.to_local().flatten().tolist():
            faults.append(f"{rows}x{columns}: {held}, holds {tensor.to_local().tolist()}; {sharding_of(tensor)[0]}")
    return faults


@pytest.mark.parametrize("kind", ["hsdp", "shard 1", "both", "crossed", "tp 0", "tp 1"])
def test_the_box_of_a_parameter_is_what_its_rank_holds(ranks4: Ranks, kind: str) -> None:
    assert ranks4.run(placed, kind) == [[]] * 4
