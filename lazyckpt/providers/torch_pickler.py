"""Pickles with torch's reducers, as ``torch.save`` does: objects with tensors that are not plain, such as sparse and
quantised ones and those of subclasses, and large NumPy arrays."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.providers.base import StorageTable, TensorView, TensorViews
from lazyckpt.providers.plain_tensors import PLAIN_DTYPES, PROTOCOL, StorageSpan, location, reduced
from lazyckpt.providers.sharded import refuse_part
from lazyckpt.providers.spans import Spans, whole_of

MIN_ARRAY_BYTES = 64 << 10  # NumPy arrays from here on are written as storages, not as pickle bytes


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


def array_tensor(obj: Any) -> torch.Tensor | None:
    """Returns the memory of a large contiguous NumPy array as uint8[n]; None for an object to be pickled instead."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not numpy.ndarray or obj.nbytes < MIN_ARRAY_BYTES or obj.dtype.hasobject:
        return None
    if not (obj.flags.c_contiguous or obj.flags.f_contiguous):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the array may be read-only: nothing writes to it here
        return torch.from_numpy(obj.ravel(order="K").view("uint8"))


def reduced_as_usual(obj: Any, root: Any, kinds: dict[int, Any]) -> Any:
    """Lets a pickler treat ``obj``, a part of ``root``, as it would by itself, unless it is a shard."""
    _note_kind(obj, kinds)
    if isinstance(obj, torch.Tensor):
        refuse_part(obj, root)
    return NotImplemented


_NOTHING = (dict, ())  # reduced
# Asked first, since a persistent id is looked for in every object: these are no storages.
_COMMON = frozenset((int, str, tuple, bool, float, dict, list, OrderedDict, type(None), FunctionType, type))


def _is_plain(obj: Any) -> bool:
    return type(obj) is torch.Tensor and obj.dtype in PLAIN_DTYPES and _engine.look_at_tensors([obj]) is not None


class _Pickler(pickle.Pickler):
    """Writes the same as ``torch.save``; storages go into the table."""

    def __init__(self, obj: Any, out: io.BytesIO, table: StorageTable, keys: Iterator[str]) -> None:
        super().__init__(out, PROTOCOL)
        self._root = obj
        self._table = table
        self._reusable = keys
        self._spans = _SpanFinder(obj).spans() if table.compact else None
        self.views: dict[str, TensorView] = {}  # by key, in the order of appearance
        self.kinds: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _COMMON:
            return None
        span = None
        if isinstance(obj, StorageSpan):
            storage, span, dtype, kind = obj
        elif isinstance(obj, torch.storage.TypedStorage):
            storage, kind, dtype = obj._untyped_storage, getattr(torch, obj._pickle_storage_type()), obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, dtype = obj, torch.UntypedStorage, torch.uint8
        else:
            return None
        view = self._table.add(storage, dtype, self._reusable, span and span[:2])
        self.views[view.key] = view
        return "storage", kind, view.key, location(storage), view.nbytes // dtype.itemsize

    def reducer_override(self, obj: Any) -> Any:
        if _is_plain(obj):
            return reduced(obj, None if self._spans is None else self._spans.of(obj))
        if (memory := array_tensor(obj)) is not None:
            order = "C" if obj.flags.c_contiguous else "F"
            return type(obj), (obj.shape, obj.dtype, _SharedArray(memory), 0, None, order)
        return reduced_as_usual(obj, self._root, self.kinds)


class _SpanFinder(pickle.Pickler):
    """Collects the plain tensors of an object, and for each storage that it finds elsewhere a tensor that shows all of
    it. The pickle is of no use."""

    def __init__(self, obj: Any) -> None:
        super().__init__(io.BytesIO(), PROTOCOL)
        self._tensors: list[torch.Tensor] = []
        self.dump(obj)

    def spans(self) -> Spans:
        return Spans(self._tensors)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _COMMON:
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        elif not isinstance(obj, torch.UntypedStorage):
            return None
        self._tensors.append(whole_of(obj))
        return "storage"

    def reducer_override(self, obj: Any) -> Any:
        if _is_plain(obj):
            self._tensors.append(obj)
            return _NOTHING
        if array_tensor(obj) is not None:  # has memory of its own
            return _NOTHING
        return NotImplemented


def dump(obj: Any, table: StorageTable, reusable_keys: Iterator[str]) -> tuple[bytes, TensorViews, dict[int, Any]]:
    """The opcodes of ``obj`` (no PROTO, no STOP), the columns kept of its storages in the order of appearance, and its
    kinds."""
    out = io.BytesIO()
    pickler = _Pickler(obj, out, table, reusable_keys)
    pickler.dump(obj)
    return out.getvalue()[2:-1], without_storages(pickler.views.values()), pickler.kinds


def without_storages(views: Iterable[TensorView]) -> TensorViews:
    """The columns of these views without the storages, which would keep memory alive."""
    columns = TensorViews()
    for view in views:
        columns.append(view)
    columns.storages = []
    columns = columns.take(range(len(columns)))  # no longer than they are, unlike lists that have grown
    return columns
