"""A store in memory that counts its requests."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from lazyckpt.stores.store import Store
from lazyckpt.stores.urls import opened

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
        self._read = self.store.read
        monkeypatch.setattr(self.store, "read", self.read)

    def read(self, name: str, begin: int, end: int) -> Buffer:
        is_block = begin % BLOCK_BYTES == 0
        with self._lock:
            self.asked.append((begin, end))
            self._others += not is_block
            if self._others == 2:
                self.several.set()
        assert is_block or self.several.wait(60)
        return self._read(name, begin, end)
