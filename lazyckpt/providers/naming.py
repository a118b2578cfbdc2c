"""Finds names of storages for messages, after something went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.wrappers import links_of


def name_of_storage(provider: CompositeProvider, storage: torch.UntypedStorage) -> str | None:
    """Returns a name such as ``model.layers.0.weight`` or ``optimizer.state.3.exp_avg``; None if no tensor views it."""
    for name, part in provider.parts.items():
        if isinstance(part, StateProvider) and (found := name_in(part.state(), name, storage)) is not None:
            return found
    return None


def name_in(obj: Any, name: str, storage: torch.UntypedStorage) -> str | None:
    """Returns the path, from ``name`` on, to a tensor in ``obj`` that views ``storage``; None if there is none."""
    for path, tensor in _walk(obj, name):
        try:
            if tensor.untyped_storage()._cdata == storage._cdata:
                return path.removeprefix(".")
        except (NotImplementedError, RuntimeError):
            continue
    return None


def _walk(obj: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(obj, torch.Tensor):
        yield path, obj
        for link in links_of(obj):
            yield from _walk(link.inner, f"{path}.{link.name}")
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield from _walk(value, f"{path}.{key}")
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield from _walk(value, f"{path}.{index}")
