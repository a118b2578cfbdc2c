"""Memory at chosen addresses, saves of it that watch its pages, and ways to write to it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lazyckpt import _engine
from lazyckpt.formats.program import SOURCE

PAGE = 4096
CHUNK = 16 * PAGE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
WP_BIT = 1 << 57  # of an entry in /proc/self/pagemap: the page is write-protected by userfaultfd


def make_engine(**knobs: object) -> _engine.Engine:
    knobs = {"ring_bytes": 4 * CHUNK, "chunk_bytes": CHUNK, "io_depth": 2, "copy_threads": 1, **knobs}
    return _engine.Engine(watch_pages=True, **knobs)  # type: ignore[arg-type]


def map_anew(address: int, pages: int) -> None:
    """Replaces pages by new anonymous ones."""
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    assert LIBC.mmap(address, pages * PAGE, 3, fixed, -1, 0) == address


@dataclass
class Memory:
    """Memory at a chosen address, since a storage may lie anywhere."""

    mapping: mmap.mmap
    address: int
    size: int

    @classmethod
    def of(cls, size: int, *, at: int = 0, flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> Memory:
        memory = cls.within(mmap.mmap(-1, size + 2 * PAGE, flags=flags), size, at=at)
        memory.array[:] = np.arange(size, dtype=np.uint32).astype(np.uint8)
        return memory

    @classmethod
    def within(cls, mapping: mmap.mmap, size: int, *, at: int = 0) -> Memory:
        return cls(mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + at, size)

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer((ctypes.c_char * self.size).from_address(self.address), np.uint8)


def is_protected(memory: Memory) -> list[bool]:
    """Returns whether each page that touches the memory is protected."""
    first, end = memory.address // PAGE, -(-(memory.address + memory.size) // PAGE)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = pagemap.read(8 * (end - first))
    return [bool(entry & WP_BIT) for (entry,) in struct.iter_unpack("Q", entries)]


class Save:
    """A job whose sources follow one another in one file. ``finish`` copies them."""

    def __init__(
        self,
        engine: _engine.Engine,
        sources: list[Memory],
        path: Path,
        owners: int = 1,
        expected: bytes | None = None,  # if reading the sources would change the case
    ) -> None:
        self.path, self.sources = path, sources
        self.expected = expected or b"".join(source.array.tobytes() for source in sources)
        self.job = engine.begin(
            array("Q", [source.address for source in sources]),
            array("Q", [source.size for source in sources]),
            array("Q", [owners] * len(sources)),
            1,
            True,
        )
        rows = [number for at, source in enumerate(sources) for number in (SOURCE, source.size, at)]
        self.job.append(0, 0, array("q", rows), b"")
        self.job.seal()

    def finish(self) -> list[int]:
        """Copies the sources and returns the torn ones; if there are none, checks the file."""
        self.job.wait_eager()
        self.job.go()
        self.job.open(0, self.path, len(self.expected))
        assert self.job.wait_released(30) and self.job.wait_settled(30)
        torn = self.job.torn()
        if torn:
            with pytest.raises(OSError, match="written to") as caught:
                self.job.raise_error()
            assert caught.value.errno == errno.ECANCELED
        else:
            self.job.raise_error()
            assert self.path.read_bytes() == self.expected
            assert self.job.files() == [(len(self.expected), _engine.crc32(self.expected))]
        return torn


def by_recv(memory: Memory, at: int) -> None:
    ours, theirs = socket.socketpair()
    theirs.send(b"\xff")
    ours.recv_into(memory.array[at : at + 1], 1)


def by_read(memory: Memory, at: int) -> None:
    with open("/dev/zero", "rb", buffering=0) as zero:
        assert os.readv(zero.fileno(), [memory.array[at : at + 1]]) == 1


def by_thread(memory: Memory, at: int) -> None:
    thread = threading.Thread(target=memory.array.__setitem__, args=(at, 255))
    thread.start()
    thread.join()


WRITERS: dict[str, Callable[[Memory, int], None]] = {
    "a store": lambda memory, at: memory.array.__setitem__(at, 255),
    "memset": lambda memory, at: ctypes.memset(memory.address + at, 255, 1) and None,
    "recv": by_recv,
    "readv": by_read,
    "another thread": by_thread,
    "a store of the same byte": lambda memory, at: memory.array.__setitem__(at, memory.array[at]),
}
