"""Lists the checkpoints of a run, and the remains of dead processes beside them."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lazyckpt.errors import LoadError, ReadError, load_error
from lazyckpt.storage import claim, folders, manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import Checkpoint, pin_of
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.tools import deepspeed


@dataclass(frozen=True)
class BrokenCheckpoint:
    """A checkpoint whose manifest cannot be read, or whose files have other lengths."""

    path: Path
    step: int | None  # None: a trainer's
    bytes: int
    pinned: bool
    unreadable: bool  # the operating system refuses to read it; it may be whole
    reason: str


@dataclass(frozen=True)
class Leftover:
    """A temporary file or folder of ``bytes`` bytes. Whether the process of a lone file is alive cannot be known."""

    name: str
    bytes: int
    state: Literal["in use", "abandoned", "unknown", "uploading"]


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a run, the one saved last first; broken ones by name; and leftovers."""

    checkpoints: list[Checkpoint]
    broken: list[BrokenCheckpoint]
    leftovers: list[Leftover]


def list_run(directory: AnyPath) -> Listing:
    """Lists a run's folder or URL from its manifests; no other file is read. Raises LoadError if it is no run's."""
    if isinstance(directory, StorePath):
        return _list_url(directory)
    catalog = catalog_of(directory)
    checkpoints = catalog.scan()
    broken = sorted((_broken(directory, error) for error in catalog.broken), key=lambda broken: broken.path.name)
    return Listing(checkpoints, broken, leftovers(directory))


def _list_url(url: StorePath) -> Listing:
    from lazyckpt.tools.remote import scan

    found, errors, halves = scan(url)
    broken = []
    for error in errors:
        folder = error.path if error.path.parent == url else error.path.parent
        step = manifest.step_of(folder.name) if manifest.is_folder_name(folder.name) else None
        broken.append(BrokenCheckpoint(folder, step, 0, False, isinstance(error, ReadError), error.what))
    return Listing(found, broken, [Leftover(name, nbytes, "uploading") for name, nbytes in halves.items()])


def catalog_of(directory: Path) -> Catalog:
    """Opens a run's folder. Raises LoadError if it is a checkpoint or no folder, ReadError if it cannot be read."""
    try:
        os.scandir(directory).close()
    except OSError as error:
        raise load_error("cannot be read", error, path=directory) from error
    if os.path.isfile(directory / manifest.MANIFEST) or deepspeed.is_tag(directory):
        raise LoadError("a checkpoint itself; give the folder it is in, or use 'lazyckpt inspect'", path=directory)
    return Catalog(directory)


def _broken(directory: Path, error: LoadError) -> BrokenCheckpoint:
    folder = error.path if error.path.parent == directory else error.path.parent
    return BrokenCheckpoint(
        path=folder,
        step=manifest.step_of(folder.name),
        bytes=_bytes_on_disk(folder),
        pinned=os.path.lexists(pin_of(folder)),
        unreadable=isinstance(error, ReadError),
        reason=error.what,
    )


def leftovers(directory: Path) -> list[Leftover]:
    """Returns the unfinished files in a run's folder: those being written, and the remains of dead processes."""
    found = []
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if not folders.is_unfinished(entry.name):
            continue
        path = Path(entry.path)
        state: Literal["in use", "abandoned", "unknown"] = "in use"
        if not entry.is_dir(follow_symlinks=False) or entry.name.startswith(folders.REPLACED):
            state = "unknown"
        elif entry.name.startswith(folders.TRASH) or not _is_locked(path):
            state = "abandoned"
        found.append(Leftover(entry.name, _bytes_on_disk(path), state))
    return found


def _is_locked(folder: Path) -> bool:
    """Whether a live process holds the lock of a staged folder. Asks with a shared lock, released at once."""
    if claim.is_shared(folder):
        return not claim.is_abandoned(folder)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # published or swept meanwhile
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _bytes_on_disk(path: Path) -> int:
    """The length of a file, or of the files in a folder; 0 if a commit has renamed it meanwhile."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            return sum(os.lstat(entry.path).st_size for entry in os.scandir(path))
        return os.lstat(path).st_size
    except OSError:
        return 0
