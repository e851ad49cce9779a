"""Adapters out of shards: the files of a single process, alone or merged into the base."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import metashard
from metashard.errors import SaveError
from metashard.layout import named_slots

from . import zoo
from .ranks import Ranks
from .test_lora import config, load, reference
from .test_save import POLICY, different, state_of

BF16, FP32 = torch.bfloat16, torch.float32
SD3, CLIP, UNET = "SD3Transformer2DModel", "CLIPTextModel", "UNet2DConditionModel"
LLAMA = "LlamaForCausalLM-tied"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {name: str(tmp_path_factory.mktemp(name)) for name in (SD3, CLIP, UNET, LLAMA)}
    for name, folder in made.items():
        zoo.CASES[name].build().save_pretrained(folder)
    return made


def as_if_trained(module: nn.Module) -> nn.Module:
    """Give what is trained other values, the same on shards as in one process."""
    for slot, tensor in named_slots(module, attributes=False):
        if not slot.requires_grad:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(slot.fqn.encode()))
        value = (torch.randn(slot.shape, generator=generator) / 8).to(slot.dtype)
        local = tensor.detach()
        if isinstance(tensor, DTensor):
            local = local.to_local()
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        local.copy_(value)
    return module


def spec(style: str, name: str = "default", **kwargs: Any) -> metashard.LoraSpec:
    return metashard.LoraSpec(config(**kwargs), name=name, style=style)


# --- peft's format

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (SD3, {}),
    "DoRA": (SD3, {"use_dora": True}),
    "modules to save": (SD3, {"modules_to_save": ["proj_out"]}),
    "embedding": (CLIP, {"target_modules": ["q_proj", "token_embedding"]}),
    "one of two tied layers": (LLAMA, {"target_modules": ["embed_tokens", "q_proj"]}),
    "convolution": (UNET, {"target_modules": ["to_q", "conv1"], "lora_alpha": 7}),
}


def saves_as_peft(kind: str, folder: str, out: str, rank: int = 4) -> list[str]:
    model, options = KINDS[kind]
    specs = [spec("peft", r=rank, **options)]
    module = as_if_trained(load(folder, BF16, specs)[0])
    report = metashard.save_lora(module, Path(out, "saved"), format="peft", save=POLICY)
    if dist.get_rank() == 0:
        as_if_trained(reference(model, folder, BF16, specs)).save_pretrained(
            Path(out, "expected"), save_embedding_layers=False
        )
        Path(out, "expected", "README.md").unlink()
        found = different(Path(out, "saved"), Path(out, "expected"))
        nbytes = sum(tensor.nbytes for tensor in state_of(Path(out, "saved")).values())
        return found if sum(report.written) == nbytes else [*found, f"{report.written} written of {nbytes}"]
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_peft_format_is_that_of_one_process(ranks2: Ranks, folders: dict[str, str], tmp_path: Path, kind: str) -> None:
    """Weights and config, byte for byte; nothing but the adapter is written."""
    assert ranks2.run(saves_as_peft, kind, folders[KINDS[kind][0]], str(tmp_path)) == [[], []]


def test_more_ranks_than_rows(ranks4: Ranks, folders: dict[str, str], tmp_path: Path) -> None:
    """A of rank 3 on 4 ranks: one of them holds none of it."""
    assert ranks4.run(saves_as_peft, "DoRA", folders[SD3], str(tmp_path), 3) == [[], [], [], []]


# --- diffusers' format


def saved_for_diffusers(model: str, folder: str, out: str, style: str, options: dict[str, Any]) -> list[torch.Tensor]:
    module = as_if_trained(load(folder, FP32, [spec(style, **options)])[0])
    metashard.save_lora(module, Path(out, "lora"), save=POLICY)
    return zoo.run_forward(zoo.CASES[model], module, FP32)


@pytest.mark.parametrize("style", ["inject", "peft"])
@pytest.mark.parametrize("options", [{"lora_alpha": 9}, {"use_dora": True}], ids=["alpha", "DoRA"])
@pytest.mark.parametrize("model", [SD3, UNET])
def test_diffusers_loads_what_was_saved(
    ranks2: Ranks, folders: dict[str, str], tmp_path: Path, model: str, style: str, options: dict[str, Any]
) -> None:
    """By the model's own loader with the prefix that pipelines use; the forward is that of the shards."""
    outputs = ranks2.run(saved_for_diffusers, model, folders[model], str(tmp_path), style, options)[0]
    module = zoo.CASES[model].load(folders[model], FP32)
    prefix = "unet" if model == UNET else "transformer"
    module.load_lora_adapter(str(tmp_path / "lora"), prefix=prefix, use_safetensors=True)
    with torch.no_grad():
        again = zoo.run_forward(zoo.CASES[model], module, FP32)
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
    with safe_open(str(tmp_path / "lora" / "pytorch_lora_weights.safetensors"), framework="pt") as opened:
        assert "lora_adapter_metadata" in opened.metadata()


def test_a_pipeline_loads_a_text_encoder_s_adapter(ranks2: Ranks, folders: dict[str, str], tmp_path: Path) -> None:
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader

    options = {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 9}
    outputs = ranks2.run(saved_for_diffusers, CLIP, folders[CLIP], str(tmp_path), "peft", options)[0]
    module = zoo.CASES[CLIP].load(folders[CLIP], FP32)
    state, alphas, metadata = Loader.lora_state_dict(str(tmp_path / "lora"), return_lora_metadata=True)
    Loader.load_lora_into_text_encoder(state, alphas, module, metadata=metadata, prefix="text_encoder")
    with torch.no_grad():
        again = zoo.run_forward(zoo.CASES[CLIP], module, FP32)
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))


# --- the base, with and without


def saves_merged(kind: str, folder: str, out: str) -> list[str]:
    model, options = KINDS[kind]
    specs = [spec("peft", **options)]
    module = as_if_trained(load(folder, BF16, specs)[0])
    before = metashard.digest_shards(module)
    metashard.save_component(module, Path(out, "merged"), lora="merge", save=POLICY)
    metashard.save_component(module, Path(out, "base"), save=POLICY)
    found = [] if metashard.digest_shards(module) == before else ["saving has changed the module"]
    if dist.get_rank() == 0:
        zoo.CASES[model].load(folder, BF16).save_pretrained(Path(out, "plain"))
        found += [f"base: {name}" for name in different(Path(out, "base"), Path(out, "plain"))]
        as_if_trained(reference(model, folder, BF16, specs)).merge_and_unload().save_pretrained(Path(out, "expected"))
        found += [f"merged: {name}" for name in different(Path(out, "merged"), Path(out, "expected"))]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_left_out_or_merged_as_peft_merges(
    ranks2: Ranks, folders: dict[str, str], tmp_path: Path, kind: str
) -> None:
    """Byte for byte what one process saves, without adapters and after `merge_and_unload`."""
    assert ranks2.run(saves_merged, kind, folders[KINDS[kind][0]], str(tmp_path)) == [[], []]


# --- bad input


def digests_around_a_merge(folder: str, out: str) -> list[str]:
    module = as_if_trained(load(folder, BF16, [spec("peft")])[0])
    before = metashard.digest_shards(module)
    metashard.save_component(module, out, lora="merge", save=POLICY)
    return [before, metashard.digest_shards(module)]


def test_on_one_rank_a_merge_leaves_the_module_as_it_was(
    ranks1: Ranks, folders: dict[str, str], tmp_path: Path
) -> None:
    """There the gathered tensor is the shard itself."""
    ((before, after),) = ranks1.run(digests_around_a_merge, folders[SD3], str(tmp_path / "out"))
    assert before == after


def merges_tied(folder: str, out: str) -> None:
    module = load(folder, BF16, [spec("peft", target_modules=["embed_tokens", "lm_head"])])[0]
    metashard.save_component(module, out, lora="merge", save=POLICY)


def test_two_adapters_on_one_weight_are_not_merged(ranks2: Ranks, tmp_path: Path) -> None:
    zoo.CASES[LLAMA].build().save_pretrained(tmp_path / "model")
    for error in ranks2.run_expecting(SaveError, merges_tied, str(tmp_path / "model"), str(tmp_path / "out")):
        assert "model.embed_tokens and lm_head share one weight" in str(error)
        assert "save_lora" in str(error)
        assert error.phase == "resolve"
    assert os.listdir(tmp_path) == ["model"]


def save_badly(folder: str, out: str, **kwargs: Any) -> None:
    lora = kwargs.pop("lora", None)
    module, _ = load(folder, BF16, lora)
    metashard.save_lora(module, out, save=POLICY, **kwargs)


@pytest.mark.parametrize(
    ("lora", "kwargs", "message"),
    [
        ([], {}, "has no adapter"),
        (["a"], {"adapter": "b"}, "has the adapters a"),
        (["a", "b"], {}, "Say which one"),
        (["a"], {"format": "kohya"}, "expected one of diffusers, peft"),
    ],
)
def test_every_rank_refuses_an_adapter_that_is_not_there(
    ranks2: Ranks, folders: dict[str, str], tmp_path: Path, lora: list[str], kwargs: dict[str, Any], message: str
) -> None:
    specs = [spec("inject", name) for name in lora] or None
    for error in ranks2.run_expecting(SaveError, save_badly, folders[SD3], str(tmp_path / "out"), lora=specs, **kwargs):
        assert message in str(error)
    assert not (tmp_path / "out").exists()
