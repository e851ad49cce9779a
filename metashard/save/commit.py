"""All or nothing: a checkpoint is written beside the folder that it shall be, and takes its place in one step.

[Note: taking the place]
Where the folder is new or empty, its complete replacement is renamed to it. Where it holds something and may be
overwritten, the two directories are exchanged, which Linux does in one step as well, and whatever else was in the old
one moves along. So at any time the folder is the old one or the new one, whole.

Where a directory cannot take the other's place (the folder is a mount point or the current one, its parent may not be
written, a network file system without the exchange), files are renamed one by one: first the old index or single weight
file goes out of the way, so that no loader takes a mixture for a checkpoint, then the old files, then the new ones come
in, index or single weight file last. An error or Ctrl-C puts everything back; after a crash within these renames, the
old files are still in the hidden folder beside the new ones.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from metashard.errors import SaveError
from metashard.report import size_text

logger = logging.getLogger(__name__)

_PREFIX = ".metashard-save-"
_OPEN = ".saving"  # in a stage until it is complete: the file by which ranks find out whether they see it
_ASIDE = "replaced"
_NAME_BYTES = 200  # of the folder's name in that of its stage: a name may have 255 in all


class Stage:
    """A hidden folder that takes a save until it is complete. One rank makes it.

    Args:
        folder: Where the checkpoint shall be.
        overwrite: Whether it may hold something already.

    Raises:
        SaveError: The folder is no directory, holds something, or cannot be written.
    """

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        self.folder = folder = Path(os.path.realpath(folder))
        if folder.exists() and not folder.is_dir():
            raise SaveError(f"{folder} is a file; expected a folder.", phase="resolve", file=str(folder))
        self.overwrite = overwrite
        self._refuse_content()
        self.token = token = secrets.token_hex(8)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.beside = _can_move(folder)
            short = os.fsdecode(os.fsencode(folder.name)[:_NAME_BYTES])
            self.name = f"{_PREFIX}{short}-{token}" if self.beside else f"{_PREFIX}{token}"
            if self.beside:
                try:
                    os.mkdir(folder.parent / self.name)
                except PermissionError:  # of the parent: the folder itself may still be ours
                    self.beside, self.name = False, f"{_PREFIX}{token}"
            if not self.beside:
                folder.mkdir(exist_ok=True)
                os.mkdir(folder / self.name)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        self.path = stage_path(folder, self.name, beside=self.beside)
        (self.path / _OPEN).write_text(token)
        self._lock = os.open(self.path / _OPEN, os.O_RDONLY)
        self._disposable = True  # nothing in it but what this save has made
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._clear_leftovers()

    def _refuse_content(self) -> None:
        held = (
            [name for name in os.listdir(self.folder) if not name.startswith(_PREFIX)] if self.folder.exists() else []
        )
        if held and not self.overwrite:
            raise SaveError(
                f"{self.folder} holds {len(held)} files or folders ({', '.join(sorted(held)[:3])}). Save to an empty "
                "folder, or pass overwrite=True: files of the same names and other weights of the model are replaced, "
                "everything else stays.",
                file=str(self.folder),
                expected="a new or empty folder",
                got=f"{len(held)} entries",
            )

    def _clear_leftovers(self) -> None:
        """Remove what saves to the same folder have left that were killed: nobody holds a lock on it any more."""
        alike = re.compile(re.escape(self.name.removesuffix(self.token)) + r"[0-9a-f]{16}")
        for path in [self.path.parent / name for name in os.listdir(self.path.parent) if alike.fullmatch(name)]:
            with suppress(OSError):  # one that is complete, or whose rank 0 is alive
                descriptor = os.open(path / _OPEN, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    logger.warning("Removed %s, left by a save that was interrupted", path)
                finally:
                    os.close(descriptor)

    def reserve(self, headers: dict[str, bytes], sizes: dict[str, int]) -> None:
        """Make the weight files, with their headers and at their size.

        Raises:
            SaveError: There is not enough room for them.
        """
        wanted, free = sum(sizes.values()), shutil.disk_usage(self.path).free
        if wanted > free:
            raise SaveError(
                f"{self.folder} has room for {size_text(free)}, the save takes {size_text(wanted)}. What is there now "
                "stays until the save is complete, so that both have to fit.",
                phase="layout",
                file=str(self.folder),
                expected=wanted,
                got=free,
            )
        for name, head in headers.items():
            with open(self.path / name, "xb") as file:
                file.write(head)
                file.truncate(sizes[name])

    def commit(self, stale: Callable[[str], bool]) -> None:
        """Let the checkpoint take its place.

        Args:
            stale: Whether a file of this name in the old folder would be taken for a part of the new checkpoint.

        Raises:
            SaveError: Something has come into the folder since the save began, and may not be overwritten.
        """
        self._refuse_content()
        os.unlink(self.path / _OPEN)  # from here on nobody clears it away
        new = sorted(os.listdir(self.path))
        for name in new:
            _flush(self.path / name)
        _flush(self.path)
        if not self.beside:
            self._rename_files(new, stale)
        elif not self.folder.exists() or not os.listdir(self.folder):
            if self.folder.exists():
                shutil.copystat(self.folder, self.path)
            os.rename(self.path, self.folder)
        else:
            shutil.copystat(self.folder, self.path)
            if not self._exchange_folders(new, stale):
                self._rename_files(new, stale)
        for folder in (self.folder, self.folder.parent):
            with suppress(OSError):  # the renames are done: what was saved is there
                _flush(folder)

    def _exchange_folders(self, new: list[str], stale: Callable[[str], bool]) -> bool:
        """Exchange the stage and the folder, and bring along what else was in it; False where the system cannot."""
        old, error = os.stat(self.folder), None
        self._disposable = False
        try:
            exchanged = _exchange(self.path, self.folder)
        except BaseException as raised:  # noqa: BLE001 - Ctrl-C may come right after the exchange
            exchanged, error = os.path.samestat(os.stat(self.path), old), raised
        if exchanged and error is None:
            others = [name for name in os.listdir(self.path) if name not in new and not stale(name)]
            error = _move([(self.path / name, self.folder / name) for name in others])
        self._disposable = error is None or not exchanged or _exchange(self.path, self.folder)
        if error is not None:
            raise error
        return exchanged

    def _rename_files(self, new: list[str], stale: Callable[[str], bool]) -> None:
        """File by file, see [Note: taking the place]."""
        aside = self.path / _ASIDE
        aside.mkdir()
        old = [name for name in os.listdir(self.folder) if name in new or stale(name)]
        moves = [(self.folder / name, aside / name) for name in sorted(old, key=_authority_first)]
        moves += [(self.path / name, self.folder / name) for name in sorted(new, key=_authority_first, reverse=True)]
        self._disposable = False
        error = _move(moves)
        self._disposable = True
        if error is not None:
            raise error

    def close(self) -> None:
        """Remove what is left of it, unless it holds files of the old folder that could not be put back."""
        if self._disposable:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            logger.error("%s holds files of %s that could not be put back", self.path, self.folder)
        os.close(self._lock)


def _move(moves: list[tuple[Path, Path]]) -> BaseException | None:
    """Rename all, or none and return why. Raises only if what was renamed could not be put back."""
    begun: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            begun.append((source, target))  # first: Ctrl-C may come right after the rename
            os.rename(source, target)
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        for source, target in reversed(begun):
            if os.path.lexists(target) and not os.path.lexists(source):
                os.rename(target, source)
        return error
    return None


def stage_path(folder: Path, name: str, *, beside: bool) -> Path:
    """Where a rank sees the stage of rank 0, if it does."""
    folder = Path(os.path.realpath(folder))
    return (folder.parent if beside else folder) / name


def sees(path: Path, token: str) -> bool:
    """Whether the stage at `path` is the one with this token: the same files, not only the same name."""
    try:
        return (path / _OPEN).read_text() == token
    except OSError:
        return False


def _authority_first(name: str) -> tuple[bool, bool, str]:
    """Order in which the loss of files makes a checkpoint unreadable: index, weights, the rest."""
    return not name.endswith(".index.json"), not name.endswith(".safetensors"), name


def _can_move(folder: Path) -> bool:
    """Whether the folder is, or would be, a plain directory on its parent's file system, and this process not in it."""
    if not folder.exists():
        return True
    with suppress(OSError):
        if os.path.samefile(folder, os.curdir):  # to stay in a directory that has been exchanged is to be nowhere
            return False
    return not os.path.ismount(folder) and os.stat(folder).st_dev == os.stat(folder.parent).st_dev


def _cannot_write(folder: Path, error: OSError) -> SaveError:
    return SaveError(
        f"{folder} cannot be written: {error.strerror}. Give a folder that this user may write to.",
        phase="resolve",
        file=str(folder),
        got=error.strerror,
    )


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
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.EBUSY, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))
