"""The plan of one ``.distcp`` file: the tensors that one rank holds of a sharded state, and ready-made items."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.errors import ConfigError
from lazyckpt.formats import distcp
from lazyckpt.formats.distcp import Place
from lazyckpt.formats.program import Extent
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.providers.base import TensorView, TensorViews
from lazyckpt.providers.plain_tensors import tensor_pickle
from lazyckpt.providers.ranges import in_front

Item = tuple[str, torch.Tensor | bytes]  # a unique name, for messages too; bytes are written as they are


_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
Looked = tuple[bytes, dict[int, torch.UntypedStorage]] | None  # see _engine.look_at_tensors


class ShardCache:
    """Facts that successive files of one rank share: the layout, and the results of ``gather`` if the tensors are the
    same. Holds no tensor."""

    def __init__(self) -> None:
        self.facts: Any = None  # names, and all that is asked of the tensors
        self.kept = TensorViews()  # without the storages
        self.pickles: dict[str, bytes] = {}
        self._layout: tuple[list[tuple[int, bytes]], distcp.Layout] | None = None
        self._columns: Any = None  # of the last program: these very objects, which nothing changes
        self._places: dict[str, Place] = {}  # in that program, by name

    def layout(self, tensors: list[tuple[int, bytes]]) -> distcp.Layout:
        if self._layout is None or self._layout[0] != tensors:
            self._layout = tensors, distcp.Layout(tensors)
        return self._layout[1]

    def laid_out(self, views: TensorViews, pickles: dict[str, bytes]) -> tuple[distcp.Layout, dict[str, Place]]:
        """The layout of these tensors, and their places by name."""
        columns = views.keys, views.sizes, pickles
        if self._columns is None or not all(map(is_, columns, self._columns)):
            sized = zip(views.keys, views.sizes, strict=True)
            layout = self.layout([(nbytes, pickles[key]) for key, nbytes in sized])
            self._places, self._columns = dict(zip(views.keys, layout.places, strict=True)), columns
        assert self._layout is not None
        return self._layout[1], self._places


class ShardPlan(FilePlan):
    """One ``.distcp`` file. Of each tensor, it holds the visible elements: a shard, not the storage below it.

    ``places`` says where each item lies in the file, by name; it is complete when ``lay_out`` has returned, and stands
    before any byte is copied. The places of tensors depend on their names, sizes and dtypes, and on whether an
    optimizer owns them; ready-made items follow behind. Tensors that are one memory are one item under several names.
    The file ends with ``stamp``.
    """

    any_order = True

    def __init__(
        self,
        items: Iterable[Item],
        cache: ShardCache | None = None,
        stamp: bytes = b"",
        look: Callable[[list[torch.Tensor]], Looked] | None = None,
    ) -> None:
        """``look``: what to ask instead of ``look_at``."""
        self.places: dict[str, Place] = {}
        self._items = list(items)
        self._cache = cache or ShardCache()
        self._look = look or look_at
        self._stamp = stamp
        self._pickles: dict[str, bytes] = {}  # of the tensors that are laid out, by name
        self._tensors: dict[str, torch.Tensor] = {}
        self._contents: dict[str, bytes] = {}  # ready-made items
        self._same: dict[str, str] = {}  # names whose bytes another item has

    def gather(self) -> TensorViews:
        names = [name for name, _ in self._items]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two items of one file are named {twice!r}")
        # isinstance() takes four times as long for a tensor.
        self._contents = {name: value for name, value in self._items if type(value) is bytes}
        self._tensors = {name: value for name, value in self._items if type(value) is not bytes}  # type: ignore[misc]
        tensors = list(self._tensors.values())
        looked = self._look(tensors)
        facts, storages = (None, {}) if looked is None else ((list(self._tensors), looked[0]), looked[1])
        if facts is not None and facts == self._cache.facts:
            found = list(storages.values())
            pointers = list(map(torch.UntypedStorage.data_ptr, found))
            views = self._cache.kept.with_memory(list(storages), pointers).with_storages(found)
            views.tensors = tensors
            self._pickles = self._cache.pickles
            return views
        views = TensorViews()
        views.tensors = tensors
        simple = facts is not None
        seen: dict[tuple[int, int, bytes], str] = {}
        for name, value in self._tensors.items():
            try:
                tensor = in_front(value)
            except ConfigError as error:
                raise ConfigError(f"cannot save {name!r}: {error}") from error
            if tensor is None:
                self._contents[name] = _saved(name, value)
                continue
            nbytes = tensor.nbytes
            pickled = tensor_pickle(tensor.dtype, tensor.shape, tensor.stride(), nbytes, distcp.STORAGE_KEY)
            view = TensorView(name, tensor.untyped_storage(), nbytes, tensor.dtype)
            simple = simple and view.storage._cdata in storages
            first = seen.setdefault((view.storage._cdata, nbytes, pickled), name)
            if first != name:
                self._same[name] = first
                continue
            self._pickles[name] = pickled
            views.append(view)
        if simple and not self._same and list(views.identities) == list(storages):
            self._cache.facts, self._cache.pickles = facts, self._pickles
            self._cache.kept = views.with_storages([])
        return views

    def lay_out(self, views: TensorViews) -> tuple[list[Extent], int]:
        layout, places = self._cache.laid_out(views, self._pickles)
        tail, ready = layout.finish([*self._contents.values(), self._stamp])
        self.places = dict(places)
        self.places.update(zip(self._contents, ready[:-1], strict=True))
        self.places.update((name, self.places[first]) for name, first in self._same.items())
        return [*layout.head, *tail], layout.head_end + sum(place.nbytes for place in ready)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        plain = ((name, tensor) for name, tensor in self._tensors.items() if name in self._pickles)
        return next((name for name, tensor in plain if tensor.untyped_storage()._cdata == storage._cdata), None)


def look_at(tensors: list[torch.Tensor]) -> Looked:
    """All that ``gather`` makes of these tensors, but their storages, and these; None if it must ask each."""
    return _engine.look_at_tensors(tensors) if _PLAIN_TYPES.issuperset(map(type, tensors)) else None


def _saved(name: str, tensor: torch.Tensor) -> bytes:
    """The item of a tensor that is not made of plain bytes, as torch.distributed.checkpoint writes it."""
    out = io.BytesIO()
    try:
        torch.save(tensor.detach().cpu(), out)
    except Exception as error:  # code of the tensor's class
        raise ConfigError(f"cannot save {name!r}, a {type(tensor).__name__}: {error}") from error
    return out.getvalue()
