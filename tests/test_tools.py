"""The tools that make checkpoints, break them, drop them from the page cache, and compare digests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import metashard
from metashard.component import resolve_component
from tools import compare_digests, evict_page_cache, make_checkpoint

from .parity import cpu_mesh
from .ranks import Ranks

# isort: split
# Found by what the tools put on the path; the same objects that they use.
import checkpoint_writer
import preflight
from checkpoint_damage import DAMAGE
from checkpoint_damage import damage as break_it
from memory import Memory
from setting import TINY

BF16 = torch.bfloat16
MIB = 1 << 20
# Billions of parameters, as published.
PUBLISHED = {
    "sd3.5-medium": 2.24,
    "qwen-image": 20.43,
    "wan2.2-a14b": 14.29,
    "wan2.1-t2v-1.3b": 1.42,
    "ltx-2": 18.88,
    "flux": 11.90,
    "hunyuan-video": 12.82,
}
SMALL_WAN: dict[str, Any] = dict(
    num_attention_heads=4, attention_head_dim=24, text_dim=64, freq_dim=32, ffn_dim=128, rope_max_seq_len=32
)


def write_tiny(out: Path, **kwargs: Any) -> make_checkpoint.WrittenPipeline:
    """Two blocks of SD3's kind in several files."""
    return make_checkpoint.write_pipeline(
        out, "sd3-small", **{"layers": 2, "config": TINY, "max_shard_bytes": 60_000, **kwargs}
    )


def one_line(captured: Any) -> str:
    """The one line that a tool has written on stderr."""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.strip()


# ---- families -------------------------------------------------------------------------------------------------------


def test_families_have_the_published_number_of_parameters() -> None:
    counted = {}
    for name in PUBLISHED:
        family = make_checkpoint.FAMILIES[name]
        with torch.device("meta"):
            model = getattr(diffusers, family.cls)(**family.config_for(None))
        counted[name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 2)
    assert counted == PUBLISHED
    assert set(make_checkpoint.FAMILIES) == {*PUBLISHED, "sd3-small"}


def test_depth_scales_all_lists_of_blocks() -> None:
    flux, sd3 = make_checkpoint.FAMILIES["flux"], make_checkpoint.FAMILIES["sd3.5-medium"]
    assert make_checkpoint.layers_at("flux", 0.1) == 2
    assert flux.config_for(2)["num_single_layers"] == 4
    assert sd3.config_for(3)["dual_attention_layers"] == (0, 1, 2)
    assert make_checkpoint.layers_at("wan2.2-a14b", 0.001) == 1


def test_two_experts_variants_and_the_pipeline_index(tmp_path: Path) -> None:
    """As the libraries read them; both experts have weights of their own."""
    for variant in (None, "fp16"):
        written = make_checkpoint.write_pipeline(
            tmp_path, "wan2.2-a14b", layers=1, config=SMALL_WAN, variant=variant, max_shard_bytes=100_000
        )
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["boundary_ratio"] == 0.875
    assert written.components == ("transformer", "transformer_2")
    values = []
    for component in written.components:
        for variant in (None, "fp16"):
            found = resolve_component(tmp_path, component, variant=variant)
            assert len(found.files) > 1
            assert index[component] == [found.library, found.class_name]
            values.append(load_file(tmp_path / component / found.files[0]))
    first, first_variant, second, _ = values
    assert all(torch.equal(first[key], first_variant[key]) for key in first)
    assert not torch.equal(first["patch_embedding.weight"], second["patch_embedding.weight"])
    diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "transformer_2", torch_dtype=BF16)


def test_values_are_the_same_at_any_file_size_and_depth(tmp_path: Path) -> None:
    everything: list[dict[str, torch.Tensor]] = []
    for number, options in enumerate(({}, {"max_shard_bytes": 10**9}, {"layers": 3}, {"seed": 1})):
        held: dict[str, torch.Tensor] = {}
        for file in write_tiny(tmp_path / str(number), **options).files:
            held |= load_file(file)
        everything.append(held)
    base, one_file, deeper, other_seed = everything
    key = "transformer_blocks.0.attn.to_q.weight"
    assert base.keys() == one_file.keys() < deeper.keys()
    assert all(torch.equal(base[name], one_file[name]) for name in base)
    assert torch.equal(base[key], deeper[key])
    assert not torch.equal(base[key], other_seed[key])


# ---- the stream -----------------------------------------------------------------------------------------------------


def test_memory_of_writing_is_that_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the writer's own counter, at a piece that is far smaller than the tensors, for many of them."""
    monkeypatch.setattr(checkpoint_writer, "PIECE", 1 << 9)
    small, large = write_tiny(tmp_path / "small", layers=1), write_tiny(tmp_path / "large", layers=8)
    assert large.weight_bytes > 3 * small.weight_bytes > 20 * small.peak_buffer_bytes
    piece = (1 << 9) * (4 + 2)  # as drawn in fp32, and as written in bf16
    assert small.peak_buffer_bytes == large.peak_buffer_bytes == piece


def test_memory_of_the_process_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    write_tiny(tmp_path / "first")  # imports, the allocator's own
    wide = dict(TINY, num_attention_heads=16, attention_head_dim=128, caption_projection_dim=2048)
    with Memory() as memory:
        written = write_tiny(tmp_path / "wide", layers=1, config=wide, max_shard_bytes=10**9)
    assert written.weight_bytes > 256 * MIB
    assert memory.peak_host < 64 * MIB, memory.peak_host


# ---- adapters -------------------------------------------------------------------------------------------------------


def lora_values(folder: str, sources: list[str]) -> list[dict[str, torch.Tensor]]:
    """What each adapter's parameters are once it is loaded, by the end of their names; runs on the ranks."""
    found = []
    for source in sources:
        module = metashard.load_component(folder, "transformer", mesh=cpu_mesh(), dtype=BF16, lora=source)
        values = {name: p.full_tensor() for name, p in module.named_parameters() if ".lora_" in name}
        found.append({name.removeprefix("base_model.model."): value.float() for name, value in values.items()})
    return found


def test_adapters_load_from_a_peft_folder_and_from_a_diffusers_file(ranks1: Ranks, tmp_path: Path) -> None:
    written = write_tiny(tmp_path, lora_rank=3)
    assert written.lora == tmp_path / "lora"
    sources = [str(written.lora / f"transformer-{form}") for form in ("peft", "diffusers")]
    [(peft, from_diffusers)] = ranks1.run(lora_values, str(tmp_path), sources)
    assert len(peft) > 8
    assert peft.keys() == from_diffusers.keys()
    assert all(torch.equal(peft[name], from_diffusers[name]) for name in peft)
    assert all(value.abs().sum() > 0 and 3 in value.shape for value in peft.values())


def test_the_second_expert_has_an_adapter_of_its_own(tmp_path: Path) -> None:
    written = make_checkpoint.write_pipeline(tmp_path, "wan2.2-a14b", layers=1, config=SMALL_WAN, lora_rank=2)
    assert written.lora is not None
    files = [written.lora / f"{name}-diffusers/pytorch_lora_weights.safetensors" for name in written.components]
    first, second = map(load_file, files)
    assert first.keys() == second.keys()
    assert all(key.startswith("transformer.blocks.0.") for key in first)
    assert not any(torch.equal(first[key], second[key]) for key in first)


# ---- damage ---------------------------------------------------------------------------------------------------------


def refusals(folders: list[str]) -> list[str]:
    """What kind of error each folder gets, and where it points; runs on the ranks."""
    told = []
    for folder in folders:
        try:
            metashard.load_component(folder, "transformer", mesh=cpu_mesh(), dtype=BF16)
        except metashard.MetaShardError as error:
            told.append(f"{type(error).__name__} {error.file}")
        else:
            told.append("loaded")
    return told


def test_every_kind_of_damage_is_refused(ranks1: Ranks, tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole").path
    for kind in DAMAGE:
        shutil.copytree(whole, tmp_path / kind)
        assert break_it(tmp_path / kind / "transformer", kind).parent == tmp_path / kind / "transformer"
    [told] = ranks1.run(refusals, [str(tmp_path / kind) for kind in ("whole", *DAMAGE)])
    verdicts = dict(zip(("whole", *DAMAGE), told, strict=True))
    assert verdicts.pop("whole") == "loaded"
    classes = {kind: verdict.partition(" ")[0] for kind, verdict in verdicts.items()}
    assert classes == {kind: {"config": "ComponentError"}.get(kind, "CheckpointError") for kind in DAMAGE}


def test_damage_that_needs_an_index_says_so(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, max_shard_bytes=10**9).path / "transformer"
    with pytest.raises(preflight.UsageError, match="--max-shard-size"):
        break_it(folder, "wrong-index")


# ---- make_checkpoint's command line ---------------------------------------------------------------------------------


def test_the_command_line_writes_and_damages(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(tmp_path), "--family", "wan2.1-t2v-1.3b", "--scale", "0.01", "--dtype", "fp16"]
    config = make_checkpoint.FAMILIES["wan2.1-t2v-1.3b"].config
    monkeypatch.setitem(config, "num_attention_heads", 1)
    monkeypatch.setitem(config, "ffn_dim", 64)
    assert make_checkpoint.main([*arguments, "--lora-rank", "2", "--damage", "truncated"]) == 0
    out = capsys.readouterr().out
    assert "transformer-diffusers, transformer-peft" in out
    assert "damaged (truncated)" in out
    with pytest.raises(metashard.CheckpointError, match="truncated"):
        metashard.plan_load(tmp_path, "transformer", world_size=2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--family", "sd9"], "unknown family 'sd9'"),
        (["--family", "flux", "--layers", "0"], "layers must be at least 1"),
        (["--family", "flux", "--scale", "1.5"], "--scale is a part of the published depth"),
        (["--family", "flux", "--max-shard-size", "big"], "bad size 'big'"),
        (["--family", "flux", "--lora-rank", "0"], "rank must be at least 1"),
        (["--family", "flux", "--damage", "rust"], "unknown damage 'rust'"),
        (["--family", "flux"], "too little disk: 23.8 GB to write"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    flags: list[str], says: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 0, 10**9))
    out = tmp_path / "out"
    assert make_checkpoint.main([str(out), *flags]) == 2
    line = one_line(capsys.readouterr())
    assert line.startswith("make_checkpoint: ")
    assert says in line
    assert not out.exists()


def test_what_is_there_is_only_replaced_when_asked(tmp_path: Path) -> None:
    before = write_tiny(tmp_path).files
    with pytest.raises(preflight.UsageError, match="--overwrite"):
        write_tiny(tmp_path)
    after = write_tiny(tmp_path, max_shard_bytes=10**9, overwrite=True).files
    assert not any(path.exists() for path in before)
    with safe_open(str(after[0]), framework="pt") as file:
        assert len(list(file.keys())) > 10


# ---- the page cache -------------------------------------------------------------------------------------------------


def test_evicting_tells_what_is_left(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).write_bytes(bytes(300_000))
    assert evict_page_cache.main([str(tmp_path / "x"), str(tmp_path / "a")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "0.3 MB in 1 file(s), 100.0% cached before, 0.0% left" in first
    assert "0.6 MB in 2 file(s), 100.0% cached before, 0.0% left" in second


def test_files_that_stay_are_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")
    monkeypatch.setattr(evict_page_cache, "evict", lambda files: 0.5)
    assert evict_page_cache.main([str(tmp_path)]) == 1


def test_eviction_that_cannot_be_is_one_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x").write_bytes(b"x")
    for path, says in (("nothing", "no such file or folder"), ("empty", "no files with anything in them")):
        assert evict_page_cache.main([str(tmp_path / path)]) == 2
        assert says in one_line(capsys.readouterr())
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("os.access", lambda path, mode: mode == 4)  # readable, as somebody else's files are
    assert evict_page_cache.main([str(tmp_path / "x")]) == 2
    assert "no permission to evict" in one_line(capsys.readouterr())


# ---- digests --------------------------------------------------------------------------------------------------------

ONE, TWO, THREE = ("0" * 63 + digit for digit in "123")


def results(path: Path, digests: Any) -> str:
    path.write_text(json.dumps({"digests": digests}))
    return str(path)


def test_digests_of_two_runs(tmp_path: Path, capsys: Any) -> None:
    a = results(tmp_path / "a", {"before": {"2": [ONE, TWO], "1": [THREE]}, "direct": {"2": [ONE, TWO]}})
    same = results(tmp_path / "b", {"direct": {"2": [ONE, TWO]}, "stream": {"2": [ONE, THREE]}})
    other = results(tmp_path / "c", {"direct": {"2": [ONE, THREE]}})
    assert compare_digests.main([a, same]) == 0
    assert capsys.readouterr().out == "direct, 2 rank(s): equal\n"
    assert compare_digests.main([a, other]) == 1
    assert capsys.readouterr().out == "direct, 2 rank(s): DIFFERS on rank(s) 1\n"
    assert compare_digests.main([a, same, "--across"]) == 1  # stream ended with something else
    assert "B's stream and A's before, 2 rank(s): DIFFERS on rank(s) 1" in capsys.readouterr().out
    assert compare_digests.main([a, a, "--across"]) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "has no `digests`"),
        ('{"digests": {"direct": {"2": ["abc", "def"]}}}', "expected a list of one sha256 a rank"),
        (json.dumps({"digests": {"direct": {"2": [ONE]}}}), "expected a list of one sha256 a rank"),
        (json.dumps({"digests": {"direct": [ONE]}}), "expected a list of one sha256 a rank"),
        (json.dumps({"digests": {"direct": {"1": [ONE]}}}), "nothing to compare"),
    ],
)
def test_files_without_digests_to_compare_are_one_line(
    content: str | None, says: str, tmp_path: Path, capsys: Any
) -> None:
    good = results(tmp_path / "good", {"direct": {"2": [ONE, TWO]}})
    if content is not None:
        (tmp_path / "bad").write_text(content)
    assert compare_digests.main([good, str(tmp_path / "bad")]) == 2
    assert says in one_line(capsys.readouterr())
