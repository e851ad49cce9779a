"""The plan of a load against the report of that load, rank by rank."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.distributed.tensor import Shard

import metashard
from metashard.cli import main
from tests import zoo

from .parity import cpu_mesh

BYTES = ("bytes_read", "bytes_sent", "bytes_received", "bytes_resident")
SLACK = 96 << 20  # what Python and the libraries allocate beside the tensors, in a process that has not loaded before


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"])


def _by_columns(parameter: torch.nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def _real(folder: str, mesh: tuple[int, ...], dtype: torch.dtype, load: dict[str, Any], kind: str) -> Any:
    _, report = metashard.load_component(
        folder,
        mesh=cpu_mesh(*mesh),
        dtype=dtype,
        lora=_lora() if kind == "lora" else None,
        shard=metashard.ShardPolicy(shard_placement_fn=_by_columns if kind == "columns" else None),
        load=metashard.LoadPolicy(timeout=60, **load),
        output_loading_info=True,
    )
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, str] = {}

    def save(name: str) -> str:
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            zoo.CASES[name].build().save_pretrained(made[name])
        return made[name]

    return save


@pytest.mark.parametrize(
    ("name", "mesh", "load", "kind"),
    [
        ("SD3Transformer2DModel", (2,), {"strategy": "direct"}, "plain"),
        ("SD3Transformer2DModel", (4,), {"strategy": "direct"}, "lora"),
        ("SD3Transformer2DModel", (2, 2), {"strategy": "direct"}, "plain"),
        ("WanTransformer3DModel", (4,), {"strategy": "direct"}, "plain"),
        ("WanTransformer3DModel", (2, 2), {"strategy": "rank0"}, "plain"),
        ("QwenImageTransformer2DModel", (2,), {"strategy": "direct"}, "plain"),  # plain attributes
        ("T5EncoderModel", (2,), {"strategy": "direct"}, "plain"),  # ties
        ("AutoencoderKL", (2,), {"strategy": "direct"}, "plain"),
        ("SD3Transformer2DModel", (1,), {"strategy": "direct"}, "plain"),
        ("SD3Transformer2DModel", (4,), {"strategy": "direct"}, "columns"),
        ("SD3Transformer2DModel", (4,), {"strategy": "stream"}, "plain"),
        ("SD3Transformer2DModel", (2,), {"strategy": "stream", "transport": "broadcast"}, "lora"),
        ("SD3Transformer2DModel", (2,), {"strategy": "rank0"}, "lora"),
        ("WanTransformer3DModel", (4,), {"strategy": "rank0", "transport": "broadcast"}, "plain"),
    ],
)
def test_a_plan_has_the_bytes_of_the_load(name, mesh, load, kind, folder, ranks_of):
    world = mesh[0] * (mesh[1] if len(mesh) > 1 else 1)
    report = ranks_of[world].run(_real, folder(name), mesh, torch.bfloat16, load, kind, timeout=120)[0]
    plan = metashard.plan_load(
        folder(name),
        mesh_shape=mesh,
        dtype=torch.bfloat16,
        lora=_lora() if kind == "lora" else None,
        shard=metashard.ShardPolicy(shard_placement_fn=_by_columns if kind == "columns" else None),
        load=metashard.LoadPolicy(**load),
    )
    assert plan.strategy == report.strategy
    assert plan.dtype_counts == report.dtype_counts
    planned = plan.ranks[plan.strategy]
    for rank, (expected, came) in enumerate(zip(planned, report.ranks, strict=True)):
        figures = {field: (getattr(expected, field), getattr(came, field)) for field in BYTES}
        assert all(a == b for a, b in figures.values()), (rank, figures)
        assert came.peak_host_bytes <= expected.peak_host_bytes + SLACK


def test_a_plan_for_4096_ranks_adds_up_and_warns_of_small_reads(folder):
    plan = metashard.plan_load(folder("FluxTransformer2DModel"), world_size=4096, dtype=torch.bfloat16)
    ranks = plan.ranks["direct"]
    assert len(ranks) == 4096
    assert sum(rank.bytes_read for rank in ranks) == plan.checkpoint_bytes
    assert any("less than 1 MiB" in text and "100%" in text for text in plan.warnings)
    assert json.loads(plan.to_json())["mesh_shape"] == [4096]


def test_groups_hold_every_sharded_parameter_once(folder):
    plan = metashard.plan_load(folder("SD3Transformer2DModel"), world_size=2, dtype=torch.bfloat16)
    model = zoo.CASES["SD3Transformer2DModel"].build()
    assert sum(group.parameters for group in plan.groups) == len(list(model.parameters()))
    assert sum(group.all_gather_bytes for group in plan.groups) == 2 * sum(p.numel() for p in model.parameters())
    assert plan.groups[-1].name == ""


def test_seconds_follow_the_bytes(folder):
    plan = metashard.plan_load(folder("SD3Transformer2DModel"), world_size=4)
    slow, fast = (plan.seconds(storage_gbps=gbps, network_gbps=1e6) for gbps in (1e-3, 2e-3))
    assert slow["direct"] == pytest.approx(2 * fast["direct"])
    assert slow["direct"] == pytest.approx(plan.checkpoint_bytes / 1e6)
    assert (
        plan.seconds(storage_gbps=1, network_gbps=1)["rank0"] > plan.seconds(storage_gbps=1, network_gbps=1)["direct"]
    )


def test_a_plan_refuses_what_a_load_refuses(folder, tmp_path):
    with pytest.raises(metashard.ComponentError, match="no folder"):
        metashard.plan_load(tmp_path / "absent", world_size=2)
    with pytest.raises(ValueError, match="either"):
        metashard.plan_load(folder("SD3Transformer2DModel"))
    with pytest.raises(ValueError, match="expected"):
        metashard.plan_load(folder("SD3Transformer2DModel"), mesh_shape=(0,))
    with pytest.raises(metashard.ComponentError):
        metashard.plan_load(tmp_path, world_size=2)
    unknown = metashard.ShardPolicy(ignored_params=["no_such.weight"])
    with pytest.raises(metashard.ShardError, match="no parameter"):
        metashard.plan_load(folder("SD3Transformer2DModel"), world_size=2, shard=unknown)


@pytest.mark.parametrize("name", ["", "gpu", "meta", "cuda:0", None])
def test_a_device_type_that_no_mesh_has_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="expected a type alone"):
        metashard.plan_load(tmp_path, world_size=2, device_type=name)


@pytest.mark.parametrize("verb", ["plan", "load"])
def test_an_empty_path_is_not_the_current_folder(verb, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder("SD3Transformer2DModel"))
    assert main([verb, "", *(["--world-size", "2"] if verb == "plan" else [])]) == 2
    assert "An empty path" in capsys.readouterr().err


@pytest.mark.parametrize("gbps", ["0", "-1", "nan", "inf"])
def test_speeds_are_refused_before_anything_is_printed(gbps, folder, capsys):
    args = ["plan", folder("SD3Transformer2DModel"), "--world-size", "2", "--network-gbps", "1"]
    assert main([*args, f"--storage-gbps={gbps}"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "expected positive numbers" in told.err


def test_the_command_prints_tables_or_json(folder, capsys):
    args = ["plan", folder("SD3Transformer2DModel"), "--dtype", "bf16"]
    assert main([*args, "--world-size", "8", "--lora-rank", "4", "--storage-gbps", "5", "--network-gbps", "10"]) == 0
    text = capsys.readouterr().out
    assert "auto takes direct" in text
    assert all(word in text for word in ("stream", "rank0", "seconds to move", "FSDP groups"))
    assert main([*args, "--mesh", "2x4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]["direct"]) == 8


def test_the_command_says_in_one_line_what_is_wrong(folder, tmp_path, capsys):
    good = folder("SD3Transformer2DModel")
    seconds = ["--storage-gbps", "5", "--network-gbps", "5"]
    wrong = ([str(tmp_path)], ["x" * 300], [good, *seconds[:2]], [good, *seconds, "--json"], [good, "--lora-rank", "0"])
    for args in wrong:
        assert main(["plan", *args, "--world-size", "2"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (["--world-size", "0"], "world_size=0: expected 1 to 65,536 ranks"),
        (["--world-size=-1"], "world_size=-1: expected 1 to 65,536 ranks"),
        (["--world-size", "1000000000"], "world_size=1000000000: expected 1 to 65,536 ranks"),
        (["--mesh", "x"], "--mesh 'x': expected replicas x ranks of a replica, such as \"2x8\""),
        (["--mesh", "2x"], "--mesh '2x': expected"),
        (["--mesh", "2xmany"], "--mesh '2xmany': expected"),
        (["--mesh=-2x8"], "--mesh '-2x8': expected"),
        (["--mesh", ""], "--mesh '': expected"),
        (["--mesh", "0x8"], "mesh_shape=(0, 8): expected (shard,) or (replicate, shard), in all 1 to 65,536 ranks"),
        (["--mesh", "2x2x2"], "mesh_shape=(2, 2, 2): expected"),
        (["--mesh", "1000x1000"], "mesh_shape=(1000, 1000): expected"),
    ],
)
def test_an_absurd_number_of_ranks_is_one_line_before_anything_is_read(size, message, tmp_path, capsys):
    assert main(["plan", str(tmp_path / "absent"), *size]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert message in told.err
    assert told.out == ""
