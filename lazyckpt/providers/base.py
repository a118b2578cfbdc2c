"""The data that state providers exchange with the rest: on a save, storages, which are never copied here
(DataStates-LLM, V-A3); on a restore, pairs of a saved tensor and a live one that takes its bytes.

A provider knows its state; the formats and the engine behind it know bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, NamedTuple

import torch


class TensorView(NamedTuple):
    """One storage, to be written once however many tensors view it. Holding it keeps its memory alive."""

    key: str  # the record is named data/<key>
    storage: torch.UntypedStorage
    nbytes: int
    dtype: torch.dtype  # torch.load types storages: one storage, one dtype


@dataclass(slots=True)
class TensorViews:
    """Storages as columns: there are tens of thousands, and each save() goes through them."""

    keys: list[str] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes
    dtypes: list[torch.dtype] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)  # _cdata: the same as long as the storage lives
    # The tensors through which the state sees the storages, as far as known: their versions tell of writes. No column,
    # and only for one file.
    tensors: list[torch.Tensor] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> TensorView:
        return TensorView(self.keys[at], self.storages[at], self.sizes[at], self.dtypes[at])

    def __iter__(self) -> Iterator[TensorView]:
        return map(TensorView, self.keys, self.storages, self.sizes, self.dtypes)

    @classmethod
    def joined(cls, parts: Sequence[TensorViews]) -> TensorViews:
        """The storages of all ``parts``; the part itself if there is one."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(p._columns() for p in parts), strict=True)
        return cls(*map(list, map(chain.from_iterable, columns)))

    def append(self, view: TensorView) -> None:
        self.keys.append(view.key)
        self.storages.append(view.storage)
        self.sizes.append(view.nbytes)
        self.dtypes.append(view.dtype)
        self.devices.append(view.storage.device)
        self.identities.append(view.storage._cdata)

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
        columns = (list(map(column.__getitem__, order)) if column else [] for column in self._columns())
        return TensorViews(*columns)

    def _columns(self) -> tuple[list[Any], ...]:
        return self.keys, self.storages, self.sizes, self.dtypes, self.devices, self.identities


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
        new = len(self.views)
        position = self._positions.setdefault(storage._cdata, new)
        if position == new:
            while (key := next(reusable_keys, None) or next(self.fresh_keys)) in self._keys:
                pass
            self._keys.add(key)
            self.views.append(TensorView(key, storage, storage.nbytes(), dtype))
        elif self.views.dtypes[position] != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        return self.views[position]

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


@dataclass(frozen=True, slots=True)
class Landing:
    """A saved tensor whose bytes are read straight into a live one of the same shape and dtype."""

    saved: torch.Tensor
    live: torch.Tensor
