"""The main job: what `load_component` and `wrap_model` give equals `from_pretrained` in one process, on every rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import metashard
from metashard.layout import named_slots
from tests import zoo
from tests.parity import check_case, cpu_mesh, differences, reference

WAYS: list[dict[str, Any]] = [
    {"strategy": "rank0", "transport": "scatter"},
    {"strategy": "rank0", "transport": "broadcast"},
    {"strategy": "direct"},
    {"strategy": "stream", "transport": "scatter"},
    {"strategy": "stream", "transport": "broadcast"},
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a zoo case, saved once; with `shard_size` in several files."""
    made: dict[tuple[str, str | None], str] = {}

    def folder(name: str, shard_size: str | None = None) -> str:
        if (name, shard_size) not in made:
            path = tmp_path_factory.mktemp(name)
            options = {} if shard_size is None else {"max_shard_size": shard_size}
            zoo.CASES[name].build().save_pretrained(path, **options)
            made[name, shard_size] = str(path)
        return made[name, shard_size]

    return folder


def faults(results: list[list[dict[str, Any]]]) -> list[str]:
    return [
        f"rank {rank}, {way['report'].strategy}: {text}"
        for rank, ways in enumerate(results)
        for way in ways
        for text in way["found"]
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", zoo.CORE)
def test_named_families_load_as_from_pretrained_does(name, world, dtype, saved, request):
    ranks = request.getfixturevalue(f"ranks{world}")
    ways = WAYS if world == 2 else WAYS[:3]
    results = ranks.run(check_case, name, saved(name), DTYPES[dtype], ways, timeout=120)
    assert faults(results) == []
    assert [way["report"].strategy for way in results[0]] == [way["strategy"] for way in ways]


@pytest.mark.parametrize("name", sorted(set(zoo.CASES) - set(zoo.CORE)))
def test_every_model_class_loads_as_from_pretrained_does(name, saved, ranks2):
    ways = [{"strategy": "auto"}, {"strategy": "rank0", "transport": "broadcast"}]
    auto = ranks2.run(check_case, name, saved(name), torch.bfloat16, ways, timeout=180)
    assert faults(auto) == []


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("name", ["WanTransformer3DModel", "SD3Transformer2DModel", "T5EncoderModel"])
def test_hsdp_replicas_are_equal_to_the_reference(name, mesh, saved, ranks4):
    results = ranks4.run(check_case, name, saved(name), torch.bfloat16, WAYS, mesh, timeout=120)
    assert faults(results) == []


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "FluxTransformer2DModel", "T5EncoderModel"])
def test_several_files_are_loaded_by_their_index(name, saved, ranks2):
    folder = saved(name, "20KB")
    assert len(list(Path(folder).glob("*.safetensors"))) >= 2
    results = ranks2.run(check_case, name, folder, torch.bfloat16, WAYS, timeout=120)
    assert faults(results) == []


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("load_dtype", [torch.float32, None])
def test_files_are_cast_as_from_pretrained_casts_them(file_dtype, load_dtype, tmp_path, ranks2):
    zoo.CASES["WanTransformer3DModel"].build().to(file_dtype).save_pretrained(tmp_path)
    results = ranks2.run(check_case, "WanTransformer3DModel", str(tmp_path), load_dtype, WAYS, timeout=120)
    assert faults(results) == []


def _bytes(folder: str, ways: list[dict[str, Any]]) -> list[Any]:
    reports = []
    for way in ways:
        _, report = metashard.load_component(
            folder, mesh=cpu_mesh(), dtype=torch.float32, load=metashard.LoadPolicy(**way), output_loading_info=True
        )
        reports.append(report)
    return reports


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_byte_is_read_once(world, saved, request):
    """Counted, replicated tensors (SD3's position table) included."""
    folder = saved("SD3Transformer2DModel")
    ranks = request.getfixturevalue(f"ranks{world}")
    weights = sum(t.nbytes for t in zoo.CASES["SD3Transformer2DModel"].build().state_dict().values())
    for report in ranks.run(_bytes, folder, [{"strategy": "direct"}, {"strategy": "stream"}])[0]:
        assert sum(rank.bytes_read for rank in report.ranks) == weights, report
        if world > 1 and report.strategy == "direct":
            assert max(rank.bytes_read for rank in report.ranks) < 0.6 * weights + 20_000


def test_scatter_sends_each_rank_its_shard_only(saved, ranks4):
    ways = [{"strategy": "rank0", "transport": t} for t in ("scatter", "broadcast")]
    scatter, broadcast = ranks4.run(_bytes, saved("FluxTransformer2DModel"), ways)[0]
    for rank in scatter.ranks[1:]:
        assert rank.bytes_received == rank.bytes_resident
    for rank in broadcast.ranks[1:]:
        assert rank.bytes_received > 3.5 * rank.bytes_resident


def _auto(folder: str, component: str | None = None, **load: Any) -> tuple[str, str]:
    _, report = metashard.load_component(
        folder, component, mesh=cpu_mesh(), load=metashard.LoadPolicy(**load), output_loading_info=True
    )
    return report.strategy, report.reason


def test_auto_goes_direct_and_says_why(saved, ranks2):
    answers = ranks2.run(_auto, saved("SD3Transformer2DModel"))
    assert answers[0] == answers[1]
    assert answers[0][0] == "direct"
    assert "every rank sees the files" in answers[0][1]


def _auto_blind(folder: str, hidden: str) -> tuple[str, str]:
    """Rank 1 looks for the files elsewhere."""
    if dist.get_rank() == 1:
        shutil.copytree(folder, hidden, ignore=shutil.ignore_patterns("*.safetensors"))
    from metashard import strategy

    original = strategy._sees
    if dist.get_rank() == 1:
        strategy._sees = lambda folder, headers: original(Path(hidden), headers)
    try:
        return _auto(folder)
    finally:
        strategy._sees = original


def test_auto_streams_where_a_rank_does_not_see_the_files(saved, ranks2, tmp_path):
    answers = ranks2.run(_auto_blind, saved("SD3Transformer2DModel"), str(tmp_path / "elsewhere"))
    assert answers[0] == answers[1]
    assert answers[0][0] == "stream"
    assert "ranks 1 do not see" in answers[0][1]


def _wrapped(name: str, folder: str, dtype: torch.dtype) -> list[str]:
    case = zoo.CASES[name]
    key = "torch_dtype" if case.library == "diffusers" else "dtype"
    module = metashard.from_pretrained(case.cls, folder, **{key: dtype})
    fired: list[str] = []
    module.register_forward_hook(lambda *_: fired.append("hook"))
    wrapped = metashard.wrap_model(module, mesh=cpu_mesh())
    expected = reference(case, Path(folder), dtype)
    found = differences(wrapped, expected)
    outputs, wanted = zoo.run_forward(case, wrapped, dtype), zoo.run_forward(case, expected, dtype)
    found += [f"output {i}" for i, (a, b) in enumerate(zip(outputs, wanted, strict=True)) if not torch.equal(a, b)]
    return found if fired else [*found, "the hook set before the load did not fire"]


@pytest.mark.parametrize(
    "name", ["SD3Transformer2DModel", "WanTransformer3DModel", "LlamaForCausalLM-tied", "T5EncoderModel"]
)
def test_from_pretrained_and_wrap_model_give_the_reference(name, saved, ranks2):
    assert ranks2.run(_wrapped, name, saved(name), torch.bfloat16) == [[], []]


def _own_model() -> nn.Module:
    torch.manual_seed(dist.get_rank())  # ranks differ on purpose: rank 0's values count

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("table", torch.arange(6.0), persistent=False)
            self.scale = torch.tensor([2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.table * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with metashard.init_context():
        return Model()


def _own(transport: str) -> tuple[bool, list[float], list[float]]:
    module = _own_model()
    state = {k: v.clone() for k, v in module.state_dict().items()} if dist.get_rank() == 0 else None
    box = [state]
    dist.broadcast_object_list(box, src=0)
    shell = all(p.is_meta for p in module.parameters())
    wrapped = metashard.wrap_model(module, mesh=cpu_mesh(), load=metashard.LoadPolicy(transport=transport))
    plain = list(wrapped.parameters())
    got = wrapped(torch.ones(2, 6)).sum().item()
    from tests.parity import full

    same = all(torch.equal(full(p), box[0][n]) for n, p in wrapped.named_parameters())
    assert plain
    return shell, [float(same)], [got]


@pytest.mark.parametrize("transport", ["scatter", "broadcast"])
def test_a_model_built_under_init_context_takes_rank_0s_values(transport, ranks2):
    (shell0, same0, out0), (shell1, same1, out1) = ranks2.run(_own, transport)
    assert (shell0, shell1) == (False, True)
    assert same0 == same1 == [1.0]
    assert out0 == out1


def _with_hook(folder: str, strategy: str) -> tuple[str, list[str], bool]:
    def prepare(module: nn.Module) -> None:
        module.enable_gradient_checkpointing()
        torch.manual_seed(100 + dist.get_rank())
        module.extra = nn.Linear(3, 5)

    module = metashard.load_component(
        folder, mesh=cpu_mesh(), prepare=prepare, load=metashard.LoadPolicy(strategy=strategy)
    )
    from tests.parity import full

    torch.manual_seed(100)
    wanted = nn.Linear(3, 5)
    same = torch.equal(full(module.extra.weight), wanted.weight) and torch.equal(full(module.extra.bias), wanted.bias)
    case = zoo.CASES["SD3Transformer2DModel"]
    found = [d for d in differences(module, reference(case, Path(folder), None)) if "extra." not in d]
    return str(module.is_gradient_checkpointing), found, same


@pytest.mark.parametrize("strategy", ["direct", "rank0", "stream"])
def test_the_hook_may_add_layers_which_come_from_rank_0(strategy, saved, ranks2):
    assert ranks2.run(_with_hook, saved("SD3Transformer2DModel"), strategy) == [("True", [], True)] * 2


def _components(folder: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    opened: list[str] = []
    modules = metashard.load_components(folder, ["transformer", "transformer_2"], mesh=cpu_mesh(), dtype=torch.bfloat16)
    case = zoo.CASES["WanTransformer3DModel"]
    found = {n: differences(m, reference(case, Path(folder) / n, torch.bfloat16)) for n, m in modules.items()}
    return list(modules), found, opened


def test_two_experts_load_one_after_the_other(ranks2, tmp_path):
    _wan_pipeline(tmp_path)
    names, found, _ = ranks2.run(_components, str(tmp_path))[0]
    assert names == ["transformer", "transformer_2"]
    assert found == {"transformer": [], "transformer_2": []}


def _wan_pipeline(folder: Path, second: Any = ("diffusers", "WanTransformer3DModel")) -> None:
    model = zoo.CASES["WanTransformer3DModel"].build()
    model.save_pretrained(folder / "transformer")
    if second[0] is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        model.save_pretrained(folder / "transformer_2")
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": list(second),
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))


# What goes wrong must go wrong in the same way on every rank, with nothing half loaded.


def _error(folder: str, component: str | None = None, shard: Any = None, **load: Any) -> tuple[str, str, Any]:
    try:
        metashard.load_component(
            folder,
            component,
            mesh=cpu_mesh(),
            shard=shard or metashard.ShardPolicy(),
            load=metashard.LoadPolicy(**{"timeout": 60, **load}),
        )
    except metashard.MetaShardError as error:
        return type(error).__name__, str(error), error.key
    return "loaded", "", None


def _without(folder: Path, key: str) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    del state[key]
    save_file(state, file, metadata={"format": "pt"})


def _same_on_all(answers: list[tuple[str, str, Any]]) -> tuple[str, str, Any]:
    assert len(set(answers)) == 1, answers
    return answers[0]


@pytest.mark.parametrize("strategy", ["auto", "direct", "stream", "rank0"])
def test_a_missing_key_is_an_error_on_every_rank(strategy, tmp_path, ranks2):
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(tmp_path)
    _without(tmp_path, "proj_out.weight")
    kind, text, key = _same_on_all(ranks2.run(_error, str(tmp_path), strategy=strategy))
    assert (kind, key) == ("CheckpointError", "proj_out.weight")
    assert "lacks 1 of the model's tensors: proj_out.weight" in text


@pytest.mark.parametrize("strategy", ["auto", "direct", "stream", "rank0"])
def test_a_shape_that_does_not_fit_is_an_error_on_every_rank(strategy, tmp_path, ranks2):
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["out_channels"] = config["out_channels"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind, text, key = _same_on_all(ranks2.run(_error, str(tmp_path), strategy=strategy))
    assert (kind, key) == ("CheckpointError", "proj_out.bias")
    assert "Is config.json from another model?" in text


@pytest.mark.parametrize(
    ("component", "kind", "words"),
    [
        ("transformer_2", "ComponentError", "null"),
        ("transfomer", "ComponentError", "transformer"),
        ("scheduler", "ComponentError", "no weights"),
        ("vae", "ComponentError", "vae"),
        (None, "ComponentError", "transformer"),
    ],
)
def test_a_component_that_cannot_be_had_is_an_error_on_every_rank(component, kind, words, tmp_path, ranks2):
    _wan_pipeline(tmp_path, second=(None, None))
    got, text, _ = _same_on_all(ranks2.run(_error, str(tmp_path), component))
    assert got == kind
    assert words in text


def test_an_index_that_names_an_absent_file_is_an_error_on_every_rank(saved, tmp_path, ranks2):
    folder = tmp_path / "model"
    shutil.copytree(saved("SD3Transformer2DModel", "20KB"), folder)
    next(folder.glob("*00002-of*.safetensors")).unlink()
    kind, text, _ = _same_on_all(ranks2.run(_error, str(folder)))
    assert kind == "CheckpointError"
    assert "00002-of" in text


def test_a_model_without_blocks_to_wrap_is_an_error_that_says_what_to_pass(saved, ranks2):
    shard = metashard.ShardPolicy(wrap=("NoSuchBlock",))
    kind, text, _ = _same_on_all(ranks2.run(_error, saved("SD3Transformer2DModel"), None, shard))
    assert kind == "ShardError"
    assert "NoSuchBlock" in text
    assert "JointTransformerBlock" in text


def _failing_hook(folder: str, failing: int) -> tuple[str, str, bool]:
    def prepare(module: nn.Module) -> None:
        if dist.get_rank() == failing:
            raise RuntimeError("no such backend")

    try:
        metashard.load_component(folder, mesh=cpu_mesh(), prepare=prepare)
    except metashard.LoadError as error:
        return str(error), str(error.phase), isinstance(error.__cause__, RuntimeError)
    return "loaded", "", False


@pytest.mark.parametrize("failing", [0, 1])
def test_a_hook_that_raises_on_one_rank_raises_on_every_rank(failing, saved, ranks2):
    answers = ranks2.run(_failing_hook, saved("SD3Transformer2DModel"), failing)
    for rank, (text, phase, chained) in enumerate(answers):
        assert "no such backend" in text
        assert f"rank {failing}" in text
        assert phase == "prepare"
        assert chained is (rank == failing)


def _own_init(folder: str) -> tuple[bool, str]:
    module, report = metashard.load_component(
        folder, mesh=cpu_mesh(), load=metashard.LoadPolicy(missing="init"), output_loading_info=True
    )
    from tests.parity import full

    value = full(dict(module.named_parameters())["proj_out.weight"])
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    leftovers = [slot.fqn for slot, tensor in named_slots(module) if tensor.is_meta]
    return bool(value.abs().sum() > 0) and all(torch.equal(v, value) for v in gathered) and not leftovers, report.reason


def test_missing_weights_take_the_modules_own_init_when_asked_to(tmp_path, ranks2):
    zoo.CASES["SD3Transformer2DModel"].build().save_pretrained(tmp_path)
    _without(tmp_path, "proj_out.weight")
    for equal, reason in ranks2.run(_own_init, str(tmp_path)):
        assert equal
        assert "1 missing" in reason


def _from_hub(cache: str, name: str) -> list[tuple[str, Any]]:
    """By id from a local cache, for this component and for one that is not in it."""
    from huggingface_hub import constants

    before = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, True
    try:
        module = metashard.load_component("org/name", "transformer", mesh=cpu_mesh(), dtype=torch.bfloat16)
        folder = next(Path(cache).glob("models--org--name/snapshots/*/transformer"))
        found = differences(module, reference(zoo.CASES[name], folder, torch.bfloat16))
        return [("differences", found), _error("org/absent", "transformer")[:1], _error("org/name", "vae")[:1]]
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = before


def test_a_hub_id_loads_from_the_local_cache(tmp_path, ranks2):
    from tests.test_component import hub_cache

    name = "SD3Transformer2DModel"
    zoo.CASES[name].build().save_pretrained(tmp_path / "source" / "transformer")
    index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", name]}
    (tmp_path / "source" / "model_index.json").write_text(json.dumps(index))
    hub_cache(tmp_path / "hub", tmp_path / "source")
    wanted = [("differences", []), ("ComponentError",), ("ComponentError",)]
    assert ranks2.run(_from_hub, str(tmp_path / "hub"), name) == [wanted, wanted]


def _by_rank(folder: str, kind: str) -> str:
    """A load whose `kind` of argument depends on the rank, or whose hook does what would be lost; the error's name."""
    from torch.distributed.tensor import Shard

    first = dist.get_rank() == 0
    kwargs: dict[str, Any] = {"mesh": cpu_mesh(), "load": metashard.LoadPolicy(timeout=60)}
    if kind == "wrap":
        name = "Attention" if first else "JointTransformerBlock"
        kwargs["shard"] = metashard.ShardPolicy(wrap=lambda module: type(module).__name__ == name)
    elif kind == "placement":
        kwargs["shard"] = metashard.ShardPolicy(
            shard_placement_fn=lambda p: Shard(1) if first and p.ndim == 2 and p.shape[1] % 2 == 0 else None
        )
    elif kind == "dtype":
        kwargs["dtype"] = torch.float32 if first else torch.bfloat16
    elif kind == "timeout":
        kwargs["load"] = metashard.LoadPolicy(timeout=61 + dist.get_rank())
    elif kind == "cast":
        kwargs["prepare"] = lambda module: module.to(torch.float16)
    else:
        kwargs["prepare"] = lambda module: 5
    try:
        metashard.load_component(folder, **kwargs)
    except metashard.MetaShardError as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.parametrize("kind", ["wrap", "placement", "dtype", "timeout", "cast"])
def test_what_differs_by_rank_or_would_be_lost_is_refused(kind, saved, ranks2):
    assert ranks2.run(_by_rank, saved("SD3Transformer2DModel"), kind) == ["LayoutError"] * 2


def test_a_hook_that_returns_no_module_is_an_error_on_every_rank(saved, ranks2):
    assert ranks2.run(_by_rank, saved("SD3Transformer2DModel"), "nonsense") == ["LoadError"] * 2


def _string_dtype(folder: str) -> list[str]:
    case = zoo.CASES["T5EncoderModel"]
    module = metashard.load_component(folder, mesh=cpu_mesh(), dtype="float16")
    return differences(module, reference(case, Path(folder), torch.float16))


def test_a_dtype_by_name_keeps_the_pins(saved, ranks2):
    assert ranks2.run(_string_dtype, saved("T5EncoderModel")) == [[], []]
