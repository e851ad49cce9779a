"""Adapters: bitwise what peft gives in one process, on any number of ranks, through every strategy."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import metashard
from metashard.lora import needs_base_weights
from metashard.verify_lora import verify_lora
from tests import zoo
from tests.parity import cpu_mesh, differences, full
from tests.ranks import Ranks

BF16 = torch.bfloat16
SD3 = "SD3Transformer2DModel"
WAN = "WanTransformer3DModel"
CLIP = "CLIPTextModel"
UNET = "UNet2DConditionModel"
MODELS = (SD3, WAN, CLIP, UNET)
LOADS = (
    dict(strategy="direct"),
    dict(strategy="stream"),
    dict(strategy="stream", transport="broadcast"),
    dict(strategy="rank0"),
    dict(strategy="rank0", transport="broadcast"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {name: str(tmp_path_factory.mktemp(name)) for name in MODELS}
    for name, folder in made.items():
        zoo.CASES[name].build().save_pretrained(folder)
    return made


def config(**kwargs: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["to_q", "to_k"], **kwargs})


def reference(name: str, folder: str, dtype: torch.dtype, specs: list[metashard.LoraSpec], seed: int = 5) -> nn.Module:
    """The libraries' own way, in one process."""
    from peft import PeftModel, get_peft_model

    module = zoo.CASES[name].load(folder, dtype)
    torch.manual_seed(seed)
    for spec in specs:
        if spec.style == "inject":
            if spec.exists:
                module.load_lora_adapter(str(spec.source), prefix=None, adapter_name=spec.name, use_safetensors=True)
            else:
                module.add_adapter(copy.deepcopy(spec.source), spec.name)
        elif spec.exists and isinstance(module, PeftModel):
            module.load_adapter(spec.source, spec.name, is_trainable=spec.trainable, torch_device="cpu")
        elif spec.exists:
            module = PeftModel.from_pretrained(
                module, spec.source, spec.name, is_trainable=spec.trainable, torch_device="cpu"
            )
        elif isinstance(module, PeftModel):
            module.add_adapter(spec.name, copy.deepcopy(spec.source))
        else:
            module = get_peft_model(module, copy.deepcopy(spec.source), spec.name)
    return module


def load(folder: str, dtype: torch.dtype | None, lora: Any, seed: int = 5, **load: Any) -> tuple[nn.Module, Any]:
    """Load with ranks' generators in different states: only rank 0's counts."""
    torch.manual_seed(seed + 7919 * dist.get_rank())
    return metashard.load_component(
        folder,
        mesh=cpu_mesh(),
        dtype=dtype,
        lora=lora,
        shard=metashard.ShardPolicy(wrap=()),
        load=metashard.LoadPolicy(**{"timeout": 60, **load}),
        output_loading_info=True,
    )


def compare(
    name: str,
    folder: str,
    dtype: torch.dtype,
    specs: list[metashard.LoraSpec],
    loads: tuple[dict[str, Any], ...] = LOADS,
) -> list[str]:
    """What differs from the reference, over several ways to load; runs on the ranks."""
    expected = reference(name, folder, dtype, specs)
    after, found = torch.get_rng_state(), []
    for options in loads:
        module, report = load(folder, dtype, specs, **options)
        drawn = torch.get_rng_state()
        found += [f"{options} ({report.strategy}): {line}" for line in differences(module, expected)]
        if dist.get_rank() == 0 and not torch.equal(drawn, after):
            found.append(f"{options}: rank 0 has drawn other numbers than a single process")
        for spec in specs:
            if module.peft_config[spec.name].to_dict() != expected.peft_config[spec.name].to_dict():
                found.append(f"{options}: config of {spec.name}")
        if active(module) != active(expected):
            found.append(f"{options}: active adapters {active(module)}, expected {active(expected)}")
    return found


def active(module: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        name: (sub.active_adapters, sub.disable_adapters, getattr(sub, "scaling", None))
        for name, sub in module.named_modules()
        if isinstance(sub, BaseTunerLayer)
    }


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("style", ["peft", "inject"])
def test_new_adapters_are_what_peft_gives_in_one_process(ranks_of: dict[int, Ranks], folders, world, style):
    """Through every strategy and transport, names, dtypes, requires_grad and draws included; twice in a row."""
    specs = [metashard.LoraSpec(config(modules_to_save=["proj_out"]), style=style)]
    loads = (*LOADS, LOADS[0]) if style == "peft" else (LOADS[0], LOADS[2], LOADS[3])
    for found in ranks_of[world].run(compare, WAN, folders[WAN], BF16, specs, loads):
        assert found == []


# name -> model, LoraConfig
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rank and alpha patterns": (SD3, dict(rank_pattern={"to_k": 2}, alpha_pattern={"to_q": 16})),
    "regex": (SD3, dict(target_modules=r".*transformer_blocks\.[12]\.attn\.to_[qv]")),
    "all-linear": (CLIP, dict(target_modules="all-linear")),
    "some layers": (CLIP, dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers")),
    "rslora, gaussian": (SD3, dict(use_rslora=True, init_lora_weights="gaussian")),
    "orthogonal": (SD3, dict(init_lora_weights="orthogonal")),
    "no init": (SD3, dict(init_lora_weights=False)),
    "bias all": (SD3, dict(bias="all")),
    "bias lora_only": (SD3, dict(bias="lora_only")),
    "lora_bias": (SD3, dict(lora_bias=True, target_modules=["to_q"])),
    "embedding": (CLIP, dict(target_modules=["q_proj", "token_embedding"])),
    "convolution": (UNET, dict(target_modules=["conv1", "to_q"], modules_to_save=["conv_out"])),
    "modules_to_save with an embedding": (CLIP, dict(target_modules=["q_proj"], modules_to_save=["token_embedding"])),
}
VALUE_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": (SD3, dict(use_dora=True)),
    "dora on convolutions": (UNET, dict(use_dora=True, target_modules=["conv1"])),
    "pissa": (SD3, dict(init_lora_weights="pissa")),
    "olora": (SD3, dict(init_lora_weights="olora")),
    "eva": (SD3, dict(init_lora_weights="eva")),
    "trainable tokens": (CLIP, dict(target_modules=["q_proj"], trainable_token_indices={"token_embedding": [1, 3]})),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(ranks2: Ranks, folders, option):
    name, kwargs = OPTIONS[option]
    specs = [metashard.LoraSpec(config(**kwargs))]
    for found in ranks2.run(compare, name, folders[name], BF16, specs, (LOADS[0], LOADS[3])):
        assert found == []


@pytest.mark.parametrize("option", VALUE_OPTIONS)
def test_inits_that_look_at_the_base_go_through_rank_0(ranks2: Ranks, folders, option):
    name, kwargs = VALUE_OPTIONS[option]
    lora = config(**kwargs)
    for strategy, reason, found in ranks2.run(load_with_values, name, folders[name], lora):
        assert found == []
        assert strategy == "rank0"
        assert reason == needs_base_weights(lora)
    for error in ranks2.run_expecting(metashard.LoadError, load, folders[name], BF16, lora, strategy="direct"):
        assert needs_base_weights(lora) in str(error)


def load_with_values(name: str, folder: str, lora: Any) -> tuple[str, str, list[str]]:
    expected = reference(name, folder, BF16, [metashard.LoraSpec(lora)])
    module, report = load(folder, BF16, lora)
    return report.strategy, report.reason, differences(module, expected)


def test_loftq_goes_through_rank_0_and_changes_the_base(ranks2: Ranks, folders):
    lora = config(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1})
    assert ranks2.run(with_stub_of_loftq, folders[SD3], lora) == [("rank0", [])] * 2


def with_stub_of_loftq(folder: str, lora: Any) -> tuple[str, list[str]]:
    """bitsandbytes does the quantising and needs no place here: any function of the base's values will do."""
    import peft.tuners.lora.layer as layer

    def stub(weight: torch.Tensor, reduced_rank: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert not weight.is_meta
        assert weight.float().norm() > 0
        return weight.round(), weight[:1].repeat(reduced_rank, 1), weight[:, :1].repeat(1, reduced_rank)

    before, layer.loftq_init = layer.loftq_init, stub
    try:
        return load_with_values(SD3, folder, lora)[::2]
    finally:
        layer.loftq_init = before


def test_a_variant_the_loader_does_not_know_is_routed_through_rank_0():
    from peft import LoHaConfig

    assert needs_base_weights(config()) is None
    assert "LOHA" in needs_base_weights(LoHaConfig(target_modules=["to_q"]))
    assert "init_lora_weights='pissa_niter_4'" in needs_base_weights(config(init_lora_weights="pissa_niter_4"))


def test_several_new_adapters_one_inactive(ranks2: Ranks, folders):
    first, second = config(), config(r=2, target_modules=["to_v", "to_q"])
    for style in ("peft", "inject"):
        specs = [metashard.LoraSpec(first, "a", style=style), metashard.LoraSpec(second, "b", style=style)]
        for found in ranks2.run(compare, SD3, folders[SD3], BF16, specs, (LOADS[0], LOADS[3])):
            assert found == []


# --- existing adapters


@pytest.fixture(scope="module")
def adapters(folders, tmp_path_factory) -> dict[str, str]:
    """Adapters of the small SD3 with values of their own."""
    from peft import get_peft_model

    root = tmp_path_factory.mktemp("adapters")
    made = {}
    for name, kwargs in {
        "peft": dict(modules_to_save=["proj_out"]),
        "other": dict(r=2, target_modules=["to_v", "to_q"]),
        "pissa": dict(init_lora_weights="pissa"),
        "dora": dict(use_dora=True),
    }.items():
        module = get_peft_model(zoo.CASES[SD3].load(folders[SD3], torch.float32), config(**kwargs))
        randomise(module)
        made[name] = str(root / name)
        module.save_pretrained(made[name])
    module = zoo.CASES[SD3].load(folders[SD3], torch.float32)
    module.add_adapter(config(rank_pattern={"to_k": 2}))
    randomise(module)
    made["diffusers"] = str(root / "diffusers")
    module.save_lora_adapter(made["diffusers"])
    file = Path(made["diffusers"]) / "pytorch_lora_weights.safetensors"
    state = load_file(file)
    made["pipeline"] = str(root / "pipeline.safetensors")
    both = {f"transformer.{k}": v for k, v in state.items()} | {"text_encoder.x.lora_A.weight": torch.zeros(4, 4)}
    save_file(both, made["pipeline"])
    old = {k.replace(".lora_A.", ".lora.down.").replace(".lora_B.", ".lora.up."): v for k, v in state.items()}
    made["old keys"] = str(root / "old.safetensors")
    save_file(old, made["old keys"])
    return made


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("trainable", [True, False])
def test_an_existing_peft_adapter(ranks2: Ranks, folders, adapters, trainable):
    specs = [metashard.LoraSpec(adapters["peft"], trainable=trainable)]
    for found in ranks2.run(compare, SD3, folders[SD3], BF16, specs, (LOADS[0], LOADS[1], LOADS[3])):
        assert found == []


def test_an_existing_dora_adapter_needs_no_base_weights_and_a_pissa_one_does(ranks2: Ranks, folders, adapters):
    assert needs_base_weights(adapters["dora"]) is None
    for name, loads in {"dora": (LOADS[0],), "pissa": ({},)}.items():
        for found in ranks2.run(compare, SD3, folders[SD3], torch.float32, [metashard.LoraSpec(adapters[name])], loads):
            assert found == []


@pytest.mark.parametrize("name", ["diffusers", "old keys"])
def test_an_existing_diffusers_adapter(ranks2: Ranks, folders, adapters, name):
    specs = [metashard.LoraSpec(adapters[name], style="inject")]
    for found in ranks2.run(compare, SD3, folders[SD3], BF16, specs, (LOADS[0], LOADS[3])):
        assert found == []


def test_only_the_components_keys_of_a_pipelines_lora_file_are_taken(ranks2: Ranks, folders, adapters, tmp_path):
    """`transformer_2` takes those of `transformer`, as a file of the second expert is saved."""
    for component in ("transformer", "transformer_2"):
        shutil.copytree(folders[SD3], tmp_path / component)
    index = {"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": "0.42.1"}
    entry = ["diffusers", SD3]
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"transformer": entry, "transformer_2": entry}))
    for component in ("transformer", "transformer_2"):
        found = ranks2.run(load_component_with, str(tmp_path), component, adapters["pipeline"], adapters["diffusers"])
        assert found == [[], []]


def load_component_with(root: str, component: str, adapter: str, same: str) -> list[str]:
    module = metashard.load_component(root, component, mesh=cpu_mesh(), dtype=BF16, lora=adapter)
    return differences(module, reference(SD3, f"{root}/{component}", BF16, [metashard.LoraSpec(same, style="inject")]))


def test_a_text_encoders_keys_of_a_diffusers_file(folders, tmp_path):
    """transformers' models have no `load_lora_adapter`; the adapter is what diffusers derives from the keys."""
    module = zoo.CASES[CLIP].load(folders[CLIP], torch.float32)
    target = next(name for name, _ in module.named_modules() if name.endswith("0.self_attn.q_proj"))
    rows, columns = module.get_submodule(target).weight.shape
    state = {
        f"text_encoder.{target}.lora_A.weight": torch.randn(3, columns),
        f"text_encoder.{target}.lora_B.weight": torch.randn(rows, 3),
        "transformer.x.lora_A.weight": torch.zeros(1),
    }
    module = metashard.add_lora(module, save(tmp_path / "lora.safetensors", state))
    adapted = module.get_submodule(target)
    assert torch.equal(adapted.lora_A["default"].weight, state[f"text_encoder.{target}.lora_A.weight"])
    assert torch.equal(adapted.lora_B["default"].weight, state[f"text_encoder.{target}.lora_B.weight"])
    assert adapted.scaling == {"default": 1.0}


def test_existing_and_new_adapters_together(ranks2: Ranks, folders, adapters):
    specs = [
        metashard.LoraSpec(adapters["other"], "old", trainable=False),
        metashard.LoraSpec(config(), "new"),
    ]
    for found in ranks2.run(compare, SD3, folders[SD3], BF16, specs, (LOADS[0], LOADS[3])):
        assert found == []
    both = [
        metashard.LoraSpec(adapters["other"], "old", trainable=False, active=True),
        metashard.LoraSpec(config(), "new", active=True),
    ]
    for flags, names in ranks2.run(activity, folders[SD3], both):
        assert names == {("old", "new")}
        assert flags == {"old": {False}, "new": {True}}


def activity(folder: str, specs: Any) -> tuple[dict[str, set[bool]], set[Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    module, _ = load(folder, BF16, specs)
    names = {tuple(sub.active_adapters) for sub in module.modules() if isinstance(sub, BaseTunerLayer)}
    parameters = [(n.split("."), p.requires_grad) for n, p in module.named_parameters() if "lora_" in n]
    return {spec.name: {flag for parts, flag in parameters if spec.name in parts} for spec in specs}, names


# --- what is refused


def changed(adapter: str, to: Path, change: Any, name: str = "adapter_model.safetensors") -> str:
    """A copy of an adapter with other tensors."""
    to.mkdir()
    for file in Path(adapter).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    state = load_file(to / name)
    change(state)
    save_file(state, to / name)
    return str(to)


def save(path: Path, state: dict[str, torch.Tensor]) -> str:
    save_file(state, path)
    return str(path)


def test_an_adapter_that_does_not_fit_is_the_same_error_on_every_rank(ranks2: Ranks, folders, adapters, tmp_path):
    key = "base_model.model.transformer_blocks.1.attn.to_q.lora_A.weight"
    plain, proj = key.removeprefix("base_model.model."), "base_model.model.proj_out.weight"
    lora_file = "pytorch_lora_weights.safetensors"
    extra = {"blocks.9.lora_A.weight": torch.ones(1)}
    unknown = {"base_model.model.transformer_blocks.9.attn.to_q.lora_A.weight": torch.zeros(2, 2)}
    cases = {
        changed(adapters["peft"], tmp_path / "a", lambda s: s.update(unknown)): "transformer_blocks.9.attn.to_q",
        changed(adapters["peft"], tmp_path / "b", lambda s: s.pop(key)): "transformer_blocks.1.attn.to_q.lora_A.weight",
        changed(adapters["peft"], tmp_path / "c", lambda s: s.update({key: torch.zeros(4, 5)})): "[4, 5]",
        changed(adapters["peft"], tmp_path / "d", lambda s: s.pop(proj)): "proj_out.weight",
        changed(adapters["diffusers"], tmp_path / "e", lambda s: s.update(extra), lora_file): "blocks.9",
        changed(adapters["diffusers"], tmp_path / "f", lambda s: s.pop(plain), lora_file): plain,
        changed(
            adapters["diffusers"], tmp_path / "g", lambda s: s.update({plain: torch.zeros(4, 5)}), lora_file
        ): "[4, 5]",
        str(tmp_path / "nothing"): "no adapter at",
        str(tmp_path): "is no adapter",
        folders[WAN] + "/diffusion_pytorch_model.safetensors": "have no place in the model",
        save(tmp_path / "unet.safetensors", {"unet.down.lora_A.weight": torch.ones(1)}): "no key of",
    }
    for source, text in cases.items():
        for error in ranks2.run_expecting(metashard.AdapterError, load, folders[SD3], BF16, source):
            assert text in str(error), source
            assert error.phase in ("adapters", "plan")
            assert error.rank == 0


def test_targets_that_match_nothing_are_refused_with_near_names(ranks2: Ranks, folders):
    for error in ranks2.run_expecting(
        metashard.AdapterError, load, folders[SD3], BF16, config(target_modules=["to_qq", "to_keys"])
    ):
        assert "to_q" in str(error)
        assert "to_k" in str(error)
        assert error.key == "to_keys"


def test_one_idle_target_of_several_is_a_warning_with_near_names(folders, caplog):
    module = zoo.CASES[SD3].load(folders[SD3], torch.float32)
    with caplog.at_level(logging.WARNING, logger="metashard"):
        metashard.add_lora(module, config(target_modules=["to_q", "to_keys"]))
    assert "to_keys" in caplog.text
    assert "to_k" in caplog.text


def prompt_tuning() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def vera() -> Any:
    from peft import VeraConfig

    return VeraConfig(target_modules=["to_q"])


@pytest.mark.parametrize("make", [prompt_tuning, vera])
def test_kinds_that_cannot_be_added_layer_by_layer_are_refused(ranks2: Ranks, folders, make):
    for error in ranks2.run_expecting(metashard.AdapterError, load, folders[SD3], BF16, make()):
        assert "not supported" in str(error)


def test_a_sharded_module_takes_no_adapters(ranks2: Ranks, folders):
    for error in ranks2.run_expecting(metashard.AdapterError, add_to_sharded, folders[SD3]):
        assert "before wrap_model" in str(error)


def add_to_sharded(folder: str) -> None:
    module, _ = load(folder, BF16, None)
    metashard.add_lora(module, config())


def test_ranks_given_different_adapters_are_refused(ranks2: Ranks, folders):
    for error in ranks2.run_expecting(metashard.LayoutError, load_with_own_rank, folders[SD3]):
        assert "different adapters" in str(error)
    for error in ranks2.run_expecting(metashard.LayoutError, load_on_rank_0_only, folders[SD3]):
        assert "lora=" in str(error)


def load_with_own_rank(folder: str) -> None:
    load(folder, BF16, config(r=2 + dist.get_rank()))


def load_on_rank_0_only(folder: str) -> None:
    load(folder, BF16, config() if dist.get_rank() == 0 else None)


@pytest.mark.parametrize(
    "wrong", [dict(source=3), dict(source="x", style="other"), dict(source="x", name=""), dict(source="x", name="a.b")]
)
def test_a_spec_says_what_it_expects(wrong):
    with pytest.raises((TypeError, ValueError), match="expected"):
        metashard.LoraSpec(**wrong)


# --- the two calls of a trainer


def test_add_lora_and_wrap_model(ranks2: Ranks, folders):
    for found in ranks2.run(wrapped, folders[WAN], "peft") + ranks2.run(wrapped, folders[WAN], "inject"):
        assert found == []


def wrapped(folder: str, style: str) -> list[str]:
    spec = metashard.LoraSpec(config(init_lora_weights="pissa", modules_to_save=["proj_out"]), style=style)
    expected = reference(WAN, folder, BF16, [spec])
    module = metashard.from_pretrained(zoo.CASES[WAN].cls, folder, torch_dtype=BF16)
    torch.manual_seed(5 + dist.get_rank())
    module = metashard.add_lora(module, spec)
    module = metashard.wrap_model(module, mesh=cpu_mesh(), load=metashard.LoadPolicy(timeout=60))
    return differences(module, expected)


def test_add_lora_without_a_process_group(folders):
    module = zoo.CASES[SD3].load(folders[SD3], BF16)
    torch.manual_seed(5)
    module = metashard.add_lora(module, config())
    expected = reference(SD3, folders[SD3], BF16, [metashard.LoraSpec(config())])
    assert differences(module, expected) == []


def test_the_base_is_what_it_is_without_adapters(ranks2: Ranks, folders):
    assert ranks2.run(base_shards, folders[WAN]) == [[], []]


def base_shards(folder: str) -> list[str]:
    plain = dict(load(folder, BF16, None)[0].named_parameters())
    with_lora = load(folder, BF16, metashard.LoraSpec(config(), style="inject"))[0]
    found = []
    for name, parameter in with_lora.named_parameters():
        if "lora_" not in name and not torch.equal(full(parameter), full(plain[name.replace(".base_layer", "")])):
            found.append(name)
    return found


@pytest.mark.parametrize("style", ["peft", "inject"])
def test_verify_lora(ranks2: Ranks, folders, style):
    spec = metashard.LoraSpec(config(modules_to_save=["proj_out"]), style=style)
    for checks in ranks2.run(verify, folders[WAN], spec):
        assert [(check.name, check.faults) for check in checks if not check.ok] == []


def test_verify_lora_sees_what_is_wrong(ranks2: Ranks, folders):
    """Adapters that break what is checked on purpose: an init with a lora_B, and one that changes the base."""
    broken = {"orthogonal": "lora_B is zero", "pissa": "base shards are those of a load without the adapter"}
    for init, name in broken.items():
        for checks in ranks2.run(verify, folders[SD3], config(init_lora_weights=init)):
            assert name in {check.name for check in checks if not check.ok}


def verify(folder: str, lora: Any) -> list[Any]:
    return verify_lora(folder, mesh=cpu_mesh(), lora=lora, dtype=BF16, load=metashard.LoadPolicy(timeout=60))


def test_nothing_of_peft_is_imported_before_it_is_needed():
    import subprocess
    import sys

    code = "import sys, metashard; metashard.LoraSpec('x'); assert not {'peft', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=120)


def _styles(asked: list[tuple[str | None, bool]], folder: str) -> list[str | None] | str:
    from peft import LoraConfig

    from metashard.lora import _with_styles

    specs = [
        metashard.LoraSpec(folder if exists else LoraConfig(target_modules=["to_q"]), name=f"a{n}", style=style)
        for n, (style, exists) in enumerate(asked)
    ]
    try:
        return [spec.style for spec in _with_styles(specs)]
    except metashard.AdapterError as error:
        return str(error)


@pytest.mark.parametrize(
    ("asked", "styles"),
    [
        ([(None, False)], ["peft"]),
        ([(None, True), (None, False)], ["inject", "inject"]),  # a diffusers file decides for a new one beside it
        ([(None, False), ("inject", False)], ["inject", "inject"]),
        ([("peft", True), (None, False)], ["peft", "peft"]),
    ],
)
def test_one_style_is_found_for_all_adapters(asked, styles, tmp_path) -> None:
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    assert _styles(asked, str(tmp_path)) == styles


@pytest.mark.parametrize("asked", [[(None, True), ("peft", False)], [("peft", False), (None, True)]])
def test_two_styles_are_refused_before_anything_is_added(asked, tmp_path) -> None:
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    assert "cannot be mixed" in _styles(asked, str(tmp_path))
