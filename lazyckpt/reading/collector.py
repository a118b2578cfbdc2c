"""Pauses Python's garbage collector while a checkpoint becomes tens of thousands of long-lived objects.

The collector would walk them all again and again and free nothing, for a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """For computing only, not for waiting: the pause holds for every thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
