"""The folders that a run uses as mirrors, and the mount point above each: where a file system is not mounted now, an
empty folder must not count as an empty mirror.

The folder of the run remembers them. Otherwise uploads would fill the disk below the mount point, and ``restore()``
would begin anew.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

from lazyckpt.storage import mounts
from lazyckpt.tiers.words import read_word, write_word

IN_USE = ".lazyckpt-mirrors"
_remembering = threading.Lock()  # each mirror has a thread


def _forget() -> None:
    """In a forked child, the thread that has the lock does not exist."""
    global _remembering
    _remembering = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def check(mirror: Path, run: Path | None) -> None:
    """Raises OSError if the mirror's file system is not mounted. Call it if the mirror has no id of a run. ``run``: the
    folder of the run, which may remember the mirror."""
    if not mirror.parent.is_dir():
        what = f"{mirror.parent} does not exist: mount its file system, or make the folder"
        raise OSError(errno.ENODEV, what, str(mirror))
    then = None if run is None else _known(run).get(str(mirror))
    if then is not None and mounts.file_system(mirror)[1] in Path(then).parents:
        what = f"this run used it on {then}, where no file system is mounted now; mount it. If it has moved, remove"
        raise OSError(errno.ENODEV, f"{what} {run and run / IN_USE}", str(mirror))


def remember(mirror: Path, run: Path) -> None:
    """Notes, durably, that the run uses the mirror, and where it is mounted. Raises OSError."""
    point = str(mounts.file_system(mirror)[1])
    with _remembering:
        known = _known(run)
        if known.get(str(mirror)) != point:
            write_word(run / IN_USE, json.dumps({**known, str(mirror): point}))


def _known(run: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(read_word(run / IN_USE) or "{}")
        return {str(mirror): str(point) for mirror, point in found.items()}
    except (ValueError, AttributeError):
        return {}
