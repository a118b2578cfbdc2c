"""The durability protocol, as numbered steps.

    1. stage      a temporary folder beside the target, locked; files are created in it with O_EXCL
    2. write      the engine writes them and checks every completion
    3. sync       the engine calls fdatasync on each file, after all its writes; with verify_after_write it then reads
                  the file back
    4. agree      all checkpoints before this one are published or have failed: they appear in order
    5. describe   the manifest (lengths, checksums, parent), written last; fsync it, then the temporary folder
    6. publish    rename to the final name; fsync the parent. Only now is the checkpoint committed
    7. clean      rename replaced and expired checkpoints to .trash-…; fsync the parent, then remove them

Nothing is ever written into a folder that has its final name. A lone file goes the same way without 4 and 5.
After a failed sync nothing is retried: the staged folder is discarded, and the next save begins with new files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from lazyckpt import _engine
from lazyckpt.storage import folders, hidden, locks, permissions, removal
from lazyckpt.storage.manifest import DCP_FILE, DEEPSPEED_FILES, MANIFEST

# Of the files of one rank each. Another world size has others.
_PARTS = (DCP_FILE, *DEEPSPEED_FILES)


class Staging:
    """A checkpoint folder before it has its final name. This process holds its lock as long as it exists.

    It is made beside ``target``, or in the folder ``inside``, which must be on the same file system. With
    ``keep_others``, files that other programs put into a replaced folder stay, unless the new one has a file of the
    name. Without ``replaces``, publication fails where anything but an empty folder has its name.
    """

    def __init__(
        self, target: Path, inside: Path | None = None, *, keep_others: bool = False, replaces: bool = True
    ) -> None:
        self.target = target
        self._keep_others = keep_others
        self._replaces = replaces
        self._published = False
        self._lock = -1
        while True:
            self.path = folders.fresh_name(folders.TEMPORARY, target if inside is None else inside / target.name)
            try:
                os.mkdir(self.path)
            except FileNotFoundError:
                if inside is None or inside.exists():
                    raise
                hidden.make(inside)  # another process found it empty, and removed it
                continue
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # swept between the two calls, by a process that took it for a leftover
            except OSError:
                shutil.rmtree(self.path, ignore_errors=True)
                raise
            try:
                locks.hold(self._lock)
                if os.path.isdir(self.path):
                    permissions.shut(self.path, target)
                    return
            except BaseException:
                self.discard()
                raise
            self._unlock()

    def may_replace(self) -> bool:
        """Whether the folder ``target`` can be renamed. Raises OSError.

        The kernel refuses (EXDEV) a folder from a lower layer of an overlay, and one with another project ID (xfs)."""
        occupied = self.path / "occupied"
        occupied.mkdir()
        try:
            # Never succeeds: this folder is not empty, and its lock keeps others from emptying it.
            os.rename(self.target, self.path)
        except OSError as error:
            occupied.rmdir()
            return error.errno != errno.EXDEV
        os.rename(self.path, self.target)
        raise OSError(errno.EBUSY, "another process emptied it", str(self.path))

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        """Step 5. ``written``: the files that the engine has synced; this syncs all others in the folder.

        A replacement takes over the mode and owner of the file or folder."""
        synced = {self.path / name for name in written}
        if manifest is not None:
            synced.add(self._write_manifest(manifest))
        permissions.keep(self.target, self.path)
        sync_all(self.path, synced)

    def _write_manifest(self, manifest: dict[str, Any]) -> Path:
        path = self.path / MANIFEST
        with folders.create(path) as file:
            json.dump(manifest, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        return path

    def publish(self) -> Path | None:
        """Step 6. Returns the folder that this one replaced, which now has another name, or None."""
        replaced = None
        if self._replaces and os.path.lexists(self.target):
            if self._keep_others:
                carry_over(self.target, self.path)
            replaced = self._exchange()
            if self._keep_others and replaced is not None:
                carry_over(replaced, self.target)  # files that were added meanwhile
        else:
            try:
                os.rename(self.path, self.target)  # also onto an empty folder
            except OSError as error:
                if self._replaces or error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                what = "another program made it during the save"
                raise FileExistsError(errno.EEXIST, what, str(self.target)) from error
        self._published = True
        try:
            folders.sync_path(self.target.parent)
            if self.path.parent != self.target.parent:
                with contextlib.suppress(FileNotFoundError):  # another process found it empty, and removed it
                    folders.sync_path(self.path.parent)
        except OSError as error:
            what = f"{error.strerror} at the fsync of its folder; it may or may not survive a power cut"
            raise OSError(error.errno, what, str(self.target.parent)) from error
        self._unlock()
        return replaced

    def _exchange(self) -> Path | None:
        try:
            _engine.rename_exchange(self.path, self.target)
            return self.path
        except OSError as error:
            if error.errno == errno.EXDEV and not self._keep_others:
                removal.take_apart(self.target)
                os.rename(self.path, self.target)
                return None
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        # A file system without RENAME_EXCHANGE. For an instant neither has the name; older checkpoints stand in.
        old = folders.fresh_name(folders.TRASH, self.path.parent / self.target.name)
        os.rename(self.target, old)
        try:
            os.rename(self.path, self.target)
        except OSError:
            os.rename(old, self.target)
            raise
        return old

    def discard(self) -> None:
        """Removes the staged folder, after an error.

        Removes nothing after a failed publication: the replaced folder may yet get its name back. The next sweep
        removes it."""
        try:
            if not self._published:
                shutil.rmtree(self.path, ignore_errors=True)
                if hidden.is_place(self.path.parent):
                    hidden.remove(self.path.parent)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        fd, self._lock = self._lock, -1  # once: another file may have the number by the next call
        locks.drop(fd)


def sync_all(root: Path, synced: Container[Path]) -> None:
    """Syncs the files and folders below ``root``, except the files in ``synced``. Raises OSError."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            file = Path(folder, name)
            if file not in synced and not file.is_symlink():
                folders.sync_path(file)
        folders.sync_path(folder)


def carry_over(old: Path, new: Path) -> None:
    """Links files that only the folder ``old`` has into ``new``, except parts of an older sharded state: those of
    torch.distributed.checkpoint or of DeepSpeed, in a folder that has new ones."""
    if old.is_symlink() or not old.is_dir():
        return
    changed = []
    for folder, subfolders, names in os.walk(old, onerror=folders.reraise):
        into = new / Path(folder).relative_to(old)
        if os.path.lexists(into) and not into.is_dir():
            subfolders.clear()
            continue
        into.mkdir(exist_ok=True)
        parts = tuple(ending for ending in _PARTS if any(name.endswith(ending) for name in os.listdir(into)))
        for name in (*names, *(name for name in subfolders if Path(folder, name).is_symlink())):
            if os.path.lexists(into / name) or name.endswith(parts):
                continue
            try:
                os.link(Path(folder, name), into / name, follow_symlinks=False)
            except OSError:  # no hard links here
                shutil.copy2(Path(folder, name), into / name, follow_symlinks=False)
                if not os.path.islink(into / name):
                    folders.sync_path(into / name)
        changed.append(into)
    for into in reversed(changed):  # a folder's name is in the one above it
        folders.sync_path(into)


class PartStaging(Staging):
    """One rank's files in a folder that other code stages, locks and publishes."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """``folder`` exists; ``names`` are those of the files."""
        self.path = self.target = folder
        self._files = [folder / name for name in names]

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        folders.sync_path(self.path)

    def publish(self) -> Path | None:
        """Does nothing: the code that staged the folder publishes it."""
        return None

    def discard(self) -> None:
        """Removes these files, after an error."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()


class FileStaging(Staging):
    """A lone file, in a folder of its own, before it has its final name."""

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        """A lone file needs no description, but takes over the mode and owner of the replaced file."""
        permissions.keep(self.target, self.path / self.target.name)

    def publish(self) -> Path | None:
        publish_file(self.path / self.target.name, self.target)
        self._published = True
        with contextlib.suppress(OSError):  # the file has its name; the next sweep removes the folder
            self.path.rmdir()
        self._unlock()
        return None


def publish_file(temporary: Path, target: Path) -> None:
    """Step 6 for a lone file or a link."""
    os.replace(temporary, target)
    folders.sync_path(target.parent)


def publish_pointer(file: Path, target: Path) -> None:
    """Writes the name of ``target``, relative to the folder of ``file``, into that file, atomically and durably. Raises
    OSError."""
    staging = FileStaging(file)
    try:
        with folders.create(staging.path / file.name) as unfinished:
            unfinished.write(os.path.relpath(target, file.parent))
            unfinished.flush()
            os.fsync(unfinished.fileno())
        staging.describe(None, [file.name])
        staging.publish()
    except BaseException:
        staging.discard()
        raise


def publish_link(name: Path, target: Path) -> None:
    """Makes ``name`` a relative symbolic link to ``target``, atomically and durably.

    Removes a folder that has the name. Raises OSError."""
    unfinished = name.with_name(f"{folders.TEMPORARY}{name.name}-link")  # not unique: the next link replaces a leftover
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(os.path.relpath(target, name.parent))
    trash = removal.hide(name) if name.is_dir() and not name.is_symlink() else None
    publish_file(unfinished, name)
    if trash is not None:
        removal.unlink(trash)
