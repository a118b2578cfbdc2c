"""The plan of one file of one save: state → storages (providers/), storages → layout (formats/)."""

from __future__ import annotations

import ctypes
import itertools
from abc import ABC, abstractmethod
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lazyckpt import devices
from lazyckpt.errors import ConfigError
from lazyckpt.formats import program, torch_zip
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.safetensors_cache import SafetensorsCache
from lazyckpt.providers.base import Parts, StorageTable, TensorView, TensorViews
from lazyckpt.providers.casting import check_dtype, converted
from lazyckpt.providers.composite import CompositeProvider, UnpicklableError
from lazyckpt.providers.naming import name_in
from lazyckpt.providers.pickles import Skeleton, pickle_of
from lazyckpt.providers.ranges import bytes_spanned, overlaps, to_host
from lazyckpt.providers.restorable import UnrestorableError
from lazyckpt.providers.sharded import refuse_part

ARCHIVE_NAME = "archive"  # the folder inside the zip, as torch.save names it for a buffer


class FilePlan(ABC):
    """One file of one save. Holds the state until the save is copied."""

    any_order: bool  # whether the storages may be laid out in another order than gather() gives
    is_written = True  # False: it is copied for its checksums only
    choice: Hashable = None  # what order() depends on besides its arguments

    @abstractmethod
    def gather(self) -> TensorViews:
        """Returns the storages of the state, and keeps a pickle of everything else in it, as it is now.

        Raises pickle's errors, and ConfigError for state that the format cannot hold.
        """

    def order(self, views: TensorViews, owned: Container[int]) -> list[int] | Parts | None:
        """The places of the gathered storages, or of the parts that this process writes, in the order of the file, None
        if that is as they were gathered; ``owned`` are the identities of those that have an owner."""
        if not self.any_order:
            return None
        return torch_zip.file_order(views.sizes, list(map(owned.__contains__, views.identities)))

    @abstractmethod
    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        """The program that writes the views, source i being view i, and its size in bytes."""

    def ranges(self) -> Sequence[tuple[int, int]]:
        """Begin and end of what this process writes of a file that others write, too; of the program laid out last.
        Empty: it writes all."""
        return ()

    def again(self) -> FilePlan | None:
        """The plan of the same file with the present state; None if the state must not be collected twice in one
        save."""
        return self

    @abstractmethod
    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        """The path to a tensor of the state that views ``storage``; for messages."""

    def name_of_view(self, view: TensorView) -> str | None:
        """The same, of one that lies in ``view`` if that is a part of a storage."""
        return self.name_of(view.storage)


class NoPlan(FilePlan):
    """A file that cannot be saved, and why: the save fails like one whose state cannot be gathered."""

    any_order = True

    def __init__(self, why: Exception) -> None:
        self._why = why

    def gather(self) -> TensorViews:
        raise self._why

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        raise self._why

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return None


class ArchiveCache:
    """Facts that successive archives of one state share: pickle, storage keys and layout. Holds no tensor."""

    def __init__(self) -> None:
        self.skeleton = Skeleton()  # of an object; the providers of a tracked state have their own
        self.fresh_keys: Iterator[str] = map(str, itertools.count())
        self.added: list[TensorViews] = []  # see StorageTable
        self.safetensors = SafetensorsCache()  # of files in that format, which have no pickle
        self._layout: tuple[tuple[list[str], Sequence[int]], torch_zip.Layout] | None = None

    def layout(self, views: TensorViews) -> torch_zip.Layout:
        facts = views.keys, views.sizes
        if self._layout is None or self._layout[0] != facts:
            self._layout = facts, torch_zip.Layout(ARCHIVE_NAME, *facts)
        return self._layout[1]


class ZipPlan(FilePlan):
    """The archive that ``torch.save`` would write."""

    any_order = True
    _compact = False

    def __init__(self, cache: ArchiveCache) -> None:
        self._cache = cache
        self._opcodes = b""

    def gather(self) -> TensorViews:
        table = StorageTable(self._cache.fresh_keys, self._cache.added, compact=self._compact)
        self._opcodes = self._pickle(table)
        self._cache.added = table.added
        return table.views

    @abstractmethod
    def _pickle(self, table: StorageTable) -> bytes:
        """Pickle opcodes of the state, whose storages are added to ``table``."""

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        layout = self._cache.layout(views)
        tail = layout.finish(torch_zip.small_records(pickle_of(self._opcodes)))
        return [*layout.head, *tail], tail[-1].end


class StatePlan(ZipPlan):
    """The tracked state of a Checkpointer."""

    def __init__(self, state: CompositeProvider, cache: ArchiveCache) -> None:
        super().__init__(cache)
        self._state = state

    def _pickle(self, table: StorageTable) -> bytes:
        return self._state.opcodes(table)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return self._state.name_of(storage)


class ObjectPlan(ZipPlan):
    """Any object. ``prefix`` begins the names of its tensors in messages. ``compact``: of a storage, the archive holds
    only the bytes that its tensors show."""

    def __init__(self, obj: Any, cache: ArchiveCache, prefix: str = "", *, compact: bool = False) -> None:
        super().__init__(cache)
        self._obj = obj
        self._prefix = prefix
        self._compact = compact

    def _pickle(self, table: StorageTable) -> bytes:
        return self._cache.skeleton.opcodes(self._obj, table)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return name_in(self._obj, self._prefix, storage)

    def name_of_view(self, view: TensorView) -> str | None:
        within = range(view.offset, view.offset + view.nbytes) if self._compact else None
        return name_in(self._obj, self._prefix, view.storage, within)


def archive_of(obj: Any, cache: ArchiveCache) -> bytes:
    """The archive of a small object, as it is now, in memory. Raises the errors of ``FilePlan.gather``."""
    plan = ObjectPlan(obj, cache)
    views = plan.gather()
    extents, _ = plan.lay_out(views)
    held = map(devices.on_host, views.storages)
    return program.run(extents, [ctypes.string_at(storage.data_ptr(), storage.nbytes()) for storage in held])


class SafetensorsPlan(FilePlan):
    """A dict of tensors."""

    any_order = False

    def __init__(
        self,
        tensors: Any,
        metadata: Mapping[str, str] | None = None,
        prefix: str = "",
        cache: SafetensorsCache | None = None,
    ) -> None:
        self._tensors = tensors
        self._metadata = metadata
        self._prefix = prefix
        self._cache = cache or SafetensorsCache()
        self._shapes: list[tuple[int, ...]] = []

    def gather(self) -> TensorViews:
        tensors = self._tensors
        if (kept := self._cache.again(tensors)) is not None:
            self._shapes = self._cache.shapes
            return kept
        named = isinstance(tensors, dict) and all(
            isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in tensors.items()
        )
        if not named:
            raise ConfigError("a .safetensors file takes a dict of names to tensors")
        views = TensorViews()
        shapes: list[tuple[int, ...]] = []
        # Sorted as the format's own library does, so that every tensor is aligned to its dtype.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            refuse_part(tensor, tensors)
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise ConfigError(f"{name!r} is not a dense tensor with data")
            held = tensor.untyped_storage().nbytes()
            needed = tensor.storage_offset() * tensor.itemsize + bytes_spanned(tensor) if tensor.numel() else 0
            if needed > held:
                raise ConfigError(
                    f"{name!r} needs {needed} bytes, but its storage has {held}: it was resized, or sharded training "
                    "has freed it; give it its memory back before the save"
                )
            # Elements that are not contiguous are written from a copy in host memory.
            dense = tensor.detach()
            if not dense.is_contiguous() or dense.is_conj():
                dense = to_host(dense)
            dense = dense.resolve_conj().resolve_neg().contiguous()
            begin = dense.storage_offset() * dense.itemsize
            views.append(TensorView(name, dense.untyped_storage(), dense.nbytes, dense.dtype, begin))
            views.tensors.append(tensor)
            shapes.append(tuple(dense.shape))
        for name, other in overlaps(dict(zip(views.keys, views.tensors, strict=True))).items():
            raise ConfigError(
                f"{other!r} and {name!r} share memory, which safetensors cannot express; clone one of them, or use a "
                "name that does not end in .safetensors"
            )
        self._cache.keep(tensors, views, shapes)
        self._shapes = shapes
        return views

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        try:
            layout = self._cache.layout(views, self._shapes, self._metadata)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return [layout.data, layout.header], layout.header_bytes + sum(views.sizes)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return name_in(self._tensors, self._prefix, storage)

    def name_of_view(self, view: TensorView) -> str | None:
        return name_in(self._tensors, self._prefix, view.storage, range(view.offset, view.offset + view.nbytes))


class CastPlan(FilePlan):
    """A dict of tensors in another dtype."""

    def __init__(self, name: str, state: Any, dtype: torch.dtype) -> None:
        """Raises ConfigError for a state that is no dict, and for a dtype that is not floating."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"dtype is for a state dict, not for a {type(state).__name__}")
        check_dtype(dtype)
        self._plan_of = partial(plan_for, name)
        self._state = state
        self._dtype = dtype
        self.any_order = self._plan_of({}).any_order

    def gather(self) -> TensorViews:
        self._plan = self._plan_of(converted(self._state, self._dtype))
        views = self._plan.gather()
        views.tensors = [value for value in self._state.values() if isinstance(value, torch.Tensor)]
        return views

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        return self._plan.lay_out(views)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        return name_in(self._state, "", storage)


def plan_for(
    name: str,
    obj: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    cache: ArchiveCache | None = None,
    prefix: str = "",
    compact: bool = False,
) -> FilePlan:
    """The plan of a file ``name`` that holds ``obj``. ``cache`` speeds up the next archive of a similar object.
    ``compact``: see ``ObjectPlan``; a .safetensors file always is."""
    if name.endswith(".safetensors"):
        return SafetensorsPlan(obj, metadata, prefix, cache.safetensors if cache else None)
    return ObjectPlan(obj, cache or ArchiveCache(), prefix, compact=compact)


def unsavable(error: Exception) -> str:
    """Says why a plan could not gather or lay out."""
    if isinstance(error, UnpicklableError | UnrestorableError | ConfigError):
        return str(error)
    return f"cannot be pickled: {type(error).__name__}: {error}"
