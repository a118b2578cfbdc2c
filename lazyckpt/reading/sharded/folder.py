"""A folder that many ranks wrote: its ``.metadata``, and the places of its items."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError, UnsupportedFormatError
from lazyckpt.formats.distcp import Place, open_item
from lazyckpt.formats.reader import FileReader
from lazyckpt.providers.global_state import unflatten
from lazyckpt.reading.archive import Archive
from lazyckpt.reading.ranges import process_engine
from lazyckpt.reading.sharded.metadata import METADATA, Stamps, read_metadata
from lazyckpt.reading.sharded.slices import Slice, read_slices, slice_of
from lazyckpt.storage.manifest import crc_of
from lazyckpt.stores.calls import each
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.stores.urls import located

_OPENED_AT_ONCE = 16  # objects of a store
_MAX_STEPS = 100  # of a path in the state: walks recurse once for each


@dataclass(frozen=True)
class Entry:
    """A tensor or another object of the saved state."""

    path: tuple[str | int, ...]  # in the state
    described: Any  # TensorStorageMetadata, or BytesStorageMetadata
    items: dict[tuple[int, ...] | None, tuple[str, Place]] = field(default_factory=dict)
    """File and place of each item, by the offsets of the part that it holds; None for an object."""

    @property
    def is_tensor(self) -> bool:
        return hasattr(self.described, "chunks")

    @property
    def sameness(self) -> Any:
        """Equal for two tensors that are one, under several names: all their bytes lie in the same items."""
        return self.described.size, frozenset(self.items.items())


class Target(NamedTuple):
    """The destination of a part of a tensor."""

    name: str
    offsets: tuple[int, ...]  # of the part in the whole tensor
    local: torch.Tensor  # of the part's shape


class ShardedFolder:
    """The ``.metadata`` of a folder of torch.distributed.checkpoint, ours or another's."""

    def __init__(self, file: FileReader, crc32: int | None) -> None:
        """``file``: the ``.metadata``. ``crc32``: of that file, as the manifest says, if there is one. Raises
        LoadError."""
        self.path = located(file.path).parent
        metadata = read_metadata(file, crc32)
        self.stamps = Stamps(file)
        self._objects: dict[str, FileReader] = {}  # of a store, by name
        self._last: FileReader | None = None  # the only one of them that keeps bytes in memory
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        self.entries = {
            name: Entry(self._path_in_state(paths.get(name, (name,)), name), described)
            for name, described in metadata.state_dict_metadata.items()
        }
        for index, info in metadata.storage_data.items():
            offsets = None if index.offset is None else tuple(index.offset)
            if (entry := self.entries.get(index.fqn)) is not None:
                entry.items[offsets] = info.relative_path, Place(info.offset, info.length)

    def tree(
        self, own: Mapping[Any, int], read_object: Callable[[str], Any]
    ) -> tuple[dict[str, Any], dict[int, tuple[str, torch.Tensor]]]:
        """Returns the saved state, its tensors on the meta device, and these with their names by ``id``.

        ``own``: the rank whose state is taken, by the names of parts that every rank has of its own. Such parts that it
        does not name are a dict by rank."""
        leaves: dict[tuple[str | int, ...], Any] = {}
        names: dict[int, tuple[str, torch.Tensor]] = {}  # the tensors, so that no id comes back
        of_ranks: dict[Any, Any] = {}
        for name, entry in self.entries.items():
            if entry.path[0] in own:
                if entry.path[1:] == (str(own[entry.path[0]]),):
                    of_ranks[entry.path[0]] = read_object(name)
            elif not entry.is_tensor:
                leaves[entry.path] = read_object(name)
            else:
                size, dtype = entry.described.size, entry.described.properties.dtype
                leaves[entry.path] = tensor = torch.empty(size, dtype=dtype, device="meta")
                names[id(tensor)] = name, tensor
        try:
            return unflatten(leaves) | of_ranks, names
        except ValueError as error:
            raise CorruptFileError(f"{METADATA}: {error}", path=self.path) from error

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[FileReader]:
        """Opens a file of the folder. Raises CorruptFileError if it is of another save, LoadError if it cannot be
        read."""
        if not isinstance(self.path, StorePath):
            with FileReader(self.path / name) as file:
                self.stamps.check(file)
                yield file
            return
        kept = self._object(name)
        if self._last is not None and self._last is not kept:
            self._last.forget()
        self._last = kept
        yield kept

    def _object(self, name: str) -> FileReader:
        """An object that stays open: to open it again would take several requests."""
        if (kept := self._objects.get(name)) is None:
            kept = FileReader(self.path / name)
            self.stamps.check(kept)
            kept.forget()
            self._objects[name] = kept
        return kept

    def read(self, targets: Iterable[Target], engine: _engine.Engine) -> None:
        """Reads parts of tensors into place, each file in parallel, and checks every byte. Raises
        CorruptFileError, which names file and tensor, and LoadError."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        by_file: dict[str, list[Slice]] = {}
        for name, offsets, local in targets:
            entry = self.entries[name]
            wanted = ChunkStorageMetadata(torch.Size(offsets), local.shape)
            for item in create_read_items_for_chunk_list(name, entry.described, [wanted]):
                target = slice_of(local.detach(), item.dest_offsets, item.lengths)
                file_name, place = entry.items[tuple(item.storage_index.offset or ())]
                by_file.setdefault(file_name, []).append(Slice(name, place, tuple(item.storage_offsets), target))
        # Finds a file of another save before any byte lands.
        if isinstance(self.path, StorePath):
            each(self._object, by_file, _OPENED_AT_ONCE)
        else:
            for name in by_file:
                with self.open(name):
                    pass
        for name, parts in by_file.items():
            with self.open(name) as file:
                read_slices(file, parts, engine)

    def read_object(self, name: str, *, weights_only: bool = True) -> Any:
        """Returns an object, verified. Raises LoadError; UnsupportedFormatError for a type that is not allowed."""
        file_name, place = self.entries[name].items[None]
        with self.open(file_name) as file:
            try:
                return Archive(open_item(file, place), "cpu", weights_only, engine=process_engine()).tree
            except (CorruptFileError, UnsupportedFormatError) as error:
                raise type(error)(f"{name}: {error.what}", path=error.path) from error

    def _path_in_state(self, path: Any, name: str) -> tuple[str | int, ...]:
        if isinstance(path, tuple | list) and 0 < len(path) <= _MAX_STEPS and {*map(type, path)} <= {str, int}:
            return tuple(path)
        raise CorruptFileError(f"{name}: its path in the state is none", path=self.path / METADATA)


def open_folder(path: AnyPath) -> ShardedFolder:
    """The folder ``path``, with its manifest if it has one. Raises LoadError."""
    with FileReader(path / METADATA) as file:
        return ShardedFolder(file, crc_of(path, METADATA))
