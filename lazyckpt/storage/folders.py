"""Makes, names and syncs folders and files."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import uuid
from pathlib import Path
from typing import NoReturn, TextIO

TEMPORARY = ".tmp-"
TRASH = ".trash-"
PUBLISH = ".publish-"  # see in_place.py
REPLACED = ".replaced-"  # see shared.py
_NAME_BYTES = 100  # of a name that its temporary name repeats
_UNFINISHED = re.compile(r"\.(tmp|trash|publish|replaced)-.*-[0-9a-f]{32}", re.DOTALL)


def create(path: Path) -> TextIO:
    """Creates a text file. Raises FileExistsError if ``path`` exists.

    Calls ``os.open``, like every step of the protocol, so that the crash tests can record it."""
    return open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o666))


def sync_path(path: str | os.PathLike[str]) -> None:
    """Calls fsync on a folder or file, so that its names or bytes survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Makes a folder if it is missing, and syncs its name: otherwise a power cut loses even synced files inside."""
    new = [path, *(folder for folder in path.parents if not folder.exists())]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        name = error.filename
        what = f"a symbolic link to {os.readlink(name)}, which leads to no folder" if os.path.islink(name) else "a file"
        raise NotADirectoryError(errno.ENOTDIR, f"not a folder: {what}", name) from error
    for folder in new:
        if not folder.is_mount():
            with contextlib.suppress(PermissionError):  # not ours to read: the program that made the name syncs it
                sync_path(folder.absolute().parent)


def free_bytes(folder: Path) -> float:
    """Returns the bytes that may be written there; infinity if the file system does not say. Raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks > 0 else math.inf


def fresh_name(prefix: str, target: Path) -> Path:
    """Returns an unused name beside ``target``, short enough for every file system."""
    name = os.fsencode(target.name.removeprefix(TEMPORARY))[:_NAME_BYTES].decode(errors="ignore")
    return target.with_name(f"{prefix}{name}-{uuid.uuid4().hex}")


def is_whole(name: str) -> bool:
    """Whether ``fresh_name`` keeps this name whole; it cuts longer ones."""
    return len(os.fsencode(name)) < _NAME_BYTES


def is_unfinished(name: str) -> bool:
    """Whether this is one of our temporary, trash, publish or replaced names."""
    return _UNFINISHED.fullmatch(name) is not None


def target_of(name: str) -> str:
    """Returns the name that ``fresh_name`` was given, for a name that ``is_unfinished``."""
    return name.partition("-")[2].rpartition("-")[0]


def reraise(error: OSError) -> NoReturn:
    """Raises ``error``: for ``os.walk`` and ``os.fwalk``, which otherwise skip a folder that they cannot list."""
    raise error
