"""Pickles any Python object as ``torch.save`` would, with the storages beside the pickle.

``torch.save`` spends 25 µs a tensor in Python reducers. The native pickler (csrc/python/plain_pickler.cc) writes the
same opcodes for plain state, nested dicts, lists and tuples of text, numbers and plain tensors, in a fraction of one.
It writes them anew at every save, so they are never out of date. Only the keys of the storages are kept.

For any other object, Python's own C pickler writes an *outline*, with a placeholder for each tensor. The opcodes of
plain tensors (plain_tensors.py) are put into the places. They are kept, and used again while the facts in them have not
changed, which every save asks every tensor. torch_pickler.py pickles objects with other tensors and large NumPy arrays.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.plain_tensors import (
    PLACES,
    PLAIN_DTYPES,
    PROTOCOL,
    spell,
    string,
    word,
    words_of,
)
from lazyckpt.providers.spans import whole_of
from lazyckpt.providers.torch_pickler import array_tensor, dump, reduced_as_usual, without_storages

_dtype = attrgetter("dtype")


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
        if (memory := array_tensor(obj)) is not None:
            self.others.append((len(self.tensors), obj.shape, obj.dtype, obj.flags.c_contiguous))
            self.tensors.append(memory)
            return _PLACEHOLDER
        return reduced_as_usual(obj, self._root, self.kinds)

    def _note(self, storage: torch.UntypedStorage, *facts: Any) -> tuple[Any, ...]:
        self.others.append((len(self.tensors), *facts))
        self.tensors.append(whole_of(storage))
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
        self._storages: list[int] = []  # in a compact table: the number of the storage of each span

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
            if table.compact:
                plain = _VOCABULARY.pickle_compact(obj, _FIRST_PLACE, self._plain)
            else:
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
            spans = zip(now.offsets, now.sizes, strict=True) if table.compact else repeat(None, len(storages))
            columns = zip(storages, now.dtypes, spans, strict=True)
            views = [table.add(storage, dtype, reusable, span) for storage, dtype, span in columns]
            kept = without_storages(views)
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
            facts = looks, outline.others, table.compact
            known = (
                facts == self._facts
                and (self._tensors is not None or outline.opcodes == self.outline)
                and self._add_again(table, storages)
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
                self._tensors, self._kept = spelled, without_storages(views.values())
        if self._tensors is not None:
            opcodes = outline.filled(self._tensors)
        if opcodes is None:
            self._tensors = None
            opcodes, self._kept, kinds = dump(obj, table, iter(self._kept.keys))
        if table.compact and not known and plain is not None:
            numbers = {identity: number for number, identity in enumerate(plain[1])}
            self._storages = [numbers.get(identity, -1) for identity in self._kept.identities]
            facts = None if -1 in self._storages else facts  # -1: of an array, or made by a reducer just now
        self._facts, self.outline, self.pickled, self.kinds = facts, outline.opcodes, opcodes, kinds
        return opcodes

    def _add_again(self, table: StorageTable, storages: dict[int, torch.UntypedStorage]) -> bool:
        """Adds the columns kept, for ``storages``, by identity."""
        columns = list(storages.items())
        if table.compact:
            columns = [columns[at] for at in self._storages]
        found = [storage for _, storage in columns]
        kept = self._kept.with_memory((identity for identity, _ in columns), map(torch.UntypedStorage.data_ptr, found))
        return table.add_again(kept, found)


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
