"""What a checkpoint must not be able to do: run code, reach the network, start a program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import metashard
from metashard.adapter_files import add_existing
from metashard.adapters import LoraSpec
from metashard.component import resolve_component
from metashard.errors import AdapterError, ComponentError, LoadError
from tests import zoo
from tests.parity import cpu_mesh
from tests.ranks import Ranks

DIFFUSERS, TRANSFORMERS = "SD3Transformer2DModel", "T5EncoderModel"

# Runs in a process of its own: an audit hook cannot be taken back. Everything is imported before it starts to look, as
# libraries may ask the system about itself then; what it sees afterwards is the load.
WATCHED = """
import json, sys
import torch, diffusers, transformers, peft, huggingface_hub
import metashard
from metashard.cli import make_mesh, process_group
from metashard.errors import LoadError
import metashard.lora, metashard.load
from tests import zoo

seen, watching = [], []
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")

def hook(event, args):
    if watching and event in NETWORK + PROGRAMS:
        seen.append(event)
        raise RuntimeError(f"{event} in a load")

sys.addaudithook(hook)
assert not huggingface_hub.constants.HF_HUB_OFFLINE
folders, control = json.loads(sys.argv[1])
with process_group() as device:
    mesh = make_mesh(device)
    metashard.load_component(folders[0], mesh=mesh)  # torch's and the libraries' own first-use imports
    watching.append(True)
    for folder in folders:
        for strategy in ("direct", "stream", "rank0"):
            metashard.load_component(folder, mesh=mesh, load=metashard.LoadPolicy(strategy=strategy))
    local = list(seen)
    if control:
        try:
            metashard.load_component("some-org/some-name", mesh=mesh)
        except LoadError as error:
            assert "in a load" in str(error) or "cannot be reached" in str(error), error
print(json.dumps([local, seen[len(local):]]))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name in (DIFFUSERS, TRANSFORMERS):
        path = tmp_path_factory.mktemp(name)
        zoo.CASES[name].build().save_pretrained(path)
        made[name] = str(path)
    return made


def test_a_local_load_reaches_no_network_and_starts_no_program(folders: dict[str, str], tmp_path: Path) -> None:
    """And a hub id does reach for the network: the watch can see it."""
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", WATCHED, json.dumps([list(folders.values()), True])]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    local, hub = json.loads(done.stdout.splitlines()[-1])
    assert local == []
    assert hub, "a hub id was given and nothing was seen: the watch is blind"


class Evil:
    """Pickles as a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def pickled(folder: Path, name: str, mark: Path) -> Path:
    """The model of a zoo case with a pickle for its weights that makes a folder when it is loaded without care."""
    zoo.CASES[name].build().save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    stem = "diffusion_pytorch_model" if zoo.CASES[name].library == "diffusers" else "pytorch_model"
    torch.save({"w": Evil(mark)}, folder / f"{stem}.bin")
    return folder / f"{stem}.bin"


def load(folder: str, **policy: Any) -> None:
    metashard.load_component(folder, mesh=cpu_mesh(), load=metashard.LoadPolicy(timeout=60, **policy))


@pytest.mark.parametrize("name", [DIFFUSERS, TRANSFORMERS])
def test_a_pickle_is_refused_and_with_the_callers_word_runs_nothing(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    file = pickled(tmp_path / "m", name, mark)
    for error in ranks2.run_expecting(ComponentError, load, str(tmp_path / "m")):
        assert "allow_pickle=True" in str(error)
    for error in ranks2.run_expecting(LoadError, load, str(tmp_path / "m"), allow_pickle=True):
        assert re.search("weights_only|WeightsUnpickler|Unable to load weights", str(error)), error
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "the pickle is harmless: this test could not fail"


def test_a_pickle_under_the_name_of_a_safetensors_file_runs_nothing(ranks1: Ranks, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickled(tmp_path / "m", DIFFUSERS, mark).rename(tmp_path / "m" / "diffusion_pytorch_model.safetensors")
    (error,) = ranks1.run_expecting(metashard.CheckpointError, load, str(tmp_path / "m"), allow_pickle=True)
    assert "torch pickle" in str(error)
    assert not mark.exists()


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(target_modules=["to_q"]).save_pretrained(tmp_path)
    mark = tmp_path / "ran"
    torch.save({"w": Evil(mark)}, tmp_path / "adapter_model.bin")
    for hint in (r"pickled \(adapter_model.bin\)", "Fetch the folder again"):
        with pytest.raises(AdapterError, match=f"has no adapter_model.safetensors.*{hint}"):
            add_existing(zoo.CASES[DIFFUSERS].build(), LoraSpec(str(tmp_path)), None)
        (tmp_path / "adapter_model.bin").unlink(missing_ok=True)  # and without it, nobody asks the hub
    assert not mark.exists()


def test_code_named_in_a_config_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the weights, named every way that the libraries know."""
    mark = tmp_path / "ran"
    root = tmp_path / "m"
    (root / "transformer").mkdir(parents=True)
    for name in ("evil.py", "transformer/evil.py", "pipeline.py"):
        (root / name).write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Model: pass\n")
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    auto = {"AutoModel": "evil.Model", "AutoConfig": "evil.Model"}

    def refused(match: str, component: str | None, **files: Any) -> None:
        for name, content in files.items():
            (root / name.replace("__", "/")).with_suffix(".json").write_text(json.dumps(content))
        with pytest.raises(ComponentError, match=match):
            _ = resolve_component(root, component).cls

    weights = root / "transformer" / "model.safetensors"
    weights.write_bytes(b"")
    index = {"_class_name": ["pipeline", "Evil"], "transformer": ["evil", "Model"]}
    refused("never a repository's own code", "transformer", model_index=index)
    refused("never a repository's own code", "transformer", model_index={"transformer": ["transformers.evil", "Model"]})
    own = {"architectures": ["Model"], "auto_map": auto, "model_type": "evil"}
    refused(
        "never runs", "transformer", model_index={"transformer": ["transformers", "Model"]}, transformer__config=own
    )
    (root / "model_index.json").unlink()
    refused("never runs", "transformer", transformer__config=own)
    refused("names no class", "transformer", transformer__config={"model_type": "evil", "auto_map": auto})
    refused("names no class", "transformer", transformer__config={"_class_name": "evil.Model", "auto_map": auto})
    assert not mark.exists()
    __import__("evil")
    assert mark.exists(), "the module is harmless: this test could not fail"


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "some-org/kernel"},
        {"_attn_implementation": "some-org/kernel@main:forward"},
        {"attn_implementation": {"text_config": "some-org/kernel"}},
        {"text_config": {"_attn_implementation_internal": "some-org/kernel"}},
        {"text_config": {"inner": {"experts_implementation": "some-org/kernel"}}},
    ],
)
def test_a_kernel_on_the_hub_named_in_a_config_is_refused(folders: dict[str, str], tmp_path: Path, config: Any) -> None:
    """transformers would download and run it."""
    for file in Path(folders[TRANSFORMERS]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plain = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "attn_implementation": "eager"}))
    assert resolve_component(tmp_path).files
    (tmp_path / "config.json").write_text(json.dumps({**plain, **config}))
    with pytest.raises(ComponentError, match="fetch from the hub and run"):
        resolve_component(tmp_path)


@pytest.mark.parametrize("dtype", ["float99", "save", "__name__", 7])
def test_a_dtype_in_a_config_that_is_none_is_told(
    ranks1: Ranks, folders: dict[str, str], tmp_path: Path, dtype: Any
) -> None:
    for file in Path(folders[TRANSFORMERS]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plain = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "dtype": dtype}))
    (error,) = ranks1.run_expecting(ComponentError, load, str(tmp_path))
    assert "which torch does not have" in str(error)


def test_the_package_calls_no_shell_and_evaluates_no_text() -> None:
    import ast

    banned = {"eval", "exec", "compile", "__import__"}
    banned_methods = {"system", "popen", "Popen", "check_output", "check_call", "spawn", "fork", "execv"}
    modules = {"subprocess", "pty", "shlex", "marshal", "shelve", "runpy"}
    files = sorted(Path(metashard.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                plain, name = getattr(node.func, "id", ""), getattr(node.func, "attr", "")
                assert plain not in banned, f"{path.name}:{node.lineno} calls {plain}"
                assert name not in banned_methods, f"{path.name}:{node.lineno} calls {name}"
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not modules & {name.partition(".")[0] for name in names}, f"{path.name}: {names}"
