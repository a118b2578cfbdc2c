"""Describes a folder of torch.distributed.checkpoint, ours or another's, without reading a tensor or running its code.

The result consists of the same objects as ``read_inert`` returns for a single file, so code that shows, compares or
converts files takes folders, too. A tensor is one whole, although the ranks held parts of it.
"""

from __future__ import annotations

from typing import Any

import torch

from lazyckpt.conversion.inert import (
    InertObject,
    InertPart,
    InertShards,
    InertStorage,
    InertTensor,
    read_inert,
    strides_of,
)
from lazyckpt.errors import CorruptFileError, UnsupportedFormatError
from lazyckpt.formats.distcp import Place, is_archive, item_directory
from lazyckpt.formats.dtypes import Dtype
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.torch_zip_reader import Directory
from lazyckpt.providers.global_state import unflatten
from lazyckpt.reading.sharded.folder import Entry, ShardedFolder
from lazyckpt.reading.sharded.metadata import METADATA
from lazyckpt.stores.store import AnyPath


class Bytes(InertObject):
    """An object that is in the folder as it is, and not as an archive of ``torch.save``."""

    global_name = "bytes"


def read_inert_folder(folder: ShardedFolder) -> dict[str, Any]:
    """Returns the saved state. Raises LoadError, if an object in it cannot be described, too."""
    leaves: dict[tuple[str | int, ...], Any] = {}
    storages: dict[Any, InertStorage] = {}  # of tensors that are one, one
    objects: dict[tuple[str, Place], Any] = {}
    path = folder.path
    for name, entry in folder.entries.items():
        if entry.is_tensor:
            leaves[entry.path] = _tensor(path, name, entry, storages)
            continue
        where = entry.items[None]
        if where not in objects:
            objects[where] = _object(path / where[0], where[1], name)
        leaves[entry.path] = objects[where]
    try:
        return unflatten(leaves)
    except ValueError as error:
        raise CorruptFileError(str(error), path=folder.path / METADATA) from error


def records_at(file: FileReader, place: Place, name: str) -> Directory:
    """The records of an item, under names that are unique in the folder; those of the directory stay. An item that is
    no archive is one record without a checksum. Raises CorruptFileError, which names the item."""
    if not is_archive(file, place):
        return Directory({name: Record(name, place.offset, place.nbytes, None)}, "")
    try:
        found = item_directory(file, place)
    except CorruptFileError as error:
        raise CorruptFileError(f"{name}: {error.what}", path=error.path) from error
    records = {key: record._replace(name=f"{name}/{key}") for key, record in found.records.items()}
    return Directory(records, found.archive_name)


def _tensor(folder: AnyPath, name: str, entry: Entry, storages: dict[Any, InertStorage]) -> InertTensor:
    described = entry.described
    shape, dtype = tuple(described.size), described.properties.dtype
    if described.properties.layout is not torch.strided:
        what = f"{name} is a tensor of {described.properties.layout}; lazyckpt.load reads the others with a key"
        raise UnsupportedFormatError(what, path=folder / METADATA)
    parts = {
        offsets: InertPart(folder / entry.items[offsets][0], entry.items[offsets][1], offsets, tuple(chunk.sizes))
        for chunk in described.chunks
        if (offsets := tuple(chunk.offsets)) in entry.items and 0 not in chunk.sizes
    }
    told = Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)
    if (storage := storages.get(entry.sameness)) is None:
        record = Record(name, 0, described.size.numel() * dtype.itemsize, None)
        storage = InertStorage(record, told, folder / METADATA, InertShards(shape, tuple(parts.values())))
        storages[entry.sameness] = storage
    return InertTensor(told.name, shape, 0, strides_of(shape), storage)


def _object(file: AnyPath, place: Place, name: str) -> Any:
    with FileReader(file) as reader:
        directory = records_at(reader, place, name)
    return read_inert(file, directory) if "data.pkl" in directory.records else Bytes()
