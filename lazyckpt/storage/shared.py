"""A staged folder into which several ranks write, and the renames that decide about it (ranks/votes.py).

Rank 0 makes it (``SharedStaging``); the others find it by its name (``AttachedStaging``). A replaced
checkpoint is moved aside first and not exchanged with the new one: the decision needs a rename that leaves nothing
under the old name. After a crash in between, ``removal.sweep`` gives the old checkpoint its name back.

A lone file is staged in such a folder, too, and decided by renames of the file (``SharedFile``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from lazyckpt import waits
from lazyckpt.storage import claim, commit, folders, locks, permissions, removal
from lazyckpt.storage.claim import LOCK, FolderClaim

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # something has the name that a folder is renamed to


class SharedFolder:
    """The staged folder ``name`` of the checkpoint ``target``, seen from any rank: the ``Folder`` of ranks/votes.py."""

    def __init__(
        self, target: Path, path: Path, mine: FolderClaim, timeout_s: float, latest: Path | None = None
    ) -> None:
        """``path``: of the staged folder, which is beside ``target`` or in another folder of the same file system.
        ``latest``: as in ``Request``."""
        self._target, self._path, self._claim, self._timeout_s = target, path, mine, timeout_s
        self._latest = latest
        self._source = path  # which either gets the final name or becomes trash
        self._trash = path.with_name(_renamed(path, folders.TRASH))
        self._aside = target.with_name(_renamed(path, folders.REPLACED))

    def taken_by(self) -> str | None:
        return claim.other_claim(self._path.parent, self._claim)

    def to_final(self) -> Literal["done", "gone", "occupied"]:
        try:
            os.rename(self._source, self._target)
        except FileNotFoundError:
            return "gone"
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return "occupied"
        return "done"

    def to_trash(self) -> bool:
        try:
            os.rename(self._source, self._trash)
        except FileNotFoundError:
            return False
        return True

    def set_aside(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            os.rename(self._target, self._aside)

    def put_back(self) -> None:
        removal.put_back(self._aside, self._target)

    def is_published(self) -> bool:
        """Whether the final name is that of what was staged. The node may remember that the name was missing, or the
        checkpoint that had it. So on a network file system it answers False only after ``waits.STALE_NAME_S``, unless
        it sees the trash."""
        end = time.monotonic() + (0 if claim.is_local(self._target.parent) else waits.STALE_NAME_S)
        while not self._has_final_name():
            if os.path.lexists(self._trash) or time.monotonic() >= end:
                return False
            time.sleep(waits.SHARED_NAME_LOOK_S)
            with contextlib.suppress(OSError):
                os.listdir(self._target.parent)  # some clients then drop cached names
        return True

    def _has_final_name(self) -> bool:
        return claim.staged_name(self._target) == self._path.name

    def sync(self) -> None:
        for parent in dict.fromkeys((self._target.parent, self._path.parent)):
            folders.sync_path(parent)
        if self._latest is not None and self.taken_by() is None:
            commit.publish_pointer(self._latest, self._target)

    def await_decision(self) -> None:
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end and self._source.exists():
            time.sleep(waits.SHARED_NAME_LOOK_S)

    def remove_trash(self) -> None:
        removal.unlink(self._trash)


class SharedFile(SharedFolder):
    """The lone file that is staged in the folder ``name``; it exists when this is made. Both renames have the file as
    their source. It replaces another one at once, so nothing is set aside."""

    def __init__(
        self, target: Path, path: Path, mine: FolderClaim, timeout_s: float, latest: Path | None = None
    ) -> None:
        """Raises OSError."""
        super().__init__(target, path, mine, timeout_s, latest)
        self._source = path / target.name
        self._trash = path / f"{folders.TRASH}{target.name}"
        # As long as the file is open, no other one gets its inode number, even if a restarted job has removed it.
        opened = locks.keep(os.open(self._source, os.O_RDONLY | os.O_CLOEXEC))
        self._status = os.fstat(opened)
        weakref.finalize(self, locks.drop, opened)

    def _has_final_name(self) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(self._target.lstat(), self._status)
        return False

    def remove_trash(self) -> None:
        removal.unlink(self._path)


class SharedStaging(commit.Staging):
    """A checkpoint folder that several ranks fill, in the process of rank 0. It holds the lock of the folder's file."""

    def __init__(
        self, target: Path, mine: FolderClaim, inside: Path | None = None, *, keep_others: bool = False
    ) -> None:
        """``inside`` and ``keep_others``: as in ``Staging``."""
        self._claim = mine
        self._lock_file = -1
        while True:
            super().__init__(target, inside, keep_others=keep_others)
            try:
                self._lock_it()
                return
            except FileNotFoundError:  # swept by a process on another node, which does not see the folder's own lock
                self.discard()
            except BaseException:
                self.discard()
                raise

    def _lock_it(self) -> None:
        unfinished = self.path / f"{LOCK}-unfinished"  # no process sees the file without its lock and its contents
        self._lock_file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        locks.hold(self._lock_file)
        os.write(self._lock_file, claim.describe_staged(self._claim, self.path.name))
        os.rename(unfinished, self.path / LOCK)

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        if self._keep_others:  # now, since ``Ballot.decide`` moves the old folder away before it publishes this one
            commit.carry_over(self.target, self.path)
        super().describe(manifest, written)

    def publish(self) -> Path | None:
        """Unlocks the folder, which ``Ballot.decide`` has published. Returns the replaced folder, as in ``Staging``."""
        self._published = True
        self._unlock()
        replaced = self.target.with_name(_renamed(self.path, folders.REPLACED))
        if not os.path.lexists(replaced):
            return None
        if self._keep_others:
            with contextlib.suppress(OSError):  # the checkpoint is committed
                commit.carry_over(replaced, self.target)  # files that were added meanwhile
        return replaced

    def _unlock(self) -> None:
        fd, self._lock_file = self._lock_file, -1
        locks.drop(fd)
        super()._unlock()


class SharedFileStaging(SharedStaging):
    """The folder of a lone file that several ranks write, in the process of rank 0."""

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        """As ``FileStaging``."""
        permissions.keep(self.target, self.path / self.target.name)

    def publish(self) -> Path | None:
        """Removes the folder, which ``Ballot.decide`` has emptied."""
        self._published = True
        shutil.rmtree(self.path, ignore_errors=True)  # the file has its name; the next sweep removes the folder
        self._unlock()
        return None


class AttachedStaging(commit.Staging):
    """The same folder in the process of another rank, which neither publishes nor removes it."""

    def __init__(self, target: Path, path: Path) -> None:
        self.target = target
        self.path = path

    def sync(self, written: Iterable[str]) -> None:
        """Syncs this rank's files and folders there, except the contents of ``written``, which the engine has synced.

        Rank 0 syncs the rest, in ``describe``. Where nodes share the file system, it cannot sync what the cache of this
        one holds."""
        written = set(written)
        if claim.is_local(self.path):
            for folder in {(self.path / name).parent for name in written} | {self.path}:
                folders.sync_path(folder)
        else:
            commit.sync_all(self.path, {self.path / name for name in written})

    def describe(self, manifest: dict[str, Any] | None, written: Iterable[str]) -> None:
        """Does nothing: rank 0 describes the checkpoint."""

    def publish(self) -> Path | None:
        return None

    def discard(self) -> None:
        """Does nothing: the ranks decide about the folder (``Ballot.refuse``)."""


def _renamed(staged: Path, prefix: str) -> str:
    return prefix + staged.name.removeprefix(folders.TEMPORARY)
