"""A Hub id to a local folder that holds one component's files, and no others."""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from metashard.component import PIPELINE_INDEX, identify, name_parts, resolve_component
from metashard.errors import ComponentError, LoadError
from metashard.files import resolve_error
from metashard.weight_files import CONFIG, GENERATION_CONFIG, choose_files, read_index

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")


def fetch(
    checkpoint: str | Path,
    component: str | None,
    *,
    variant: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """Folder in the hub cache that holds this component's files; what is not there yet is downloaded.

    The JSON files that say which weight files there are come first, then those, all from one commit. Weights that
    exist as pickles only are not downloaded unless `allow_pickle`.

    Args:
        checkpoint: A hub id ("org/name"). No local folder: whether it is one is asked before, on one rank for all.
        component: As for `resolve_component`.
        variant: As for `resolve_component`.
        revision: Branch, tag or commit on the hub.
        local_files_only: Use what the local cache holds and never the network.
        allow_pickle: As for `resolve_component`.

    Returns:
        The folder to give to `resolve_component`. Files that are already in the cache are not downloaded again.

    Raises:
        ComponentError: Not a hub id; or the hub's own error (gated, not found, offline), chained.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    folder = _jsons(checkpoint, component, revision=revision, local_files_only=local_files_only)
    # The folder's name is the commit: whatever `revision` meant, all files come from that one.
    repo, commit, prefix = str(checkpoint), folder.name, _prefix(component)
    with _hub_errors_told(repo, revision, local_files_only):
        try:
            listed = [file.path for file in get_cached_repo_tree(repo, revision=commit)]
        except CachedRepoTreeNotFoundError:  # kept by `_jsons`; a cache made by other means may have none
            return _all_there_is(folder, component, repo, variant=variant, allow_pickle=allow_pickle)
        get = functools.partial(snapshot_download, repo, revision=commit, local_files_only=local_files_only)
        place, library, _, config = identify(folder, component)
        inside = [name[len(prefix) :] for name in listed if name.startswith(prefix) and "/" not in name[len(prefix) :]]
        _, index, files = choose_files(inside, place, library, config, variant=variant, allow_pickle=allow_pickle)
        if library == "transformers" and GENERATION_CONFIG in inside:
            with suppress(LocalEntryNotFoundError):  # as `from_pretrained` does, which has its own without it
                get(allow_patterns=[glob.escape(prefix + GENERATION_CONFIG)])
        if index is not None:
            get(allow_patterns=[glob.escape(prefix + index)])
            files = sorted(set(read_index(place / index).values()))
        get(allow_patterns=[glob.escape(prefix + name) for name in files])
    return folder


def find_commit(checkpoint: str | Path, component: str | None, *, revision: str | None = None) -> str:
    """The commit that a revision means now; downloads no more than the component's two JSON files.

    A branch can move between two calls, and caches of two nodes can be of different age: one rank asks for all.

    Raises:
        ComponentError: As `fetch` does.
    """
    return _jsons(checkpoint, component, revision=revision, local_files_only=False).name


def _jsons(checkpoint: str | Path, component: str | None, *, revision: str | None, local_files_only: bool) -> Path:
    """The snapshot's folder, with model_index.json and the component's config.json in it."""
    if not isinstance(checkpoint, str) or not _HUB_ID.fullmatch(checkpoint):
        text = f"{checkpoint or 'An empty path'} does not exist. Give a local folder, or a hub id such as 'org/name'."
        raise resolve_error(text, file=checkpoint, expected="a folder or a hub id", got=str(checkpoint))
    from huggingface_hub import snapshot_download

    patterns = [PIPELINE_INDEX, glob.escape(_prefix(component)) + CONFIG]
    with _hub_errors_told(checkpoint, revision, local_files_only):
        found = snapshot_download(
            checkpoint, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
        )
    return Path(found)


def _prefix(component: str | None) -> str:
    return "".join(part + "/" for part in name_parts(component))


def _all_there_is(folder: Path, component: str | None, repo: str, *, variant: str | None, allow_pickle: bool) -> Path:
    """A snapshot of which nobody knows what else belongs to it, if the component is whole there."""
    try:
        resolve_component(folder, component, variant=variant, allow_pickle=allow_pickle)
    except LoadError as cause:
        if cause.file is not None and Path(cause.file).name == PIPELINE_INDEX:
            raise  # no such component, whatever was downloaded
        what = "" if component is None else f" --include '{component}/*' {PIPELINE_INDEX}"
        text = f"{cause.message} The local hub cache may hold {repo} in part only: `hf download {repo}{what}` gets all."
        raise resolve_error(text, file=cause.file, key=cause.key, expected=cause.expected, got=cause.got) from cause
    return folder


@contextmanager
def _hub_errors_told(repo: str, revision: str | None, local_files_only: bool) -> Iterator[None]:
    """Whatever the hub's client raises, in our words, with the original chained."""
    try:
        yield
    except LoadError:
        raise
    except Exception as cause:
        raise _hub_error(cause, repo, revision, local_files_only) from cause


def _hub_error(cause: Exception, repo: str, revision: str | None, local_files_only: bool) -> ComponentError:
    from huggingface_hub import constants, errors

    at = repo if revision is None else f"{repo} at {revision}"
    log_in = "log in with `hf auth login`, or set HF_TOKEN, on every node"
    offline = any(isinstance(error, errors.OfflineModeIsEnabled) for error in (cause, cause.__cause__))
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.GatedRepoError):
        text = f"{at} is gated: accept its conditions on its hub page, then {log_in}"
    elif isinstance(cause, errors.RepositoryNotFoundError):
        text = f"{repo} is neither a local folder nor a repository on the hub that you may read. Check the name; if "
        text += f"it is private, {log_in}"
    elif isinstance(cause, errors.RevisionNotFoundError):
        text = f"{repo} has no revision {revision!r} on the hub. Check the name of the branch or tag, or the commit"
    elif isinstance(cause, errors.LocalEntryNotFoundError) or offline:
        text = (
            f"{at} is no local folder and not, or in part only, in the local hub cache {constants.HF_HUB_CACHE}, and "
        )
        if local_files_only:
            text += "this rank does not download: give all ranks of a node one cache (HF_HOME or HF_HUB_CACHE)"
        elif offline:
            text += f"HF_HUB_OFFLINE is set. Run `hf download {repo}` where there is a network, or unset it"
        else:
            text += "the hub cannot be reached. Try again, or download it first where there is a network"
    elif status in (401, 403):
        text = f"the hub refuses access to {at}. If your token is old or may not read it, {log_in}: {cause}"
    else:
        text = f"{at} cannot be fetched from the hub: {type(cause).__name__}: {cause}"
    return resolve_error(f"{text}.", file=repo, got=type(cause).__name__)
