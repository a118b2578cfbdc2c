"""The memory of this process: what malloc has given, and by how much it grows, at most, while it works."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MallInfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def allocated_bytes() -> int:
    """By C and C++, tensors included, that are not given back: to the byte, whatever the allocator keeps. 0 where the C
    library does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


def reset_peak() -> int:
    """Gives free memory back to the system, forgets the peak, and returns the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def growth_bytes(work: Callable[[], object]) -> int:
    before = reset_peak()
    kept = work()
    grown = status_bytes("VmHWM") - before
    del kept
    return grown
