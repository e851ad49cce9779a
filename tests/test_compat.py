"""Every private name of torch and the libraries that the package leans on is there and does what it is used for."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import metashard
from metashard import _compat

from .parity import cpu_mesh
from .ranks import Ranks


def private_imports(source: str) -> list[str]:
    """Imports with a private part in the module's or the name's path."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "metashard":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if any(part.startswith("_") and part != "__future__" for part in name.split("."))]


def test_private_imports_live_in_compat_only() -> None:
    folder = Path(metashard.__file__).parent
    others = {
        str(path.relative_to(folder)): private_imports(path.read_text())
        for path in folder.rglob("*.py")
        if path.name != "_compat.py"
    }
    assert {name: found for name, found in others.items() if found} == {}
    assert private_imports((folder / "_compat.py").read_text())  # else this test shows nothing


# --- torch


def test_mesh_infos_and_placement_results_have_the_fields_that_are_given() -> None:
    assert {"mesh", "shard_mesh_dim"} <= inspect.signature(_compat.FSDPMeshInfo).parameters.keys()
    hsdp = inspect.signature(_compat.HSDPMeshInfo).parameters.keys()
    assert {"mesh", "shard_mesh_dim", "replicate_mesh_dim"} <= hsdp
    assert {"placement", "mesh_info"} <= inspect.signature(_compat.ShardPlacementResult).parameters.keys()


def second_group() -> tuple[int, list[bool], bool]:
    twin = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("shard",))
    info = _compat.FSDPMeshInfo(twin, shard_mesh_dim=0)
    model = nn.Linear(4, 4)
    fully_shard(
        model,
        mesh=cpu_mesh(),
        shard_placement_fn=lambda p: (
            _compat.ShardPlacementResult(placement=None, mesh_info=info) if p.ndim == 1 else None
        ),
    )
    groups = model._get_fsdp_state()._fsdp_param_groups
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    _compat.set_group_policy(model, [info], policy)
    changed = [group.mp_policy is policy for group in groups]
    model(torch.ones(1, 4)).sum().backward()
    assert [group._reduce_dtype for group in groups] == [torch.float64 if own else None for own in changed]
    return len(groups), sorted(changed), all(parameter.grad is not None for parameter in model.parameters())


def test_another_mesh_makes_another_group_in_one_module_with_a_policy_of_its_own(ranks2: Ranks) -> None:
    assert ranks2.run(second_group) == [(2, [False, True], True)] * 2


def strided() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["dp"])
    return [f"{type(placement).__name__} {placement.dim}" for placement in layer.weight.placements]


def test_fsdp_over_tensor_parallel_gives_a_strided_shard(ranks4: Ranks) -> None:
    assert ranks4.run(strided) == [["_StridedShard 0", "Shard 0"]] * 4
    assert _compat._StridedShard is _StridedShard


def applied() -> tuple[bool, bool, bool]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3))
    buffer = torch.ones(2)
    model.register_buffer("table", buffer)
    fully_shard(model, mesh=cpu_mesh())

    def materialise(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        local = torch.zeros_like(tensor.to_local(), device="cpu")
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    _compat.apply_to_tensors(model, materialise)
    real = not any(parameter.to_local().is_meta for parameter in model.parameters())
    works = tuple(model(torch.ones(1, 4)).shape) == (1, 3)  # FSDP has noticed its new shards
    return real, model.table is buffer, works and isinstance(model, FSDPModule)


def test_apply_replaces_shards_keeps_buffers_and_tells_fsdp(ranks2: Ranks) -> None:
    assert ranks2.run(applied) == [(True, True, True)] * 2


def keeps_shards_in_one_object() -> list[bool]:
    sharded = nn.Parameter(distribute_tensor(torch.ones(1, 3), cpu_mesh(), [Shard(0)]))
    held, plain = _compat.held_tensor(sharded), nn.Parameter(torch.ones(2))
    return [
        held is _compat.held_tensor(sharded),
        held.shape == sharded.to_local().shape,
        _compat.held_tensor(plain) is plain,
    ]


def test_a_shard_is_held_in_one_tensor_object(ranks2: Ranks) -> None:
    assert ranks2.run(keeps_shards_in_one_object) == [[True] * 3] * 2


def test_default_dtype_is_put_back_and_left_alone_where_it_cannot_be_one() -> None:
    with _compat.default_dtype(torch.bfloat16):
        assert torch.ones(1).dtype == torch.bfloat16
    for dtype in (None, torch.float8_e4m3fn, torch.int64):
        with _compat.default_dtype(dtype):
            assert torch.ones(1).dtype == torch.float32
    with pytest.raises(KeyError), _compat.default_dtype(torch.float64):
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


# --- the libraries


def test_from_pretrained_lives_in_the_base_classes() -> None:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    before = {base: base.__dict__["from_pretrained"] for base in (ModelMixin, PreTrainedModel)}
    assert all(isinstance(function, classmethod) for function in before.values())
    with _compat.library_from_pretrained({base: lambda cls, path, **kwargs: (cls, path, kwargs) for base in before}):
        for base in before:
            assert base.from_pretrained("x", a=1) == (base, "x", {"a": 1})
    assert {base: base.__dict__["from_pretrained"] for base in before} == before


def test_diffusers_renames_the_keys_of_old_attention_blocks() -> None:
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        module = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1)
    old = {"encoder.mid_block.attentions.0.query.weight": 1, "decoder.conv_in.weight": 2}
    fixed = _compat.diffusers_fixed_keys(module, old)
    assert fixed == {"encoder.mid_block.attentions.0.to_q.weight": 1, "decoder.conv_in.weight": 2}
    assert "encoder.mid_block.attentions.0.query.weight" in old  # the caller's is left as it is


def tiny_bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=11, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    return _compat.transformers_from_config(transformers.BertModel, config, dtype=torch.bfloat16)


def test_transformers_builds_from_a_config_in_a_dtype() -> None:
    model = tiny_bert()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_transformers_renames_old_keys_and_strips_the_prefix() -> None:
    model = tiny_bert()
    live = dict(model.named_parameters())
    rename = _compat.transformers_renamer(model)
    assert rename("bert.embeddings.word_embeddings.weight", live) == ("embeddings.word_embeddings.weight", None)
    assert rename("embeddings.LayerNorm.gamma", live) == ("embeddings.LayerNorm.weight", None)
    assert rename("embeddings.word_embeddings.weight", live) == ("embeddings.word_embeddings.weight", None)


def test_transformers_says_when_values_are_converted() -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=11, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = _compat.transformers_from_config(transformers.MixtralForCausalLM, config, dtype=None)
    live = dict(model.named_parameters())
    name, pattern = _compat.transformers_renamer(model)("model.layers.0.block_sparse_moe.experts.1.w1.weight", live)
    assert pattern is not None
    assert name in live


def test_transformers_tells_which_parameters_it_pins() -> None:
    model = tiny_bert()
    assert _compat.transformers_dtype_plan(model, torch.float16)("embeddings.LayerNorm.weight") is None

    import transformers

    config = transformers.T5Config(vocab_size=11, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2)
    with torch.device("meta"):
        t5 = _compat.transformers_from_config(transformers.T5EncoderModel, config, dtype=torch.float16)
    plan = _compat.transformers_dtype_plan(t5, torch.float16)
    assert plan("encoder.block.0.layer.1.DenseReluDense.wo.weight") == torch.float32
    assert plan("encoder.block.0.layer.1.DenseReluDense.wi.weight") is None


@pytest.mark.parametrize(
    ("patterns", "matches"), [(None, False), ((), False), ([r"rope\.freqs"], True), ({"other"}, False)]
)
def test_patterns_of_ignored_keys_are_searched(patterns: object, matches: bool) -> None:
    assert _compat.ignored_by(patterns, "block.rope.freqs") is matches


def test_init_empty_weights_unties_what_it_registers() -> None:
    """Why `retie` is there; when this fails it may go."""
    from accelerate import init_empty_weights

    first = nn.Linear(2, 2)
    with init_empty_weights(include_buffers=False):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        first.register_buffer("table", torch.ones(1))
    assert first.weight.is_meta
    assert not first.table.is_meta
    assert second.weight is not first.weight


def test_diffusers_names_its_pins_as_they_are_cleared() -> None:
    from diffusers import WanTransformer3DModel

    assert "scale_shift_table" in WanTransformer3DModel._keep_in_fp32_modules


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_what_a_library_would_write_is_told(library: str, tmp_path: Path) -> None:
    """And nothing is written; afterwards it writes again, and shows its progress as before."""
    import safetensors.torch
    import transformers
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny() if library == "diffusers" else tiny_bert()
    original = safetensors.torch.save_file, transformers.modeling_utils.safe_save_file
    shown = transformers.utils.logging.is_progress_bar_enabled()
    told: list[tuple[int, str, dict[str, str]]] = []
    with _compat.recorded_save_file(lambda tensors, name, metadata: told.append((len(tensors), name, dict(metadata)))):
        model.save_pretrained(tmp_path)
    assert [(count, metadata) for count, _, metadata in told] == [(len(model.state_dict()), {"format": "pt"})]
    assert told[0][1].startswith(str(tmp_path))
    assert not list(tmp_path.glob("*.safetensors"))
    assert (safetensors.torch.save_file, transformers.modeling_utils.safe_save_file) == original
    assert transformers.utils.logging.is_progress_bar_enabled() is shown


def test_transformers_s_loader_notes_what_a_save_reverts(tmp_path: Path) -> None:
    """Why `transformers_renamer` sets `_weight_conversions`: without it the order of files would be another."""
    model = tiny_bert()
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path)._weight_conversions == []


def test_transformers_looks_for_fsdp_by_the_mark() -> None:
    import transformers
    from transformers.distributed.fsdp import is_fsdp_managed_module

    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1)
    wrapped = nn.ModuleList([transformers.BertModel(config)])
    assert not is_fsdp_managed_module(wrapped[0])
    _compat.note_fsdp_for_transformers(wrapped)
    assert is_fsdp_managed_module(wrapped[0])
