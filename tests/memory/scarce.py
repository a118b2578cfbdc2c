"""scarce.cc, for the scripts beside this one that it is preloaded in."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None)
_arm, _stop, _seen = _libc.scarce_arm, _libc.scarce_stop, _libc.scarce_seen
_seen.restype = ctypes.c_long


def arm(first: int, count: int = 1, threads: str = "all") -> None:
    """From here on so many allocations fail; "engine": of the engine's threads."""
    arguments = ctypes.c_long(first), ctypes.c_long(count), ctypes.c_bool(threads == "all")
    _arm(*arguments)


def stop() -> None:
    """From here on none does."""
    while True:
        try:
            _stop()
            return
        except MemoryError:  # for this call
            pass


def seen() -> int:
    """How many allocations there were in between."""
    return int(_seen())


def open_files() -> list[str]:
    """What the descriptors of this process are of."""
    folder = "/proc/self/fd"
    return sorted(os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.lexists(f"{folder}/{fd}"))
