"""Publishes into a folder that cannot be renamed (``mounts.is_fixed``, ``Staging.may_replace``), such as a volume.

Nothing can take the place of such a folder in one step, so the files of the checkpoint get their names one by one. The
steps of commit.py hold, except that the temporary folder is inside the target, and for

    6. publish    a. rename the temporary folder to .publish-…; fsync the target. The checkpoint is durable now
                  b. remove the marker of the old one; fsync the target
                  c. link the other files to their names; fsync
                  d. link the marker to its name; fsync
                  e. remove .publish-…; fsync the target

The marker is the file that the caller added first. After a crash before b. the target holds the old checkpoint, and
after d. the new one. In between the marker is missing, so a loader fails instead of mixing the two. ``finish``
then does b. to e. again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lazyckpt.storage import commit, folders, locks, mounts

MARKER = ".lazyckpt-marker"  # in the temporary folder: the name of the marker


def stage(
    target: Path, inside: Path | None, prepare: Callable[[Path], None], *, keep_others: bool = True
) -> commit.Staging:
    """Makes the temporary folder of ``target``: beside it, in ``inside`` if that is on the same mount, or in a target
    that cannot be renamed. Calls ``prepare`` with each folder before it makes something there. ``keep_others``: as in
    ``Staging``; a target that cannot be renamed always keeps them. Raises OSError."""
    if not mounts.is_fixed(target):
        prepare(target.parent)
        if inside is not None:
            prepare(inside)
            if not mounts.on_one_mount(inside, target.parent):
                inside = None
        staging = commit.Staging(target, inside, keep_others=keep_others)
        try:
            if not target.is_dir() or staging.may_replace():
                return staging
        except OSError:
            staging.discard()
            raise
        staging.discard()
    prepare(target)
    return InPlaceStaging(target)


class InPlaceStaging(commit.Staging):
    """A staged folder inside the folder that it will fill. Other files of that folder stay."""

    def __init__(self, target: Path) -> None:
        super().__init__(target, target)

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        """Also notes the marker: with Accelerate and the Trainer, the weights."""
        written = list(written)
        with folders.create(self.path / MARKER) as file:
            file.write("".join(written[:1]))
        super().describe(manifest, written)

    def publish(self) -> None:
        finish(self.target)  # otherwise an older checkpoint would be published after this one
        _contents(self.path, self.target)  # raises before anything is touched
        ready = folders.fresh_name(folders.PUBLISH, self.target / self.target.name)
        os.rename(self.path, ready)
        self._published = True
        try:
            folders.sync_path(self.target)
            _give_names(ready)
        except OSError as error:
            what = f"{error.strerror} while its files got their names; the next save into the folder finishes that"
            raise OSError(error.errno, what, str(self.target)) from error
        self._unlock()


def finish(folder: Path) -> None:
    """Finishes publications into ``folder`` that a crash or an error cut off. Waits while another process publishes.

    Raises OSError if the disk fails, or if locks do not work here, so that the other process might be alive.
    """
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(folders.PUBLISH) and folders.is_unfinished(entry.name):
            _finish(Path(entry.path))


def _finish(ready: Path) -> None:
    try:
        fd = os.open(ready, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # another process has just finished it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if ready.is_dir():
            _give_names(ready)
    except OSError as error:
        if error.errno in locks.NO_LOCKS:
            what = "a process may still be publishing it; if none is, move what it holds to the folder above by hand"
            raise OSError(error.errno, what, str(ready)) from error
        raise
    finally:
        os.close(fd)


def _give_names(ready: Path) -> None:
    """Takes steps b. to e.; can be repeated from the start after a crash at any point."""
    target = ready.parent
    subfolders, files = _contents(ready, target)

    def sync() -> None:
        for folder in reversed(subfolders):  # a folder's name is in the one above it
            folders.sync_path(target / folder)

    for folder in subfolders:
        (target / folder).mkdir(exist_ok=True)
    noted = (ready / MARKER).read_text() if (ready / MARKER).exists() else ""
    marker = [file for file in files if str(file) == noted]
    for file in marker:
        (target / file).unlink(missing_ok=True)
    sync()
    for file in files:
        if file not in marker:
            _link(ready / file, target / file)
    sync()
    for file in marker:
        _link(ready / file, target / file)
    sync()
    shutil.rmtree(ready)
    folders.sync_path(target)  # or the old files could come back and replace newer ones


def _link(file: Path, name: Path) -> None:
    """Links rather than renames: after a power cut a renamed file might have neither name."""
    if os.path.lexists(name) and os.path.samestat(file.lstat(), name.lstat()):
        return
    name.unlink(missing_ok=True)
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError:  # no hard links here
        os.rename(file, name)


def _contents(ready: Path, target: Path) -> tuple[list[Path], list[Path]]:
    """The folders and the files in ``ready``. Raises OSError if ``target`` has a file in the place of a folder, or the
    other way round, or a link or mount point in the place of a folder."""
    subfolders, files = [], []
    for parent, inner, names in os.walk(ready):
        folder = Path(parent).relative_to(ready)
        there = target / folder
        if os.path.lexists(there) and (there.is_symlink() or not there.is_dir()):
            raise NotADirectoryError(errno.ENOTDIR, "the checkpoint has a folder of this name", str(there))
        if there.is_dir() and not mounts.on_one_mount(there, target):
            raise OSError(errno.EXDEV, "the checkpoint has a folder of this name, and it is a mount point", str(there))
        subfolders.append(folder)
        files += [folder / name for name in (*names, *(n for n in inner if Path(parent, n).is_symlink()))]
    for file in files:
        there = target / file
        if there.is_dir() and not there.is_symlink():
            raise IsADirectoryError(errno.EISDIR, "the checkpoint has a file of this name", str(there))
    return subfolders, [file for file in files if file != Path(MARKER)]
