"""A place for checkpoints that has a URL, and the names in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Entry(NamedTuple):
    """An object of a store."""

    name: str  # below the store's URL, with slashes
    nbytes: int
    tag: str  # another one whenever the object is replaced
    modified: float  # as time.time(), by the clock of the store


class UnlistableError(OSError):
    """A folder cannot be listed, since an object there has a name that the library refuses: ``a//b``, ``a/../b``, or
    one with a control character."""


class Store(ABC):
    """Holds objects by name. Any thread may call. All methods raise OSError; its ``strerror`` tells no secret."""

    url: str
    """Without credentials, and without a slash at the end."""
    looks_first = False
    """Whether ``create`` has to look before it writes, so that two that do it in the same moment both succeed. Known
    once something was created."""

    @property
    def heard(self) -> float:
        """When the last part of an answer came, as time.monotonic(), if the store can tell. Any thread may ask."""
        return 0.0

    @abstractmethod
    def read(self, name: str, begin: int, end: int) -> Buffer:
        """Returns exactly these bytes of an object."""

    def stream(self, name: str, begin: int, end: int) -> Iterator[Buffer]:
        """The same bytes, in parts as they come, which takes little memory."""
        yield self.read(name, begin, end)

    @abstractmethod
    def whole(self, name: str, most: int) -> bytes:
        """Returns a small object. Raises OSError (EFBIG) if it has more than ``most`` bytes."""

    @abstractmethod
    def entry(self, name: str) -> Entry:
        """Describes an object. Raises FileNotFoundError."""

    @abstractmethod
    def entries(self, folder: str = "") -> list[Entry]:
        """All objects below a folder. Raises UnlistableError for a foreign one with a strange name."""

    def level(self, folder: str = "") -> tuple[list[Entry], list[str]]:
        """The objects directly in a folder, and the names of the folders there. Raises UnlistableError only if an
        object directly there has a strange name."""
        whole = self.entries(folder)
        begin = len(folder) + 1 if folder else 0
        inside = {entry.name[begin:].partition("/")[0] for entry in whole if "/" in entry.name[begin:]}
        return [entry for entry in whole if "/" not in entry.name[begin:]], sorted(inside)

    @abstractmethod
    def write(self, name: str, parts: Iterable[Buffer], nbytes: int, label: str = "") -> None:
        """Makes an object of these parts, ``nbytes`` in all, which appears whole or not at all. Also raises what
        ``parts`` raises. ``label``: a word that the store keeps with it."""

    @abstractmethod
    def label(self, name: str) -> str:
        """The label of an object; "" if it has none. Raises FileNotFoundError."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Makes a small object unless something has its name; returns whether it did."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, those that exist."""

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self, name)


opened_stores: dict[str, Store] = {}  # of this process, by URL


class StorePath:
    """A name in a store; as text, its URL. Like a path of pathlib in what lazyckpt asks of a path."""

    def __init__(self, store: Store, key: str) -> None:
        self.store = store
        self.key = key.strip("/")

    @property
    def name(self) -> str:
        """The last part."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        return StorePath(self.store, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        return self.parent / name

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.store, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    __fspath__ = __str__  # for messages: no file has this name

    def __reduce__(self) -> tuple[Any, ...]:
        return _located, (self.store.url, self.key)  # without the store's options, which may hold credentials

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def _located(url: str, key: str) -> StorePath:
    """A name in the store that this process has opened at ``url``. Raises KeyError."""
    return StorePath(opened_stores[url], key)


AnyPath: TypeAlias = Path | StorePath
