"""Saved on one number of ranks, loaded on another: weights bit for bit, and training that goes on as it would have."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, StepLR

import metashard
from metashard.fill.bytes import as_bytes
from metashard.save import save_component
from tools.make_checkpoint import write_pipeline

from . import zoo
from .parity import cpu_mesh, differences, full, load_case, reference
from .ranks import Ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # they import each other by their bare names

FP32, BF16 = torch.float32, torch.bfloat16
POLICY = metashard.SavePolicy(timeout=60)
SD3, WAN = "SD3Transformer2DModel", "WanTransformer3DModel"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each core case, by its name."""
    root = tmp_path_factory.mktemp("models")
    for name in zoo.CORE:
        zoo.CASES[name].build().save_pretrained(root / name)
    return root


# --- load, save, load


def save_all(root: Path, out: Path, names: list[str], dtype: torch.dtype) -> None:
    for name in names:
        module, _ = load_case(zoo.CASES[name], str(root / name), dtype, {}, cpu_mesh())
        save_component(module, out / name, max_shard_size="60KB", save=POLICY)


def load_all(root: Path, out: Path, names: list[str], dtype: torch.dtype) -> list[str]:
    """What differs from the original folder in one process, after the way through the shards of other ranks."""
    found = []
    for name in names:
        case = zoo.CASES[name]
        module, _ = load_case(case, str(out / name), dtype, {}, cpu_mesh())
        found += [f"{name}: {line}" for line in differences(module, reference(case, root / name, dtype))]
    return found


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "dtype"),
    [(2, {1: zoo.CORE, 4: zoo.CORE[1::2]}, BF16), (4, {2: zoo.CORE[::2]}, FP32), (1, {2: [SD3, WAN]}, BF16)],
    ids=["2 to 1 and 4, bf16", "4 to 2, fp32", "1 to 2, bf16"],
)
def test_saved_on_some_ranks_and_loaded_on_others_is_the_single_process_s(
    ranks_of: dict[int, Ranks], models: Path, tmp_path: Path, saved_on: int, loaded_on: dict[int, Any], dtype: Any
) -> None:
    """Each core family to fewer ranks, and to more or from more; in bf16 Wan is mixed, with its fp32 pins."""
    names = list(max(loaded_on.values(), key=len))
    ranks_of[saved_on].run(save_all, models, tmp_path, names, dtype, timeout=120)
    for size, some in loaded_on.items():
        assert ranks_of[size].run(load_all, models, tmp_path, list(some), dtype, timeout=120) == [[]] * size


# --- train, save, resume: by the examples' own code

STEPS = 8


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each kind of training starts from."""
    import flow_matching

    made = {}
    for kind, family in (("lora", "sd3"), ("full", "wan")):
        name, config = flow_matching.FAMILIES[family]
        made[kind] = tmp_path_factory.mktemp(family)
        write_pipeline(made[kind], name, layers=2, dtype=FP32, config=config)
    return made


class Training:
    """A LoRA in SD3, or a full fine-tune of Wan in bf16 with fp32 pins; new, or from a checkpoint."""

    def __init__(self, kind: str, root: Path, checkpoint: Path | None = None) -> None:
        import train_full
        import train_lora

        mesh = cpu_mesh()
        if kind == "lora":
            adapter = checkpoint / "adapter" if checkpoint else train_lora.NEW
            made = train_lora.load(root, "transformer", adapter, mesh, STEPS)
            self.family, self.inputs, self.save = "sd3", {}, train_lora.save
        else:
            folder, name = (checkpoint / "transformer_2", None) if checkpoint else (root, "transformer_2")
            made = train_full.load(folder, name, mesh, BF16, STEPS)
            self.family, self.inputs, self.save = "wan", train_full.WAN, train_full.save
        self.model, self.optimizer, self.scheduler = made
        if checkpoint:
            train_lora.load_progress(checkpoint / "progress", *made)  # shared by both

    def train(self, *steps: int) -> list[float]:
        from flow_matching import train

        made = (self.model, self.optimizer, self.scheduler, self.family, torch.device("cpu"))
        return train(*made, steps=range(*steps), **self.inputs)

    def evaluate(self) -> float:
        from flow_matching import evaluate

        return evaluate(self.model, self.family, torch.device("cpu"), **self.inputs)

    def digest(self) -> str:
        """Of the full weights, the full optimizer state and the learning rates."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(f"{name} {parameter.dtype}".encode())
            values = [parameter, *(value for _, value in sorted(self.optimizer.state.get(parameter, {}).items()))]
            for value in values:
                digest.update(as_bytes(full(value).contiguous()).numpy())
        digest.update(repr((self.scheduler.get_last_lr(), self.scheduler.last_epoch)).encode())
        digest.update(repr([group["lr"] for group in self.optimizer.param_groups]).encode())
        return digest.hexdigest()


def first_run(kind: str, root: Path, out: Path) -> dict[str, Any]:
    """Half of the steps, a checkpoint, and the other half."""
    run = Training(kind, root)
    run.train(STEPS // 2)
    run.save(out, run.model, run.optimizer, run.scheduler)
    told = {"state": run.digest(), "loss": run.evaluate()}
    return {**told, "losses": run.train(STEPS // 2, STEPS), "end": run.digest()}


def second_run(kind: str, root: Path, out: Path) -> dict[str, Any]:
    """The other half from the checkpoint."""
    run = Training(kind, root, out)
    told = {"state": run.digest(), "loss": run.evaluate()}
    return {**told, "losses": run.train(run.scheduler.last_epoch, STEPS), "end": run.digest()}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_training_goes_on_on_another_number_of_ranks(
    ranks_of: dict[int, Ranks], pipelines: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Saved on 2 ranks, resumed on 1, 2 and 4.

    Weights, optimizer and schedule are the same bits everywhere, and so is the loss of the same pictures. On 2 ranks so
    are all steps that follow. On others a rank computes with other batch sizes and gradients are averaged in another
    order, so that losses differ by rounding: of fp32 in the LoRA, of bf16 in the full fine-tune.
    """
    root, out = pipelines[kind], tmp_path / "checkpoint"
    first = ranks_of[2].run(first_run, kind, root, out, timeout=120)[0]
    for size in (1, 2, 4):
        told = ranks_of[size].run(second_run, kind, root, out, timeout=120)
        assert [run["losses"] for run in told] == [told[0]["losses"]] * size
        resumed = told[0]
        assert (resumed["state"], resumed["loss"]) == (first["state"], first["loss"])
        assert len(resumed["losses"]) == STEPS // 2
        if size == 2:
            assert (resumed["losses"], resumed["end"]) == (first["losses"], first["end"])
        else:
            assert resumed["losses"] == pytest.approx(first["losses"], rel=1e-3 if kind == "full" else 1e-6)


def test_dcp_knows_the_attributes_of_a_scheduler_and_not_its_class(tmp_path: Path) -> None:
    """What docs/save-and-resume.md says of other schedulers and other settings."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1e-4)
    cosine, step = CosineAnnealingLR(optimizer, T_max=100), StepLR(optimizer, step_size=10)
    dcp.save({"cosine": cosine, "step": step}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*: cosine\.step_size"):
        dcp.load({"cosine": StepLR(optimizer, step_size=10)}, checkpoint_id=tmp_path, no_dist=True)
    again, other = CosineAnnealingLR(optimizer, T_max=1000), ExponentialLR(optimizer, gamma=0.9)
    dcp.load({"cosine": again, "step": other}, checkpoint_id=tmp_path, no_dist=True)
    assert (again.T_max, other.gamma) == (100, 0.1)
