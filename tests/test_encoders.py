"""Encoders and language models: pipeline folders, keys of other versions, pins, dtypes, frozen use, generate."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import metashard
from tests import zoo
from tests.parity import check_case, cpu_mesh, differences

WAYS: list[dict[str, Any]] = [{"strategy": "auto"}, {"strategy": "stream"}, {"strategy": "rank0"}]


def faults(results: list[list[dict[str, Any]]]) -> list[str]:
    return [f"{way['report'].strategy}: {text}" for ways in results for way in ways for text in way["found"]]


# --- fp32 pins


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "pinned", "in_bf16"),
    [("T5EncoderModel", "wo", False), ("UMT5EncoderModel", "wo", False)],
)
def test_both_pin_rules(name: str, pinned: str, in_bf16: bool, dtype: torch.dtype, tmp_path: Path, ranks2: Any) -> None:
    zoo.CASES[name].build().save_pretrained(tmp_path)
    results = ranks2.run(check_case, name, str(tmp_path), dtype, WAYS)
    assert faults(results) == []
    assert [way["report"].strategy for way in results[0]] == ["direct", "stream", "rank0"]
    expected = zoo.CASES[name].load(tmp_path, dtype)
    in_fp32 = {fqn for fqn, parameter in expected.named_parameters() if parameter.dtype == torch.float32}
    assert in_fp32 == {
        fqn
        for fqn, _ in expected.named_parameters()
        if pinned in fqn.split(".") and (in_bf16 or dtype == torch.float16)
    }


# --- keys as other versions of transformers save them


def save_renamed(folder: Path, rename: Callable[[str], str], extra: dict[str, Any]) -> None:
    """Keys renamed, and others added: name -> function of the tensors that are there."""
    tensors = load_file(folder / "model.safetensors")
    made = {rename(key): value for key, value in tensors.items()}
    made |= {key: make(tensors) for key, make in extra.items()}
    assert made.keys() != tensors.keys()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def _sub(pattern: str, by: str) -> Callable[[str], str]:
    return lambda key: re.sub(pattern, by, key)


POSITIONS = {"text_model.embeddings.position_ids": lambda tensors: torch.arange(9)[None]}
# case: (zoo name, old key from the one on disk now, keys that only old files have, the strategy that `auto` takes)
OLD_KEYS: dict[str, tuple[str, Callable[[str], str], dict[str, Any], str]] = {
    "CLIP text": ("CLIPTextModel", _sub(r"^", "text_model."), POSITIONS, "direct"),
    "CLIP text with projection": ("CLIPTextModelWithProjection", _sub(r"$", ""), POSITIONS, "direct"),
    "CLIP vision": ("CLIPVisionModel", _sub(r"^", "vision_model."), {}, "direct"),
    "T5 from a full model": (
        "T5EncoderModel",
        _sub(r"$", ""),
        {"decoder.final_layer_norm.weight": lambda t: torch.ones(18), "lm_head.weight": lambda t: torch.ones(53, 18)},
        "direct",
    ),
    "T5 with both names of a tie": (
        "T5EncoderModel",
        _sub(r"$", ""),
        {"encoder.embed_tokens.weight": lambda t: t["shared.weight"].clone()},
        "rank0",
    ),
    "Bert gamma and beta": (
        "BertModel",
        lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        {},
        "direct",
    ),
    "Bert under its prefix": ("BertModel", _sub(r"^", "bert."), {}, "direct"),
    "Llama from a causal model": (
        "LlamaModel",
        _sub(r"^", "model."),
        {"lm_head.weight": lambda t: torch.ones(53, 24)},
        "direct",
    ),
    "Llava with live keys": (
        "LlavaForConditionalGeneration",
        lambda key: re.sub(
            r"^(vision_tower|multi_modal_projector)",
            r"model.\1",
            re.sub(r"^language_model\.model", "model.language_model", key.replace("language_model.lm_head", "lm_head")),
        ),
        {},
        "direct",
    ),
}


@pytest.mark.parametrize("case", OLD_KEYS)
def test_keys_of_other_versions(case: str, tmp_path: Path, ranks2: Any) -> None:
    name, rename, extra, strategy = OLD_KEYS[case]
    original = zoo.CASES[name].build()
    original.save_pretrained(tmp_path)
    save_renamed(tmp_path, rename, extra)
    loaded = zoo.CASES[name].load(tmp_path, torch.float32)
    for key, value in original.state_dict().items():  # the library knows these keys: the reference is not random
        assert torch.equal(loaded.state_dict()[key], value), key
    results = ranks2.run(check_case, name, str(tmp_path), torch.bfloat16, [{"strategy": "auto"}, {"strategy": "rank0"}])
    assert faults(results) == []
    assert results[0][0]["report"].strategy == strategy


# --- dtypes that configs name


def load_as_config_says(folder: str, name: str, ways: list[dict[str, Any]]) -> list[list[str]]:
    expected = getattr(transformers, name).from_pretrained(folder)
    return [
        differences(metashard.load_component(folder, mesh=cpu_mesh(), load=metashard.LoadPolicy(**way)), expected)
        for way in ways
    ]


@pytest.mark.parametrize(
    "said",
    [
        {"torch_dtype": "bfloat16", "dtype": None},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "text_config": {"dtype": "float32"}, "vision_config": {"torch_dtype": "float32"}},
        {"dtype": None, "text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "bfloat16"}},
    ],
    ids=["torch_dtype", "dtype", "nested, other", "nested only"],
)
def test_dtype_of_the_config(said: dict[str, Any], tmp_path: Path, ranks2: Any) -> None:
    name = "Qwen2_5_VLForConditionalGeneration"
    zoo.CASES[name].build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in said.items():
        if isinstance(value, dict):
            config[key].pop("dtype", None)
            config[key].update(value)
        elif value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ranks2.run(load_as_config_says, str(tmp_path), name, WAYS) == [[[], [], []]] * 2


# --- frozen encoders inside a trainer


def encode_frozen(folder: str, strategy: str) -> dict[str, Any]:
    case = zoo.CASES["T5EncoderModel"]

    def freeze(module: torch.nn.Module) -> None:
        module.requires_grad_(False)

    encoder = metashard.load_component(
        folder,
        mesh=cpu_mesh(),
        dtype=torch.bfloat16,
        prepare=freeze,
        shard=metashard.ShardPolicy(reshard_after_forward=True),
        load=metashard.LoadPolicy(strategy=strategy),
    )
    expected = case.load(folder, torch.bfloat16)
    outputs = [zoo.run_forward(case, encoder, torch.bfloat16)[0] for _ in range(2)]
    wanted = zoo.run_forward(case, expected, torch.bfloat16)[0]
    return {
        "equal": [torch.equal(output, wanted) for output in outputs],
        "trainable": [name for name, p in encoder.named_parameters() if p.requires_grad],
        "grads": [name for name, p in encoder.named_parameters() if p.grad is not None],
        "whole": [name for name, p in encoder.named_parameters() if not isinstance(p, DTensor)],
        "tracked": outputs[0].requires_grad,
        "bytes": sum(p.to_local().nbytes for p in encoder.parameters()) / sum(p.nbytes for p in expected.parameters()),
        "groups": sum(isinstance(module, FSDPModule) for module in encoder.modules()),
    }


@pytest.mark.parametrize("strategy", ["direct", "rank0"])
def test_a_frozen_encoder_is_sharded_and_encodes_as_in_one_process(strategy: str, tmp_path: Path, ranks2: Any) -> None:
    zoo.CASES["T5EncoderModel"].build().save_pretrained(tmp_path)
    for told in ranks2.run(encode_frozen, str(tmp_path), strategy):
        assert told["equal"] == [True, True]
        assert (told["trainable"], told["grads"], told["whole"], told["tracked"]) == ([], [], [], False)
        assert told["bytes"] < 0.6  # half, and the padding of odd rows
        assert told["groups"] == 1 + 3  # the root and its blocks


def clip_beside_forward(folder: str) -> list[bool]:
    """What pipelines call beside forward: features of a part, and the final norm for `clip_skip`."""
    case = zoo.CASES["CLIPModel"]
    loaded = metashard.load_component(folder, mesh=cpu_mesh(), dtype=torch.float32)
    expected = case.load(folder, torch.float32)
    inputs = case.inputs(torch.float32)
    with torch.no_grad():
        made = [
            (
                model.get_text_features(input_ids=inputs["input_ids"]).pooler_output,
                model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output,
                model(**inputs).logits_per_text,
            )
            for model in (loaded, expected)
        ]
    return [torch.equal(a, b) for a, b in zip(*made, strict=True)]


def test_features_without_a_forward(tmp_path: Path, ranks2: Any) -> None:
    zoo.CASES["CLIPModel"].build().save_pretrained(tmp_path)
    assert ranks2.run(clip_beside_forward, str(tmp_path)) == [[True] * 3] * 2


# --- generate


def generate(folder: str, how: str) -> tuple[list[list[int]], list[list[int]], Any]:
    """Tokens of two prompts, of which this rank's own is made by the sharded model; one stops long before the other."""
    cls = transformers.LlamaForCausalLM
    if how == "wrap_model":
        sharded = metashard.wrap_model(metashard.from_pretrained(cls, folder), mesh=cpu_mesh())
    else:
        sharded = metashard.load_component(folder, mesh=cpu_mesh(), load=metashard.LoadPolicy(strategy=how))
    expected = cls.from_pretrained(folder)
    prompts = [torch.tensor([[3, 5, 7]]), torch.tensor([[11, 2, 4]])]
    mine = sharded.generate(prompts[dist.get_rank()]).tolist()[0]
    return mine, expected.generate(prompts[dist.get_rank()]).tolist()[0], sharded.generation_config.to_diff_dict()


@pytest.mark.parametrize("how", ["direct", "rank0", "wrap_model"])
def test_ranks_generate_texts_of_different_length(how: str, tmp_path: Path, ranks2: Any) -> None:
    """Each step gathers parameters from all ranks, so the shorter text's rank has to go on until both are done."""
    model = zoo.CASES["LlamaForCausalLM-tied"].build()
    settings = copy.deepcopy(model.generation_config)
    settings.max_new_tokens, settings.do_sample = 9, False
    first = model.generate(torch.tensor([[3, 5, 7]]), generation_config=settings)[0, 4].item()  # its second new token
    settings.eos_token_id = [first, 52]
    model.generation_config = settings
    model.save_pretrained(tmp_path)
    told = ranks2.run(generate, str(tmp_path), how, timeout=60)
    assert [mine for mine, _, _ in told] == [expected for _, expected, _ in told]
    assert len(told[0][0]) != len(told[1][0])
    assert all(settings["eos_token_id"] == [first, 52] for _, _, settings in told)
