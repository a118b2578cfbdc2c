"""Tells which folders can be renamed, and on what file system a folder is.

The kernel renames no mount point, and nothing from one mount to another, even of the same disk: bind mounts, such as
the volumes of containers, have one device number. So this module reads the table of mounts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path

OVERLAYS = ("overlay", "fuse.fuse-overlayfs")
_UNKNOWN = "unknown", ""
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes spaces and backslashes there


def is_fixed(folder: Path) -> bool:
    """Whether no other folder may take the place of this one. That holds for a mount point, a folder with a mount
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
    there = f"{folder}".rstrip("/") + "/"
    return any(f"{path}/".startswith(there) for path in held) or not os.access(folder.parent, os.W_OK)


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
    return table.get(point, _UNKNOWN)[0], point


def source_of(folder: Path) -> tuple[str, str]:
    """The type of the file system of a folder, and its source, such as ``server:/export``."""
    table = _mounts()
    return table.get(_mount_of(folder, table), _UNKNOWN)


def _mount_of(folder: Path, points: Container[Path]) -> Path:
    folder = folder.resolve()
    return next((path for path in (folder, *folder.parents) if path in points), Path("/"))


def _mounts() -> Mapping[Path, tuple[str, str]]:
    """Type and source of each mount, by mount point; of several on one, the last. Empty without /proc."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return {}
    return _parsed(table)


@functools.lru_cache(maxsize=1)  # a container may have hundreds, and every folder that is saved asks twice
def _parsed(table: bytes) -> Mapping[Path, tuple[str, str]]:
    lines = (os.fsdecode(line).split(" ") for line in table.splitlines())
    return {Path(_plain(fields[4])): _what(fields[fields.index("-") + 1 :]) for fields in lines}


def _what(fields: list[str]) -> tuple[str, str]:
    return fields[0], _plain(fields[1])


def _plain(field: str) -> str:
    return _OCTAL.sub(lambda code: chr(int(code[1], 8)), field)
