"""The data that state providers exchange with the rest: on a save, storages, which are never copied here
(DataStates-LLM, V-A3); on a restore, pairs of a saved tensor and a live one that takes its bytes.

A provider knows its state; the formats and the engine behind it know bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from operator import add
from typing import Any, NamedTuple

import torch


class TensorView(NamedTuple):
    """A storage or a part of one, written once however many tensors view it. Holding it keeps the memory alive."""

    key: str  # the record is named data/<key>
    storage: torch.UntypedStorage
    nbytes: int
    dtype: torch.dtype  # torch.load types storages: one storage, one dtype
    offset: int = 0  # of its first byte in the storage


class Parts(NamedTuple):
    """Parts of some views, as columns. A view may have several."""

    places: list[int]  # of the views
    offsets: array[int]  # of the first byte of each part in its view
    sizes: array[int]  # bytes


def _numbers() -> array[int]:
    return array("Q")


# torch makes a new object each time that it is asked for a device.
_devices: dict[torch.device, torch.device] = {}


@dataclass(slots=True)
class TensorViews:
    """Storages as columns: there are tens of thousands, and each save() goes through them.

    Columns of numbers are arrays, since they are kept from save to save: a list takes five times as much memory."""

    keys: list[str] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    sizes: array[int] = field(default_factory=_numbers)  # bytes
    dtypes: list[torch.dtype] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    identities: array[int] = field(default_factory=_numbers)  # _cdata: the same as long as the storage lives
    pointers: array[int] = field(default_factory=_numbers)
    whole: bool = field(default=True, init=False)  # whether the sizes are those of the storages, no less
    offsets: array[int] | None = field(default=None, init=False)  # of the first bytes in the storages; None: all 0
    # The tensors through which the state sees the storages, as far as known: their versions tell of writes. No column,
    # and only for one file.
    tensors: list[torch.Tensor] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: int) -> TensorView:
        offset = 0 if self.offsets is None else self.offsets[at]
        return TensorView(self.keys[at], self.storages[at], self.sizes[at], self.dtypes[at], offset)

    def __iter__(self) -> Iterator[TensorView]:
        offsets = repeat(0) if self.offsets is None else self.offsets
        return map(TensorView, self.keys, self.storages, self.sizes, self.dtypes, offsets)

    @classmethod
    def joined(cls, parts: Sequence[TensorViews]) -> TensorViews:
        """The storages of all ``parts``; the part itself if there is one."""
        if len(parts) == 1:
            return parts[0]
        joined = cls()
        for part in parts:
            joined.extend(part)
        return joined

    def append(self, view: TensorView) -> None:
        if view.offset and self.offsets is None:
            self.offsets = array("Q", bytes(8 * len(self)))
        if self.offsets is not None:
            self.offsets.append(view.offset)
        self.keys.append(view.key)
        self.storages.append(view.storage)
        self.sizes.append(view.nbytes)
        self.dtypes.append(view.dtype)
        device = view.storage.device
        self.devices.append(_devices.setdefault(device, device))
        self.identities.append(view.storage._cdata)
        self.pointers.append(view.storage.data_ptr())
        self.whole = self.whole and view.nbytes == view.storage.nbytes()

    def extend(self, others: TensorViews) -> None:
        if self.offsets is not None or others.offsets is not None:
            mine, theirs = (views.offsets or array("Q", bytes(8 * len(views))) for views in (self, others))
            self.offsets = mine + theirs
        self.keys += others.keys
        self.storages += others.storages
        self.sizes += others.sizes
        self.dtypes += others.dtypes
        self.devices += others.devices
        self.identities += others.identities
        self.pointers += others.pointers
        self.whole = self.whole and others.whole

    def take(self, order: Sequence[int]) -> TensorViews:
        """Returns the storages at these places, in this order."""

        def at(column: Any) -> Any:
            taken = list(map(column.__getitem__, order)) if column else []
            return taken if isinstance(column, list) else array(column.typecode, taken)

        taken = TensorViews(*map(at, (self.keys, self.storages, *self.columns()[1:-1])))
        taken.whole, taken.offsets = self.whole, None if self.offsets is None else at(self.offsets)
        return taken

    def parts(self, chosen: Parts) -> TensorViews:
        """Returns these parts of the views, which may be parts of their storages already."""
        parts = self.take(chosen.places)
        begins = parts.offsets
        parts.offsets = chosen.offsets if begins is None else array("Q", map(add, begins, chosen.offsets))
        parts.sizes, parts.whole = chosen.sizes, False
        return parts

    def columns(self) -> tuple[Any, ...]:
        """Everything but the storages: nothing that keeps memory alive. The lists are shared."""
        return self.keys, self.sizes, self.dtypes, self.devices, self.identities, self.pointers, self.whole

    def with_memory(self, identities: Iterable[int], pointers: Iterable[int]) -> TensorViews:
        """The same columns, without storages, for storages of the same kinds at other places."""
        memory = array("Q", identities), array("Q", pointers)
        views = TensorViews(self.keys, [], self.sizes, self.dtypes, self.devices, *memory)
        views.whole, views.offsets = self.whole, self.offsets
        return views

    def with_storages(self, storages: list[torch.UntypedStorage]) -> TensorViews:
        """The same columns for these storages. The lists are shared."""
        keys, *others, whole = self.columns()
        views = TensorViews(keys, storages, *others)
        views.whole, views.offsets = whole, self.offsets
        return views


class StorageTable:
    """The storages of one checkpoint: each has one key, also if several providers hold it (tied weights)."""

    def __init__(self, fresh_keys: Iterator[str], before: Sequence[TensorViews] = (), *, compact: bool = False) -> None:
        """``before``: what was ``added`` to the table of an earlier save. ``compact``: instead of the storages, it has
        spans of them (``_engine.spans_of``), each with a key of its own."""
        self.compact = compact
        self.views = TensorViews()
        self.added: list[TensorViews] = []
        """The first parts that were added whole, without their storages."""
        self._fresh_keys = fresh_keys
        self._before = before
        self._has_same_keys = self._has_same_memory = True  # as before, as far as there are parts
        self._is_whole = True
        self._positions: dict[Any, int] = {}  # in views, by the storage's _cdata (and the span), of the first of them
        self._keys: set[str] = set()

    def add(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        reusable_keys: Iterator[str],
        span: tuple[int, int] | None = None,
    ) -> TensorView:
        """The view of ``storage``, made under the next reusable key if it is new here. ``span``: in a compact table,
        where it begins and how many bytes it has; None: all of the storage.

        Raises RuntimeError, as ``torch.save`` does, if it was added before under another dtype.
        """
        self._index()
        self._is_whole = False
        new = len(self.views)
        offset, nbytes = span or (0, storage.nbytes())
        place = (storage._cdata, offset, nbytes) if self.compact else storage._cdata
        position = self._positions.setdefault(place, new)
        if position == new:
            while (key := next(reusable_keys, None) or next(self._fresh_keys)) in self._keys:
                pass
            self._keys.add(key)
            self.views.append(TensorView(key, storage, nbytes, dtype, offset))
        elif self.views.dtypes[position] != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        return self.views[position]

    def add_again(self, kept: TensorViews, storages: list[torch.UntypedStorage]) -> bool:
        """Adds distinct ``storages`` with the columns ``kept``. Returns False, and adds nothing, if keys or dtypes
        conflict with others here."""
        if not self._fits_as_before(kept):
            self._index()
            places = self._places(kept)
            if not self._positions.keys().isdisjoint(places):  # another provider has some of them, too
                for key, place, dtype in zip(kept.keys, places, kept.dtypes, strict=True):
                    at = self._positions.get(place)
                    if at is not None and (self.views.keys[at], self.views.dtypes[at]) != (key, dtype):
                        return False
                new = [at for at, place in enumerate(places) if place not in self._positions]
                kept, storages = kept.with_storages(storages).take(new), [storages[at] for at in new]
                self._is_whole = False
            if not self._keys.isdisjoint(kept.keys):
                return False
        if self._is_whole:
            self.added.append(kept)
        self.views.extend(kept.with_storages(storages))
        return True

    def _fits_as_before(self, kept: TensorViews) -> bool:
        """Whether ``kept`` conflicts with nothing because it did not at an earlier save."""
        at = len(self.added)
        before = self._before[at] if at < len(self._before) else None
        self._has_same_keys = self._has_same_keys and self._is_whole and before is not None and before.keys is kept.keys
        if not self._has_same_keys or before is None:
            return False
        self._has_same_memory = self._has_same_memory and before.identities is kept.identities
        return self._has_same_memory or set(kept.identities).isdisjoint(self.views.identities)

    def _index(self) -> None:
        """Completes the positions and the keys."""
        known = len(self._keys)
        if known < len(self.views):
            self._keys.update(self.views.keys[known:])
            self._positions.update(zip(self._places(self.views)[known:], count(known)))

    def _places(self, views: TensorViews) -> Sequence[Any]:
        """By which these storages are known here."""
        if not self.compact:
            return views.identities
        offsets = repeat(0, len(views)) if views.offsets is None else views.offsets
        return list(zip(views.identities, offsets, views.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Landing:
    """A saved tensor whose bytes are read straight into a live one of the same shape and dtype."""

    saved: torch.Tensor
    live: torch.Tensor
