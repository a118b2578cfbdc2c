"""State providers: what turns one kind of state into a stream of segments, and back (DataStates-LLM, V-A3).

A provider knows its state; the containers and the engine behind it know bytes. The stream of a provider is

    TensorView*   the storages of its tensors: never copied, never serialised, only pointed to
    Bytes         the rest of its state: pickle opcodes that leave one object on the unpickler's stack

and `Deferred`, the third kind of segment, is what a container adds: checksums that are known only when the
bytes before them are copied (the CRC rows of :mod:`lazyckpt.containers.base`).

To make a provider of your own, derive from :class:`lazyckpt.StateProvider` (objects.py); from :class:`Provider`
itself only to write the opcodes yourself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class TensorView(NamedTuple):
    """One storage, to be written once however many tensors view it. Holding it keeps its memory alive."""

    key: str  # the record is named data/<key>
    storage: torch.UntypedStorage
    nbytes: int
    dtype: torch.dtype  # torch.load types storages: one storage, one dtype


@dataclass(frozen=True, slots=True)
class Bytes:
    """Small and serialised already: nothing that happens after ``save()`` changes it."""

    data: bytes


Segment = TensorView | Bytes


@dataclass
class StorageTable:
    """The storages of one checkpoint: each has one key, also if several providers hold it (tied weights)."""

    fresh_keys: Iterator[str]
    views: list[TensorView] = field(default_factory=list)
    _by_storage: dict[int, TensorView] = field(default_factory=dict)
    _keys: set[str] = field(default_factory=set)

    def add(self, storage: torch.UntypedStorage, dtype: torch.dtype, reusable_keys: Iterator[str]) -> TensorView:
        """The view of ``storage``, made under the next reusable key if it is new here.

        Raises RuntimeError, as ``torch.save`` does, if it was added before under another dtype.
        """
        view = self._by_storage.get(storage._cdata)
        if view is None:
            while (key := next(reusable_keys, None) or next(self.fresh_keys)) in self._keys:
                pass
            view = self._by_storage[storage._cdata] = TensorView(key, storage, storage.nbytes(), dtype)
            self._keys.add(key)
            self.views.append(view)
            return view
        if view.dtype != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        return view

    def add_all(self, storages: dict[int, torch.UntypedStorage], keys: list[str], dtypes: list[torch.dtype]) -> bool:
        """Adds storages, given by ``_cdata``, under keys they had before; False, and nothing is added, if any of that
        cannot be."""
        identities: Iterable[int] = storages.keys()
        new = map(TensorView, keys, storages.values(), map(torch.UntypedStorage.nbytes, storages.values()), dtypes)
        if self._by_storage.keys().isdisjoint(identities):
            if not self._keys.isdisjoint(keys):
                return False
            views = list(new)
        else:
            known = [self._by_storage.get(identity) for identity in identities]
            for view, key, dtype in zip(known, keys, dtypes, strict=True):
                if (key in self._keys) if view is None else (view.key != key or view.dtype != dtype):
                    return False
            views = [view for view, before in zip(new, known, strict=True) if before is None]
            identities = [view.storage._cdata for view in views]
        self._keys.update(keys)
        self._by_storage.update(zip(identities, views, strict=True))
        self.views += views
        return True


@dataclass(frozen=True, slots=True)
class Landing:
    """A saved tensor whose bytes may be read straight into a live one of the same shape and dtype."""

    saved: torch.Tensor
    live: torch.Tensor


class Provider(ABC):
    """One named part of the training state."""

    @abstractmethod
    def segments(self, table: StorageTable) -> Iterator[Segment]:
        """The state as it is now: every storage (through ``table``, which also knows the other providers'),
        then Bytes that pickle the object, protocol 2, without the PROTO and STOP opcodes.

        Called inside ``save()``. Raises whatever pickle raises for an object that cannot be pickled.
        """

    @abstractmethod
    def landings(self, saved: Any) -> list[Landing]:
        """Checks ``saved`` against the live state, before a byte of it is read; says what may land in place.

        ``saved`` is the unpickled state, its tensors allocated but not filled. Raises
        :class:`RestoreError` that lists every missing, unexpected and misshapen entry.
        """

    @abstractmethod
    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        """Takes over ``saved``, whose tensors are filled now, except those in ``landed`` (by ``id`` of the saved
        tensor), whose bytes are in the live tensor that it maps to."""
