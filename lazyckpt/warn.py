"""Warnings that point at the user's line, from whatever depth lazyckpt gives them."""

from __future__ import annotations

import contextlib
import sys
import warnings

# Packages whose frames stand between the user's line and a warning.
_INNER = frozenset(
    (
        *("lazyckpt", "torch", "lightning", "pytorch_lightning", "transformers", "accelerate"),
        *("contextlib", "functools", "threading", "concurrent"),
    )
)
_given: set[str] = set()


def warn(message: str) -> None:
    """Warns at the innermost frame that is the user's; on a background thread, at the thread's first frame."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def warn_in_background(message: str) -> None:
    """Warns on a background thread. A filter that turns warnings into errors has no effect, since no code could catch
    the error."""
    with contextlib.suppress(Warning):
        warnings.warn(message, stacklevel=2)


def warn_once(message: str) -> None:
    """Warns, unless this process has given the same warning before."""
    if message not in _given:
        _given.add(message)
        warn(message)
