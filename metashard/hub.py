"""A Hub id to a local folder that holds one component's files, and no others."""

from __future__ import annotations

import functools
import glob
import re
from pathlib import Path

from metashard.component import PIPELINE_INDEX, identify, name_parts
from metashard.errors import ComponentError, LoadError
from metashard.files import resolve_error
from metashard.weight_files import CONFIG, choose_files, read_index

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
    """Folder of a checkpoint; a hub id is downloaded first, and only this component's files.

    The JSON files that say which weight files there are come first, then those, all from one commit. Weights that
    exist as pickles only are not downloaded unless `allow_pickle`.

    Args:
        checkpoint: A local folder, returned as it is, or a hub id ("org/name", a str that is no existing path).
        component: As for `resolve_component`.
        variant: As for `resolve_component`.
        revision: Branch, tag or commit on the hub.
        local_files_only: Use what the local cache holds and never the network.
        allow_pickle: As for `resolve_component`.

    Returns:
        The folder to give to `resolve_component`. Files that are already in the cache are not downloaded again.

    Raises:
        ComponentError: Not a folder and not a hub id; or the hub's own error (gated, not found, offline), chained.
    """
    if Path(checkpoint).exists():
        return Path(checkpoint)
    if not isinstance(checkpoint, str) or not _HUB_ID.fullmatch(checkpoint):
        text = f"{checkpoint} does not exist. Give a local folder, or a hub id such as 'org/name'."
        raise resolve_error(text, file=checkpoint, expected="a folder or a hub id", got=str(checkpoint))
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    prefix = "".join(part + "/" for part in name_parts(component))
    try:
        jsons = [PIPELINE_INDEX, glob.escape(prefix) + CONFIG]
        folder = Path(
            snapshot_download(checkpoint, revision=revision, allow_patterns=jsons, local_files_only=local_files_only)
        )
        # The folder's name is the commit: whatever `revision` meant, all files come from that one. The call above has
        # kept the commit's list of files. A cache made by other means may have none: then what is there is all.
        commit = folder.name
        try:
            listed = [file.path for file in get_cached_repo_tree(checkpoint, revision=commit)]
        except CachedRepoTreeNotFoundError:
            return folder
        get = functools.partial(snapshot_download, checkpoint, revision=commit, local_files_only=local_files_only)
        place, library, _, config = identify(folder, component)
        inside = [name[len(prefix) :] for name in listed if name.startswith(prefix) and "/" not in name[len(prefix) :]]
        _, index, files = choose_files(inside, place, library, config, variant=variant, allow_pickle=allow_pickle)
        if index is not None:
            get(allow_patterns=[glob.escape(prefix + index)])
            files = sorted(set(read_index(place / index).values()))
        get(allow_patterns=[glob.escape(prefix + name) for name in files])
    except LoadError:
        raise
    except Exception as cause:  # whatever the hub's client raises, told in our words
        raise _hub_error(cause, checkpoint, revision, local_files_only) from cause
    return folder


def _hub_error(cause: Exception, repo: str, revision: str | None, local_files_only: bool) -> ComponentError:
    """The hub's error in our words; the caller chains the original."""
    from huggingface_hub import errors

    at = repo if revision is None else f"{repo} at {revision}"
    if isinstance(cause, errors.GatedRepoError):
        text = f"{at} is gated: accept its conditions on its hub page, then log in with `hf auth login`"
    elif isinstance(cause, errors.RepositoryNotFoundError):
        text = f"{repo} is neither a local folder nor a repository on the hub that you may read"
    elif isinstance(cause, errors.RevisionNotFoundError):
        text = f"{repo} has no revision {revision!r} on the hub"
    elif isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        how = "local_files_only=True" if local_files_only else "the hub cannot be reached"
        text = f"{at} is no local folder and not, or in part only, in the local hub cache, and {how}. Download it first"
    else:
        text = f"{at} cannot be fetched from the hub: {type(cause).__name__}: {cause}"
    return resolve_error(f"{text}.", file=repo, got=type(cause).__name__)
