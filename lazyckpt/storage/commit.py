"""The durability protocol, as numbered steps.

    1. stage      a temporary folder beside the target, locked; files are created in it with O_EXCL
    2. write      the engine writes them and checks every completion
    3. sync       the engine calls fdatasync on each file, after all its writes; with verify_after_write it then reads
                  the file back
    4. agree      all checkpoints before this one are published or have failed: they appear in order
    5. describe   the manifest (lengths, checksums, parent), written last; fsync it, then the temporary folder
    6. publish    rename to the final name; fsync the parent. Only now is the checkpoint committed
    7. clean      what was replaced or is no longer kept is renamed to .trash-…; fsync the parent, then remove it

Nothing is ever written into a folder that has its final name. A lone file goes the same way without 4 and 5.
After a failed sync nothing is retried: the staged folder is discarded, and the next save begins with new files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lazyckpt import _engine
from lazyckpt.storage import mounts

TEMPORARY = ".tmp-"
TRASH = ".trash-"
PUBLISH = ".publish-"  # see in_place.py
MANIFEST = "manifest.json"
# What flock says where there are no locks: NFS, Lustre mounted noflock, file systems in user space. Our arguments are
# valid, so EINVAL means no more. Nobody else can lock there either, and what nobody can lock is not swept.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# Endings of the files without which a framework takes a folder for no checkpoint.
WEIGHTS = (".safetensors", ".bin", ".index.json")
_NAME_BYTES = 100  # of a name, that come back in the temporary one
_UNFINISHED = re.compile(r"\.(tmp|trash|publish)-.*-[0-9a-f]{32}", re.DOTALL)

# Descriptors that hold the locks of staged folders. A forked child must let go of its copies, or a lock would
# outlive the process that it stands for.
_locks: set[int] = set()


def _close_locks_in_child() -> None:
    for fd in _locks:
        os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def sync_path(path: str | os.PathLike[str]) -> None:
    """fsync of a folder or file, so that its names or bytes survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Makes a folder, if it is missing, and sees to it that its name survives a power cut: without, what is synced
    inside it would be of no use."""
    new = [path, *(folder for folder in path.parents if not folder.exists())]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        name = error.filename
        what = f"a symbolic link to {os.readlink(name)}, which leads to no folder" if os.path.islink(name) else "a file"
        raise NotADirectoryError(errno.ENOTDIR, f"not a folder: {what}", name) from error
    for folder in new:
        if not folder.is_mount():
            with contextlib.suppress(PermissionError):  # not ours to read: whoever could make a name in it must sync it
                sync_path(folder.absolute().parent)


def free_bytes(folder: Path) -> float:
    """What may be written there; infinite where the file system does not say, as some in user space. Raises OSError."""
    disk = os.statvfs(str(folder))  # of a Path it says TypeError if there is no memory
    return disk.f_bavail * disk.f_frsize if disk.f_blocks > 0 else math.inf


def temporary_name(target: Path) -> Path:
    return fresh_name(TEMPORARY, target)


def fresh_name(prefix: str, target: Path) -> Path:
    """A name beside ``target``; as long as file systems allow, whatever they allowed that to be."""
    name = os.fsencode(target.name.removeprefix(TEMPORARY))[:_NAME_BYTES].decode(errors="ignore")
    return target.with_name(f"{prefix}{name}-{uuid.uuid4().hex}")


def is_unfinished(name: str) -> bool:
    """Whether this is a name for what is not there yet, or no more: nobody else gives such names by chance."""
    return _UNFINISHED.fullmatch(name) is not None


class Staging:
    """A checkpoint folder before it has its final name. Locked by this process for as long as it exists.

    It is made beside ``target``, or in the folder ``inside``, which must be on the same file system. What others put
    into a folder that it replaces stays if ``keep_others``, under names that are free.
    """

    def __init__(self, target: Path, inside: Path | None = None, *, keep_others: bool = False) -> None:
        self.target = target
        self._keep_others = keep_others
        self._published = False
        self._lock = -1
        while True:
            self.path = temporary_name(target if inside is None else inside / target.name)
            try:
                os.mkdir(self.path)
            except FileNotFoundError:
                if inside is None or inside.exists():
                    raise
                make_folder(inside)  # another process found it empty, and removed it
                continue
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # swept between the two calls, by a process that took it for a leftover
            except OSError:
                shutil.rmtree(self.path, ignore_errors=True)
                raise
            try:
                _locks.add(self._lock)
                self._take_lock()
                if os.path.isdir(self.path):
                    return
            except BaseException:
                self.discard()
                raise
            self._unlock()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    def may_replace(self) -> bool:
        """Whether the folder ``target`` can be renamed. The kernel says EXDEV of a folder from a lower layer of an
        overlay, and of one with another project ID (quotas of xfs). Raises OSError."""
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
        """Step 5. ``written`` are the files that the engine has synced; what others put into the folder is synced
        here, too."""
        synced = {self.path / name for name in written}
        if manifest is not None:
            synced.add(self._write_manifest(manifest))
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                file = Path(folder, name)
                if file not in synced and not file.is_symlink():
                    sync_path(file)
            sync_path(folder)

    def _write_manifest(self, manifest: dict[str, Any]) -> Path:
        path = self.path / MANIFEST
        # With an opener, what is opened has an owner at once, memory or not.
        with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o666)) as file:
            json.dump(manifest, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        return path

    def publish(self) -> Path | None:
        """Step 6. Returns the folder that this one replaced, under another name by now, or None."""
        replaced = None
        if self.target.is_symlink() or os.path.lexists(self.target):
            if self._keep_others:
                _carry_over(self.target, self.path)
            replaced = self._exchange()
            if self._keep_others and replaced is not None:
                _carry_over(replaced, self.target)  # what was put there in between
        else:
            os.rename(self.path, self.target)
        self._published = True
        try:
            sync_path(self.target.parent)
            if self.path.parent != self.target.parent:
                with contextlib.suppress(FileNotFoundError):  # another process found it empty, and removed it
                    sync_path(self.path.parent)
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
                take_apart(self.target)
                os.rename(self.path, self.target)
                return None
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        # A file system without RENAME_EXCHANGE. For an instant neither has the name; older checkpoints stand in.
        old = fresh_name(TRASH, self.target)
        os.rename(self.target, old)
        try:
            os.rename(self.path, self.target)
        except OSError:
            os.rename(old, self.target)
            raise
        return old

    def discard(self) -> None:
        """Removes what was staged; after an error. After a failed publication nothing is: what it replaced may yet
        get its name back. The next sweep() tidies up."""
        try:
            if not self._published:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        fd, self._lock = self._lock, -1  # once: another file may have the number by the next call
        if fd in _locks:
            _locks.discard(fd)
            os.close(fd)


def _carry_over(old: Path, new: Path) -> None:
    """Links what the folder ``old`` holds and ``new`` lacks into ``new``."""
    if old.is_symlink() or not old.is_dir():
        return
    changed = []
    for folder, subfolders, names in os.walk(old, onerror=_raise):
        into = new / Path(folder).relative_to(old)
        if os.path.lexists(into) and not into.is_dir():
            subfolders.clear()
            continue
        into.mkdir(exist_ok=True)
        for name in (*names, *(name for name in subfolders if Path(folder, name).is_symlink())):
            if os.path.lexists(into / name):
                continue
            try:
                os.link(Path(folder, name), into / name, follow_symlinks=False)
            except OSError:  # no hard links here
                shutil.copy2(Path(folder, name), into / name, follow_symlinks=False)
                if not os.path.islink(into / name):
                    sync_path(into / name)
        changed.append(into)
    for into in reversed(changed):  # a folder's name is in the one above it
        sync_path(into)


def _raise(error: OSError) -> None:
    """For ``os.walk`` and ``os.fwalk``, which pass over a folder that they cannot list."""
    raise error


class FileStaging(Staging):
    """A lone file, in a folder of its own, before it has its final name."""

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        """A lone file needs no description."""

    def publish(self) -> Path | None:
        publish_file(self.path / self.target.name, self.target)
        self._published = True
        with contextlib.suppress(OSError):  # the file stands all the same; the next sweep() tidies up
            self.path.rmdir()
        self._unlock()
        return None


def publish_file(temporary: Path, target: Path) -> None:
    """Step 6 for a lone file or a link."""
    os.replace(temporary, target)
    sync_path(target.parent)


def publish_link(name: Path, target: Path) -> None:
    """Makes ``name`` a relative symbolic link to ``target``, atomically; it survives a power cut when this returns.

    A folder that has the name is removed. Raises OSError."""
    unfinished = name.with_name(f"{TEMPORARY}{name.name}-link")  # not unique: the next link replaces a leftover
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(os.path.relpath(target, name.parent))
    trash = hide(name) if name.is_dir() and not name.is_symlink() else None
    publish_file(unfinished, name)
    if trash is not None:
        unlink(trash)


def remove(path: Path, may_go: Callable[[Path], bool] = lambda path: True) -> bool:
    """Step 7: out of sight at once, removed after; a crash in between leaves a leftover that sweep() finds.

    Asks ``may_go`` when no other process can replace the path any more. Returns whether the path is gone: False if
    there was nothing, or if it stays. Raises OSError."""
    try:
        trash = _rename_away(path)
        if trash is None:
            return take_apart(path, may_go)
    except FileNotFoundError:
        return False
    if not may_go(trash):
        os.rename(trash, path)
        return False
    unlink(trash)
    return True


def hide(path: Path) -> Path | None:
    """The first half of ``remove``: the name is free now. Returns what ``unlink`` is to be given, or None if
    there is nothing to unlink."""
    try:
        trash = _rename_away(path)
        if trash is None:
            take_apart(path)
    except FileNotFoundError:
        return None
    return trash


def _rename_away(path: Path) -> Path | None:
    """Returns the new name, or None if the path must be removed where it is."""
    if not path.is_dir() and mounts.is_overlay(path.parent):
        path.lstat()
        return None  # a rename would first copy a file of a lower layer to the upper one
    trash = fresh_name(TRASH, path)
    try:
        os.rename(path, trash)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return None
        raise
    return trash


def take_apart(path: Path, may_go: Callable[[Path], bool] = lambda path: True) -> bool:
    """Removes, where it is, what cannot be renamed: a folder from a lower layer of an overlay (``may_replace``).

    The manifest goes first, then the weights, each for good before anything else goes. A loader fails on what a crash
    leaves. Returns False if ``may_go`` refuses, or if another process replaced the folder meanwhile. Raises OSError.
    """
    if path.is_symlink() or not path.is_dir():  # one call removes it, so that nothing is ever half there
        if not may_go(path):
            return False
        path.unlink()
        sync_path(path.parent)
        return True
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # From here on everything goes by the descriptor: the name may become that of a new checkpoint.
        if not may_go(path) or not os.path.samestat(os.fstat(fd), path.lstat()):
            return False
        for endings in ((MANIFEST,), WEIGHTS, ("",)):
            _unlink_files(fd, endings)
    finally:
        os.close(fd)
    path.rmdir()
    sync_path(path.parent)
    return True


def _unlink_files(fd: int, endings: tuple[str, ...]) -> None:
    """Removes the files below an open folder whose names have one of these endings, and folders that are empty then.
    Durable when this returns."""
    for _, subfolders, names, folder in os.fwalk(".", topdown=False, onerror=_raise, dir_fd=fd):
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


def unlink(trash: Path) -> None:
    """Whatever stood in the place of a checkpoint: a folder, a file, a link. That it no longer has its final name is
    certain before anything in it goes: a power cut must not give the name back to half of it."""
    sync_path(trash.parent)
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash, ignore_errors=True)
    else:
        trash.unlink(missing_ok=True)


def sweep(root: Path) -> list[Path]:
    """Removes what dead processes left in ``root``: trash, and what they staged."""
    swept = sweep_staged(root)
    for entry in list(os.scandir(root)):
        if entry.name.startswith(TRASH) and is_unfinished(entry.name):
            unlink(Path(entry.path))
            swept.append(Path(entry.path))
    return swept


def sweep_staged(root: Path) -> list[Path]:
    """Removes staged folders whose lock nobody holds."""
    staged = [e for e in os.scandir(root) if e.name.startswith(TEMPORARY) and is_unfinished(e.name)]
    return [Path(entry.path) for entry in staged if _remove_abandoned(Path(entry.path))]


def _remove_abandoned(path: Path) -> bool:
    """Removes a staged folder unless a live process holds its lock.

    The lock is held here until the folder is gone: a process that made it an instant ago and is about to lock it
    finds that out then (``Staging``), and not when its checkpoint disappears. The folder may be one that was replaced,
    by a process that died before it synced that: as in ``unlink``, its final name must be gone for good first.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        sync_path(path.parent)
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)
