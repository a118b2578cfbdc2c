"""Pickles any Python object as ``torch.save`` would, with the storages beside the pickle.

``torch.save`` spends 25 µs a tensor in Python reducers. The native pickler (csrc/python/plain_pickler.cc) writes the
same opcodes for plain state, nested dicts, lists and tuples of text, numbers and plain tensors, in a fraction of one.
It writes them anew at every save, so they are never out of date. Only the keys of the storages are kept.

For any other object, Python's own C pickler writes an *outline*, with a placeholder for each tensor. The opcodes of
plain tensors (plain_tensors.py) are put into the places. They are kept, and used again while the facts in them have not
changed, which every save asks every tensor. ``_Pickler``, which calls torch's reducers, pickles objects with other
tensors (sparse, quantised, of subclasses) and large NumPy arrays.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.providers.base import StorageTable, TensorView, TensorViews
from lazyckpt.providers.plain_tensors import (
    PLACES,
    PLAIN_DTYPES,
    PROTOCOL,
    location,
    reduced,
    spell,
    string,
    word,
    words_of,
)
from lazyckpt.providers.sharded import refuse_part

MIN_ARRAY_BYTES = 64 << 10  # NumPy arrays from here on are written as storages, not as pickle bytes

_dtype = attrgetter("dtype")


class _SharedArray:
    """Pickles as ``numpy.asarray(tensor)``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.modules["numpy"].asarray, (self.tensor,)


# Types that torch's restricted unpickler always reads.
_allowed_globals = torch._weights_only_unpickler._get_allowed_globals()
_READABLE = frozenset(map(id, (*_allowed_globals.values(), *torch._storage_classes, _SharedArray)))


def _note_kind(obj: Any, kinds: dict[int, Any]) -> None:
    """Adds the class of ``obj`` to ``kinds``, by ``id``, or ``obj`` itself if it is a class or a function, unless torch
    always reads it. A pickler asks for every class, function and object that is no plain container or value."""
    kind = obj if isinstance(obj, type | FunctionType | BuiltinFunctionType) else type(obj)
    if id(kind) not in _READABLE:
        if kind.__module__ in ("numpy", "numpy.dtypes") and getattr(obj, "metadata", None):
            kind = obj  # a dtype that restore() does not read, of a class that it reads
        kinds[id(kind)] = kind


def _array_tensor(obj: Any) -> torch.Tensor | None:
    """Returns the memory of a large contiguous NumPy array as uint8[n]; None for an object to be pickled instead."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not numpy.ndarray or obj.nbytes < MIN_ARRAY_BYTES or obj.dtype.hasobject:
        return None
    if not (obj.flags.c_contiguous or obj.flags.f_contiguous):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the array may be read-only: nothing writes to it here
        return torch.from_numpy(obj.ravel(order="K").view("uint8"))


def _reduced_as_usual(obj: Any, root: Any, kinds: dict[int, Any]) -> Any:
    """Lets a pickler treat ``obj``, a part of ``root``, as it would by itself, unless it is a shard."""
    _note_kind(obj, kinds)
    if isinstance(obj, torch.Tensor):
        refuse_part(obj, root)
    return NotImplemented


# Asked first, since a persistent id is looked for in every object: these are no storages.
_COMMON = frozenset((int, str, tuple, bool, float, dict, list, OrderedDict, type(None), FunctionType, type))


class _Pickler(pickle.Pickler):
    """Writes the same as ``torch.save``; storages go into the table."""

    def __init__(self, obj: Any, out: io.BytesIO, table: StorageTable, keys: Iterator[str]) -> None:
        super().__init__(out, PROTOCOL)
        self._root = obj
        self._table = table
        self._reusable = keys
        self.views: dict[str, TensorView] = {}  # by key, in the order of appearance
        self.kinds: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _COMMON:
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            storage, kind, dtype = obj._untyped_storage, getattr(torch, obj._pickle_storage_type()), obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, dtype = obj, torch.UntypedStorage, torch.uint8
        else:
            return None
        view = self._table.add(storage, dtype, self._reusable)
        self.views[view.key] = view
        return "storage", kind, view.key, location(storage), view.nbytes // dtype.itemsize

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.dtype in PLAIN_DTYPES and _engine.look_at_tensors([obj]) is not None:
            return reduced(obj)
        if (memory := _array_tensor(obj)) is not None:
            order = "C" if obj.flags.c_contiguous else "F"
            return type(obj), (obj.shape, obj.dtype, _SharedArray(memory), 0, None, order)
        return _reduced_as_usual(obj, self._root, self.kinds)


def _placeholder() -> None:
    """Takes the place of a tensor in an outline."""


_PLACEHOLDER = (_placeholder, ())
# The first places of an outline's memo are taken: the placeholder's, and those of the words that tensors share.
_TAKEN = pickle.Pickler(io.BytesIO(), PROTOCOL)
_TAKEN.dump((_placeholder, *map(str, range(1, PLACES))))
_FIRST_PLACE = len(_TAKEN.memo.copy())  # of an object in the memo of an outline
_PLACEHOLDER_OPCODES = pickle.BINGET + b"\0" + pickle.EMPTY_TUPLE + pickle.REDUCE


class _Outline(pickle.Pickler):
    """Pickles everything but tensors, and collects the tensors."""

    def __init__(self, obj: Any) -> None:
        out = io.BytesIO()
        super().__init__(out, PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []  # further facts in the pickle about stand-ins for storages and arrays
        self.kinds: dict[int, Any] = {}
        self.memo = _TAKEN.memo  # a copy
        self._root = obj
        self.dump(obj)
        self.opcodes = out.getvalue()[2:-1]

    def filled(self, tensors: list[bytes]) -> bytes | None:
        """Returns the opcodes with those of the tensors in their places; None if another opcode looks like a place."""
        parts = self.opcodes.split(_PLACEHOLDER_OPCODES)
        if len(parts) != len(tensors) + 1:
            return None
        whole = [b""] * (len(parts) + len(tensors))
        whole[::2] = parts
        whole[1::2] = tensors
        return b"".join(whole)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            self.tensors.append(obj)
            return _PLACEHOLDER
        if isinstance(obj, torch.storage.TypedStorage):
            return self._note(obj._untyped_storage, obj.dtype, obj._size())
        if isinstance(obj, torch.UntypedStorage):
            return self._note(obj)
        if (memory := _array_tensor(obj)) is not None:
            self.others.append((len(self.tensors), obj.shape, obj.dtype, obj.flags.c_contiguous))
            self.tensors.append(memory)
            return _PLACEHOLDER
        return _reduced_as_usual(obj, self._root, self.kinds)

    def _note(self, storage: torch.UntypedStorage, *facts: Any) -> tuple[Any, ...]:
        self.others.append((len(self.tensors), *facts))
        self.tensors.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return _PLACEHOLDER


_VOCABULARY = _engine.Vocabulary(
    words_of,
    lambda device: word("cpu" if device < 0 else f"cuda:{device}"),
    storage=word("storage"),
    ordered_dict=word(OrderedDict),
    places=PLACES,
)


class Skeleton:
    """The pickle of one object without its storages, kept from checkpoint to checkpoint."""

    def __init__(self) -> None:
        self._plain: _engine.PlainPickle | None = None  # of a plain object: what the native pickler wrote
        self._facts: Any = None  # of another object: all that the opcodes of its tensors depend on
        self._tensors: list[bytes] | None = None  # these opcodes, if all are plain
        self.outline = b""
        self.pickled = b""  # the opcodes
        self.kinds: dict[int, Any] = {}
        """The classes and functions that the opcodes name, by ``id``, without those that torch always reads."""
        self.accepted: dict[int, Any] = {}  # those of them that restore() has been seen to read
        self._kept = TensorViews()  # of its storages, in the order of appearance

    def __reduce__(self) -> tuple[Any, ...]:
        return Skeleton, ()  # a copy of a provider keeps its own

    def opcodes(self, obj: Any, table: StorageTable) -> bytes:
        """Returns the pickle opcodes of ``obj`` as it is now, and adds its storages to ``table``."""
        opcodes = self.opcodes_of_plain(obj, table)
        return self._opcodes_of_any(obj, table) if opcodes is None else opcodes

    def opcodes_of_plain(self, obj: Any, table: StorageTable, *, detached: bool = False) -> bytes | None:
        """As ``opcodes``; None if ``obj`` is not plain. ``detached``: of an object with ``detach()`` of each tensor in
        its place."""
        with torch._C.DisableTorchFunction():  # a mode would make it many times slower
            plain = _VOCABULARY.pickle(obj, _FIRST_PLACE, self._plain, detached)
        if plain is None:
            self._plain = None
            return None
        now, tensors, storages = plain
        table.views.tensors += tensors
        before, self._plain = self._plain, None  # Ctrl-C below must not leave it beside new keys
        kept = None if before is None else self._kept_again(now, before)
        if kept is None or not table.add_again(kept, storages):
            self._facts = self._tensors = before = None
            reusable = iter(self._kept.keys)
            views = [table.add(s, dtype, reusable) for s, dtype in zip(storages, now.dtypes, strict=True)]
            kept = _without_storages(views)
        if before is None or not now.is_same(before):
            self.pickled, self.kinds = now.with_keys(kept.keys), {}
        self._plain, self._kept = now, kept
        return self.pickled

    def _kept_again(self, now: _engine.PlainPickle, before: _engine.PlainPickle) -> TensorViews | None:
        """The columns kept, for the storages of now; None if these are of other kinds."""
        if not now.has_same_storages(before):
            return None
        if now.has_same_memory(before):
            return self._kept
        return self._kept.with_memory(now.identities, now.pointers)

    def _opcodes_of_any(self, obj: Any, table: StorageTable) -> bytes:
        outline = _Outline(obj)
        table.views.tensors += outline.tensors
        facts = None
        known = False
        if (plain := _engine.look_at_tensors(outline.tensors)) is not None:
            looks, storages = plain
            facts = looks, outline.others
            known = (
                facts == self._facts
                and (self._tensors is not None or outline.opcodes == self.outline)
                and table.add_again(self._kept_for(storages), list(storages.values()))
            )
        if known and outline.opcodes == self.outline:
            return self.pickled
        opcodes, kinds = None, outline.kinds
        if not known:
            self._facts = self._tensors = None  # now: Ctrl-C below must not leave old facts beside new keys
            if not PLAIN_DTYPES.issuperset(map(_dtype, outline.tensors)):
                facts = None
            if facts is not None and not outline.others:
                spelled, views = spell(outline.tensors, table, iter(self._kept.keys))
                self._tensors, self._kept = spelled, _without_storages(views.values())
        if self._tensors is not None:
            opcodes = outline.filled(self._tensors)
        if opcodes is None:
            self._tensors = None
            opcodes, self._kept, kinds = dump(obj, table, iter(self._kept.keys))
        self._facts, self.outline, self.pickled, self.kinds = facts, outline.opcodes, opcodes, kinds
        return opcodes

    def _kept_for(self, storages: dict[int, torch.UntypedStorage]) -> TensorViews:
        """The columns kept, with the addresses of ``storages``, by identity."""
        pointers = list(map(torch.UntypedStorage.data_ptr, storages.values()))
        return self._kept.with_memory(list(storages), pointers)


def dump(obj: Any, table: StorageTable, reusable_keys: Iterator[str]) -> tuple[bytes, TensorViews, dict[int, Any]]:
    """The opcodes of ``obj`` (no PROTO, no STOP), the columns kept of its storages in the order of appearance, and its
    kinds."""
    out = io.BytesIO()
    pickler = _Pickler(obj, out, table, reusable_keys)
    pickler.dump(obj)
    return out.getvalue()[2:-1], _without_storages(pickler.views.values()), pickler.kinds


def _without_storages(views: Iterable[TensorView]) -> TensorViews:
    """The columns of these views without the storages, which would keep memory alive."""
    columns = TensorViews()
    for view in views:
        columns.append(view)
    columns.storages = []
    columns = columns.take(range(len(columns)))  # no longer than they are, unlike lists that have grown
    return columns


def pickle_of(opcodes: bytes) -> bytes:
    """A whole pickle from the opcodes of one object."""
    return pickle.PROTO + bytes([PROTOCOL]) + opcodes + pickle.STOP


def dict_opcodes(items: dict[str, bytes]) -> bytes:
    """Opcodes of a dict from those of its values."""
    out = [pickle.EMPTY_DICT, pickle.MARK]
    for key, value in items.items():
        out += [string(key), value]
    out.append(pickle.SETITEMS)
    return b"".join(out)
