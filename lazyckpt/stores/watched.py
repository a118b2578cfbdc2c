"""A store whose calls may hang, without holding up Ctrl-C, and which tells when it last answered."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lazyckpt.stores.calls import interruptible
from lazyckpt.stores.store import Entry, Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

Answer = TypeVar("Answer")


class Watched(Store):
    """Asks another store. On the main thread Ctrl-C ends every call; an upload then takes no further part."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url = store.url
        self._answered = 0.0

    @property
    def heard(self) -> float:
        return max(self._answered, self._store.heard)

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        try:
            return interruptible(call)
        finally:
            self._answered = time.monotonic()

    def read(self, name: str, begin: int, end: int) -> Buffer:
        return self._ask(partial(self._store.read, name, begin, end))

    def stream(self, name: str, begin: int, end: int) -> Iterator[Buffer]:
        try:
            for part in self._store.stream(name, begin, end):  # never on the main thread
                self._answered = time.monotonic()
                yield part
        finally:
            self._answered = time.monotonic()

    def whole(self, name: str, most: int) -> bytes:
        return self._ask(partial(self._store.whole, name, most))

    def entry(self, name: str) -> Entry:
        return self._ask(partial(self._store.entry, name))

    def entries(self, folder: str = "") -> list[Entry]:
        return self._ask(partial(self._store.entries, folder))

    def level(self, folder: str = "") -> tuple[list[Entry], list[str]]:
        return self._ask(partial(self._store.level, folder))

    def label(self, name: str) -> str:
        return self._ask(partial(self._store.label, name))

    def write(self, name: str, parts: Iterable[Buffer], nbytes: int, label: str = "") -> None:
        over = threading.Event()

        def taken() -> Iterator[Buffer]:
            for part in parts:
                if over.is_set():
                    raise OSError(errno.ECANCELED, "the upload was interrupted", f"{self.url}/{name}")
                yield part

        try:
            self._ask(partial(self._store.write, name, taken(), nbytes, label))
        finally:
            over.set()

    def create(self, name: str, data: bytes) -> bool:
        try:
            return self._ask(partial(self._store.create, name, data))
        finally:
            self.looks_first = self._store.looks_first

    def remove(self, names: Iterable[str]) -> None:
        self._ask(partial(self._store.remove, list(names)))
