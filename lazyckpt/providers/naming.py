"""Finds names of tensors and storages for messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from lazyckpt.providers.wrappers import links_of


def tensors_in(obj: Any, path: str, *, attributes: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module, of an optimizer, in containers, in wrappers and, if asked, in the attributes of objects;
    each with its path from ``path`` on."""
    seen: dict[int, Any] = {}  # keeps temporary objects alive, so that no id comes back
    todo = [(path, obj)]
    while todo:
        path, obj = todo.pop()
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        inner: Any = ()
        if isinstance(obj, torch.nn.Module):
            inner = (*obj.named_parameters(), *obj.named_buffers())
        elif isinstance(obj, torch.optim.Optimizer):
            state = getattr(obj, "state", None)
            inner = (
                ("param_groups", getattr(obj, "param_groups", None)),
                ("state", dict(enumerate(state.values())) if isinstance(state, dict) else state),
            )
        elif isinstance(obj, dict):
            inner = obj.items()
        elif isinstance(obj, list | tuple):
            inner = enumerate(obj)
        elif isinstance(obj, torch.Tensor):
            yield path.removeprefix("."), obj
            inner = [(link.name, link.inner) for link in links_of(obj)]
        elif isinstance(obj, type):
            continue
        if attributes and not isinstance(obj, torch.nn.Module | torch.optim.Optimizer):
            inner = [*inner, *getattr(obj, "__dict__", {}).items()]
        todo += reversed([(f"{path}.{key}", value) for key, value in inner])


def name_in(obj: Any, name: str, storage: torch.UntypedStorage, within: range | None = None) -> str | None:
    """Returns the path, from ``name`` on, to a tensor in ``obj`` that views ``storage``; None if there is none.
    ``within``: one that begins among these bytes."""
    for path, tensor in tensors_in(obj, name):
        try:
            if tensor.untyped_storage()._cdata != storage._cdata:
                continue
            if within is None or tensor.storage_offset() * tensor.itemsize in within:
                return path
        except (NotImplementedError, RuntimeError):
            continue
    return None


def names_in(parts: Mapping[str, Any], identities: Iterable[int]) -> list[str]:
    """The names of storages with these ``_cdata``; "?" where no tensor of ``parts`` views one. ``parts``: objects, by
    the beginning of the names."""
    names: dict[int, str] = {}
    for begin, obj in parts.items():
        for path, tensor in tensors_in(obj, begin):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                names.setdefault(tensor.untyped_storage()._cdata, path)
    return [names.get(identity, "?") for identity in identities]
