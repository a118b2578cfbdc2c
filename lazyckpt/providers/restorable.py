"""Refuses, inside ``save()``, tracked state that ``restore()`` would refuse after a crash.

The test is the way back itself: torch's restricted unpickler, as ``restore()`` uses it, reads the pickle. It gets
storages of its own, since a class that the user allows may write to the tensors it is given. It runs when a pickle
names a class or function that no accepted pickle of this state has named, which is at the first save. After that a save
compares the names that the picklers have noted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch

from lazyckpt.errors import LoadError
from lazyckpt.formats.pickle_guard import GuardedPickle
from lazyckpt.formats.plain_pickle import NotPlain, read_plain
from lazyckpt.formats.safe_globals import sparse_tensors_to_validate
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.pickles import pickle_of
from lazyckpt.providers.torch_pickler import dump

_MAX_COPIED_BYTES = 64 << 10


class UnrestorableError(Exception):
    """The state at ``path`` cannot be restored; says why, and what to do."""

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        self.what = what
        super().__init__(f"{path!r} {what}" if path else f"this state {what}")

    def inside(self, name: str) -> UnrestorableError:
        """Returns the same error for the state that holds this one as ``name``."""
        return UnrestorableError(f"{name}.{self.path}" if self.path else name, self.what)


def refuse_unreadable(state: Any, path: str, opcodes: bytes, table: StorageTable) -> None:
    """Raises UnrestorableError, naming the object in ``state``, if ``restore()`` could not read ``opcodes``."""
    why = unreadable(opcodes, table)
    if why is None:
        return
    for inner, leaf in _leaves(state, path):
        own = StorageTable(map(str, itertools.count()))
        if unreadable(dump(leaf, own, iter(()))[0], own) is not None:
            what = f"is {_describe(leaf)}, which restore() could not read: {_cure(leaf, inner)}"
            raise UnrestorableError(inner, what)
    raise UnrestorableError(path, f"has a pickle that restore() could not read: {why}")


def unreadable(opcodes: bytes, table: StorageTable) -> str | None:
    """Returns why ``restore()`` cannot read ``opcodes``; None if it can."""
    live = dict(zip(table.views.keys, table.views.storages, strict=True))
    copies: dict[str, torch.UntypedStorage] = {}

    def copy(saved_id: Any) -> torch.storage.TypedStorage:
        _, kind, key, *_ = saved_id
        if key not in copies:
            copies[key] = _copy(live[key])
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        return torch.storage.TypedStorage(wrap_storage=copies[key], dtype=dtype, _internal=True)

    pickled = pickle_of(opcodes)
    with contextlib.suppress(NotPlain):
        read_plain(pickled, copy)
        return None
    try:
        GuardedPickle(pickled, "").load(copy)
    except LoadError as error:
        return error.what
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sparse_tensors_to_validate().clear()
    return None


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the same size on the host: a copy of a small one, since rebuilding a nested tensor reads its sizes;
    otherwise zeros, which take no memory until something touches them."""
    nbytes = storage.nbytes()
    if nbytes <= _MAX_COPIED_BYTES:
        return torch.UntypedStorage(nbytes).copy_(storage)
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()


_PLAIN = frozenset((type(None), bool, float, str, torch.Tensor))
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_SEQUENCES = (list, tuple, set, frozenset)


def _leaves(root: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The objects in the plain containers of ``root``, dictionary keys too, with their paths."""
    seen: set[int] = set()
    todo = [(path, root)]
    while todo:
        path, obj = todo.pop()
        kind = type(obj)
        if kind in _PLAIN or id(obj) in seen:
            continue
        seen.add(id(obj))
        inner: list[tuple[Any, Any]]
        if kind in _MAPPINGS:
            inner = [*obj.items(), *((f"a key, {_word(key)}", key) for key in obj)]
        elif kind in _SEQUENCES:
            inner = list(enumerate(obj))
        else:
            yield path, obj
            continue
        todo += reversed([(f"{path}.{_word(key)}" if path else _word(key), value) for key, value in inner])


def _word(key: Any) -> str:
    text = str(key)
    return text if len(text) <= 100 else f"{text[:100]}…"


_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


def _describe(obj: Any) -> str:
    if isinstance(obj, _NAMED):
        return f"the {'class' if isinstance(obj, type) else 'function'} {obj.__module__}.{obj.__qualname__}"
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    dtype = f" of dtype {obj.dtype}" if kind.__module__ == "numpy" and hasattr(obj, "dtype") else ""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{dtype}"


def _cure(obj: Any, path: str) -> str:
    last = path.rpartition(".")[2]
    it = last if last.isidentifier() else "x"
    kind = type(obj)
    if isinstance(obj, _NAMED):
        instead = "its name"
    elif isinstance(obj, argparse.Namespace | types.SimpleNamespace):
        instead = f"vars({it})"
    elif callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return "track it under a name of its own, a loader with track_loader()"
    elif isinstance(obj, enum.Enum):
        instead = f"{it}.value"
    elif dataclasses.is_dataclass(obj):
        instead = f"dataclasses.asdict({it})"
    elif isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        instead = f"{it}._asdict()"
    elif isinstance(obj, dict):
        instead = f"dict({it})"
    elif isinstance(obj, list | tuple | range | collections.deque):
        instead = f"list({it})"
    elif kind.__module__ == "numpy" and hasattr(obj, "tolist"):
        instead = f"{it}.tolist()"
    else:
        return (
            "keep what you need of it as tensors, numbers, strings, lists and dicts, or allow its class with "
            "torch.serialization.add_safe_globals in every run that saves or restores"
        )
    return f"keep {instead} instead"
