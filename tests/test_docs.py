"""README and docs/: every block of code in them runs, and every command in them is one that would be understood.

Python blocks of a page run one after another in one namespace, on two ranks, over a small checkpoint at the paths that
the page names ("cuda" becomes "cpu"). What a reader is meant to bring (a mesh, a model of his own) is in `given`. A
block that cannot run here carries the comment `<!-- not run: why -->` in the line before, and is counted in NOT_RUN.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

import metashard
from metashard.cli import make_parser
from tests.parity import cpu_mesh
from tests.ranks import Ranks
from tools import make_checkpoint

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODELS = ("path/to/pipeline", "path/to/stable-diffusion-3.5-medium", "my-checkpoint")  # the same small SD3
SD3 = dict(
    sample_size=8,
    in_channels=4,
    out_channels=4,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=64,  # the width of its text encoder
    pooled_projection_dim=64,
    caption_projection_dim=32,
    pos_embed_max_size=8,
    dual_attention_layers=(0,),
)
LANGUAGE_MODEL = dict(
    vocab_size=54,
    hidden_size=32,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
WAN = dict(
    num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=64
)
FENCE = re.compile(
    r"^(?P<not_run><!-- not run: (?P<why>[^\n]*) -->\n)?^```(?P<kind>\S*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
NOT_RUN: list[str] = [  # page and reason of every block that is not run
    "docs/save-and-resume.md: a script of its own; tests/test_resume.py makes the same calls",
    "docs/save-and-resume.md: a part of the script above",
]
OWN_SCRIPTS = {"run.py", "train.py"}  # a reader's
UNDER_ACCELERATE = ("trainer.md", "README.md")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, found.start()) + 1, found["kind"], found["text"], found["why"])
        for found in FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]
WITH_PYTHON = sorted({block.page for block in ALL if block.kind == "python" and not block.not_run})


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in ALL if block.kind == kind]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small pipelines with random weights, an adapter, and a language model."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint.write_pipeline(folder / "sd3", "sd3-small", layers=2, config=SD3, lora_rank=4)
    make_checkpoint.write_pipeline(folder / "wan", "wan2.2-a14b", layers=1, config=WAN)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LANGUAGE_MODEL)).save_pretrained(folder / "language-model")
    return folder


@pytest.fixture
def desk(models: Path, tmp_path: Path) -> Path:
    """A reader's working directory, with the paths that the pages name."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name in MODELS:
        (tmp_path / name).symlink_to(models / "sd3")
    for name in ("wan", "language-model"):
        (tmp_path / "path" / "to" / name).symlink_to(models / name)
    (tmp_path / "path" / "to" / "adapter").symlink_to(models / "sd3" / "lora" / "transformer-peft")
    return tmp_path


def given(page: str) -> dict[str, Any]:
    """What the page leaves to its reader."""
    from diffusers import SD3Transformer2DModel

    names: dict[str, Any] = dict(mesh=cpu_mesh(), rank=dist.get_rank(), seed=0, config=dict(SD3, num_layers=1))
    names["build_my_model"] = lambda config: SD3Transformer2DModel(**config)
    names["load_my_weights"] = lambda model: None
    if page.endswith("transformers.md"):
        sample = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
        names.update(tokens=dict(input_ids=torch.tensor([[0, 7, 5, 511]])), timestep=torch.tensor([500.0]))
        names.update(noisy=sample, target=sample)
    if page.endswith(("saving.md", "README.md")):  # a model that has been trained
        from peft import LoraConfig

        names["model"] = metashard.load_component(
            "path/to/pipeline", "transformer", mesh=names["mesh"], lora=LoraConfig(target_modules=["to_q"])
        )
        names["optimizer"] = torch.optim.AdamW(p for p in names["model"].parameters() if p.requires_grad)
        sum(p.square().sum() for p in names["model"].parameters() if p.requires_grad).backward()
        names["optimizer"].step()
        names["torch"] = torch
    return names


@contextlib.contextmanager
def at_the_desk(folder: Path, page: str) -> Iterator[None]:
    """In that working directory; the process group is there already; accelerate takes it for one of GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from tests.test_accelerate import environment

    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            environment() if page.endswith(UNDER_ACCELERATE) else contextlib.nullcontext(),
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
        ):
            if page.endswith(UNDER_ACCELERATE):
                PartialState(cpu=True)
                PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            yield
    finally:
        os.chdir(before)


def run_page(page: str, sources: list[tuple[str, str]], folder: Path) -> None:
    with at_the_desk(folder, page):
        names = given(page)
        for where, source in sources:
            source = source.replace('"cuda"', '"cpu"')
            try:
                exec(compile(source, where, "exec"), names)
            except Exception as error:
                error.add_note(f"in the block at {where}")
                raise


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    kinds = {"python", "bash", "yaml", "text", "{toctree}", "{raw}", "{eval-rst}", "{literalinclude}", "{include}"}
    assert {str(block): block.kind for block in ALL if block.kind not in kinds} == {}
    fences = sum(len(re.findall(r"^\s*(```|~~~)", page.read_text(), re.M)) for page in PAGES)
    assert fences == 2 * len(ALL), "a block is indented, or not closed"


def test_what_is_not_run_is_counted() -> None:
    assert [f"{block.page}: {block.not_run}" for block in ALL if block.not_run] == NOT_RUN


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs_on_two_ranks(page: str, ranks2: Ranks, desk: Path) -> None:
    mine = [block for block in ALL if block.page == page and block.kind == "python" and not block.not_run]
    ranks2.run(run_page, page, [(str(block), block.text) for block in mine], desk, timeout=240.0)


def test_a_block_that_fails_is_named(ranks2: Ranks, desk: Path) -> None:
    (error, _) = ranks2.run_expecting(KeyError, run_page, "docs/x.md", [("docs/x.md:7", "{}['no']")], desk)
    assert any("in the block at docs/x.md:7" in note for note in error.__notes__)


@pytest.mark.parametrize("block", of_kind("bash"))
def test_commands_are_understood(block: Block) -> None:
    commands = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]
    assert any(commands), "an empty block"
    for words in filter(None, commands):
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *rest = words
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(rest)
        check_command(["python", *(["-m"] if args.module else []), args.training_script, *args.training_script_args])
    elif program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert rest.pop(0) == "launch", words
        args = launch_command_parser().parse_args(rest)
        check_command(["python", args.training_script, *args.training_script_args])
    elif program in ("python", "metashard"):
        if program == "metashard" or rest[:2] == ["-m", "metashard"]:
            make_parser().parse_args(rest if program == "metashard" else rest[2:])
        elif rest[0] not in OWN_SCRIPTS:
            options = re.findall(r'add_argument\(\s*"(--[a-z_-]+)"', script_text(ROOT / rest[0]))
            assert [word for word in rest[1:] if word.startswith("--") and word not in options] == [], words
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            pattern = rf"^{word.partition('=')[0]} \?=" if "=" in word else rf"^{word}:"
            assert re.search(pattern, makefile, re.M), f"make knows no {word}"
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = [extra for word in rest for extra in re.findall(r"\[(.*)\]", word) for extra in extra.split(",")]
        assert set(wanted) <= set(known), words
    else:
        pytest.fail(f"no check for {program}: {words}")


def script_text(path: Path) -> str:
    """A script, with the modules beside it that it takes options from."""
    text = path.read_text()
    beside = [path.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.M)]
    return "\n".join([text, *(module.read_text() for module in beside if module.exists())])


@pytest.mark.parametrize("block", of_kind("yaml"))
def test_accelerates_settings_are_its_own(block: Block, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    (tmp_path / "fsdp2.yaml").write_text(block.text)
    config = load_config_from_file(str(tmp_path / "fsdp2.yaml"))
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(config.fsdp_config) <= known
    assert config.fsdp_config["fsdp_version"] == 2


def test_links_and_included_files_exist() -> None:
    lost = []
    for page in PAGES:
        text = page.read_text()
        targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
        targets += re.findall(r"^(?:```\{(?:literal)?include\} |:file: )(\S+)", text, re.M)
        lost += [f"{page.name}: {target}" for target in targets if not (page.parent / target).exists()]
    assert lost == []


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.M)
    assert [name for name in metashard.__all__ if name not in named] == []
