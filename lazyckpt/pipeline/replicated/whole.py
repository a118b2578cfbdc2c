"""The plan of a whole file that several ranks write: what ``SharePlan`` cuts."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from lazyckpt.errors import ConfigError
from lazyckpt.formats import safetensors, torch_zip
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.plan import ARCHIVE_NAME, ArchiveCache, FilePlan, SafetensorsPlan, StatePlan, ZipPlan
from lazyckpt.pipeline.replicated.share import Form, Laid, SafetensorsForm, ZipForm, laid_out
from lazyckpt.providers.base import StorageTable, TensorViews
from lazyckpt.providers.global_state import is_own
from lazyckpt.providers.naming import name_in, names_in
from lazyckpt.providers.pickles import Skeleton, dict_opcodes, pickle_of


class Rest(NamedTuple):
    """The parts of a file that the program of its storages does not write."""

    before: list[Extent]
    sums: Extent  # with the checksums of all storages
    behind: list[Extent]


class WholeFile(FilePlan):
    """A file that one rank would write, as each of several ranks has it."""

    @abstractmethod
    def ordered(self, views: TensorViews, owned: Sequence[bool]) -> tuple[list[int], Laid]:
        """The places of the gathered storages in the order of the file. ``owned``: of each, whether it has an owner."""

    @abstractmethod
    def form(self, laid: Laid) -> Form: ...

    @abstractmethod
    def rest(self, form: Form) -> Rest:
        """Rank 0's; of the state that was gathered last."""

    @abstractmethod
    def names_of(self, views: TensorViews) -> list[str]:
        """The names of tensors that lie in these views."""


class _WholeArchive(ZipPlan, WholeFile):
    """An archive. Storages that are not the same on all ranks are rank 0's."""

    def ordered(self, views: TensorViews, owned: Sequence[bool]) -> tuple[list[int], Laid]:
        return laid_out(views.keys, views.sizes, list(owned), self._own(views))

    @abstractmethod
    def _own(self, views: TensorViews) -> Container[int]:
        """The places of the gathered storages that are not the same on all ranks."""

    def form(self, laid: Laid) -> Form:
        return ZipForm(ARCHIVE_NAME, laid)

    def rest(self, form: Form) -> Rest:
        assert isinstance(form, ZipForm)
        *before, sums, behind = form.layout.finish(torch_zip.small_records(pickle_of(self._opcodes)))
        return Rest(before, sums, [behind])


class WholeState(StatePlan, _WholeArchive):
    """The tracked state of a Checkpointer on every rank."""

    def _own(self, views: TensorViews) -> Container[int]:
        return {at for name, part in self._state.parts.items() if is_own(part) for at in self._state.added[name]}

    def names_of(self, views: TensorViews) -> list[str]:
        return self._state.names_of(views.identities)


class ObjectCache(ArchiveCache):
    """What successive archives of a dict share."""

    def __init__(self) -> None:
        super().__init__()
        self.skeletons: dict[str, Skeleton] = {}  # of the values
        self.fresh_keys = self.keys = _Keys()


class _Keys(Iterator[str]):
    """Numbers for the storages that all ranks have, so that these have one key on all of them."""

    def __init__(self) -> None:
        self._everyones, self._own = itertools.count(), itertools.count()
        self.own = False  # the next key is for a storage that other ranks may lack

    def __next__(self) -> str:
        return f"own-{next(self._own)}" if self.own else str(next(self._everyones))


class WholeObject(_WholeArchive):
    """An object that all ranks hold; or a dict of which they hold some values, and rank 0 the others, too. ``prefix``
    begins the names of its tensors in messages."""

    def __init__(self, obj: Any, everyones: Container[str] | None, cache: ObjectCache, prefix: str = "") -> None:
        """``everyones``: the names of the values that all ranks hold; None: all of the object."""
        super().__init__(cache)
        self._obj = obj
        self._everyones = everyones
        self._objects = cache
        self._prefix = prefix
        self._common = 0  # storages that all ranks have

    def _pickle(self, table: StorageTable) -> bytes:
        everyones = self._everyones
        if everyones is None:
            opcodes_of_all = self._objects.skeleton.opcodes(self._obj, table)
            self._common = len(table.views)
            return opcodes_of_all
        names = sorted(self._obj, key=lambda name: name not in everyones)
        common = sum(name in everyones for name in names)
        opcodes: dict[str, bytes] = {}
        for at, name in enumerate(names):
            if at == common:
                self._common = len(table.views)
            self._objects.keys.own = at >= common
            skeleton = self._objects.skeletons.setdefault(name, Skeleton())
            opcodes[name] = skeleton.opcodes(self._obj[name], table)
        if len(names) == common:
            self._common = len(table.views)
        return dict_opcodes({name: opcodes[name] for name in self._obj})

    def _own(self, views: TensorViews) -> Container[int]:
        return range(self._common, len(views))

    def name_of(self, storage: Any) -> str | None:
        return name_in(self._obj, self._prefix, storage)

    def names_of(self, views: TensorViews) -> list[str]:
        return names_in({self._prefix: self._obj}, views.identities)


class WholeTensors(SafetensorsPlan, WholeFile):
    """A safetensors file of tensors that all ranks hold."""

    def gather(self) -> TensorViews:
        views = super().gather()
        self._columns = views.with_storages([])
        self.choice = tuple(self._shapes), tuple(views.dtypes), tuple((self._metadata or {}).items())
        return views

    def ordered(self, views: TensorViews, owned: Sequence[bool]) -> tuple[list[int], Laid]:
        first = 0 if any(owned) else len(views)
        header_bytes = self._layout().header_bytes
        return list(range(len(views))), Laid(views.keys, views.sizes, bytes(owned), first, header_bytes)

    def _layout(self) -> safetensors.Layout:
        try:
            return self._cache.layout(self._columns, self._shapes, self._metadata)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def form(self, laid: Laid) -> Form:
        return SafetensorsForm(self._layout(), laid)

    def rest(self, form: Form) -> Rest:
        return Rest([], self._layout().header, [])

    def names_of(self, views: TensorViews) -> list[str]:
        return [f"{self._prefix}.{key}".removeprefix(".") for key in views.keys]
