"""Lists the contents of each rank's file, and builds the ``.metadata`` of a DCP folder from these lists.

Each rank lists the items of its ``.distcp`` file in an *inventory*. From the inventories of all ranks rank 0 makes the
``.metadata`` that torch.distributed.checkpoint reads: classes of torch only.
"""

from __future__ import annotations

import json
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_SEAL = b"lazyckpt crc32 "
SEAL_BYTES = len(_SEAL) + 8
_VERSION = "1.0.0"  # of the folder, as torch's FileSystemWriter notes it

Path = tuple[str | int, ...]


class Shard(NamedTuple):
    """The shard of a tensor that an item holds."""

    dtype: str  # without "torch."
    size: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the shard's first element
    sizes: tuple[int, ...]  # of the shard

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.size

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class Item(NamedTuple):
    """An item of a ``.distcp`` file."""

    path: Path  # in the state; the name is its words, joined by dots
    shard: Shard | None  # None: any other object
    offset: int  # in the file
    nbytes: int

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


Inventory = Mapping[str, Sequence[Item]]  # the items of each file, by name


def encode(inventory: Inventory) -> bytes:
    return zlib.compress(json.dumps(inventory, separators=(",", ":")).encode(), 1)


def decode(data: bytes) -> dict[str, list[Item]]:
    """Undoes ``encode``. For messages between the ranks of one job, which trust each other."""
    return {
        file: [
            Item(tuple(path), None if shard is None else Shard(shard[0], *map(tuple, shard[1:])), offset, nbytes)
            for path, shard, offset, nbytes in items
        ]
        for file, items in json.loads(zlib.decompress(data)).items()
    }


class _Entry:
    """An entry of the state, and the items of all ranks that hold shards of it."""

    def __init__(self, file: str, item: Item) -> None:
        self.file = file  # the first that has some of it
        self.path = item.path
        self.shard = item.shard
        self.items: dict[tuple[int, ...] | None, tuple[str, Item]] = {}  # by offsets of the shard

    def add(self, file: str, item: Item) -> None:
        """Raises ValueError if the item is of another entry than the first."""
        if item.path != self.path or kind_of(item.shard) != kind_of(self.shard):
            where = item.path != self.path
            here, there = (
                kind_of(shard) + f" at {path}" * where
                for shard, path in ((self.shard, self.path), (item.shard, item.path))
            )
            raise ValueError(f"{item.name} is {here} in {self.file}, but {there} in {file}")
        self.items.setdefault(None if item.shard is None else item.shard.offsets, (file, item))

    def check(self) -> None:
        """Raises ValueError if the shards are not the whole."""
        shards = [item.shard for _, item in self.items.values() if item.shard is not None]
        if self.shard is not None and sum(shard.numel for shard in shards) != math.prod(self.shard.size):
            held = ", ".join(
                f"{item.shard.sizes} at {item.shard.offsets} in {file}"
                for file, item in self.items.values()
                if item.shard
            )
            raise ValueError(f"{'.'.join(map(str, self.path))}, {kind_of(self.shard)}: the ranks hold {held}")


def _refuse_nested(entries: Mapping[str, _Entry]) -> None:
    """Raises ValueError if one rank saves an entry as an object and another rank saves entries inside it."""
    by_path = {entry.path: entry for entry in entries.values()}
    for name, entry in entries.items():
        for end in range(1, len(entry.path)):
            if (outer := by_path.get(entry.path[:end])) is not None:
                what = ".".join(map(str, outer.path))
                raise ValueError(f"{what} is {kind_of(outer.shard)} in {outer.file}, but holds {name} in {entry.file}")


def kind_of(shard: Shard | None) -> str:
    """Describes the properties of an entry that must be the same on all ranks that have it."""
    return "an object" if shard is None else f"a {shard.dtype} tensor of {shard.size}"


def sealed(metadata: bytes) -> bytes:
    """The contents of ``.metadata``: a pickle, and perhaps a stamp, with a CRC-32 behind. Unpicklers do not look behind
    the pickle's end."""
    return metadata + _SEAL + b"%08x" % zlib.crc32(metadata)


def unsealed(data: bytes) -> bytes:
    """Undoes ``sealed``, and compares the CRC-32, if there is one: plain DCP writes none. Raises ValueError."""
    if not data[:-8].endswith(_SEAL):
        return data
    metadata = data[:-SEAL_BYTES]
    if data != sealed(metadata):
        raise ValueError("does not match its checksum")
    return metadata


def metadata_of(files: Inventory) -> bytes:
    """The pickle in ``.metadata`` of a folder with these files, in the order of the ranks. Of equal items the first
    counts.

    Raises ValueError, which names the entry and the files, if the ranks' inventories contradict each other."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, _Entry] = {}
    for file, items in files.items():
        for item in items:
            name = item.name
            if (entry := entries.get(name)) is None:
                entry = entries[name] = _Entry(file, item)
            entry.add(file, item)
    _refuse_nested(entries)
    described: dict[str, Any] = {}
    where: dict[Any, Any] = {}
    for name, entry in entries.items():
        entry.check()
        if entry.shard is None:
            described[name] = dcp.BytesStorageMetadata()
        else:
            described[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(getattr(torch, entry.shard.dtype)),
                torch.Size(entry.shard.size),
                [
                    dcp.ChunkStorageMetadata(torch.Size(item.shard.offsets), torch.Size(item.shard.sizes))
                    for _, item in entry.items.values()
                    if item.shard is not None
                ],
            )
        for number, (offsets, (file, item)) in enumerate(entry.items.items()):
            index = dcp.MetadataIndex(name, offsets, None if offsets is None else number)
            where[index] = _StorageInfo(file, item.offset, item.nbytes)
    metadata = dcp.Metadata(described, {name: entry.path for name, entry in entries.items()}, where, dcp.StorageMeta())
    if hasattr(metadata, "version"):  # since torch 2.9
        metadata.version = _VERSION
    return pickle.dumps(metadata)
