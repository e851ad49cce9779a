"""Meshes and placements other than one axis of Shard(0) over all ranks: parity, and who reads how much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import metashard
from metashard.layout import named_slots

from . import zoo
from .parity import cpu_mesh, differences, full, storage_faults
from .ranks import Ranks

FP32, BF16 = torch.float32, torch.bfloat16
WAYS: dict[str, dict[str, Any]] = {
    "direct": {"strategy": "direct"},
    "stream": {"strategy": "stream"},
    "stream, broadcast": {"strategy": "stream", "transport": "broadcast"},
    "rank0": {"strategy": "rank0"},
}
FROM_FILES = [way for way in WAYS if way != "rank0"]


@pytest.fixture(scope="module")
def ranks8() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        yield ranks


class GridBlock(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class GridModel(ModelMixin, ConfigMixin):
    """Blocks of two linear layers, a norm, and a persistent table that every rank keeps whole."""

    _repeated_blocks = ["GridBlock"]  # noqa: RUF012 - as diffusers writes it

    @register_to_config
    def __init__(self, width: int = 6, inner: int = 10, depth: int = 3, rows: int = 40) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GridBlock(width, inner) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.zeros(rows, width))
        self.register_buffer("step", torch.arange(width, dtype=FP32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + self.table.sum(0) + self.step


def save_grid(folder: Path, **config: int) -> int:
    """A model of random values; the bytes of its tensors."""
    torch.manual_seed(3)
    model = GridModel(**config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def load(folder: str, mesh: DeviceMesh, way: str, *, dtype: torch.dtype | None = FP32, **kwargs: Any) -> Any:
    diffusers.GridModel = GridModel  # classes are found by name in their library
    try:
        policy = metashard.LoadPolicy(**{"timeout": 10, "verify": "full", **WAYS[way]})
        return metashard.load_component(folder, mesh=mesh, dtype=dtype, load=policy, output_loading_info=True, **kwargs)
    finally:
        del diffusers.GridModel


def read_by_all(report: metashard.LoadReport) -> int:
    return sum(rank.bytes_read for rank in report.ranks)


def grid_faults(
    folder: str, mesh: DeviceMesh, way: str, *, dtype: torch.dtype = FP32, **kwargs: Any
) -> tuple[list[str], Any]:
    module, report = load(folder, mesh, way, dtype=dtype, **kwargs)
    expected = GridModel.from_pretrained(folder, torch_dtype=dtype)
    found = differences(module, expected) + storage_faults(module)
    x = torch.randn(2, expected.config.width, generator=torch.Generator().manual_seed(4)).to(dtype)
    with torch.no_grad():
        if not torch.equal(module(x), expected(x)):
            found.append("forward differs")
    return found, report


# --- HSDP: one replica reads, the others receive


def hsdp(folder: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {way: grid_faults(folder, cpu_mesh(*shape), way, dtype=BF16) for way in WAYS}


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)], ids=str)
def test_one_replica_reads_and_the_others_receive(
    ranks_of: dict[int, Ranks], tmp_path: Path, shape: tuple[int, int]
) -> None:
    """Uneven dims, cast on the way; the table, which all ranks hold, is read once over all of them too."""
    nbytes = save_grid(tmp_path, width=33, inner=50, rows=20_000)
    ranks = ranks_of[shape[0] * shape[1]].run(hsdp, str(tmp_path), shape)
    assert [(way, rank, told[way][0]) for way in WAYS for rank, told in enumerate(ranks) if told[way][0]] == []
    shards = shape[1]
    for way in FROM_FILES:
        report = ranks[0][way][1]
        assert nbytes <= read_by_all(report) <= 1.02 * nbytes, way
        assert all(rank.bytes_read == 0 for rank in report.ranks[shards:]), f"{way}: another replica reads as well"
        if way != "stream, broadcast":
            for rank in report.ranks[shards:]:
                assert rank.bytes_received <= rank.bytes_resident, way
        sent, received = (sum(getattr(r, f"bytes_{what}") for r in report.ranks) for what in ("sent", "received"))
        assert sent == received, way
    direct = ranks[0]["direct"][1].ranks
    if shards > 1:  # the readers share the work
        assert max(rank.bytes_read for rank in direct) <= 1.1 * nbytes / shards + 4096


# --- every byte once, whatever the world


def sd3_bytes(folder: str, way: str) -> Any:
    policy = metashard.LoadPolicy(timeout=60, **WAYS[way])
    _, report = metashard.load_component(folder, mesh=cpu_mesh(), dtype=BF16, load=policy, output_loading_info=True)
    return report


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, int]:
    """Folder, bytes of the weights, bytes of the position table among them."""
    folder = tmp_path_factory.mktemp("sd3")
    model = zoo.CASES["SD3Transformer2DModel"].build()
    model.save_pretrained(folder)
    state = model.state_dict()
    return str(folder), sum(t.nbytes for t in state.values()), state["pos_embed.pos_embed"].nbytes


@pytest.mark.parametrize("way", FROM_FILES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_read_are_one_checkpoint_at_every_world_size(
    request: pytest.FixtureRequest, sd3: tuple[str, int, int], world: int, way: str
) -> None:
    folder, nbytes, table = sd3
    report = request.getfixturevalue(f"ranks{world}").run(sd3_bytes, folder, way, timeout=120)[0]
    assert table > 0
    assert nbytes <= read_by_all(report) <= 1.02 * nbytes
    if way == "stream, broadcast":
        return
    for rank in report.ranks[way == "stream" :]:
        assert rank.bytes_received <= rank.bytes_resident
    if way == "direct":  # only what is replicated travels
        assert sum(rank.bytes_received for rank in report.ranks) <= (world - 1) * (table // 2 + 4096)


# --- shards on other dims


def on_dim_1(parameter: nn.Parameter) -> Shard | None:
    """FSDP takes other dims than 0 only where they can be cut evenly."""
    even = parameter.ndim >= 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even and parameter.shape[0] != parameter.shape[1] else None


def shard_1(folder: str, dtype: torch.dtype) -> Any:
    shard = metashard.ShardPolicy(shard_placement_fn=on_dim_1)
    found = {way: grid_faults(folder, cpu_mesh(), way, dtype=dtype, shard=shard)[0] for way in WAYS}
    module, _ = load(folder, cpu_mesh(), "direct", shard=shard)
    return found, sorted({p.placements[0].dim for p in module.parameters() if isinstance(p, DTensor)})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_shards_of_dim_1_and_dim_0_side_by_side(ranks4: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    save_grid(tmp_path, width=12, inner=20)
    for found, dims in ranks4.run(shard_1, str(tmp_path), dtype):
        assert found == {way: [] for way in WAYS}
        assert dims == [0, 1]


def wide_shard_1(folder: str, way: str) -> Any:
    shard = metashard.ShardPolicy(shard_placement_fn=on_dim_1)
    policy = metashard.LoadPolicy(timeout=30, staging_bytes=1 << 16, **WAYS[way])
    diffusers.GridModel = GridModel
    try:
        module, report = metashard.load_component(
            folder, mesh=cpu_mesh(), shard=shard, load=policy, output_loading_info=True
        )
    finally:
        del diffusers.GridModel
    return differences(module, GridModel.from_pretrained(folder)), report


@pytest.mark.parametrize("way", FROM_FILES)
def test_long_rows_cut_on_dim_1_are_read_once_through_small_buffers(ranks2: Ranks, tmp_path: Path, way: str) -> None:
    """Half a row is 64 KiB: as large as all staging together, which is no reason to read anything twice."""
    nbytes = save_grid(tmp_path, width=8, inner=32_768, depth=2)
    ranks = ranks2.run(wide_shard_1, str(tmp_path), way)
    assert [found for found, _ in ranks] == [[], []]
    read = read_by_all(ranks[0][1])
    # `up` is (32768, 8), whose runs are 16 bytes: these rows are read whole, once for each rank.
    twice = 2 * 32_768 * 8 * 4 if way != "stream, broadcast" else 0
    assert read <= 1.02 * nbytes + twice


# --- CPU offload and ignored parameters


def offloaded(folder: str, way: str) -> list[str]:
    shard = metashard.ShardPolicy(offload_policy=CPUOffloadPolicy(pin_memory=False), ignored_params=["norm.weight"])
    module, _ = load(folder, cpu_mesh(), way, shard=shard)
    expected = GridModel.from_pretrained(folder, torch_dtype=FP32)
    found = differences(module, expected) + storage_faults(module)
    if [f for f, p in module.named_parameters() if not isinstance(p, DTensor)] != ["norm.weight"]:
        found.append("norm.weight should be the only plain parameter")
    x = torch.randn(5, expected.config.width, generator=torch.Generator().manual_seed(5))
    for model in (module, expected):
        model(x).square().mean().backward()
    held = dict(module.named_parameters())
    for fqn, parameter in expected.named_parameters():
        if held[fqn].grad is None:
            found.append(f"{fqn}: no gradient")
        elif not torch.allclose(full(held[fqn].grad), parameter.grad, rtol=1e-5, atol=1e-7):
            found.append(f"{fqn}: gradient differs")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_parameters_load_and_train(ranks2: Ranks, tmp_path: Path, way: str) -> None:
    save_grid(tmp_path, width=7)
    assert ranks2.run(offloaded, str(tmp_path), way) == [[], []]


# --- meshes that are not all ranks, or not in order


def on_ranks(folder: str, members: list[int]) -> dict[str, Any] | None:
    mesh = DeviceMesh("cpu", members, mesh_dim_names=("shard",))  # all ranks take part in making it
    if dist.get_rank() not in members:
        return None
    return {way: grid_faults(folder, mesh, way) for way in WAYS}


@pytest.mark.parametrize("members", [[2, 3], [1, 3], [1, 2, 3], [3]], ids=str)
def test_a_mesh_need_not_begin_with_rank_0(ranks4: Ranks, tmp_path: Path, members: list[int]) -> None:
    nbytes = save_grid(tmp_path, width=7)
    ranks = ranks4.run(on_ranks, str(tmp_path), members)
    assert [rank for rank, told in enumerate(ranks) if told is not None] == members
    for way in WAYS:
        for rank in members:
            found, report = ranks[rank][way]
            assert found == [], (way, rank)
            assert report.world_size == len(members)
        assert read_by_all(report) == nbytes


def pairs(folders: list[str], way: str) -> Any:
    """Two halves of the world load two models at the same time, and then both halves the same one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))
    half = mesh.get_local_rank("half")
    return grid_faults(folders[half], mesh["shard"], way)[0] + grid_faults(folders[0], mesh["shard"], way)[0]


@pytest.mark.parametrize("way", WAYS)
def test_sub_meshes_load_side_by_side(ranks4: Ranks, tmp_path: Path, way: str) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    save_grid(Path(folders[0]), width=6)
    save_grid(Path(folders[1]), width=9, depth=5)
    assert ranks4.run(pairs, folders, way) == [[]] * 4


def after_other_groups(folder: str) -> Any:
    for ranks in ([0, 1], [0, 1], [1, 2]):
        dist.new_group(ranks)
    return on_ranks(folder, [0, 2, 3])


def test_groups_that_only_some_ranks_are_in_do_not_matter(ranks4: Ranks, tmp_path: Path) -> None:
    """A trainer makes groups of its own, and the ranks of a mesh need not be in equally many."""
    save_grid(tmp_path, width=7)
    for told in ranks4.run(after_other_groups, str(tmp_path)):
        assert told is None or [told[way][0] for way in WAYS] == [[]] * len(WAYS)


def reversed_mesh(folder: str) -> Any:
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("shard",))
    return {way: grid_faults(folder, mesh, way)[0] for way in WAYS}


def test_a_reversed_mesh_is_right_or_refused(ranks2: Ranks, tmp_path: Path) -> None:
    """A process group sorts its ranks, a mesh does not: who is first is not the same for both."""
    save_grid(tmp_path, width=7)
    for told in ranks2.run(reversed_mesh, str(tmp_path), return_exceptions=True):
        if isinstance(told, Exception):
            assert isinstance(told, metashard.ShardError), repr(told)
        else:
            assert told == {way: [] for way in WAYS}


# --- tensor parallel and FSDP


def tp_part(value: torch.Tensor, dim: int | None, index: int, parts: int) -> torch.Tensor:
    """Part `index` of `value` cut on `dim` as `torch.chunk` does; all of it for None."""
    if dim is None:
        return value
    step = -(-value.shape[dim] // parts)
    start = min(value.shape[dim], index * step)
    return value.narrow(dim, start, min(step, value.shape[dim] - start))


def tensor_parallel(folder: str, way: str, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")

    def prepare(module: nn.Module) -> None:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)

    module, report = load(folder, mesh["dp"], way, dtype=dtype, prepare=prepare)
    expected = GridModel.from_pretrained(folder, torch_dtype=dtype)
    values = {slot.fqn: tensor.detach() for slot, tensor in named_slots(expected)}
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # `down.bias` and the rest are replicated over tp
    found = []
    for slot, tensor in named_slots(module):
        value = tp_part(values[slot.fqn], dims.get(slot.fqn.split(".", 2)[-1]), tp, shape[1])
        if slot.kind == "parameter":
            most = tp_part(value, 0, 0, shape[0]).nbytes  # FSDP pads to the largest
            value = tp_part(value, 0, dp, shape[0])
        else:
            most = value.nbytes
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.dtype != value.dtype or not torch.equal(local.detach(), value):
            found.append(f"{slot.fqn}: {tuple(local.shape)}, expected {tuple(value.shape)}")
        elif local.untyped_storage().nbytes() > most:
            found.append(f"{slot.fqn}: storage of {local.untyped_storage().nbytes()} bytes")
    for fqn, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not torch.equal(parameter.full_tensor(), values[fqn]):
            found.append(f"{fqn}: full_tensor differs")
    x = torch.randn(3, expected.config.width, generator=torch.Generator().manual_seed(6)).to(dtype)
    with torch.no_grad():
        got, wanted = module(x), expected(x)
        if not torch.allclose(got.float(), wanted.float(), rtol=1e-4 if dtype == FP32 else 0.1, atol=1e-5):
            found.append(f"forward differs by {(got - wanted).abs().max().item()}")
    return found, report


def tensor_parallel_ways(folder: str, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    return {way: tensor_parallel(folder, way, shape, dtype) for way in FROM_FILES}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_fsdp_over_tensor_parallel(ranks4: Ranks, tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """dp x tp; (6 and 10) / 2 is odd, so that FSDP cuts unevenly what tensor parallel has cut evenly."""
    nbytes = save_grid(tmp_path, width=8 if shape[1] == 4 else 6, inner=12 if shape[1] == 4 else 10)
    ranks = ranks4.run(tensor_parallel_ways, str(tmp_path), shape, dtype)
    assert [(way, rank, told[way][0]) for way in FROM_FILES for rank, told in enumerate(ranks) if told[way][0]] == []
    for way in FROM_FILES:  # each dp group loads for itself
        assert read_by_all(ranks[0][way][1]) <= nbytes, way


# Hosts: ranks say that they are on other hosts than they are, and that they do not see files that they do.


def _on_hosts(folder: str, hosts: list[str], seeing: list[int], load: dict[str, Any]) -> tuple[list[str], Any]:
    from metashard import run, strategy

    rank = dist.get_rank()
    name, sees = run.socket.gethostname, strategy._sees
    run.socket.gethostname = lambda: hosts[rank]
    strategy._sees = lambda *args: rank in seeing and sees(*args)
    try:
        module, report = metashard.load_component(
            folder, mesh=cpu_mesh(), dtype=BF16, load=metashard.LoadPolicy(**load), output_loading_info=True
        )
    finally:
        run.socket.gethostname, strategy._sees = name, sees
    case = zoo.CASES["SD3Transformer2DModel"]
    expected = case.cls.from_pretrained(folder, torch_dtype=BF16)
    return differences(module, expected) + storage_faults(module), report


@pytest.mark.parametrize("transport", ["scatter", "broadcast"])
@pytest.mark.parametrize(
    ("hosts", "seeing", "readers"),
    [
        (["a", "a", "b", "b"], [0, 2], [0, 2]),
        (["a", "b", "a", "b"], [0, 3], [0, 3]),  # the reader is not the first rank of its host
        (["a", "b", "c", "c"], [0, 1, 2], [0, 1, 2]),  # hosts of one rank, too
        (["a", "a", "b", "b"], [0, 1], [0]),  # a host without the files: rank 0 reads for all
    ],
)
def test_one_rank_a_host_reads_for_its_host(hosts, seeing, readers, transport, ranks4, tmp_path):
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(tmp_path)
    load = {"transport": transport, "timeout": 60, "staging_bytes": 1 << 17}
    for found, report in ranks4.run(_on_hosts, str(tmp_path), hosts, seeing, load, timeout=120):
        assert found == []
        assert report.strategy == "stream"
        assert [rank for rank, entry in enumerate(report.ranks) if entry.bytes_read] == readers
        assert [rank for rank, entry in enumerate(report.ranks) if entry.bytes_sent and rank not in readers] == []


@pytest.mark.parametrize("strategy", ["stream", "rank0"])
@pytest.mark.parametrize("transport", ["scatter", "broadcast"])
def test_one_bucket_at_a_time_gives_the_same(strategy, transport, ranks2, tmp_path):
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(tmp_path)
    load = {"strategy": strategy, "transport": transport, "timeout": 60, "staging_bytes": 1 << 16, "overlap": False}
    for found, _ in ranks2.run(_on_hosts, str(tmp_path), ["a", "a"], [0, 1], load):
        assert found == []
