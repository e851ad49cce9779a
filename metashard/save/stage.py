"""A stage: the hidden folder that takes a save until it is complete. See [Note: taking the place]."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from metashard.errors import SaveError
from metashard.report import size_text
from metashard.save import commit
from metashard.save.commit import OPEN, PREFIX, UNFINISHED
from metashard.save.write import PART

_NAME_BYTES = 200  # of the folder's name in that of its stage: a name may have 255 in all
_TOKEN_BYTES = 8


class Stage:
    """The stage of one save. One rank makes it.

    Args:
        folder: Where the checkpoint shall be.
        overwrite: Whether it may hold something already.
        stale: Whether a file of this name in the folder would be taken for a part of the new checkpoint.

    Raises:
        SaveError: The folder is no directory, holds something, or cannot be written.
    """

    def __init__(self, folder: Path, *, overwrite: bool, stale: Callable[[str], bool] = lambda name: False) -> None:
        self.folder = folder = Path(os.path.realpath(folder))
        self.overwrite, self.stale = overwrite, stale
        if os.path.lexists(folder) and not folder.is_dir():
            what = "a link that leads to itself" if folder.is_symlink() else "a file"
            raise SaveError(f"{folder} is {what}; expected a folder.", phase="resolve", file=str(folder))
        commit.settle(left_stages(folder), folder)
        self._refuse_content()
        self.token = token = secrets.token_hex(_TOKEN_BYTES)
        try:
            if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
                code = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(code, os.strerror(code), str(folder))
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.beside = _can_move(folder)
            self.name = _stage_name(folder, beside=self.beside) + token
            if self.beside:
                try:
                    os.mkdir(folder.parent / self.name)
                except PermissionError:  # of the parent: the folder itself may still be ours
                    self.beside, self.name = False, _stage_name(folder, beside=False) + token
            if not self.beside:
                folder.mkdir(exist_ok=True)
                os.mkdir(folder / self.name)
            self.root = stage_root(folder, self.name, beside=self.beside)
            self._lock: int | None = None
            try:
                (self.root / OPEN).write_text(token)
                with suppress(OSError):  # a file system without locks
                    self._lock = commit.lock(self.root)
                self.path = self.root / UNFINISHED
                self.path.mkdir()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def _refuse_content(self) -> None:
        held = [name for name in os.listdir(self.folder) if not name.startswith(PREFIX)] if self.folder.exists() else []
        if held and not self.overwrite:
            raise SaveError(
                f"{self.folder} holds {len(held)} files or folders ({', '.join(sorted(held)[:3])}). Save to an empty "
                "folder, or pass overwrite=True: files of the same names and other weights of the model are replaced, "
                "everything else stays.",
                file=str(self.folder),
                expected="a new or empty folder",
                got=f"{len(held)} entries",
            )

    def _refuse_folders(self) -> None:
        """What is in a folder is nobody's to remove because of the folder's name."""
        new = {name.removesuffix(PART) for name in os.listdir(self.path)}
        for name in sorted(os.listdir(self.folder) if self.folder.exists() else ()):
            if (name in new or self.stale(name)) and (self.folder / name).is_dir():
                raise SaveError(
                    f"{self.folder / name} is a folder, and has the name of a file of the model. Move it away, or save "
                    "to another folder; overwrite=True replaces files only.",
                    file=str(self.folder / name),
                    expected="a file, or nothing",
                    got="a folder",
                )

    def reserve(self, headers: dict[str, bytes], sizes: dict[str, int]) -> None:
        """Make the weight files, with their headers and at their size.

        Raises:
            SaveError: There is not enough room for them, or one of them would take the place of a folder.
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
            try:
                with open(self.path / (name + PART), "xb") as file:
                    file.write(head)
                    file.truncate(sizes[name])
            except OSError as error:
                raise SaveError(
                    f"{name} of {size_text(sizes[name])} cannot be made: {error.strerror}. Nothing was changed in the "
                    "folder.",
                    phase="layout",
                    file=str(self.folder / name),
                    expected=sizes[name],
                    got=error.strerror,
                ) from error
        self._refuse_folders()

    def commit(self) -> None:
        """Let the checkpoint take its place.

        Raises:
            SaveError: Something has come into the folder since the save began, and may not be overwritten.
        """
        self._refuse_content()
        self._refuse_folders()
        for name in os.listdir(self.path):
            if name.endswith(PART):
                os.rename(self.path / name, self.path / name.removesuffix(PART))
        commit.take_place(self.root, self.folder, self.stale, movable=self.beside)

    def close(self) -> None:
        """Remove what is left of it, unless it holds files of the old folder that could not be put back."""
        if not commit.is_kept(self.root):
            commit.remove(self.root)
        if self._lock is not None:
            os.close(self._lock)


def _stage_name(folder: Path, *, beside: bool) -> str:
    """Name of a folder's stages up to the token."""
    if not beside:
        return PREFIX
    name = os.fsencode(folder.name)
    if len(name) > _NAME_BYTES:
        digest = hashlib.sha256(name).hexdigest()[:16]
        name = name[: _NAME_BYTES - 17] + b"-" + digest.encode()
    return f"{PREFIX}{os.fsdecode(name)}-"


def left_stages(folder: Path) -> list[Path]:
    """All stages of a folder, those of saves that go on included."""
    folder, found = Path(os.path.realpath(folder)), []
    for place, beside in ((folder.parent, True), (folder, False)):
        alike = re.compile(re.escape(_stage_name(folder, beside=beside)) + f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
        with suppress(OSError):
            found += [place / name for name in sorted(os.listdir(place)) if alike.fullmatch(name)]
    return found


def interrupted(folder: Path) -> list[Path]:
    """Stages with files that the folder lacks: a save was killed while it renamed them, or is at it."""
    with suppress(OSError, ValueError):  # no path at all
        return [stage for stage in left_stages(folder) if commit.is_pending(stage)]
    return []


def stage_root(folder: Path, name: str, *, beside: bool) -> Path:
    """Where a rank sees the stage of rank 0, if it does."""
    folder = Path(os.path.realpath(folder))
    return (folder.parent if beside else folder) / name


def sees(root: Path, token: str) -> bool:
    """Whether the stage at `root` is the one with this token: the same files, not only the same name."""
    try:
        return (root / OPEN).read_text() == token
    except OSError:
        return False


def _can_move(folder: Path) -> bool:
    """Whether the folder is, or would be, a plain directory on its parent's file system, and this process not in it."""
    if not folder.exists():
        return True
    with suppress(OSError):  # to stay in a directory that has been exchanged is to be nowhere
        if Path.cwd().is_relative_to(folder):
            return False
    return not os.path.ismount(folder) and os.stat(folder).st_dev == os.stat(folder.parent).st_dev


def _cannot_write(folder: Path, error: OSError) -> SaveError:
    return SaveError(
        f"{folder} cannot be written: {error.strerror}. Give a folder with room that this user may write to.",
        phase="resolve",
        file=str(folder),
        got=error.strerror,
    )
