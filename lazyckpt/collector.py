"""Pauses Python's garbage collector while a save or a load creates tens of thousands of objects, none in a cycle.

The collector would walk all of them again and again and free nothing, which takes a third of the time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

_pausing: set[int] = set()  # threads that will enable the collector


@contextmanager
def collector_paused() -> Iterator[None]:
    """For computing only, not for waiting: the pause holds for every thread."""
    was_enabled = gc.isenabled()
    try:
        if was_enabled:
            _pausing.add(get_ident())
            gc.disable()  # inside the try: Ctrl-C may arrive as this returns
        yield
    finally:
        if was_enabled:
            gc.enable()
            _pausing.discard(get_ident())


def _resume_in_child() -> None:
    """Enables the collector in a forked child, which lacks the thread that would."""
    if _pausing:
        _pausing.intersection_update({get_ident()})
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
