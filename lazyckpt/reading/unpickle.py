"""Unpickles the record ``data.pkl`` with torch's unpicklers; ``formats.plain_pickle`` is tried first."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazyckpt.errors import LoadError, UnsupportedFormatError
from lazyckpt.formats.pickle_guard import CONSENT, GuardedPickle
from lazyckpt.formats.safe_globals import WITHOUT_STORAGES, RestrictedUnpickler, sparse_tensors_to_validate

# torch's messages for opcodes that pickle writes and the restricted unpickler does not read; the last one is ours.
_BEYOND = re.compile("Unsupported operand|nested too deep")
_BEYOND_US = (
    "holds an integer of more than 255 bytes, a key nested more than 100 deep or an unknown opcode; load it with "
    "weights_only=False, which runs code from the file: only if you trust its origin"
)


class NeedsBytes(Exception):
    """The pickle names something that may look at the bytes of a storage when it is rebuilt."""


def unpickle(
    data: bytes,
    path: str | os.PathLike[str],
    persistent_load: Callable[[Any], torch.storage.TypedStorage],
    map_location: Any,
    *,
    weights_only: bool,
    needs_no_bytes: bool = False,
) -> Any:
    """The object that ``data`` holds, as ``torch.load`` makes it. Raises anything: call it inside ``load_errors``.

    With ``needs_no_bytes``, raises NeedsBytes for a pickle that names more than plain tensors.
    """
    stream: io.BytesIO
    unpickler: Any
    if weights_only:
        stream = (_PlainNames if needs_no_bytes else GuardedPickle)(data, path)
        unpickler = stream.unpickler = RestrictedUnpickler(stream, encoding="utf-8")
    else:
        stream = io.BytesIO(data)
        unpickler = _Unpickler(stream, encoding="utf-8")
    unpickler.persistent_load = persistent_load
    torch.serialization._serialization_tls.map_location = map_location
    try:
        tree = unpickler.load()
        # torch checks only on request, but an index outside of its tensor makes later code write outside of memory.
        with torch.sparse.check_sparse_tensor_invariants(weights_only or _checks_sparse_tensors()):
            torch._utils._validate_loaded_sparse_tensors()
        return tree
    finally:
        sparse_tensors_to_validate().clear()
        torch.serialization._serialization_tls.map_location = None
        if isinstance(stream, GuardedPickle):
            del stream.unpickler  # breaks a cycle that would keep the archive, and its part of the ring, alive


@contextmanager
def load_errors(path: str | os.PathLike[str], *, weights_only: bool, verified: bool) -> Iterator[None]:
    """Turns whatever unpickling raises into a LoadError. ``verified``: the checksum of the pickle is right."""
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
    """A pickle that names only what looks at no bytes; raises NeedsBytes otherwise.

    The restricted unpickler calls ``readline`` only for names: module and name alternate.
    """

    _module: str | None = None

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        word = line.decode("utf-8").removesuffix("\n")
        if self._module is None:
            self._module = word
            return line
        module, self._module = self._module, None
        in_torch = module in ("torch", "torch.storage")
        if not ((in_torch and word.endswith("Storage")) or f"{module}.{word}" in _PLAIN_NAMES):
            raise NeedsBytes
        return line


_PLAIN_NAMES = frozenset(
    ["collections.OrderedDict", "_codecs.encode", "torch.Size", "torch.device"]
    + [f"torch._utils._rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "meta_tensor_no_storage")]
    + [str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    + sorted(WITHOUT_STORAGES)
)


class _Unpickler(pickle.Unpickler):
    """The unpickler of ``torch.load(weights_only=False)``: it looks up storage types by name, and finds modules that
    have moved."""

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            try:
                return torch.serialization.StorageType(name)
            except KeyError:
                pass
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)


def _checks_sparse_tensors() -> bool:
    return bool(torch.sparse.check_sparse_tensor_invariants.is_enabled())
