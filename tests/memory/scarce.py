"""scarce.cc, for the scripts beside this one that it is preloaded in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None)
_arm, _stop, _seen, _spare = _libc.scarce_arm, _libc.scarce_stop, _libc.scarce_seen, _libc.scarce_spare
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


def spared(function: Callable[..., Any]) -> Callable[..., Any]:
    """What has all the memory that it needs."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        _spare(1)
        result = function(*arguments, **keywords)
        _spare(0)
        return result

    return call


def seen() -> int:
    """How many allocations there were in between."""
    return int(_seen())


def open_files() -> list[str]:
    """What the descriptors of this process are of."""
    folder = "/proc/self/fd"
    return sorted(os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.lexists(f"{folder}/{fd}"))
