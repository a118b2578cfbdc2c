"""By how much the memory of this process grows, at most, while it works."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path


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
