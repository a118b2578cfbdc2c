"""Engines whose operations fail."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest

from lazyckpt import _engine
from lazyckpt.reading.ranges import process_engine


@contextlib.contextmanager
def engines_fail(fault: str) -> Iterator[None]:
    """The engines that are made in this context have the fault; with "" they are sound.

    The engine of ``load()`` is made before it. It lives as long as the process, so with the fault it would fail a later
    test.
    """
    process_engine()
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(_engine, "Engine", functools.partial(_engine.Engine, fault=fault))
        yield
