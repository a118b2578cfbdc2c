"""Frozen parameters: nobody trains them, so saves copy them lazily once two snapshots in a row found them unchanged."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lazyckpt.providers.base import TensorView


class FrozenParameters:
    """What the snapshots of one Saver found of frozen parameters: address, size, version and checksum."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int, int]] = {}  # key -> pointer, bytes, version, crc
        self._twice: set[str] = set()

    def is_lazy(self, view: TensorView, tensor: torch.Tensor) -> bool:
        seen = self._seen.get(view.key)
        here = (view.storage.data_ptr(), view.nbytes, tensor._version)
        return view.key in self._twice and seen is not None and seen[:3] == here

    def observe(self, view: TensorView, version: int, crc: int, was_lazy: bool) -> bool:
        """Notes what a snapshot found. Returns False if a parameter that was copied lazily had changed."""
        here = (view.storage.data_ptr(), view.nbytes, version, crc)
        same = self._seen.get(view.key) == here
        self._seen[view.key] = here
        if same:
            self._twice.add(view.key)
        else:
            self._twice.discard(view.key)
        return same or not was_lazy


def frozen_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The dense parameters of ``modules`` that nobody trains."""
    parts = (part for module in modules for part in module.modules())
    found = (p for part in parts for p in part._parameters.values())  # Module.parameters() makes their names, too
    return [p for p in found if p is not None and not p.requires_grad and p.layout is torch.strided]
