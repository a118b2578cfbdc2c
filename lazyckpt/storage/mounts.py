"""Tells which folders can be renamed, and on what file system a folder is.

The kernel renames no mount point, and nothing from one mount to another, even of the same disk: bind mounts, such as
the volumes of containers, have one device number. So this module reads the table of mounts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container
from pathlib import Path

OVERLAYS = ("overlay", "fuse.fuse-overlayfs")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes spaces and backslashes there


def is_fixed(folder: Path) -> bool:
    """Whether another folder must not take the place of this one. That holds for a mount point, a folder with a mount
    point below it, the working folder or one above it, and a folder whose parent this process may not write to.

    If the working folder were replaced, the process would be left in a removed one. Mount points below would move along
    with the replaced folder, and its removal would empty them.
    """
    if not folder.is_dir():
        return False
    folder = folder.resolve()
    held = set(_mounts())
    with contextlib.suppress(FileNotFoundError):  # the working folder was removed
        held.add(Path.cwd())
    return any(folder == path or folder in path.parents for path in held) or not os.access(folder.parent, os.W_OK)


def on_one_mount(first: Path, second: Path) -> bool:
    """Whether a rename from one of these folders to the other is possible. Both exist."""
    points = _mounts()
    return _mount_of(first, points) == _mount_of(second, points)


def is_overlay(folder: Path) -> bool:
    """Whether the folder is on an overlay of several layers, as those of a container's image. It exists."""
    return file_system(folder)[0] in OVERLAYS


def file_system(folder: Path) -> tuple[str, Path]:
    """The type and the mount point of the file system of a folder; "unknown" where there is no /proc."""
    table = _mounts()
    point = _mount_of(folder, table)
    return table.get(point, "unknown"), point


def _mount_of(folder: Path, points: Container[Path]) -> Path:
    folder = folder.resolve()
    return next((path for path in (folder, *folder.parents) if path in points), Path("/"))


def _mounts() -> dict[Path, str]:
    """The type of what is mounted, by mount point; of several on one, the last. Empty where there is no /proc."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return {}
    lines = (os.fsdecode(line).split(" ") for line in table.splitlines())
    return {
        Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[4])): fields[fields.index("-") + 1]
        for fields in lines
    }
