"""Keeps the mode and the owner of a file or folder that is replaced, as a program that overwrites it would."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_READ = 0o444
_OWN = 0o700  # the mode that this process needs to finish its work


def shut(staged: Path, target: Path) -> None:
    """Closes the new folder ``staged`` to users who may not read the present ``target``."""
    if (old := _mode(target)) is not None:
        readers = old & _READ
        allowed = old if os.path.isdir(target) else readers | readers >> 2  # to enter a folder takes x, too
        if (mode := stat.S_IMODE(staged.stat().st_mode)) & ~(allowed | _OWN) & 0o777:
            staged.chmod(mode & (allowed | _OWN | ~0o777))


def keep(target: Path, staged: Path) -> None:
    """Gives ``staged``, and everything in it, the mode and owner of the file or folder of that name in ``target``.

    Syncs a file that it changes. Skips changes that the file system or a missing privilege refuses. Raises OSError."""
    if _mode(target) is None:
        return
    _keep(target, staged)
    for folder, subfolders, names in os.walk(staged):
        for name in (*subfolders, *names):
            new = Path(folder, name)
            _keep(target / new.relative_to(staged), new)


def _keep(old: Path, new: Path) -> None:
    if _mode(old) is None or _mode(new) is None or old.is_dir() != new.is_dir():
        return
    before = old.lstat()
    kept, needed = (0o3777, _OWN) if new.is_dir() else (0o777, 0o400)  # no file runs as its owner by us
    fd = os.open(new, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        now = os.fstat(fd)
        mode = before.st_mode & kept | needed
        if (before.st_uid, before.st_gid, mode) == (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)):
            return
        for owner in ((-1, before.st_gid), (before.st_uid, -1)):
            with contextlib.suppress(OSError):
                os.fchown(fd, *owner)
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode)  # after fchown, which clears bits
        os.fsync(fd)
    finally:
        os.close(fd)


def _mode(path: Path) -> int | None:
    """Returns None if the path is missing, or neither a file nor a folder, such as a link."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else None
