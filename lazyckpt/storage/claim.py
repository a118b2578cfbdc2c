"""A job's claim on a folder into which several processes write.

A file in the run's folder names the job whose rank 0 may publish and remove checkpoints there. A file in each staged
folder names the job that stages it; rank 0 holds a lock on that file. It is a lock on a file and not on the folder,
because on NFS and Lustre the lock of a folder holds on one node only. The file stays in the published checkpoint, and
shows that this is the staged folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazyckpt.storage import locks, mounts

CLAIM = ".lazyckpt-owner"  # in a run's folder
LOCK = ".lazyckpt-lock"  # in a staged folder
_MAX_BYTES = 4096
# File systems that one machine sees: its kernel knows all locks there.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", *mounts.OVERLAYS)


@dataclass(frozen=True)
class FolderClaim:
    """Names the job that may publish in a folder. When it starts again, its generation is higher."""

    run: str  # a uuid
    generation: int
    host: str  # of rank 0

    @classmethod
    def here(cls, run: str, generation: int) -> FolderClaim:
        return cls(run, generation, os.uname().nodename)

    def __str__(self) -> str:
        return f"the job {self.run} (start {self.generation}, rank 0 on {self.host})"


def take(directory: Path, mine: FolderClaim) -> int:
    """Claims a run's folder for a job: older ones will not publish or remove anything there.

    Returns the lock on the file, for ``let_go``. Raises OSError, also if another job takes the folder at the same
    moment, and if a newer start of this job has taken it: this process has slept meanwhile."""
    for name in os.listdir(directory):
        if name.startswith(f"{CLAIM}-"):  # of a process that died or sleeps before its rename
            (directory / name).unlink(missing_ok=True)
    temporary = directory / f"{CLAIM}-{uuid.uuid4().hex}"
    lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        locks.hold(lock)
        os.write(lock, json.dumps(asdict(mine)).encode())
        # A start that begins to take the folder after this look removes our file, so the rename fails.
        found = _claim_of(_read(directory / CLAIM))
        if found is not None and found.run == mine.run and found.generation > mine.generation:
            raise OSError(errno.EBUSY, f"it belongs to {found} now, which is newer than this one", str(directory))
        os.replace(temporary, directory / CLAIM)
    except BaseException:
        locks.drop(lock)
        temporary.unlink(missing_ok=True)
        raise
    return lock


def live_claim(directory: Path) -> FolderClaim | None:
    """The claim on a run's folder, if rank 0 of its job holds the lock, so is alive."""
    try:
        fd = os.open(
            directory / CLAIM, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        )  # NFS locks only files open for writing
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _claim_of(_parse(os.pread(fd, _MAX_BYTES, 0)))
    except OSError:  # there are no locks
        return None
    finally:
        os.close(fd)


def other_claim(directory: Path, mine: FolderClaim) -> str | None:
    """Returns None if the run's folder belongs to ``mine``, else a phrase for whose it is. Raises OSError."""
    found = _claim_of(_read(directory / CLAIM))
    return None if found == mine else str(found or "no job")


def let_go(directory: Path, mine: FolderClaim, lock: int) -> None:
    """Ends the claim ``mine``, unless another job has taken the folder."""
    with contextlib.suppress(OSError):
        if other_claim(directory, mine) is None:
            (directory / CLAIM).unlink()
    locks.drop(lock)


def describe_staged(mine: FolderClaim, name: str) -> bytes:
    """The contents of the lock file of the staged folder ``name``."""
    return json.dumps({**asdict(mine), "staged": name}).encode()


def staged_name(folder: Path) -> str | None:
    """The name under which a checkpoint was staged by several ranks, or None. Raises OSError."""
    name = _read(folder / LOCK).get("staged")
    return name if isinstance(name, str) else None


def is_shared(staged: Path) -> bool:
    return os.path.lexists(staged / LOCK)


def is_abandoned(staged: Path, by: FolderClaim | None = None) -> bool:
    """Whether the job that staged a folder is proven dead, or is an older generation of the job ``by``.

    A lock that is free proves it if this process sees all locks: on a local file system, or on the host of rank 0."""
    try:
        fd = os.open(staged / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # NFS locks only files open for writing
    except OSError:
        return False
    try:
        found = _claim_of(_parse(os.pread(fd, _MAX_BYTES, 0)))
        if by is not None and found is not None and found.run == by.run and found.generation < by.generation:
            return True
        if not is_local(staged) and (found is None or found.host != os.uname().nodename):
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def is_local(folder: Path) -> bool:
    """Whether a folder is on a file system that only this machine sees, as far as we know it."""
    return mounts.file_system(folder)[0] in _LOCAL


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return _parse(file.read(_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _parse(text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except ValueError:  # empty after a power cut
        return {}
    return told if isinstance(told, dict) else {}


def _claim_of(told: dict[str, Any]) -> FolderClaim | None:
    try:
        return FolderClaim(str(told["run"]), int(told["generation"]), str(told["host"]))
    except (KeyError, TypeError, ValueError):
        return None
