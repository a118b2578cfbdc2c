"""Saves that a test holds back before their files are made."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lazyckpt.pipeline.request import Request


class Files:
    """Holds saves back before their files are made: what does not fit into the ring stays uncopied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        self._free.set()
        self._timer: threading.Timer | None = None
        open_file = Request.open

        def held(*args: Any) -> None:
            assert self._free.wait(60), "a test forgot to release the files"
            open_file(*args)

        monkeypatch.setattr(Request, "open", held)

    def hold(self) -> None:
        if self._timer is not None:
            self._timer.join()  # an earlier release must not end this hold
        self._free.clear()

    def release(self, after_s: float = 0.0) -> None:
        self._timer = threading.Timer(after_s, self._free.set)
        self._timer.start()
