"""Unpickles the record ``data.pkl`` with torch's unpicklers; ``formats.plain_pickle`` is tried first."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lazyckpt.errors import LoadError, UnsupportedFormatError
from lazyckpt.formats.pickle_guard import CONSENT, GuardedPickle
from lazyckpt.formats.safe_globals import WITHOUT_STORAGES, sparse_tensors_to_validate

# torch's messages for opcodes that pickle writes and the restricted unpickler does not read; the last one is ours.
_BEYOND = re.compile("Unsupported operand|nested too deep")
_BEYOND_US = (
    "holds an integer of more than 255 bytes, a key nested more than 100 deep or an unknown opcode; load it with "
    "weights_only=False, which runs code from the file: only if you trust its origin"
)


class NeedsBytes(Exception):
    """The pickle names a type or function that may read the bytes of a storage while it is rebuilt."""


def unpickle(
    data: bytes,
    path: str | os.PathLike[str],
    persistent_load: Callable[[Any], torch.storage.TypedStorage],
    map_location: Any,
    *,
    weights_only: bool,
    needs_no_bytes: bool = False,
) -> Any:
    """The object that ``data`` holds, as ``torch.load`` makes it. May raise any error: call it inside ``load_errors``.

    With ``needs_no_bytes``, raises NeedsBytes for a pickle that names more than plain tensors.
    """
    torch.serialization._serialization_tls.map_location = map_location
    try:
        if weights_only:
            tree = (_PlainNames if needs_no_bytes else GuardedPickle)(data, path).load(persistent_load)
        else:
            unpickler: Any = _Unpickler(io.BytesIO(data), encoding="utf-8")
            unpickler.persistent_load = persistent_load
            tree = unpickler.load()
        # torch checks only on request, but an index outside of its tensor makes later code write outside of memory.
        checked = weights_only or bool(torch.sparse.check_sparse_tensor_invariants.is_enabled())
        with torch.sparse.check_sparse_tensor_invariants(checked):
            torch._utils._validate_loaded_sparse_tensors()
        return tree
    finally:
        sparse_tensors_to_validate().clear()
        torch.serialization._serialization_tls.map_location = None


@contextmanager
def load_errors(path: str | os.PathLike[str], *, weights_only: bool, verified: bool) -> Iterator[None]:
    """Turns errors of unpickling into a LoadError. ``verified``: the checksum of the pickle is right."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # A verified pickle is as it was saved, so restore() must not take it for damaged.
        if weights_only and verified and _BEYOND.search(str(error)):
            raise UnsupportedFormatError(f"{_BEYOND_US} ({error})", path=path) from error
        if isinstance(error, LoadError):
            raise
        if weights_only and ("weights_only" in str(error) or "allowed global" in str(error)):
            raise UnsupportedFormatError(f"is not to be unpickled: {error} ({CONSENT})", path=path) from error
        why = "it takes more memory than there is" if isinstance(error, MemoryError) else error
        raise LoadError(f"cannot be unpickled: {why}", path=path) from error


class _PlainNames(GuardedPickle):
    """A pickle that names only types and functions that read no bytes; raises NeedsBytes otherwise.

    The restricted unpickler calls ``readline`` only for names: module and name alternate.
    """

    _module: str | None = None

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        word = line.decode("utf-8").removesuffix("\n")
        if self._module is None:
            self._module = word
            return line
        full, self._module = f"{self._module}.{word}", None
        if not re.fullmatch(r"torch\.(storage\.)?\w+Storage", full) and full not in _PLAIN_NAMES:
            raise NeedsBytes
        return line


_PLAIN_NAMES = WITHOUT_STORAGES.union(
    ["collections.OrderedDict", "_codecs.encode", "torch.Size", "torch.device"],
    (f"torch._utils._rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "meta_tensor_no_storage")),
    (str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
)


class _Unpickler(pickle.Unpickler):
    """The unpickler of ``torch.load(weights_only=False)``: it looks up storage types by name, and finds modules that
    have moved."""

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            with suppress(KeyError):
                return torch.serialization.StorageType(name)
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)
