"""Reads and writes whole files past the page cache, with few system calls: copies of checkpoints beside a training.

Through the page cache the same bytes cost the training several times as much: the kernel copies them once more, and
writes them back on the cores that compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt.config import MIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART_BYTES = 8 * MIB
_HUGE_PAGE_BYTES = 2 * MIB


def parts_in(path: Path, nbytes: int, *, reuse: bool) -> Iterator[memoryview]:
    """Yields the first ``nbytes`` bytes of a file, in parts of PART_BYTES; fewer if the file is shorter. ``reuse``: one
    is overwritten by the next one. Raises OSError."""
    fd = _open(path, os.O_RDONLY)
    try:
        memory = _huge_pages(PART_BYTES)
        for begin in range(0, nbytes, PART_BYTES):
            if not reuse and begin:
                memory = _huge_pages(PART_BYTES)
            try:
                count = _read(fd, memory, begin)
            except OSError as error:
                raise _of(path, error) from None
            yield memory[: min(count, nbytes - begin)]
            if count < PART_BYTES:
                return
    finally:
        os.close(fd)


def _huge_pages(nbytes: int) -> memoryview:
    """New memory. Of small pages, the kernel takes each one in hand before the disk reaches it, which is most of what
    a read or a write past the page cache costs."""
    area = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE_BYTES
    return memoryview(area)[begin : begin + nbytes]


def _read(fd: int, memory: memoryview, begin: int) -> int:
    """Fills the memory from ``begin`` on, as far as the file goes; returns the bytes."""
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(fd, [memory[done:]], begin + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(fd):
                raise
            _through_cache(fd)  # a file system that opens with O_DIRECT and does not read so, or the end of the file
            continue
        if not count:
            break
        done += count
    if not _is_direct(fd):
        os.posix_fadvise(fd, begin, done, os.POSIX_FADV_DONTNEED)
    return done


def write_parts(path: Path, parts: Iterable[Buffer]) -> None:
    """Writes a new file and syncs it. Parts of whole pages go past the page cache. Raises OSError, FileExistsError
    if there is a file, and what ``parts`` raises."""
    fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            if left.nbytes % mmap.PAGESIZE:
                _through_cache(fd)  # the last one
            while left:
                try:
                    left = left[os.write(fd, left) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not _is_direct(fd):
                        raise _of(path, error) from None
                    _through_cache(fd)
        try:
            os.fsync(fd)
        except OSError as error:
            raise _of(path, error) from None
    finally:
        os.close(fd)


def _of(path: Path, error: OSError) -> OSError:
    """The error of a descriptor, which names no file."""
    return OSError(error.errno, error.strerror, str(path))


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o666)  # the first one may have made the file


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _through_cache(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
