"""A store in memory that counts its requests."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from lazyckpt.stores.store import Store
from lazyckpt.stores.urls import opened
from lazyckpt.stores.watched import Watched

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_BYTES = 256 << 10


class Requests:
    """Reads of a store. Of those that are no blocks, the first one is answered when another one has begun."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("obstore")
        self.store: Store = opened(url)
        self.asked: list[tuple[int, int]] = []
        self.several = threading.Event()
        self._others = 0
        self._lock = threading.Lock()
        read = Watched.read

        def counted(store: Watched, name: str, begin: int, end: int) -> Buffer:
            self._count(begin, end)
            return read(store, name, begin, end)

        monkeypatch.setattr(Watched, "read", counted)  # of all stores: load() opens one of its own

    def _count(self, begin: int, end: int) -> None:
        is_block = begin % BLOCK_BYTES == 0
        with self._lock:
            self.asked.append((begin, end))
            self._others += not is_block
            if self._others == 2:
                self.several.set()
        assert is_block or self.several.wait(60)
