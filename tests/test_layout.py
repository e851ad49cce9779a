"""The layout that all ranks must share: brought to rank 0's where a shell cannot know it, refused where it differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import metashard
from metashard.agree import Agreement
from metashard.errors import LayoutError
from metashard.layout import agree_on_layout, named_slots, plain_tensors, set_tensor, sync_model_dtypes

from . import zoo
from .parity import cpu_mesh
from .ranks import Ranks

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {"shard": metashard.ShardPolicy(wrap=()), "load": metashard.LoadPolicy(timeout=30)}


def agreement() -> Agreement:
    return Agreement(range(dist.get_world_size()), timeout=30)


class Layers(nn.Module):
    """Linear layers under the given names, in the given order, and one buffer."""

    def __init__(self, *names: str, width: int = 4) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, width))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def shell_like(module: nn.Module) -> nn.Module:
    """The module as it is on rank 0; with its parameters on meta elsewhere."""
    if dist.get_rank():
        for name, parameter in list(module.named_parameters()):
            set_tensor(module, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
    return module


# --- dtypes


def synced_dtypes() -> dict[str, str]:
    module = shell_like(Layers("a", "b"))
    module.register_buffer("count", torch.tensor(3))
    if dist.get_rank() == 0:
        module.a.to(BF16)
        module.table.data = module.table.double()
    sync_model_dtypes(module)
    return {slot.fqn: f"{slot.dtype} {slot.real}" for slot, _ in named_slots(module)}


def test_dtypes_are_those_of_rank_0_and_meta_stays_meta(ranks2: Ranks) -> None:
    first, second = ranks2.run(synced_dtypes)
    assert {name: text.split()[0] for name, text in first.items()} == {
        "table": "torch.float64",
        "count": "torch.int64",
        "a.weight": "torch.bfloat16",
        "a.bias": "torch.bfloat16",
        "b.weight": "torch.float32",
        "b.bias": "torch.float32",
    }
    assert [text.split()[0] for text in second.values()] == [text.split()[0] for text in first.values()]
    assert {name for name, text in second.items() if text.endswith("False")} == first.keys() - {"table", "count"}


def real_ones_cast() -> tuple[bool, bool, bool]:
    module = Layers("a")
    module.b = nn.Linear(4, 4)
    module.b.weight = module.a.weight
    parameter, values = module.a.weight, module.a.weight.detach().clone()
    if dist.get_rank() == 0:
        module.a.weight.data = module.a.weight.data.to(BF16)
    sync_model_dtypes(module)
    return module.a.weight is parameter, module.b.weight is parameter, torch.equal(parameter, values.to(BF16))


def test_real_tensors_are_cast_in_place_and_ties_hold(ranks2: Ranks) -> None:
    assert ranks2.run(real_ones_cast) == [(True, True, True)] * 2


def synced_with_other_names(names: tuple[str, str]) -> None:
    sync_model_dtypes(Layers("a", names[dist.get_rank()]))


@pytest.mark.parametrize(("names", "key"), [(("b", "c"), "b.bias"), (("c", "b"), "c.bias")])
def test_other_names_are_refused_on_every_rank(ranks2: Ranks, names: tuple[str, str], key: str) -> None:
    for error in ranks2.run_expecting(LayoutError, synced_with_other_names, names):
        assert (error.rank, error.phase, error.key) == (1, "agree", key)
        assert f"2 names are missing here ({names[0]}.bias, {names[0]}.weight), 2 are only here" in str(error)


def synced_alone() -> str:
    alone = [dist.new_group([0]), dist.new_group([1])]  # every rank makes both
    module = Layers("a")
    if dist.get_rank() == 0:
        module.to(BF16)
    sync_model_dtypes(module, group=alone[dist.get_rank()])
    return str(module.a.weight.dtype)


def test_dtypes_are_synced_within_the_group_given(ranks2: Ranks) -> None:
    assert ranks2.run(synced_alone) == ["torch.bfloat16", "torch.float32"]


# --- names, order, shapes


def wrap_other(kind: str) -> None:
    other = dist.get_rank() == 1
    module: nn.Module = Layers("a", "b", "c")
    if kind == "order" and other:
        module = Layers("a", "c", "b")
    elif kind == "missing" and other:
        module = Layers("a", "b")
    elif kind == "extra on rank 0" and not other:
        module.register_buffer("more", torch.zeros(2))
    elif kind == "shape" and other:
        module.b = nn.Linear(4, 5)
    elif kind == "kind" and other:
        del module.c.bias
        module.c.register_buffer("bias", torch.zeros(4))
    elif kind == "persistent" and other:
        module.register_buffer("table", torch.arange(3.0), persistent=True)
    elif kind == "not meta":
        metashard.wrap_model(module, mesh=cpu_mesh(), **POLICIES)
        return
    shell_like(module)
    before = [(slot.fqn, slot.real, id(tensor)) for slot, tensor in named_slots(module)]
    try:
        metashard.wrap_model(module, mesh=cpu_mesh(), **POLICIES)
    except LayoutError:
        assert not any(isinstance(sub, FSDPModule) for sub in module.modules())
        assert [(slot.fqn, slot.real, id(tensor)) for slot, tensor in named_slots(module)] == before
        raise


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("order", "c.weight", ["another order", "place 3 is b.weight there and c.weight here"]),
        ("missing", "c.bias", ["2 names are missing here (c.bias, c.weight)"]),
        ("extra on rank 0", "more", ["1 names are missing here (more)"]),
        ("shape", "b.weight", ["shape (4, 4)", "(5, 4)"]),
        ("kind", "c.bias", ["c.bias"]),
        ("persistent", "table", ["persistent False", "True"]),
    ],
)
def test_a_difference_is_refused_before_sharding_and_named_on_every_rank(
    ranks2: Ranks, kind: str, key: str, words: list[str]
) -> None:
    for error in ranks2.run_expecting(LayoutError, wrap_other, kind):
        assert (error.rank, error.phase, error.key) == (1, "agree", key)
        for word in words:
            assert word in str(error)


def test_a_module_that_is_real_everywhere_did_not_honor_meta_initialization(ranks2: Ranks) -> None:
    for error in ranks2.run_expecting(LayoutError, wrap_other, "not meta"):
        assert "did not honor meta initialization: 6 of 6 parameters (a.bias, a.weight, b.bias, ...)" in str(error)
        assert "init_context" in str(error)
        assert error.rank == 1


# --- ties, requires_grad


def build_in_context(name: str, retied: bool) -> dict[str, Any]:
    with metashard.init_context():
        model = zoo.CASES[name].build()
    if not retied and dist.get_rank():  # as accelerate leaves it
        for slot, tensor in named_slots(model):
            if slot.kind == "parameter" and slot.tie != slot.fqn:
                set_tensor(model, slot.fqn, nn.Parameter(torch.empty_like(tensor)))
    before = len(list(model.parameters()))
    slots = agree_on_layout(model, agreement())
    ties = {slot.fqn: slot.tie for slot, _ in named_slots(model) if slot.tie != slot.fqn}
    rank0 = {slot.fqn: slot.tie for slot in slots if slot.tie != slot.fqn}
    return {"before": before, "after": len(list(model.parameters())), "ties": ties, "rank0": rank0}


@pytest.mark.parametrize("retied", [True, False])
@pytest.mark.parametrize(
    ("name", "ties"),
    [
        ("LlamaForCausalLM-tied", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("T5EncoderModel", {"encoder.embed_tokens.weight": "shared.weight"}),
    ],
)
def test_ties_are_restored_from_rank_0(ranks2: Ranks, name: str, ties: dict[str, str], retied: bool) -> None:
    first, second = ranks2.run(build_in_context, name, retied)
    assert first["ties"] == second["ties"] == first["rank0"] == second["rank0"] == ties
    assert first["before"] == first["after"] == second["after"]
    if not retied:
        assert second["before"] == first["before"] + 1  # else this test shows nothing


def tied_on_one_rank(where: int, names: tuple[str, ...]) -> dict[str, str]:
    module = Layers("a", "b", "c")
    if dist.get_rank() == where:
        for name in names[1:]:
            module.get_submodule(name).weight = module.get_submodule(names[0]).weight
    if dist.get_rank():
        shared: dict[int, nn.Parameter] = {}
        for slot, tensor in named_slots(module):
            if slot.kind == "parameter":
                shared.setdefault(id(tensor), nn.Parameter(torch.empty_like(tensor, device="meta")))
                set_tensor(module, slot.fqn, shared[id(tensor)])
    agree_on_layout(module, agreement())
    return {slot.fqn: slot.tie for slot, _ in named_slots(module) if slot.tie != slot.fqn}


@pytest.mark.parametrize("names", [("a", "c"), ("a", "b", "c")])
def test_only_what_rank_0_ties_is_tied(ranks2: Ranks, names: tuple[str, ...]) -> None:
    expected = {f"{name}.weight": f"{names[0]}.weight" for name in names[1:]}
    assert ranks2.run(tied_on_one_rank, 0, names) == [expected] * 2
    assert ranks2.run(tied_on_one_rank, 1, names) == [{}] * 2


def freeze_on_rank_0() -> dict[str, bool]:
    module = shell_like(Layers("a", "b"))
    if dist.get_rank() == 0:
        module.a.requires_grad_(False)
    else:
        module.b.bias.requires_grad_(False)
    agree_on_layout(module, agreement())
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def test_requires_grad_is_rank_0s(ranks2: Ranks) -> None:
    expected = {"a.weight": False, "a.bias": False, "b.weight": True, "b.bias": True}
    assert ranks2.run(freeze_on_rank_0) == [expected] * 2


# --- plain tensors


class Tables:
    """A plain object that holds a tensor, as a RoPE helper or a cache does."""

    def __init__(self) -> None:
        self.angles = torch.arange(2.0)
        self.owner = self


def test_plain_tensors_are_found_wherever_a_module_keeps_them() -> None:
    module = Layers("a")
    module.direct = torch.ones(1)
    module.a.inner = torch.zeros(2)
    module.listed = [torch.zeros(1), (torch.zeros(2), {"deep": torch.zeros(3)})]
    module.keyed = {"cos": torch.zeros(4), 7: torch.zeros(5)}
    module.rope = torch.polar(torch.ones(2, 2), torch.zeros(2, 2))
    module.helper = Tables()
    module.ring = [module.listed]
    module.ring.append(module.ring)
    found = {plain.path: plain.tensor for plain in plain_tensors(module)}
    assert list(found) == [
        "direct",
        "listed[0]",
        "listed[1][0]",
        "listed[1][1]['deep']",
        "keyed['cos']",
        "keyed[7]",
        "rope",
        "helper.angles",
        "a.inner",
    ]
    assert found["rope"].dtype == torch.complex64
    assert found["helper.angles"] is module.helper.angles


def test_parameters_buffers_and_second_references_are_no_plain_tensors() -> None:
    module = Layers("a")
    module.alias = [module.a.weight, module.table]
    module.one = torch.ones(1)
    module.same = {"one": module.one}
    assert [plain.path for plain in plain_tensors(module)] == ["one"]


def test_configs_and_helpers_without_tensors_give_nothing() -> None:
    module = Layers("a")
    module.config = {"dtype": torch.float32, "names": ["a", "b"], "size": torch.Size((1, 2)), "none": None}
    module.device_of = torch.device("cpu")
    module.activation = torch.nn.functional.gelu
    module.kind = Layers
    module.generator = torch.Generator()
    assert list(plain_tensors(module)) == []


PLAIN = {"QwenImageTransformer2DModel": ["pos_embed.pos_freqs", "pos_embed.neg_freqs"]}


@pytest.mark.parametrize("name", zoo.CORE)
def test_plain_tensors_of_real_models(name: str) -> None:
    model = zoo.CASES[name].build()
    assert [plain.path for plain in plain_tensors(model)] == PLAIN.get(name, [])
    slots = [slot for slot, _ in named_slots(model)]
    state = {slot.fqn for slot in slots if slot.persistent}
    assert state == model.state_dict().keys()
    assert {slot.fqn for slot in slots if slot.kind == "parameter"} == {
        key for key, _ in model.named_parameters(remove_duplicate=False)
    }
