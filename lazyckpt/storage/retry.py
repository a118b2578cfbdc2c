"""Retries reads that the operating system refuses: a file that cannot be read just now is not damaged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lazyckpt.errors import ReadError
from lazyckpt.warn import warn

_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)  # before each retry
Read = TypeVar("Read")


def patiently(attempt: Callable[[], Read], warn: Callable[[str], None] = warn) -> Read:
    """Calls ``attempt``, and again after each ReadError for three seconds; then raises it. Warns of each retry."""
    for pause_s in _PAUSES_S:
        try:
            return attempt()
        except ReadError as error:
            warn(f"tried again: {error}")
            time.sleep(pause_s)
    return attempt()
