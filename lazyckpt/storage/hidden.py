"""The folder in which checkpoints are staged, where a script that looks for the newest folder does not find it.

Many scripts resume from the newest folder by ctime or mtime, hidden or not. So a temporary name must not be beside the
checkpoints, where a killed process leaves it. A *place* is two folders deep:

    runs/.lazyckpt/            as old as it can be
    runs/.lazyckpt/staged/     temporary and trash names

Names that come and go in the inner folder change its times, and not those of the outer one. When the outer one is made,
its mtime is set to 1970, and the folder that was the newest before gets a newer ctime: nothing sets a ctime back.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from lazyckpt import waits
from lazyckpt.storage import folders

PLACE = ".lazyckpt"
_STAGED = "staged"
_NAMES = (PLACE, "_lazyckpt")  # the second is for frameworks that upload all but names with "_"
_TICKS = 100  # at most; a kernel counts ctime in steps of some milliseconds


def place(root: Path, name: str = PLACE) -> Path:
    """The folder to stage in, for checkpoints in ``root`` or below."""
    return root / name / _STAGED


def is_place(folder: Path) -> bool:
    return folder.name == _STAGED and folder.parent.name in _NAMES


def make(folder: Path) -> None:
    """Makes a folder to stage in, if it is missing, as ``folders.make_folder`` does. Raises OSError."""
    if not is_place(folder):
        folders.make_folder(folder)
        return
    outer = folder.parent
    folders.make_folder(outer.parent)
    while not folder.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another process found it empty, and removed it
            outer.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            _make_old(outer)
            folders.sync_path(outer.parent)
            folders.sync_path(outer)


def remove(folder: Path) -> None:
    """Removes a place if it is empty."""
    try:
        folder.rmdir()
    except OSError:  # in use, or gone
        return
    try:
        folder.parent.rmdir()
    except OSError:  # it holds files of others
        _make_old(folder.parent)


def swept_with(folder: Path) -> list[Path]:
    """The folders in which dead processes may have left staged files, also of older versions, which staged
    elsewhere."""
    return [folder, folder.parent, folder.parent.parent] if is_place(folder) else [folder]


def _make_old(outer: Path) -> None:
    """Makes ``outer`` older than the newest folder beside it."""
    with contextlib.suppress(OSError):  # not ours, or a file system without such times
        os.utime(outer, (0, 0))
        beside = [entry for entry in os.scandir(outer.parent) if entry.name != outer.name and entry.is_dir()]
        if not beside:
            return
        newest = max(beside, key=lambda entry: entry.stat().st_ctime_ns)
        for _ in range(_TICKS):
            status = os.stat(newest.path)
            if status.st_ctime_ns > os.stat(outer).st_ctime_ns:
                return
            os.utime(newest.path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same; this moves the ctime
            time.sleep(waits.CTIME_TICK_S)
