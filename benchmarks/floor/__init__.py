"""The floor arm's library: built with g++ when first needed, called through ctypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

CHUNK_BYTES = 16 << 20
IO_DEPTH = 4
PIECE_BYTES = 256 << 10  # copied, then checksummed while still in the cache

_SOURCE = Path(__file__).with_name("floor.cc")
_BUILD = Path(__file__).parents[1] / "build"


class FloorUnavailable(RuntimeError):
    """The floor library cannot be built or its ring cannot be made; the message says why."""


@cache
def _library() -> ctypes.CDLL:
    binary = _BUILD / "libfloor.so"
    if not binary.exists() or binary.stat().st_mtime < _SOURCE.stat().st_mtime:
        _BUILD.mkdir(exist_ok=True)
        command = ["g++", "-std=c++20", "-O3", "-march=native", "-Wall", "-shared", "-fPIC", str(_SOURCE)]
        command += ["-o", str(binary), "-luring", "-ldeflate", "-lpthread"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise FloorUnavailable("g++ is not installed") from error
        except subprocess.CalledProcessError as error:
            raise FloorUnavailable(f"g++ failed (liburing, libdeflate?): {error.stderr}") from error
    library = ctypes.CDLL(str(binary), use_errno=True)
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    library.floor_open.argtypes = [size, size, ctypes.c_uint, ctypes.c_uint, size]
    library.floor_open.restype = pointer
    library.floor_save.argtypes = [pointer, text, size, pointer, pointer]
    library.floor_wait.argtypes = [pointer]
    library.floor_drain.argtypes = [pointer, size]
    library.floor_raw.argtypes = [pointer, text, size, ctypes.c_int]
    library.floor_raw.restype = ctypes.c_double
    library.floor_close.argtypes = [pointer]
    return library


class Floor:
    """One ring, its copy threads and its writer. Close it, or use it as a context manager.

    `save` takes ranges of (address, bytes): memory that must stay alive and unchanged until `wait` is over.
    """

    def __init__(self, ring_bytes: int, *, copy_threads: int | None = None) -> None:
        self._library = _library()
        threads = copy_threads if copy_threads is not None else len(os.sched_getaffinity(0))
        # Two chunks at least: one is copied while the other is written.
        ring_bytes = max(2, -(-ring_bytes // CHUNK_BYTES)) * CHUNK_BYTES
        self._handle = self._library.floor_open(ring_bytes, CHUNK_BYTES, IO_DEPTH, threads, PIECE_BYTES)
        if not self._handle:
            reason = os.strerror(ctypes.get_errno())
            raise FloorUnavailable(f"no ring of {ring_bytes} bytes with io_uring: {reason}")

    def save(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to write `ranges`, end to end, into `path`. Returns at once."""
        count = len(ranges)
        data = (ctypes.c_void_p * count)(*(address for address, _ in ranges))
        sizes = (ctypes.c_size_t * count)(*(nbytes for _, nbytes in ranges))
        self._library.floor_save(self._handle, os.fsencode(path), count, data, sizes)

    def wait(self) -> None:
        """Help to copy until nothing is left to be copied: after this the sources may change."""
        self._library.floor_wait(self._handle)

    def drain(self, pending: int = 0) -> None:
        """Wait until at most `pending` checkpoints are not yet durable. Raises OSError if a write failed."""
        if error := self._library.floor_drain(self._handle, pending):
            raise OSError(error, f"floor: {os.strerror(error)}")

    def raw_write(self, path: Path, nbytes: int) -> float:
        """Seconds to write `nbytes` of ring memory durably into `path`: no copy, no checksum."""
        return self._raw(path, nbytes, write=True)

    def raw_read(self, path: Path) -> float:
        """Seconds to read the whole of `path` into ring memory."""
        return self._raw(path, path.stat().st_size, write=False)

    def _raw(self, path: Path, nbytes: int, *, write: bool) -> float:
        seconds: float = self._library.floor_raw(self._handle, os.fsencode(path), nbytes, write)
        if seconds < 0:
            raise OSError(int(-seconds), os.strerror(int(-seconds)), str(path))
        return seconds

    def close(self) -> None:
        if self._handle:
            self._library.floor_close(self._handle)
            self._handle = None

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
