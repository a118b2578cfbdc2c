"""State providers: what turns one kind of state into a stream of segments, and back (DataStates-LLM, V-A3).

A provider knows its state; the formats and the engine behind it know bytes. The stream of a provider is

    TensorViews   the storages of its tensors: never copied, never serialised, only pointed to
    Bytes         the rest of its state: pickle opcodes that leave one object on the unpickler's stack

A format adds a third kind, `Deferred` there: checksums, which are known only after the bytes before them are copied
(the CRC rows of ``formats.program``).

To make a provider of your own, derive from ``StateProvider`` (objects.py); from ``Provider``
itself only to write the opcodes yourself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, NamedTuple, overload

import torch


class TensorView(NamedTuple):
    """One storage, to be written once however many tensors view it. Holding it keeps its memory alive."""

    key: str  # the record is named data/<key>
    storage: torch.UntypedStorage
    nbytes: int
    dtype: torch.dtype  # torch.load types storages: one storage, one dtype


@dataclass(slots=True)
class TensorViews(Sequence[TensorView]):
    """Storages as columns: there are tens of thousands, and each save() goes through them."""

    keys: list[str] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes
    dtypes: list[torch.dtype] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)  # _cdata: the same as long as the storage lives

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> TensorView: ...
    @overload
    def __getitem__(self, at: slice) -> TensorViews: ...
    def __getitem__(self, at: int | slice) -> TensorView | TensorViews:
        if isinstance(at, slice):
            return TensorViews(*(column[at] for column in self._columns()))
        return TensorView(self.keys[at], self.storages[at], self.sizes[at], self.dtypes[at])

    @classmethod
    def joined(cls, parts: Sequence[TensorViews]) -> TensorViews:
        """The storages of all ``parts``; the part itself if there is one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(list(chain.from_iterable(columns)) for columns in zip(*(p._columns() for p in parts), strict=True))
        )

    def append(self, view: TensorView) -> None:
        self.keys.append(view.key)
        self.storages.append(view.storage)
        self.sizes.append(view.nbytes)
        self.dtypes.append(view.dtype)
        self.devices.append(view.storage.device)
        self.identities.append(view.storage._cdata)

    def without_storages(self) -> TensorViews:
        """Returns the columns other than the storages, which keep no memory alive."""
        return TensorViews(keys=self.keys, sizes=self.sizes, dtypes=self.dtypes, devices=self.devices)

    def extend(self, kept: TensorViews, storages: dict[int, torch.UntypedStorage]) -> None:
        """Appends ``storages``, by identity, with the other columns of ``kept``."""
        self.keys += kept.keys
        self.storages += storages.values()
        self.sizes += kept.sizes
        self.dtypes += kept.dtypes
        self.devices += kept.devices
        self.identities += storages

    def take(self, order: Sequence[int]) -> TensorViews:
        """Returns the storages at these places, in this order."""
        return TensorViews(*(list(map(column.__getitem__, order)) if column else [] for column in self._columns()))

    def _columns(self) -> tuple[list[Any], ...]:
        return self.keys, self.storages, self.sizes, self.dtypes, self.devices, self.identities


@dataclass(frozen=True, slots=True)
class Bytes:
    """Small state, already serialised: nothing that happens after ``save()`` changes it."""

    data: bytes


Segment = TensorView | TensorViews | Bytes


@dataclass
class StorageTable:
    """The storages of one checkpoint: each has one key, also if several providers hold it (tied weights)."""

    fresh_keys: Iterator[str]
    views: TensorViews = field(default_factory=TensorViews)
    _positions: dict[int, int] = field(default_factory=dict)  # in views, by the storage's _cdata
    _keys: set[str] = field(default_factory=set)

    def add(self, storage: torch.UntypedStorage, dtype: torch.dtype, reusable_keys: Iterator[str]) -> TensorView:
        """The view of ``storage``, made under the next reusable key if it is new here.

        Raises RuntimeError, as ``torch.save`` does, if it was added before under another dtype.
        """
        new = len(self.views.keys)
        position = self._positions.setdefault(storage._cdata, new)
        if position == new:
            while (key := next(reusable_keys, None) or next(self.fresh_keys)) in self._keys:
                pass
            view = TensorView(key, storage, storage.nbytes(), dtype)
            self._keys.add(key)
            self.views.append(view)
            return view
        view = self.views[position]
        if view.dtype != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        return view

    def add_again(self, kept: TensorViews, storages: dict[int, torch.UntypedStorage]) -> bool:
        """Adds ``storages``, by ``_cdata``, with the columns ``kept`` from another save. Returns False, and adds
        nothing, if keys or dtypes conflict."""
        if not self._positions.keys().isdisjoint(storages):  # another provider has some of them, too
            for key, identity, dtype in zip(kept.keys, storages, kept.dtypes, strict=True):
                at = self._positions.get(identity)
                if at is not None and (self.views.keys[at], self.views.dtypes[at]) != (key, dtype):
                    return False
            new = [at for at, identity in enumerate(storages) if identity not in self._positions]
            storages = {identity: s for identity, s in storages.items() if identity not in self._positions}
            kept = kept.take(new)
        if not self._keys.isdisjoint(kept.keys):
            return False
        self._keys.update(kept.keys)
        self._positions.update(zip(storages, count(len(self.views))))
        self.views.extend(kept, storages)
        return True

    def check(self, first: int, keys: list[str]) -> None:
        """Raises ValueError if one of ``keys`` is missing, or if a storage from place ``first`` on has another size
        than its view says: the engine would read foreign memory."""
        if unknown := set(keys) - self._keys:
            raise ValueError(f"segments() gave the storage {min(unknown)!r}, which it has not added to the table")
        for view in self.views[first:]:
            if view.nbytes != (there := view.storage.nbytes()):
                raise ValueError(f"segments() tells {view.nbytes} bytes of the storage {view.key!r}, which has {there}")


@dataclass(frozen=True, slots=True)
class Landing:
    """A saved tensor whose bytes are read straight into a live one of the same shape and dtype."""

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
        ``RestoreError`` that lists every missing, unexpected and misshapen entry.
        """

    @abstractmethod
    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        """Takes over ``saved``, whose tensors are filled now, except those in ``landed`` (by ``id`` of the saved
        tensor), whose bytes are in the live tensor that it maps to."""
