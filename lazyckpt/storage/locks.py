"""Locks (flock) that tell other processes that this one is alive."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

# Errors of flock where there are no locks: NFS, Lustre mounted noflock, file systems in user space. Our arguments are
# valid, so EINVAL means the same. No other process can lock there either, so none sweeps there.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

# Descriptors of this process alone. A forked child must close its copies, or a lock would outlive the process that
# took it.
_held: set[int] = set()


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


def keep(fd: int) -> int:
    """Takes an open file or folder that ``drop`` will close; a forked child closes its copy at once."""
    _held.add(fd)
    return fd


def hold(fd: int) -> None:
    """Locks an open file or folder, where there are locks, until ``drop`` closes it. Raises OSError."""
    keep(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def is_held(folder: Path) -> bool:
    """Whether a live process, or this one, holds the lock of a folder. False where there are no locks."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    finally:
        os.close(fd)
    return False


def drop(fd: int) -> None:
    """Closes what ``hold`` or ``keep`` has taken; does nothing for any other descriptor."""
    if fd in _held:
        _held.remove(fd)
        os.close(fd)
