"""Frozen parameters: no optimizer trains them, so saves copy them lazily once two snapshots in a row found no
change."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from lazyckpt.capture.versions import versions_of
from lazyckpt.providers.base import TensorView
from lazyckpt.providers.wrappers import Storages, storages_in

_MAX_SEEN = 1 << 18


class Frozen:
    """The frozen parameters of some modules at one instant, looked for when they are needed."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = modules

    @cached_property
    def _storages(self) -> list[Storages]:
        return storages_in(frozen_parameters(self._modules))

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(storages.tensors for storages in self._storages))

    def places(self) -> dict[int, int]:
        """The places in ``tensors``, by the identities of the storages."""
        identities = chain.from_iterable(storages.identities for storages in self._storages)
        columns = enumerate(zip(identities, self.tensors, strict=True))
        return {identity: place for place, (identity, tensor) in columns if not tensor.is_inference()}

    def facts(self) -> Any:
        """All that is decided by, without any tensor."""
        return [storages.seen for storages in self._storages], versions_of(self.tensors)


class FrozenParameters:
    """The frozen parameters in the snapshots of one Saver: address, size, version and checksum of each."""

    def __init__(self) -> None:
        # By identity and bytes of the storage in the file, and where these begin: a file may have a part of it, and the
        # files of one Saver give the same keys to different storages. The value: pointer, version, crc, and whether
        # seen twice.
        self._seen: dict[tuple[int, int, int], tuple[int, int, int, bool]] = {}
        self.generation = 0  # grows whenever something else was seen than before

    def is_lazy(self, view: TensorView, tensor: torch.Tensor) -> bool:
        pointer, version, _, twice = self._seen.get((view.storage._cdata, view.nbytes, view.offset), (0, 0, 0, False))
        return twice and (pointer, version) == (view.storage.data_ptr(), tensor._version)

    def observe(self, view: TensorView, version: int, crc: int, was_lazy: bool) -> bool:
        """Notes a parameter of a snapshot. Returns False if it was copied lazily and had changed."""
        key = view.storage._cdata, view.nbytes, view.offset
        here = (view.storage.data_ptr(), version, crc)
        before = self._seen.pop(key, (0, 0, 0, False))
        same = before[:3] == here
        self._seen[key] = (*here, same)
        if before != self._seen[key]:
            self.generation += 1
        while len(self._seen) > _MAX_SEEN:  # drop those of freed storages
            self._seen.pop(next(iter(self._seen)))
            self.generation += 1
        return same or not was_lazy


def frozen_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The dense parameters of ``modules`` that no optimizer trains."""
    parts = (part for module in modules for part in module.modules())
    found = (p for part in parts for p in part._parameters.values())  # Module.parameters() makes their names, too
    return [p for p in found if p is not None and not p.requires_grad and p.layout is torch.strided]
