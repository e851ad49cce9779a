"""Folders and hub ids: the one component that is meant, the files its own library would load, and nothing else."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from metashard.component import Component, resolve_component
from metashard.errors import CheckpointError, ComponentError

D = "diffusion_pytorch_model"
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [8], "norm_num_groups": 2}
BERT = {"architectures": ["BertModel"], "model_type": "bert"}
PIPELINE = {
    "_class_name": "SomePipeline",
    "_diffusers_version": "0.42.1",
    "boundary_ratio": 0.9,
    "sizes": [1, 2],
    "force": True,
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "image_encoder": [None, None],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "custom": ["my_repo.code", "MyModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "BertModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "AutoencoderKL"],
    "transformer_2": ["diffusers", "AutoencoderKL"],
}


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def weights(path: Path, **tensors: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors or {"w": torch.zeros(2)}, path)


def index(path: Path, **weight_map: str) -> None:
    write(path, {"metadata": {"total_size": 0}, "weight_map": weight_map})


def model(folder: Path, config: dict[str, Any], *files: str) -> Path:
    """A folder with these files; a weight file holds one tensor, an index maps it to the first shard named."""
    write(folder / "config.json", config)
    shard = next((name for name in files if "-of-" in name), "")
    for name in files:
        if name.endswith(".json"):
            index(folder / name, w=shard)
        elif name.endswith(".safetensors"):
            weights(folder / name)
        else:
            write(folder / name, "x")
    return folder


def pipeline_folder(root: Path) -> Path:
    write(root / "model_index.json", PIPELINE)
    model(root / "transformer", VAE, f"{D}.safetensors")
    model(root / "text_encoder", BERT, "model.safetensors")
    write(root / "scheduler" / "scheduler_config.json", {"_class_name": "FlowMatchEulerDiscreteScheduler"})
    return root


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return pipeline_folder(tmp_path / "pipeline")


class TestWhichComponent:
    def test_a_named_one(self, pipeline: Path) -> None:
        import diffusers
        import transformers

        found = resolve_component(pipeline, "transformer")
        assert (found.name, found.library, found.class_name) == ("transformer", "diffusers", "AutoencoderKL")
        assert found.folder == pipeline / "transformer"
        assert found.files == (f"{D}.safetensors",)
        assert found.config == VAE
        assert (found.weight_map, found.format, found.variant, found.quantization) == (None, "safetensors", None, None)
        assert found.cls is diffusers.AutoencoderKL
        assert resolve_component(pipeline, "text_encoder").cls is transformers.BertModel
        assert pickle.loads(pickle.dumps(found)) == found

    def test_only_the_named_one_is_looked_at(self, pipeline: Path) -> None:
        shutil.rmtree(pipeline / "text_encoder")
        write(pipeline / "scheduler" / "scheduler_config.json", "garbage")
        assert resolve_component(pipeline, "transformer").name == "transformer"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (None, "say which component"),
            ("image_encoder", "is null in model_index.json"),
            ("unet", "no component 'unet'"),
            ("boundary_ratio", "no component 'boundary_ratio'"),
            ("sizes", "no component 'sizes'"),
            ("_class_name", "no component '_class_name'"),
            ("scheduler", "has no weights to shard"),
            ("tokenizer", "has no weights to shard"),
            ("feature_extractor", "has no weights to shard"),
            ("safety_checker", "does not load"),
            ("custom", "does not load"),
        ],
    )
    def test_the_error_lists_those_there_are(self, pipeline: Path, name: str | None, message: str) -> None:
        with pytest.raises(ComponentError, match=message) as caught:
            resolve_component(pipeline, name)
        assert "There are: text_encoder, transformer, transformer_2." in str(caught.value)
        assert caught.value.expected == ["text_encoder", "transformer", "transformer_2"]
        assert caught.value.key == name
        assert caught.value.phase == "resolve"

    def test_a_listed_one_whose_folder_is_missing(self, pipeline: Path) -> None:
        with pytest.raises(ComponentError, match=r"lists transformer_2 \(AutoencoderKL\), but .* no such folder"):
            resolve_component(pipeline, "transformer_2")

    @pytest.mark.parametrize(
        "name", ["../pipeline/transformer", "transformer/..", "/etc", "", "a//b", "..", "a\\b", "a\0"]
    )
    def test_a_name_never_leads_out_of_the_folder(self, pipeline: Path, name: str) -> None:
        (pipeline / "model_index.json").unlink()
        with pytest.raises(ComponentError, match="not a name inside the folder"):
            resolve_component(pipeline, name)

    @pytest.mark.parametrize("name", ["x" * 300, "\ud800", "a\0b", "a\x1bb", "../../etc", "/etc"])
    def test_odd_names_in_the_pipeline_index_are_told_and_not_followed(self, pipeline: Path, name: str) -> None:
        write(pipeline / "model_index.json", {**PIPELINE, name: ["diffusers", "SomeScheduler"], "x": [name, name]})
        assert resolve_component(pipeline, "transformer").name == "transformer"
        for asked in ("unet", "x"):
            with pytest.raises(ComponentError) as caught:
                resolve_component(pipeline, asked)
            assert str(caught.value).encode("utf-8")
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 1500

    def test_a_name_longer_than_any_folders(self, pipeline: Path) -> None:
        (pipeline / "model_index.json").unlink()
        with pytest.raises(ComponentError, match="no folder"):
            resolve_component(pipeline, "x" * 300)

    def test_a_file_name_that_is_not_utf8_beside_the_weights(self, tmp_path: Path, caplog: Any) -> None:
        model(tmp_path, VAE, f"{D}.safetensors")
        (tmp_path / os.fsdecode(b"\xff.safetensors")).write_bytes(b"")
        with caplog.at_level(logging.WARNING):
            assert resolve_component(tmp_path).files == (f"{D}.safetensors",)
        assert "udcff.safetensors" in caplog.text
        assert caplog.text.encode("utf-8")

    def test_a_folder_that_is_one_model(self, tmp_path: Path) -> None:
        found = resolve_component(model(tmp_path / "m", VAE, f"{D}.safetensors"))
        assert (found.name, found.library, found.class_name) == (None, "diffusers", "AutoencoderKL")

    def test_subfolders_without_a_pipeline_index(self, tmp_path: Path) -> None:
        model(tmp_path / "vae", VAE, f"{D}.safetensors")
        model(tmp_path / "a" / "b", BERT, "model.safetensors")
        assert resolve_component(tmp_path, "vae").class_name == "AutoencoderKL"
        assert resolve_component(tmp_path, "a/b").class_name == "BertModel"
        with pytest.raises(ComponentError, match="Components in it: vae"):
            resolve_component(tmp_path)
        with pytest.raises(ComponentError, match=r"no folder 'c'.* There are: vae"):
            resolve_component(tmp_path, "c")

    def test_the_pipeline_index_wins_over_a_config_beside_it(self, pipeline: Path) -> None:
        model(pipeline, BERT, "model.safetensors")
        assert resolve_component(pipeline, "transformer").class_name == "AutoencoderKL"
        with pytest.raises(ComponentError, match="say which component"):
            resolve_component(pipeline)

    @pytest.mark.parametrize(
        ("config", "library", "name"),
        [
            (VAE, "diffusers", "AutoencoderKL"),
            ({**VAE, **BERT}, "diffusers", "AutoencoderKL"),
            (BERT, "transformers", "BertModel"),
            ({"model_type": "bert"}, "transformers", "BertModel"),
            ({"model_type": "t5", "architectures": None}, "transformers", "T5Model"),
            ({"model_type": "t5", "architectures": []}, "transformers", "T5Model"),
        ],
    )
    def test_the_class_of_one_model(self, tmp_path: Path, config: dict[str, Any], library: str, name: str) -> None:
        found = resolve_component(model(tmp_path, config, f"{D}.safetensors", "model.safetensors"))
        assert (found.library, found.class_name) == (library, name)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "names no class"),
            ({"model_type": "nothing_known"}, "names no class"),
            ({"architectures": [7]}, "names no class"),
            ({"_class_name": "os.system"}, "names no class"),
            ({"_class_name": "DDIMScheduler"}, "has no weights"),
            ("[1]", "not a JSON object"),
            ("garbage", "not JSON"),
            ("[" * 100_000, "nested too deeply"),
            ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ],
    )
    def test_a_config_that_names_none(self, tmp_path: Path, config: Any, message: str) -> None:
        write(tmp_path / "config.json", config)
        with pytest.raises(ComponentError, match=message) as caught:
            resolve_component(tmp_path)
        assert caught.value.file == str(tmp_path / "config.json")

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ([], "is not a model"),
            (["scheduler_config.json"], "no weights to shard"),
            (["tokenizer_config.json"], "no weights to shard"),
            (["adapter_config.json", "adapter_model.safetensors"], "pass it as `lora=`"),
        ],
    )
    def test_a_folder_that_is_no_model(self, tmp_path: Path, files: list[str], message: str) -> None:
        for name in files:
            write(tmp_path / name, "{}")
        with pytest.raises(ComponentError, match=message):
            resolve_component(tmp_path)

    def test_a_config_for_each_version_is_not_followed_in_silence(self, tmp_path: Path) -> None:
        """transformers would take the other file; diffusers knows no such key."""
        files = {"configuration_files": ["config.4.0.0.json"]}
        model(tmp_path / "bert", {**BERT, **files}, "model.safetensors")
        with pytest.raises(ComponentError, match=r"configuration_files.* Save the right one as config\.json"):
            resolve_component(tmp_path / "bert")
        model(tmp_path / "vae", {"_class_name": "AutoencoderKL", **files}, "diffusion_pytorch_model.safetensors")
        assert resolve_component(tmp_path / "vae").class_name == "AutoencoderKL"

    def test_a_file_or_nothing_in_place_of_a_folder(self, tmp_path: Path) -> None:
        weights(tmp_path / "flux.safetensors")
        with pytest.raises(ComponentError, match="is a file"):
            resolve_component(tmp_path / "flux.safetensors")
        with pytest.raises(ComponentError, match="does not exist"):
            resolve_component(tmp_path / "flux")


class TestClass:
    def component(self, library: str, name: str, **config: Any) -> Component:
        return Component(Path("x"), None, library, name, config, (), None, "safetensors")

    @pytest.mark.parametrize(
        ("library", "name", "config", "message"),
        [
            ("diffusers", "FutureTransformer", {}, "has no class FutureTransformer. Is a newer diffusers needed"),
            ("transformers", "MyModel", {"auto_map": {"AutoModel": "my.MyModel"}}, "which metashard never runs"),
            ("diffusers", "DDIMScheduler", {}, "not a model with weights"),
            ("diffusers", "logging", {}, "not a model with weights"),
            ("transformers", "BertConfig", {}, "not a model with weights"),
        ],
    )
    def test_what_is_no_model(self, library: str, name: str, config: Any, message: str) -> None:
        with pytest.raises(ComponentError, match=re.escape(message)):
            _ = self.component(library, name, **config).cls

    @pytest.mark.parametrize(
        ("config", "method"),
        [
            ({}, None),
            ({"quantization_config": None}, None),
            ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
            ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
            ({"quantization_config": {}}, "unknown"),
            ({"quantization_config": "fp8"}, "unknown"),
            ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
            ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "gptq"),
        ],
    )
    def test_quantization_is_named(self, config: Any, method: str | None) -> None:
        assert self.component("diffusers", "X", **config).quantization == method


S1, S2 = "-00001-of-00002", "-00002-of-00002"
# library, files there, variant, files that are loaded; each checked against what the library itself loads
LAYOUTS = {
    "diffusers single": (VAE, [f"{D}.safetensors"], None, f"{D}.safetensors"),
    "diffusers index": (VAE, [f"{D}{S1}.safetensors", f"{D}.safetensors.index.json"], None, f"{D}{S1}.safetensors"),
    "diffusers prefers the index": (
        VAE,
        [f"{D}.safetensors", f"{D}{S1}.safetensors", f"{D}.safetensors.index.json"],
        None,
        f"{D}{S1}.safetensors",
    ),
    "diffusers variant": (VAE, [f"{D}.safetensors", f"{D}.fp16.safetensors"], "fp16", f"{D}.fp16.safetensors"),
    "diffusers plain beside a variant": (VAE, [f"{D}.safetensors", f"{D}.fp16.safetensors"], None, f"{D}.safetensors"),
    "diffusers variant index": (
        VAE,
        [f"{D}.fp16{S1}.safetensors", f"{D}.safetensors.index.fp16.json"],
        "fp16",
        f"{D}.fp16{S1}.safetensors",
    ),
    "diffusers legacy variant index": (
        VAE,
        [f"{D}{S1}.fp16.safetensors", f"{D}.safetensors.fp16.index.json"],
        "fp16",
        f"{D}{S1}.fp16.safetensors",
    ),
    "transformers single": (BERT, ["model.safetensors", "pytorch_model.bin"], None, "model.safetensors"),
    "transformers index": (
        BERT,
        [f"model{S1}.safetensors", "model.safetensors.index.json"],
        None,
        f"model{S1}.safetensors",
    ),
    "transformers prefers the single file": (
        BERT,
        ["model.safetensors", f"model{S1}.safetensors", "model.safetensors.index.json"],
        None,
        "model.safetensors",
    ),
    "transformers variant": (BERT, ["model.fp16.safetensors", "model.safetensors"], "fp16", "model.fp16.safetensors"),
    "transformers variant index": (
        BERT,
        [f"model.fp16{S1}.safetensors", "model.safetensors.index.fp16.json"],
        "fp16",
        f"model.fp16{S1}.safetensors",
    ),
    "transformers file by name": (
        {**BERT, "transformers_weights": "other.safetensors"},
        ["model.safetensors", "other.safetensors"],
        None,
        "other.safetensors",
    ),
}


class TestWeightFiles:
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_the_file_is_the_one_the_library_loads(self, tmp_path: Path, name: str) -> None:
        config, files, variant, expected = LAYOUTS[name]
        root = model(tmp_path / "m", config, *files)
        found = resolve_component(root, variant=variant)
        assert found.files == (expected,)
        assert found.variant == variant
        assert (found.weight_map is not None) == ("-of-" in expected)
        assert library_loads(root, found, tmp_path) == expected

    @pytest.mark.parametrize(
        ("config", "files"),
        [
            (VAE, [f"{D}.bin"]),
            (VAE, [f"{D}{S1}.bin", f"{D}.bin.index.json"]),
            (BERT, ["pytorch_model.bin"]),
            (BERT, [f"pytorch_model{S1}.bin", "pytorch_model.bin.index.json"]),
        ],
    )
    def test_pickles_need_the_callers_word(self, tmp_path: Path, config: Any, files: list[str]) -> None:
        model(tmp_path, config, *files)
        with pytest.raises(ComponentError, match=r"pickles only.* allow_pickle=True"):
            resolve_component(tmp_path)
        found = resolve_component(tmp_path, allow_pickle=True)
        assert (found.files, found.format) == ((files[0],), "pickle")

    def test_pickles_are_never_preferred(self, tmp_path: Path) -> None:
        model(tmp_path, VAE, f"{D}.safetensors", f"{D}.bin")
        assert resolve_component(tmp_path, allow_pickle=True).format == "safetensors"

    @pytest.mark.parametrize(
        ("files", "variant", "message"),
        [
            ([f"{D}.fp16.safetensors"], "bf16", "no weights of variant 'bf16'.* Variants there: 'fp16'."),
            ([f"{D}.safetensors"], "fp16", "Variants there: None"),
            ([f"{D}.fp16.safetensors", f"{D}.safetensors"], "x", "Variants there: 'fp16', None"),
            ([f"{D}.non_ema{S1}.safetensors"], None, "no weights without a variant.* 'non_ema'"),
            ([f"{D}{S1}.fp16.safetensors"], None, "Variants there: 'fp16'"),
            ([f"{D}.safetensors"], "../x", "not part of a file name"),
            ([], None, "has no weights that diffusers would load.* got none"),
            (["flux1-dev.safetensors"], None, "got flux1-dev.safetensors"),
            (["model.gguf"], None, "got model.gguf"),
            (["adapter_config.json", "adapter_model.safetensors"], None, "pass it as `lora=`"),
        ],
    )
    def test_no_such_weights(self, tmp_path: Path, files: list[str], variant: str | None, message: str) -> None:
        model(tmp_path, VAE, *files)
        with pytest.raises(ComponentError, match=message):
            resolve_component(tmp_path, variant=variant)

    def test_a_stale_file_is_named_in_a_warning(self, tmp_path: Path, caplog: Any) -> None:
        shards = [f"{D}{S1}.safetensors", f"{D}{S2}.safetensors", f"{D}.fp16.safetensors", f"{D}.fp16{S1}.safetensors"]
        model(tmp_path, VAE, *shards, f"{D}.safetensors.index.json", f"{D}.safetensors", "old.safetensors")
        with caplog.at_level(logging.WARNING):
            assert resolve_component(tmp_path).files == (shards[0],)
        for name in (f"{D}.safetensors", shards[1], "old.safetensors"):
            assert name in caplog.text.partition("not used: ")[2]
        assert "fp16" not in caplog.text

    def test_no_warning_where_there_is_nothing_stale(self, tmp_path: Path, caplog: Any) -> None:
        model(tmp_path, VAE, f"{D}.safetensors", f"{D}.fp16.safetensors", f"{D}.bin")
        resolve_component(tmp_path)
        resolve_component(tmp_path, variant="fp16")
        assert not caplog.text


def library_loads(root: Path, found: Component, scratch: Path) -> str:
    """Which file the library's own from_pretrained reads: each file of the folder gets its own value."""
    if found.library == "diffusers":
        cls, key = found.cls, "quant_conv.bias"
        real = cls.from_config({**found.config, "latent_channels": 1})
    else:
        cls, key = found.cls, "embeddings.LayerNorm.bias"
        sizes = dict(vocab_size=4, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        real = cls(cls.config_class(**sizes, max_position_embeddings=4))
    real.save_pretrained(scratch / "real")
    config = json.loads((scratch / "real" / "config.json").read_text())
    config |= {name: found.config[name] for name in ("transformers_weights",) if name in found.config}
    write(root / "config.json", config)
    state = load_file(next((scratch / "real").glob("*.safetensors")))
    names = sorted(path.name for path in root.iterdir() if path.suffix == ".safetensors")
    for value, name in enumerate(names):
        save_file({**state, key: torch.full_like(state[key], value)}, root / name, metadata={"format": "pt"})
    for path in root.glob("*.json"):
        if "index" in path.name:
            index(path, **dict.fromkeys(state, next(iter(json.loads(path.read_text())["weight_map"].values()))))
    loaded = cls.from_pretrained(root, variant=found.variant, local_files_only=True)
    return names[int(loaded.state_dict()[key].flatten()[0])]


class TestIndex:
    NAME = f"{D}.safetensors.index.json"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{}", "no `weight_map`"),
            ({"weight_map": {}}, "no `weight_map`"),
            ({"weight_map": ["a"]}, "no `weight_map`"),
            ({"weight_map": {"a": 1}}, "no `weight_map`"),
            ({"weight_map": {"a": None}}, "no `weight_map`"),
            ("[]", "not a JSON object"),
            ("", "not JSON"),
            ("[" * 100_000, "nested too deeply"),
            ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "given twice"),
            ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            ({"weight_map": {"a": "../x.safetensors"}}, "not a plain file name"),
            ({"weight_map": {"a": "/etc/passwd"}}, "not a plain file name"),
            ({"weight_map": {"a": "sub/x.safetensors"}}, "not a plain file name"),
            ({"weight_map": {"a": "..\\x.safetensors"}}, "not a plain file name"),
            ({"weight_map": {"a": ".."}}, "not a plain file name"),
            ({"weight_map": {"a": ""}}, "not a plain file name"),
            ({"weight_map": {"a": "x\u0000y"}}, "not a plain file name"),
            ({"weight_map": {"a": "\ud800.safetensors"}}, "not a plain file name"),
            ({"weight_map": {"a": "x" * 300}}, "not a plain file name"),
            ({"metadata": [[]] * 9, "weight_map": {"a": [[]]}}, "no `weight_map`"),
            ('{"weight_map": {"a": ' + "[" * 70 + "]" * 70 + "}}", "nested too deeply"),
        ],
    )
    def test_what_is_no_index(self, tmp_path: Path, content: Any, message: str) -> None:
        write(tmp_path / "x.safetensors", "outside")
        root = model(tmp_path / "m", VAE)
        write(root / self.NAME, content)
        with pytest.raises(CheckpointError, match=message) as caught:
            resolve_component(root)
        assert caught.value.file == str(root / self.NAME)
        assert caught.value.phase == "resolve"

    def test_a_shard_that_is_not_there(self, tmp_path: Path) -> None:
        index(model(tmp_path, VAE) / self.NAME, a="gone.safetensors")
        with pytest.raises(CheckpointError, match=f"gone.safetensors: named by {self.NAME}, but not in") as caught:
            resolve_component(tmp_path)
        assert caught.value.file == str(tmp_path / "gone.safetensors")

    def test_a_directory_in_place_of_the_index(self, tmp_path: Path) -> None:
        (model(tmp_path, VAE) / self.NAME).mkdir()
        with pytest.raises(CheckpointError, match="a directory, not a file"):
            resolve_component(tmp_path)


class TestLinks:
    @pytest.mark.parametrize("name", [f"{D}.safetensors", "config.json"])
    def test_a_link_out_of_the_folder_is_refused(self, tmp_path: Path, name: str) -> None:
        root = model(tmp_path / "m", VAE, f"{D}.safetensors")
        shutil.move(root / name, tmp_path / "elsewhere")
        (root / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            resolve_component(root)

    def test_a_linked_component_folder_is_refused_by_that_name_only(self, pipeline: Path, tmp_path: Path) -> None:
        outside = model(tmp_path / "tuned", VAE, f"{D}.safetensors")
        (pipeline / "transformer_2").symlink_to(outside)
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            resolve_component(pipeline, "transformer_2")
        assert resolve_component(pipeline / "transformer_2").class_name == "AutoencoderKL"

    def test_links_inside_and_a_link_to_the_folder_are_fine(self, pipeline: Path, tmp_path: Path) -> None:
        (pipeline / "transformer_2").symlink_to(pipeline / "transformer")
        assert resolve_component(pipeline, "transformer_2").files
        (tmp_path / "link").symlink_to(pipeline)
        assert resolve_component(tmp_path / "link", "transformer").files

    @pytest.mark.parametrize("within", ["ab", "cd", ""])
    def test_the_store_that_all_repositories_of_a_hub_cache_share(self, tmp_path: Path, within: str) -> None:
        """huggingface_hub 2 can keep a blob at `blobs/ab/ab1...` of the cache; nothing else there counts."""
        source = model(tmp_path / "source", VAE, f"{D}.safetensors")
        snapshot = hub_cache(tmp_path / "hub", source)
        blob = Path(os.path.realpath(snapshot / f"{D}.safetensors"))
        stored = tmp_path / "hub" / "blobs" / within / ("ab" * 32)
        stored.parent.mkdir(parents=True)
        shutil.move(blob, stored)
        blob.symlink_to(os.path.relpath(stored, blob.parent))
        if within == "ab":
            assert resolve_component(snapshot).files == (f"{D}.safetensors",)
        else:
            with pytest.raises(CheckpointError, match="leads out of the folder"):
                resolve_component(snapshot)

    def test_a_snapshot_that_leads_out_of_its_cache_is_refused(self, tmp_path: Path) -> None:
        snapshot = hub_cache(tmp_path / "hub", model(tmp_path / "source", VAE, f"{D}.safetensors"))
        other = hub_cache(tmp_path / "hub", model(tmp_path / "more", VAE, f"{D}.safetensors"), "org/other")
        (snapshot / f"{D}.safetensors").unlink()
        (snapshot / f"{D}.safetensors").symlink_to(other / f"{D}.safetensors")
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            resolve_component(snapshot)

    def test_another_blobs_folder_is_not_the_hubs(self, tmp_path: Path) -> None:
        weights(tmp_path / "blobs" / "w")
        root = model(tmp_path / "snapshots" / "m", VAE)
        (root / f"{D}.safetensors").symlink_to(tmp_path / "blobs" / "w")
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            resolve_component(root)


SHA = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(cache: Path, source: Path, repo: str = "org/name", only: str = "*") -> Path:
    """A local cache in the hub's layout: files under blobs, links to them in the snapshot of one commit."""
    home = cache / f"models--{repo.replace('/', '--')}"
    write(home / "refs" / "main", SHA)
    (home / "snapshots" / SHA).mkdir(parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        link = home / "snapshots" / SHA / name
        if path.is_file() and fnmatch.fnmatch(name, only) and not link.exists():
            blob = home / "blobs" / name.replace("/", "_")
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(path, blob)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return home / "snapshots" / SHA


def test_resolving_imports_no_library(pipeline: Path) -> None:
    code = (
        "import sys; from metashard.component import resolve_component; from pathlib import Path\n"
        f"resolve_component(Path({str(pipeline)!r}), 'transformer')\n"
        "print([name for name in ('diffusers', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
