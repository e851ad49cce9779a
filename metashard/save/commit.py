"""All or nothing: a checkpoint is written beside the folder that it shall be, and takes its place in one step.

[Note: taking the place]
A save to the folder NAME makes a stage, a hidden folder beside it (`.metashard-save-NAME-...`), and in that

    .saving       a token, by which ranks find out whether they see the stage; locked as long as the save lives
    unfinished/   what is to become NAME. Weight files end in .part until all is written and checked

Where NAME is new or empty, `unfinished` is renamed to it. Where it holds something and may be overwritten, what is not
replaced is first linked into `unfinished` as well (files by hard links, directories made again), and the two are
exchanged, which Linux does in one step. So at any time NAME is the old folder or the new one, whole, with all else that
was in it. What a save leaves that is killed is of use to nobody; the next one to NAME removes it. (Should an exchange
fail to be undone, the old folder stays in the stage, as `kept`.)

Where a directory cannot take the other's place (NAME is a mount point or the current one, its parent may not be
written, a file system without hard links or the exchange), files are renamed one by one, and nothing else is touched:
first the old ones to `replaced`, index or single weight file first, so that no loader takes a mixture for a checkpoint;
then `unfinished` is renamed to `complete`; then the new ones come in, index or single weight file last. An error or
Ctrl-C puts everything back. After a kill NAME may be no checkpoint: a load of it says where the files are, and the next
save to NAME puts them back, or all new ones in, before anything else.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = ".metashard-save-"
OPEN, UNFINISHED, COMPLETE, REPLACED, KEPT = ".saving", "unfinished", "complete", "replaced", "kept"
# What a file system, or a directory of somebody else, answers that has no such links or exchange.
_CANNOT = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EXDEV,
    errno.EBUSY,
    errno.EPERM,
    errno.EACCES,
    errno.EMLINK,
}


def take_place(stage: Path, folder: Path, stale: Callable[[str], bool], *, movable: bool) -> None:
    """Let what is in a stage take the folder's place. See [Note: taking the place].

    Args:
        stage: The stage; what is in its `unfinished` is complete.
        folder: The folder, which may be there.
        stale: Whether a file of this name in the old folder would be taken for a part of the new checkpoint.
        movable: Whether a directory can take the folder's place.
    """
    made = stage / UNFINISHED
    new = sorted(os.listdir(made))
    for path in (*(made / name for name in new), made, stage):
        _flush(path)
    held = os.listdir(folder) if folder.exists() else []
    in_one_step = _exchange_folders if held else _rename_folder
    movable = movable and not any(name.startswith(PREFIX) for name in held)  # another save goes on in there
    if not (movable and in_one_step(stage, folder, new, stale)):
        _rename_files(stage, folder, new, stale)
    for path in (folder, folder.parent):
        with suppress(OSError):  # the renames are done: what was saved is there
            _flush(path)


def _rename_folder(stage: Path, folder: Path, new: list[str], stale: Callable[[str], bool]) -> bool:
    """Rename a stage's directory to a folder that is not there, or empty; False where the system cannot."""
    try:
        if folder.exists():
            _look_like(folder, stage / UNFINISHED)
        os.rename(stage / UNFINISHED, folder)
    except OSError as error:
        if error.errno not in _CANNOT or not folder.exists():
            raise
        return False
    return True


def _exchange_folders(stage: Path, folder: Path, new: list[str], stale: Callable[[str], bool]) -> bool:
    """Exchange a stage's directory, with all else linked into it, and the folder; False where the system cannot."""
    made = stage / UNFINISHED
    ours = os.stat(made)

    def others(place: Path) -> list[str]:
        return [name for name in os.listdir(place) if name not in new and not stale(name)]

    try:
        _link_all(others(folder), folder, made)
        _look_like(folder, made)
        _flush(made)
        exchanged = _exchange(made, folder)
        if exchanged:
            _link_all(others(made), made, folder)  # what has come into the old one in the meantime
    except BaseException as error:  # Ctrl-C may come right after the exchange
        as_it_was = not os.path.samestat(os.stat(folder), ours) or _exchange_back(stage, folder)
        if not as_it_was or not isinstance(error, OSError) or error.errno not in _CANNOT:
            raise
        logger.info("%s is not exchanged, but its files renamed: %s", folder, error)
        exchanged = False
    if not exchanged:
        for name in set(os.listdir(made)).difference(new):
            _remove(made / name)
    return exchanged


def _exchange_back(stage: Path, folder: Path) -> bool:
    with suppress(OSError):
        if _exchange(stage / UNFINISHED, folder):
            return True
    os.rename(stage / UNFINISHED, stage / KEPT)
    logger.error("%s was replaced, and cannot be put back. What was in it is in %s", folder, stage / KEPT)
    return False


def _link_all(names: Iterable[str], source: Path, target: Path) -> None:
    """Have what is in one directory in another one as well: the same files, in directories made again."""
    for name in names:
        try:
            _link(source / name, target / name)
        except FileNotFoundError:
            if os.path.lexists(source / name):
                raise  # else somebody has removed it, who goes on in there


def _link(here: Path, there: Path) -> None:
    if here.is_dir() and not here.is_symlink():
        if os.path.ismount(here) or not os.access(here, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "what is in it cannot be removed from there", str(here))
        there.mkdir(exist_ok=True)
        _link_all(os.listdir(here), here, there)
        _look_like(here, there)
        _flush(there)
    elif not os.path.lexists(there):
        os.link(here, there, follow_symlinks=False)
    elif not os.path.samestat(os.lstat(here), os.lstat(there)):  # replaced since the first time
        between = there.with_name(f"{PREFIX}{os.getpid()}")
        os.link(here, between, follow_symlinks=False)
        os.replace(between, there)


def _look_like(source: Path, target: Path) -> None:
    """Owner, rights and times of a directory for the one in its place."""
    looks, own = os.stat(source), os.stat(target)
    if (looks.st_uid, looks.st_gid) != (own.st_uid, own.st_gid):
        os.chown(target, looks.st_uid, looks.st_gid)
    shutil.copystat(source, target)


def _rename_files(stage: Path, folder: Path, new: list[str], stale: Callable[[str], bool]) -> None:
    """File by file, see [Note: taking the place]."""
    made, complete, aside = stage / UNFINISHED, stage / COMPLETE, stage / REPLACED
    aside.mkdir()
    old = [name for name in os.listdir(folder) if name in new or stale(name)]
    moves = [(folder / name, aside / name) for name in sorted(old, key=_authority_first)]
    moves.append((made, complete))
    moves += [(complete / name, folder / name) for name in sorted(new, key=_authority_first, reverse=True)]
    try:
        _move(moves)
    except BaseException:
        with suppress(OSError):  # not everything could be put back
            aside.rmdir()
        raise
    complete.rmdir()  # from here on what is in `replaced` is of no use any more


def _move(moves: list[tuple[Path, Path]]) -> None:
    """Rename all or none. Only if what was renamed cannot be put back, some are."""
    begun: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            begun.append((source, target))  # first: Ctrl-C may come right after the rename
            os.rename(source, target)
    except BaseException:
        for source, target in reversed(begun):
            if os.path.lexists(target) and not os.path.lexists(source):
                os.rename(target, source)
        raise


def is_pending(stage: Path) -> bool:
    """Whether the folder lacks files that are in this stage."""
    return (stage / REPLACED).exists() and ((stage / UNFINISHED).exists() or (stage / COMPLETE).exists())


def is_kept(stage: Path) -> bool:
    """Whether something in this stage is nowhere else."""
    return is_pending(stage) or (stage / KEPT).exists()


def remove(stage: Path) -> None:
    """Remove a stage; in an order in which a part of it is never taken for a pending one, or for somebody else's."""
    for name in (UNFINISHED, COMPLETE, REPLACED):
        _remove(stage / name)
    shutil.rmtree(stage, ignore_errors=True)


def settle(stages: Iterable[Path], folder: Path) -> None:
    """Make good what saves have left that were killed; those that go on hold a lock."""
    for stage in stages:
        with suppress(OSError), _locked(stage):  # one that goes on, or that cannot be locked here
            if is_pending(stage):
                _finish_renames(stage, folder)
            if not is_kept(stage):
                remove(stage)
                logger.warning("Removed %s, left by a save that was interrupted", stage)


def _finish_renames(stage: Path, folder: Path) -> None:
    """Put the old files back, or all new ones in, unless others have come in their places."""
    complete = stage / COMPLETE
    source = complete if complete.exists() else stage / REPLACED
    names = sorted(os.listdir(source), key=_authority_first, reverse=True)
    taken = [name for name in names if os.path.lexists(folder / name)]
    if taken:
        logger.warning(
            "%s has files that a save had to leave in the middle of its renames, and %s is in %s again. Remove the "
            "former once you have seen what is in it.",
            source,
            taken[0],
            folder,
        )
        return
    _move([(source / name, folder / name) for name in names])
    source.rmdir()
    what = "moved all new ones in" if source == complete else "moved the old ones back"
    logger.warning("A save to %s was interrupted while it renamed files; %s", folder, what)


@contextmanager
def _locked(stage: Path) -> Iterator[None]:
    descriptor = lock(stage)
    try:
        yield
    finally:
        os.close(descriptor)


def lock(stage: Path) -> int:
    """Lock a stage; gives the descriptor that holds the lock.

    Raises:
        OSError: Another process holds it, or there are no locks here.
    """
    descriptor = os.open(stage / OPEN, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only what may be written
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _authority_first(name: str) -> tuple[bool, bool, str]:
    """Order in which the loss of files makes a checkpoint unreadable: index, weights, the rest."""
    return not name.endswith(".index.json"), not name.endswith(".safetensors"), name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # directories on some file systems
            raise
    finally:
        os.close(descriptor)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change places in one step; False where the system cannot (`renameat2`, Linux)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(other))
