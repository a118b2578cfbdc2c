"""What successive safetensors files of one state share, so that a save asks only whether the tensors are the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.formats import safetensors
from lazyckpt.providers.base import TensorViews

_PLAIN_DICTS = (dict, OrderedDict)
_PLAIN_NAMES = frozenset((str,))
_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


class SafetensorsCache:
    """What was made of a dict of tensors, if all are plain and each has a storage of its own. Holds no tensor."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []  # in the order of the file
        self._facts: bytes | None = None  # all that is asked of the tensors
        self._kept = TensorViews()  # without the storages
        self._layout: tuple[Any, safetensors.Layout] | None = None

    def again(self, tensors: Any) -> TensorViews | None:
        """The views of these tensors; None if they are not of the kinds that were kept."""
        if self._facts is None:
            return None
        ordered, facts, storages = _look(tensors, self._kept.keys)
        if facts != self._facts:
            return None
        found = list(storages.values())
        pointers = list(map(torch.UntypedStorage.data_ptr, found))
        if len(set(pointers)) < len(pointers):  # two storages of one memory; or of none, which is rare
            return None
        views = self._kept.with_memory(list(storages), pointers).with_storages(found)
        views.tensors = ordered
        return views

    def keep(self, tensors: Any, views: TensorViews, shapes: list[tuple[int, ...]]) -> None:
        """Keeps what was made of these tensors, which are in order in ``views``."""
        self._facts = None  # now: Ctrl-C below must not leave old facts beside new columns
        self._kept, self.shapes = views.with_storages([]), shapes
        _, facts, storages = _look(tensors, views.keys)
        if list(storages) == list(views.identities):  # not if a tensor was copied
            self._facts = facts

    def layout(
        self, views: TensorViews, shapes: list[tuple[int, ...]], metadata: Mapping[str, str] | None
    ) -> safetensors.Layout:
        """Raises the errors of ``safetensors.Layout``."""
        facts = views.keys, views.dtypes, shapes, list((metadata or {}).items())
        if self._layout is None or self._layout[0] != facts:
            self._layout = facts, safetensors.Layout(views.keys, views.dtypes, shapes, metadata)
        return self._layout[1]


def _look(tensors: Any, order: list[str]) -> tuple[list[torch.Tensor], bytes | None, dict[int, torch.UntypedStorage]]:
    """The tensors in this order of their names, their facts, and their storages by identity. There are no facts if the
    names are others, or if a name or a tensor is not plain."""
    if type(tensors) not in _PLAIN_DICTS or tensors.keys() != set(order):
        return [], None, {}
    ordered = list(map(tensors.__getitem__, order))
    plain = _PLAIN_NAMES.issuperset(map(type, tensors)) and _PLAIN_TENSORS.issuperset(map(type, ordered))
    looked = _engine.look_at_tensors(ordered) if plain else None
    return ([], None, {}) if looked is None else (ordered, *looked)
