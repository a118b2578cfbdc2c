"""Removes checkpoints, the last step of the durability protocol (commit.py), and what dead processes left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from lazyckpt.storage import claim, folders, mounts
from lazyckpt.storage.claim import FolderClaim
from lazyckpt.storage.manifest import MANIFEST

# Endings of the files without which a framework does not recognize a checkpoint.
_WEIGHTS = (".safetensors", ".bin", ".index.json")


def remove(path: Path, may_go: Callable[[Path], bool] = lambda path: True, *, inside: Path | None = None) -> bool:
    """Hides a path, then removes it. After a crash in between, ``sweep`` removes the rest.

    Returns whether the name is free now. Raises OSError."""
    if (trash := hide(path, may_go, inside=inside)) is not None:
        unlink(trash, path.parent)
    return not os.path.lexists(path)


def hide(path: Path, may_go: Callable[[Path], bool] = lambda path: True, *, inside: Path | None = None) -> Path | None:
    """Renames a path out of sight, unless ``may_go`` refuses when no other process can replace the path any more. It
    gets a name beside the old one, or in the folder ``inside`` if that is there and on the same mount.

    Returns the path for ``unlink``. None: nothing is left to remove, or it stays. Raises OSError."""
    try:
        trash = _rename_away(path, inside)
        if trash is None:
            take_apart(path, may_go)
    except FileNotFoundError:
        return None
    if trash is not None and not may_go(trash):
        os.rename(trash, path)
        return None
    return trash


def _rename_away(path: Path, inside: Path | None) -> Path | None:
    """Returns the new name, or None if the path must be removed where it is."""
    if not path.is_dir() and mounts.is_overlay(path.parent):
        path.lstat()
        return None  # a rename would first copy a file of a lower layer to the upper one
    trash = folders.fresh_name(folders.TRASH, path if inside is None else inside / path.name)
    try:
        os.rename(path, trash)
    except OSError as error:
        if inside is not None and error.errno in (errno.ENOENT, errno.EXDEV):
            return _rename_away(path, None)
        if error.errno == errno.EXDEV:
            return None
        raise
    return trash


def take_apart(path: Path, may_go: Callable[[Path], bool] = lambda path: True) -> None:
    """Removes in place a folder that cannot be renamed, such as one from a lower layer of an overlay. Leaves it if
    ``may_go`` refuses, or if another process replaced it meanwhile.

    Removes the manifest first, then the weights, and syncs each time, so that a loader fails on the remains of a crash.
    Raises OSError.
    """
    if path.is_symlink() or not path.is_dir():  # one call removes it whole
        if may_go(path):
            path.unlink()
            folders.sync_path(path.parent)
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # From here on everything goes by the descriptor: the name may become that of a new checkpoint.
        if not may_go(path) or not os.path.samestat(os.fstat(fd), path.lstat()):
            return
        for endings in ((MANIFEST,), _WEIGHTS, ("",)):
            _unlink_files(fd, endings)
    finally:
        os.close(fd)
    path.rmdir()
    folders.sync_path(path.parent)


def _unlink_files(fd: int, endings: tuple[str, ...]) -> None:
    """Removes the files below an open folder whose names have one of these endings, and then empty folders, durably."""
    for _, subfolders, names, folder in os.fwalk(".", topdown=False, onerror=folders.reraise, dir_fd=fd):
        links = {name for name in subfolders if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)}
        for name in (*names, *links):
            if name.endswith(endings):
                os.unlink(name, dir_fd=folder)
        for name in set(subfolders) - links:
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        os.fsync(folder)


def unlink(trash: Path, was_in: Path | None = None) -> None:
    """Removes a folder, file or link that was renamed to ``trash``. ``was_in``: its folder before the rename, if
    another.

    Syncs the rename first: a power cut must not give the final name back to half of a checkpoint."""
    for folder in dict.fromkeys((trash.parent, was_in or trash.parent)):
        folders.sync_path(folder)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash, ignore_errors=True)
    else:
        trash.unlink(missing_ok=True)


def sweep(root: Path, by: FolderClaim | None = None) -> list[Path]:
    """Removes the remains of dead processes in ``root``: trash and staged folders. Gives a checkpoint back its name if
    its replacement never came. ``by``: also removes folders that older generations of this job have staged."""
    asides = _unfinished(root, folders.REPLACED)
    replaced = [
        path
        for path in asides
        if folders.is_whole(name := folders.target_of(path.name)) and not put_back(path, root / name)
    ]
    trash = [*_unfinished(root, folders.TRASH), *filter(None, map(hide, replaced))]
    staged = sweep_staged(root, by)
    for path in trash:
        unlink(path)
    return [*staged, *trash]


def put_back(aside: Path, target: Path) -> bool:
    """Gives a checkpoint back its name if its replacement never came; returns whether it has the name, or is gone."""
    if not os.path.lexists(target):
        with contextlib.suppress(FileNotFoundError):
            try:
                os.rename(aside, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # published meanwhile
                    raise
    return not os.path.lexists(aside)


def sweep_staged(root: Path, by: FolderClaim | None = None) -> list[Path]:
    """Removes staged folders whose lock is free, and those of older generations of the job ``by``."""
    return [path for path in _unfinished(root, folders.TEMPORARY) if _remove_abandoned(path, by)]


def _unfinished(root: Path, prefix: str) -> list[Path]:
    return [root / name for name in os.listdir(root) if name.startswith(prefix) and folders.is_unfinished(name)]


def _remove_abandoned(path: Path, by: FolderClaim | None) -> bool:
    """Removes a staged folder unless a live process holds its lock.

    Holds the lock until the folder is gone: a process that has just made it and is about to lock it notices then
    (``Staging``), and not when its checkpoint disappears. The folder may be one that was replaced by a process that
    died before it synced that, so its final name must be gone for good first, as in ``unlink``. A folder
    that several ranks fill is renamed first, so that they find it gone.
    """
    if claim.is_shared(path):
        trash = hide(path) if claim.is_abandoned(path, by) else None
        if trash is not None:
            unlink(trash)
        return trash is not None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        folders.sync_path(path.parent)
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)
