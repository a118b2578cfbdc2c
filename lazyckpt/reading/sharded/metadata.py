"""Reads the record ``.metadata`` of a folder of torch.distributed.checkpoint (DCP), which is a pickle.

Plain DCP unpickles it without any check, so a hostile file runs code. Here it names nothing but the classes of DCP's
metadata, dtypes and paths, and it cannot change a class: each is replaced by a stand-in that only makes instances.
"""

from __future__ import annotations

import collections
import os
import pathlib
import pickle
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from lazyckpt import private_names
from lazyckpt.collector import collector_paused
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.distcp import stamp_before
from lazyckpt.formats.inventory import SEAL_BYTES, unsealed
from lazyckpt.formats.reader import FileReader
from lazyckpt.reading.bounded_pickle import BoundedUnpickler
from lazyckpt.reading.sharded.checks import Place, check_places, check_tensor

METADATA = ".metadata"


def read_metadata(file: FileReader, crc32: int | None) -> Any:
    """Returns the ``Metadata`` in ``file``, whose items lie in files of the same folder. ``crc32``: of the file, as the
    manifest says, if there is one.

    Raises CorruptFileError for a damaged or hostile file, UnsupportedFormatError for a kind of storage or a class that
    is not of plain DCP, LoadError if it cannot be read."""
    private_names.check("torch.distributed.checkpoint")  # not below: the file is not to blame
    path = file.path
    data = file.read(0, file.size)
    if crc32 is not None and crc32 != zlib.crc32(data):
        raise CorruptFileError("its checksum is not the one in the manifest", path=path)
    try:
        data = unsealed(data)
        with collector_paused():
            metadata = _Unpickler(data).load()
            _check(metadata, path)
    except LoadError:
        raise
    except _Forbidden as error:
        raise UnsupportedFormatError(
            f"is not to be unpickled: it names {error}, which is no part of torch.distributed.checkpoint's metadata. "
            "torch's FileSystemReader reads it, and runs code from it: only if you trust its origin",
            path=path,
        ) from error
    except Exception as error:
        why = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise CorruptFileError(f"damaged: {why}", path=path) from error
    return metadata


class Stamps:
    """Tells whether the files of a folder are of the save that wrote its ``.metadata``.

    If a folder is copied over an older one of the same step, and the copy is broken off, then every item is intact."""

    def __init__(self, metadata: FileReader) -> None:
        self._wanted = stamp_before(metadata, metadata.size - SEAL_BYTES)
        self._alike: set[str | os.PathLike[str]] = set()

    def check(self, file: FileReader) -> None:
        """Raises CorruptFileError for a file of another save, LoadError if it cannot be read."""
        if self._wanted is None or file.path in self._alike:
            return
        found = stamp_before(file, file.size)
        if found is None:
            raise file.corrupt("does not end with the stamp of its save: it is damaged, or of another program")
        if found != self._wanted:
            raise file.corrupt(f"is of another save than {METADATA}")
        self._alike.add(file.path)


def _check(metadata: Any, path: str | os.PathLike[str]) -> None:
    """Raises LoadError unless this is the metadata of a folder that DCP may have written."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    if type(metadata) is not Metadata or type(getattr(metadata, "state_dict_metadata", None)) is not dict:
        raise CorruptFileError("holds no metadata of torch.distributed.checkpoint", path=path)
    items = getattr(metadata, "storage_data", None)
    if type(items) is not dict:
        raise UnsupportedFormatError("its items are not in files of plain torch.distributed.checkpoint", path=path)
    names: dict[Place, str] = {}
    places: dict[str, dict[tuple[int, ...] | None, Place]] = {}
    forms: dict[Place, Any] = {}
    for index, info in items.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise UnsupportedFormatError("its items are not in files of plain torch.distributed.checkpoint", path=path)
        facts = vars(info)
        name, offset, nbytes = map(facts.get, ("relative_path", "offset", "length"))
        if type(name) is not str or not _is_in_folder(name) or type(offset) is not int or type(nbytes) is not int:
            raise CorruptFileError(f"item {index.fqn}: {nbytes} bytes at offset {offset} of file {name!r}", path=path)
        if facts.get("transform_descriptors"):
            what = f"item {index.fqn} went through an extension ({facts['transform_descriptors']})"
            raise UnsupportedFormatError(f"{what}; torch's FileSystemReader reads it", path=path)
        names[name, offset, nbytes] = index.fqn
        where = None if index.offset is None else tuple(index.offset)
        places.setdefault(index.fqn, {})[where] = name, offset, nbytes
    check_places(names)
    for name, described in metadata.state_dict_metadata.items():
        found = places.get(name, {})
        try:
            if type(described) is not BytesStorageMetadata:
                check_tensor(described, found, forms)
            elif None not in found:
                raise ValueError("it is in no file")
        except (ValueError, TypeError) as error:
            raise CorruptFileError(f"{name}: {error}", path=path) from error


def _is_in_folder(name: str) -> bool:
    return name == Path(name).name and name not in ("", ".", "..") and "\0" not in name


class _Forbidden(Exception):
    """The pickle names another class or function."""


class _Unpickler(BoundedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        try:
            return _allowed()[module, name]
        except KeyError:
            raise _Forbidden(f"{module}.{name}") from None


class _Frozen(type):
    """A class that a pickle cannot change: BUILD would set attributes of the class itself."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"sets {name} of a class")


def _stand_in(of: type) -> type:
    """A class whose instances are empty ones of another class."""

    def new(_: type) -> Any:
        return object.__new__(of)

    return _Frozen(of.__name__, (), {"__slots__": (), "__new__": new})


class _Call:
    """A function that a pickle can call and not change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"sets {name} of a function")


@cache
def _allowed() -> dict[tuple[str, str], Any]:
    from torch.distributed._shard.sharded_tensor import metadata as sharded
    from torch.distributed.checkpoint import filesystem, metadata

    dataclasses = [
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        sharded.TensorProperties,  # in checkpoints of older versions of torch
        metadata.StorageMeta,
        filesystem._StorageInfo,
    ]
    calls: dict[tuple[str, str], Callable[..., Any]] = {
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
        (sharded.__name__, "MEM_FORMAT_ENCODING"): sharded.MEM_FORMAT_ENCODING,
        ("torch.serialization", "_get_layout"): _layout,
    }
    # Python 3.13 keeps them in pathlib._local.
    for module in ("pathlib", "pathlib._local"):
        calls |= {(module, kind): pathlib.PurePosixPath for kind in ("PosixPath", "PurePosixPath")}
        calls |= {(module, kind): pathlib.PureWindowsPath for kind in ("WindowsPath", "PureWindowsPath")}
    allowed: dict[tuple[str, str], Any] = {(kind.__module__, kind.__name__): _stand_in(kind) for kind in dataclasses}
    allowed |= {what: _Call(function) for what, function in calls.items()}
    # Classes in C, whose attributes cannot be set.
    allowed |= {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): collections.OrderedDict}
    return allowed


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return found
