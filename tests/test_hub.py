"""Hub ids: the one component's files and no others, from one commit on all ranks; and the hub's errors in our words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from huggingface_hub import constants, errors

import metashard
from metashard.checkpoint import read_checkpoint
from metashard.component import resolve_component
from metashard.errors import ComponentError
from metashard.hub import fetch, find_commit
from tests import zoo
from tests.parity import cpu_mesh, differences

from .test_component import BERT, PIPELINE, S1, S2, SHA, VAE, D, hub_cache, model, pipeline_folder, write


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return pipeline_folder(tmp_path / "pipeline")


class TestHub:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        return tmp_path / "hub"

    @pytest.mark.parametrize("local_files_only", [True, False])
    def test_offline_from_the_local_cache(self, pipeline: Path, cache: Path, local_files_only: bool) -> None:
        snapshot = hub_cache(cache, pipeline)
        folder = fetch("org/name", "transformer", local_files_only=local_files_only)
        assert folder == snapshot
        found = resolve_component(folder, "transformer")
        assert set(read_checkpoint(found.folder, found.files, found.weight_map).entries) == {"w"}
        # a part of the snapshot given as a folder of its own
        assert resolve_component(folder / "transformer").files == found.files
        assert fetch("org/name", "transformer", revision=SHA, local_files_only=local_files_only) == snapshot

    @pytest.mark.parametrize("local_files_only", [True, False])
    def test_offline_and_not_in_the_cache(self, cache: Path, local_files_only: bool) -> None:
        with pytest.raises(ComponentError, match="in the local hub cache") as caught:
            fetch("org/name", "transformer", local_files_only=local_files_only)
        assert type(caught.value.__cause__).__name__ == "LocalEntryNotFoundError"
        assert caught.value.phase == "resolve"

    @pytest.mark.parametrize("local_files_only", [True, False])
    def test_offline_with_this_component_only(self, pipeline: Path, cache: Path, local_files_only: bool) -> None:
        """The cache knows all files of the commit and has one component's: enough for that one, an error for others."""
        files = [path.relative_to(pipeline).as_posix() for path in pipeline.rglob("*") if path.is_file()]
        for name in ("model_index.json", "transformer/*", "text_encoder/config.json"):
            snapshot = hub_cache(cache, pipeline, only=name)
        tree = {name: {"size": (pipeline / name).stat().st_size, "blob_id": "0" * 40} for name in files}
        write(snapshot.parent.parent / "trees" / f"{SHA}.json", {"format_version": 1, "files": tree})
        assert fetch("org/name", "transformer", local_files_only=local_files_only) == snapshot
        with pytest.raises(ComponentError, match="in part only"):
            fetch("org/name", "text_encoder", local_files_only=local_files_only)

    @pytest.mark.parametrize("name", ["./org/name", "/org/name", "name", "a/b/c", "../name", "org/na me", "", "org/"])
    def test_a_folder_that_is_not_there_is_no_hub_id(self, tmp_path: Path, name: str, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        if name:
            with pytest.raises(ComponentError, match="does not exist"):
                fetch(name, None)
        with pytest.raises(ComponentError, match="does not exist"):
            fetch(Path("org/name"), None)

    @pytest.mark.parametrize(
        ("component", "variant", "extra", "expected"),
        [
            ("transformer", None, [], {f"transformer/{D}.safetensors"}),
            ("transformer", "fp16", [], {f"transformer/{D}.fp16.safetensors"}),
            ("text_encoder", None, [], {"text_encoder/model.safetensors"}),
            (
                "vae",
                None,
                [f"{D}{S1}.safetensors", f"{D}{S2}.safetensors", f"{D}.safetensors.index.json"],
                {f"vae/{D}{S1}.safetensors", f"vae/{D}.safetensors.index.json"},
            ),
        ],
    )
    def test_only_this_components_files_are_downloaded(
        self, pipeline: Path, cache: Path, monkeypatch: Any, component: str, variant: Any, extra: Any, expected: Any
    ) -> None:
        model(pipeline / "transformer", VAE, f"{D}.safetensors", f"{D}.fp16.safetensors", f"{D}.bin")
        write(pipeline / "model_index.json", {**PIPELINE, "vae": ["diffusers", "AutoencoderKL"]})
        model(pipeline / "vae", VAE, *extra)
        hub = fake_hub(pipeline, cache, monkeypatch)
        folder = fetch("org/name", component, variant=variant, revision="main")
        got = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert got == {"model_index.json", f"{component}/config.json", *expected}
        assert set(hub) == {"main", SHA}  # one commit for all but the first call
        assert resolve_component(folder, component, variant=variant).files

    @pytest.mark.parametrize("allow_pickle", [False, True])
    def test_pickles_are_downloaded_on_the_callers_word_only(
        self, tmp_path: Path, cache: Path, monkeypatch: Any, allow_pickle: bool
    ) -> None:
        fake_hub(model(tmp_path / "source", BERT, "pytorch_model.bin"), cache, monkeypatch)
        if allow_pickle:
            folder = fetch("org/name", None, allow_pickle=True)
            assert resolve_component(folder, allow_pickle=True).files == ("pytorch_model.bin",)
        else:
            with pytest.raises(ComponentError, match="pickles only"):
                fetch("org/name", None)
        assert len(list(cache.rglob("snapshots/*/*.bin"))) == allow_pickle

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("GatedRepoError", "gated: accept its conditions"),
            ("RepositoryNotFoundError", "neither a local folder nor a repository"),
            ("RevisionNotFoundError", "has no revision 'v9'"),
            ("HfHubHTTPError", "cannot be fetched from the hub: HfHubHTTPError: no"),
        ],
    )
    def test_the_hubs_errors_are_told_and_chained(self, monkeypatch: Any, name: str, message: str) -> None:
        import huggingface_hub.errors

        cls = getattr(huggingface_hub.errors, name)
        original = cls.__new__(cls, "no")
        monkeypatch.setattr(cls, "__str__", lambda _: "no")

        def refuse(*_: Any, **__: Any) -> str:
            raise original

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(ComponentError, match=message) as caught:
            fetch("org/name", None, revision="v9")
        assert caught.value.__cause__ is original


def fake_hub(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the hub's client: what is asked for travels from `source` to the cache. Returns revisions asked."""
    asked: list[str] = []

    def snapshot_download(repo: str, *, revision: str | None = None, allow_patterns: Any, **_: Any) -> str:
        asked.append(revision or "main")
        for pattern in allow_patterns:
            hub_cache(cache, source, repo, pattern)
        return str(cache / f"models--{repo.replace('/', '--')}" / "snapshots" / SHA)

    def get_cached_repo_tree(repo: str, *, revision: str) -> Any:
        files = (path for path in source.rglob("*") if path.is_file())
        return [SimpleNamespace(path=path.relative_to(source).as_posix()) for path in files]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", get_cached_repo_tree)
    return asked


# --- on ranks

ENCODER, TRANSFORMER = "CLIPTextModel", "SD3Transformer2DModel"
OTHER_SHA = "f" * 40


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two real models, the encoder's weights in a variant too."""
    root = tmp_path_factory.mktemp("hub") / "source"
    encoder = zoo.CASES[ENCODER].build()
    encoder.save_pretrained(root / "text_encoder")
    encoder.to(torch.float16).save_pretrained(root / "text_encoder", variant="fp16")
    zoo.CASES[TRANSFORMER].build().save_pretrained(root / "transformer", max_shard_size="40KB")
    listed = {"text_encoder": ["transformers", ENCODER], "transformer": ["diffusers", TRANSFORMER]}
    write(root / "model_index.json", {"_class_name": "SomePipeline", **listed})
    return root


@contextmanager
def using(cache: str, *, offline: bool = True) -> Iterator[None]:
    before = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, offline
    try:
        yield
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = before


def load(component: str = "text_encoder", **kwargs: Any) -> torch.nn.Module:
    return metashard.load_component("org/name", component, mesh=cpu_mesh(), dtype=torch.bfloat16, **kwargs)


def load_offline(cache: str, source: str, ways: list[dict[str, Any]]) -> list[list[str]]:
    """What differs from `from_pretrained` of the source folder, for each way."""
    found = []
    with using(cache):
        for way in ways:
            name = way.get("component", "text_encoder")
            case = zoo.CASES[ENCODER if name == "text_encoder" else TRANSFORMER]
            named = {"dtype" if case.library == "transformers" else "torch_dtype": torch.bfloat16}
            expected = case.cls.from_pretrained(source, subfolder=name, variant=way.get("variant"), **named)
            found.append(differences(load(**way), expected))
    return found


def test_offline_by_branch_tag_commit_and_variant(repo: Path, tmp_path: Path, ranks2: Any) -> None:
    snapshot = hub_cache(tmp_path, repo)
    for ref in ("v1", "refs/pr/3"):
        write(snapshot.parent.parent / "refs" / ref, SHA)
    ways = [
        {},
        {"variant": "fp16"},
        {"revision": "v1"},
        {"revision": "refs/pr/3", "component": "transformer"},
        {"revision": SHA, "component": "transformer"},
    ]
    assert ranks2.run(load_offline, str(tmp_path), str(repo), ways) == [[[]] * len(ways)] * 2


def load_in_own_cache(caches: list[str], hosts: list[str]) -> torch.Tensor:
    """One cache a rank, as nodes have them."""
    import socket

    original = socket.gethostname
    socket.gethostname = lambda: hosts[dist.get_rank()]
    try:
        with using(caches[dist.get_rank()]):
            loaded = load()
        return loaded.get_input_embeddings().weight.full_tensor()
    finally:
        socket.gethostname = original


@pytest.mark.parametrize("both", [True, False], ids=["both commits there", "the older only"])
def test_nodes_whose_branch_is_at_another_commit(repo: Path, tmp_path: Path, ranks2: Any, both: bool) -> None:
    """The second node's cache says that main is an older commit, with weights of the same size: never a mix of both."""
    caches = [str(tmp_path / name) for name in ("new", "old")]
    hub_cache(Path(caches[0]), repo)
    home = hub_cache(Path(caches[1]), repo).parent.parent
    shutil.copytree(home / "snapshots" / SHA, home / "snapshots" / OTHER_SHA)
    older = zoo.CASES[ENCODER].build()
    with torch.no_grad():
        older.get_input_embeddings().weight.zero_()
    older.save_pretrained(home / "snapshots" / OTHER_SHA / "text_encoder")
    write(home / "refs" / "main", OTHER_SHA)
    if both:
        expected = zoo.CASES[ENCODER].build().get_input_embeddings().weight.bfloat16()
        for weight in ranks2.run(load_in_own_cache, caches, ["a", "b"]):
            assert torch.equal(weight, expected)
        return
    shutil.rmtree(home / "snapshots" / SHA)
    for error in ranks2.run_expecting(ComponentError, load_in_own_cache, caches, ["a", "b"]):
        assert error.rank == 1
        assert SHA in str(error)
        assert "HF_HUB_OFFLINE is set" in str(error)


def test_ranks_of_a_node_with_caches_of_their_own(repo: Path, tmp_path: Path, ranks2: Any) -> None:
    hub_cache(tmp_path / "first", repo)
    caches = [str(tmp_path / name) for name in ("first", "second")]
    for error in ranks2.run_expecting(ComponentError, load_in_own_cache, caches, ["a", "a"]):
        assert error.rank == 1
        assert "give all ranks of a node one cache" in str(error)


def load_with_errors(name: str, cause: str | None, status: int | None, online: bool, cache: str) -> None:
    """The hub's client as it fails: nothing else can show these errors without a network."""
    error = getattr(errors, name).__new__(getattr(errors, name), "the hub's own words")
    error.response = SimpleNamespace(status_code=status)
    error.__cause__ = None if cause is None else getattr(errors, cause)("no")

    def refuse(*_: Any, **__: Any) -> str:
        raise error

    original, huggingface_hub.snapshot_download = huggingface_hub.snapshot_download, refuse
    try:
        with using(cache, offline=not online):
            load(revision="v9")
    finally:
        huggingface_hub.snapshot_download = original


@pytest.mark.parametrize(
    ("name", "cause", "status", "remedies"),
    [
        ("GatedRepoError", None, 403, ["gated: accept its conditions", "hf auth login", "HF_TOKEN"]),
        ("RepositoryNotFoundError", None, 401, ["Check the name", "private", "hf auth login"]),
        ("RevisionNotFoundError", None, 404, ["no revision 'v9'", "branch or tag"]),
        ("LocalEntryNotFoundError", "OfflineModeIsEnabled", None, ["HF_HUB_OFFLINE is set", "hf download org/name"]),
        ("LocalEntryNotFoundError", None, None, ["the hub cannot be reached", "download it first"]),
        ("OfflineModeIsEnabled", None, None, ["HF_HUB_OFFLINE is set"]),
        ("HfHubHTTPError", None, 401, ["refuses access", "token"]),
        ("HfHubHTTPError", None, 500, ["cannot be fetched from the hub: HfHubHTTPError"]),
    ],
)
def test_every_rank_is_told_what_to_do(
    name: str, cause: Any, status: Any, remedies: list[str], ranks2: Any, tmp_path: Path
) -> None:
    raised = ranks2.run_expecting(ComponentError, load_with_errors, name, cause, status, True, str(tmp_path))
    assert str(raised[0]) == str(raised[1])
    assert raised[0].got == name
    assert raised[0].phase == "resolve"
    for remedy in remedies:
        assert remedy in str(raised[0])


def load_nothing(cache: str) -> None:
    with using(cache):
        load()


def test_offline_with_an_empty_cache_on_every_rank(ranks2: Any, tmp_path: Path) -> None:
    """The real client."""
    for error in ranks2.run_expecting(ComponentError, load_nothing, str(tmp_path)):
        assert "HF_HUB_OFFLINE is set" in str(error)
        assert str(tmp_path) in str(error)


def load_and_note(cache: str, source: str) -> tuple[list[tuple[bool, list[str]]], list[str]]:
    """What this rank asks the hub for: (downloads, patterns) of each call; and what differs from the source."""
    asked: list[tuple[bool, list[str]]] = []
    with pytest.MonkeyPatch.context() as patch, using(cache):
        fake_hub(Path(source), Path(cache), patch)
        fake = huggingface_hub.snapshot_download

        def noted(*args: Any, local_files_only: bool = False, allow_patterns: list[str], **kwargs: Any) -> str:
            asked.append((not local_files_only, allow_patterns))
            return fake(*args, allow_patterns=allow_patterns if not local_files_only else [], **kwargs)

        patch.setattr("huggingface_hub.snapshot_download", noted)
        loaded = load()
    return asked, differences(loaded, zoo.CASES[ENCODER].load(Path(source) / "text_encoder", torch.bfloat16))


def test_one_rank_downloads_and_only_the_components_files(repo: Path, tmp_path: Path, ranks2: Any) -> None:
    first, second = ranks2.run(load_and_note, str(tmp_path), str(repo))
    assert (first[1], second[1]) == ([], [])
    assert {pattern for downloads, patterns in first[0] if downloads for pattern in patterns} == {
        "model_index.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
    }
    assert all(downloads for downloads, _ in first[0])
    assert not any(downloads for downloads, _ in second[0])


class TestPartialCache:
    """Made by other means than the hub's client: which files there should be is not known."""

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return tmp_path / "hub"

    @pytest.mark.parametrize("lost", ["config.json", f"{D}.safetensors.index.json", f"{D}-00002-of-*", "*"])
    def test_what_is_not_there_is_told_with_the_remedy(self, repo: Path, cache: Path, lost: str) -> None:
        snapshot = hub_cache(cache, repo)
        for path in snapshot.glob(f"transformer/{lost}"):
            path.unlink()
        with pytest.raises(metashard.MetaShardError, match="in part only: `hf download org/name --include"):
            fetch("org/name", "transformer")
        assert fetch("org/name", "text_encoder") == snapshot

    def test_a_component_that_the_pipeline_has_not(self, repo: Path, cache: Path) -> None:
        hub_cache(cache, repo)
        with pytest.raises(ComponentError, match="lists no component 'vae'") as caught:
            fetch("org/name", "vae")
        assert "in part only" not in str(caught.value)

    def test_a_revision_is_one_commit(self, repo: Path, cache: Path) -> None:
        hub_cache(cache, repo)
        assert find_commit("org/name", "transformer") == SHA
        assert find_commit("org/name", None, revision=SHA) == SHA
        with pytest.raises(ComponentError, match="org/name at v2 is no local folder"):
            find_commit("org/name", None, revision="v2")
