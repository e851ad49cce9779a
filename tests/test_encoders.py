"""Encoders and language models: pipeline folders, keys of other versions, pins, dtypes, frozen use, generate."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

import metashard
from tests import zoo
from tests.parity import check_case, cpu_mesh, differences
from tools import make_checkpoint

WAYS: list[dict[str, Any]] = [{"strategy": "auto"}, {"strategy": "stream"}, {"strategy": "rank0"}]


def faults(results: list[list[dict[str, Any]]]) -> list[str]:
    return [f"{way['report'].strategy}: {text}" for ways in results for way in ways for text in way["found"]]


# --- fp32 pins


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "pinned", "in_bf16"),
    [("T5EncoderModel", "wo", False), ("UMT5EncoderModel", "wo", False), ("VoxtralEncoder", "embed_positions", True)],
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
    "Qwen2.5-VL with live keys": (
        "Qwen2_5_VLForConditionalGeneration",
        lambda key: re.sub(r"^visual\.", "model.visual.", re.sub(r"^model\.", "model.language_model.", key)),
        {},
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


# --- folders of a larger model

# case: (zoo case that is saved in the folder, class of a part of it, keys on disk from those that are saved)
PARTS: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "CLIP text": ("CLIPModel", "CLIPTextModel", str),
    "CLIP text, bare keys": ("CLIPModel", "CLIPTextModel", _sub(r"^text_model\.", "")),
    "CLIP text with projection": ("CLIPModel", "CLIPTextModelWithProjection", str),
    "CLIP text with projection, bare keys": ("CLIPModel", "CLIPTextModelWithProjection", _sub(r"^text_model\.", "")),
    "CLIP vision": ("CLIPModel", "CLIPVisionModel", str),
    "CLIP vision with projection": ("CLIPModel", "CLIPVisionModelWithProjection", str),
    "Siglip vision": ("SiglipModel", "SiglipVisionModel", str),
    "T5": ("T5ForConditionalGeneration", "T5EncoderModel", str),
    "Llama": ("LlamaForCausalLM-untied", "LlamaModel", str),
    "Qwen2.5-VL text": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLTextModel", str),
}


def save_whole(folder: Path, case: str, cls: str, rename: Callable[[str], str] = str, size: str = "20KB") -> Path:
    """A pipeline folder whose component `part` is a whole model, and model_index.json names a class of a part of it."""
    part = folder / "part"
    zoo.CASES[case].build().save_pretrained(part, max_shard_size=size)
    for file in part.glob("*.safetensors"):
        save_file({rename(key): value for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
    index = part / "model.safetensors.index.json"
    if index.exists():
        told = json.loads(index.read_text())
        told["weight_map"] = {rename(key): file for key, file in told["weight_map"].items()}
        index.write_text(json.dumps(told))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "P", "part": ["transformers", cls]}))
    return folder


def load_part(folder: str, cls: str, dtype: torch.dtype | None) -> tuple[list[str], dict[str, int], int]:
    """What differs from `from_pretrained` in any strategy; bytes read in each; the part's bytes in fp32."""
    library = getattr(transformers, cls)
    expected, info = library.from_pretrained(f"{folder}/part", dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    found, read = [], {}
    for strategy in ("direct", "stream", "rank0"):
        loaded, report = metashard.load_component(
            folder,
            "part",
            mesh=cpu_mesh(),
            dtype=dtype,
            load=metashard.LoadPolicy(strategy=strategy),
            output_loading_info=True,
        )
        found += [f"{strategy}: {text}" for text in differences(loaded, expected)]
        if (got := loaded.config.to_dict()) != (want := expected.config.to_dict()):
            found.append(f"{strategy}: config {got}, expected {want}")
        if sorted(report.unexpected) != sorted(info["unexpected_keys"]):
            found.append(f"{strategy}: unexpected {report.unexpected}, expected {info['unexpected_keys']}")
        read[strategy] = sum(rank.bytes_read for rank in report.ranks)
    by_role = metashard.wrap_model(metashard.from_pretrained(library, f"{folder}/part", dtype=dtype), mesh=cpu_mesh())
    found += [f"from_pretrained: {text}" for text in differences(by_role, expected)]
    return found, read, sum(parameter.numel() for parameter in expected.parameters()) * 4


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_a_larger_model_reads_its_own_weights_only(case: str, tmp_path: Path, ranks2: Any) -> None:
    whole, cls, rename = PARTS[case]
    save_whole(tmp_path, whole, cls, rename)
    sizes = [file.stat().st_size for file in (tmp_path / "part").glob("*.safetensors")]
    assert len(sizes) > 1
    for found, read, bytes_of_part in ranks2.run(load_part, str(tmp_path), cls, torch.bfloat16):
        assert found == []
        assert read["direct"] == read["stream"] == read["rank0"] == bytes_of_part < 0.95 * sum(sizes)
    planned = metashard.plan_load(tmp_path, "part", world_size=2, dtype="bfloat16").ranks
    assert {name: sum(rank.bytes_read for rank in ranks) for name, ranks in planned.items()} == read


def test_the_dtype_of_a_part_is_that_of_the_first_file_where_no_config_says_it(tmp_path: Path, ranks2: Any) -> None:
    part = save_whole(tmp_path, "CLIPModel", "CLIPTextModel", size="1GB") / "part"
    config = json.loads((part / "config.json").read_text())
    for told in (config["text_config"], config["vision_config"]):
        told.pop("dtype", None)
    (part / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))  # of the whole, which nobody asks
    tensors = load_file(part / "model.safetensors")
    (part / "model.safetensors").unlink()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {key: first if key.startswith("text_model") else second for key in tensors}
    assert weight_map[min(weight_map)] == second  # the first key is not in the first file
    for name, dtype in ((first, torch.bfloat16), (second, torch.float16)):
        mine = {key: value.to(dtype) for key, value in tensors.items() if weight_map[key] == name}
        save_file(mine, part / name, metadata={"format": "pt"})
    (part / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for found, _, _ in ranks2.run(load_part, str(tmp_path), "CLIPTextModel", None):
        assert found == []


def config_without(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {k: v for k, v in {**config, **changes}.items() if v is not KeyError}


def without_projection(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "text_config": {k: v for k, v in config["text_config"].items() if k != "projection_dim"}}


# case: (class named for the folder of a whole CLIP, the config from the right one, words of the error)
MISFITS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "class of another family": ("T5EncoderModel", dict, r"lacks \d+ of the model's tensors"),
    "a whole of another family": ("SiglipModel", dict, "lacks|the checkpoint has shape"),
    "no width of the projection": ("CLIPTextModelWithProjection", without_projection, "the checkpoint has shape"),
    "no part for the class": ("CLIPTextModel", config_without(text_config=KeyError), "the checkpoint has shape"),
    "a null part": ("CLIPTextModel", config_without(text_config=None), "text_config = None"),
    "a part that is a name": ("CLIPTextModel", config_without(text_config="text.json"), "text_config = 'text.json'"),
}


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("strategy", ["auto", "rank0"])
def test_every_rank_raises_for_a_part_that_is_not_there(case: str, strategy: str, tmp_path: Path, ranks2: Any) -> None:
    cls, change, words = MISFITS[case]
    part = save_whole(tmp_path, "CLIPModel", cls) / "part"
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(change(config)))
    raised = ranks2.run_expecting(metashard.MetaShardError, load_named, str(tmp_path), strategy)
    assert all(re.search(words, str(error)) for error in raised), raised


def load_named(folder: str, strategy: str) -> None:
    metashard.load_component(folder, "part", mesh=cpu_mesh(), load=metashard.LoadPolicy(strategy=strategy))


# --- pipeline folders

# component: (class that model_index.json names, zoo case that is saved there)
COMPONENTS: dict[str, tuple[str, str]] = {
    "text_encoder": ("CLIPTextModel", "CLIPModel"),
    "text_encoder_2": ("CLIPTextModelWithProjection", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("T5EncoderModel", "T5ForConditionalGeneration"),
    "mllm": ("Mistral3ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
}


def load_encoders(folder: str) -> dict[str, list[str]]:
    """Differences of each component, all of them loaded in one call."""
    loaded = metashard.load_components(folder, list(COMPONENTS), mesh=cpu_mesh(), dtype=torch.bfloat16)
    return {
        name: differences(
            loaded[name], getattr(transformers, cls).from_pretrained(f"{folder}/{name}", dtype=torch.bfloat16)
        )
        for name, (cls, _) in COMPONENTS.items()
    }


def test_encoders_of_a_pipeline_folder(tmp_path: Path, ranks2: Any) -> None:
    for name, (_, case) in COMPONENTS.items():
        zoo.CASES[case].build().save_pretrained(tmp_path / name)
    listed = {name: ["transformers", cls] for name, (cls, _) in COMPONENTS.items()}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "SomePipeline", **listed}))
    assert ranks2.run(load_encoders, str(tmp_path)) == [{name: [] for name in COMPONENTS}] * 2


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


SD3 = dict(
    sample_size=8,
    in_channels=4,
    out_channels=4,
    attention_head_dim=8,
    num_attention_heads=4,
    caption_projection_dim=32,
    joint_attention_dim=64,
    pooled_projection_dim=64,
    pos_embed_max_size=8,
    dual_attention_layers=(0,),
)


def loss_of_prompt(transformer: torch.nn.Module, encoder: torch.nn.Module, seed: int) -> tuple[torch.Tensor, ...]:
    """Loss of one prompt, and its embedding."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        prompt = encoder(input_ids=torch.randint(2, 510, (1, 7), generator=draw))
    predicted = transformer(
        hidden_states=torch.randn(1, 4, 8, 8, generator=draw),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=prompt.last_hidden_state,
        pooled_projections=prompt.text_embeds,
    ).sample
    return predicted.square().mean(), prompt.last_hidden_state


def train_beside_encoder(folder: str, offload: bool) -> dict[str, Any]:
    """Two steps on prompts of each rank's own, and the same in one process with the gradients of all ranks averaged."""

    def freeze(module: torch.nn.Module) -> None:
        module.requires_grad_(False)

    encoder = metashard.load_component(
        folder,
        "text_encoder",
        mesh=cpu_mesh(),
        dtype=torch.float32,
        prepare=freeze,
        shard=metashard.ShardPolicy(
            reshard_after_forward=True, offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None
        ),
    )
    transformer = metashard.load_component(folder, "transformer", mesh=cpu_mesh(), dtype=torch.float32)
    alone = transformers.CLIPTextModelWithProjection.from_pretrained(f"{folder}/text_encoder", dtype=torch.float32)
    whole = diffusers.SD3Transformer2DModel.from_pretrained(f"{folder}/transformer", torch_dtype=torch.float32)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (transformer, whole)]
    ranks, equal = dist.get_world_size(), []
    for step in range(2):
        loss, made = loss_of_prompt(transformer, encoder, seed=step * ranks + dist.get_rank())
        loss.backward()
        for rank in range(ranks):
            expected, wanted = loss_of_prompt(whole, alone, seed=step * ranks + rank)
            (expected / ranks).backward()
            if rank == dist.get_rank():
                equal += [torch.equal(made, wanted), torch.allclose(loss, expected, rtol=1e-5)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    apart = [
        name
        for (name, got), want in zip(transformer.named_parameters(), whole.parameters(), strict=True)
        if not torch.allclose(got.full_tensor(), want, rtol=1e-4, atol=1e-6)
    ]
    return {
        "equal": equal,
        "apart": apart,
        "changed": differences(encoder, alone.requires_grad_(False)),
        "grads": [name for name, parameter in encoder.named_parameters() if parameter.grad is not None],
    }


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_a_frozen_encoder_beside_a_transformer_that_trains(offload: bool, tmp_path: Path, ranks2: Any) -> None:
    make_checkpoint.write_pipeline(tmp_path / "sd3", "sd3-small", layers=1, config=SD3, dtype=torch.float32)
    for told in ranks2.run(train_beside_encoder, str(tmp_path / "sd3"), offload):
        assert told == {"equal": [True] * 4, "apart": [], "changed": [], "grads": []}


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
