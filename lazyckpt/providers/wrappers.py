"""Looks into wrapper subclasses: tensors that hold other tensors instead of memory.

Low-bit optimizer state, quantized weights and DTensors are wrappers. The method ``__tensor_flatten__`` of their class
names the attributes that hold the inner tensors, which may be wrappers themselves. The owner of a wrapper owns the
storages inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lazyckpt import _engine

_MAX_DEPTH = 4  # wrappers nested deeper than this are copied eagerly


class Link(NamedTuple):
    """A wrapper and one tensor inside it."""

    wrapper: torch.Tensor
    name: str  # of the attribute
    inner: torch.Tensor

    def holds(self) -> bool:
        """Whether the wrapper still holds this tensor."""
        try:
            return getattr(self.wrapper, self.name) is self.inner
        except Exception:  # code of the wrapper's class
            return False


@dataclass
class Storages:
    """Tensors and their storages, as columns."""

    tensors: list[torch.Tensor]
    seen: _engine.Seen
    links: dict[int, list[Link]]
    """By identity of a storage: the wrappers through which it is seen."""

    @cached_property
    def identities(self) -> list[int]:
        """The ``_cdata`` of the storages."""
        return self.seen.identities


def storages_in(tree: Any, *, links: bool = False) -> list[Storages]:
    """Finds the storages of all tensors in nested dicts, lists and tuples.

    The first item has the storages of tensors that are no wrappers. Each further item is one level deeper inside the
    wrappers. Wrappers whose class raises, or that ``links_of`` rejects, contribute nothing. Without ``links``, which
    take long to find, the column is empty, and tensors inside a DTensor count as plain ones.
    """
    found = []
    above: dict[int, list[Link]] = {}  # by id of a tensor: the wrappers that hold it
    for _ in range(_MAX_DEPTH + 1):
        with torch._C.DisableTorchFunction():  # runs no code of subclasses; a mode would make it many times slower
            tensors, seen, wrappers = _engine.storages_in(tree, not links)
        found.append(level := Storages(tensors, seen, {}))
        for tensor, identity in zip(tensors, level.identities, strict=True) if links and above else ():
            level.links.setdefault(identity, []).extend(above[id(tensor)])
        if not wrappers:
            break
        below: dict[int, list[Link]] = {}
        inside: dict[int, torch.Tensor] = {}
        for wrapper in wrappers:
            for link in links_of(wrapper):
                key = id(link.inner)
                inside[key] = link.inner
                chain = [link, *above[id(wrapper)]] if id(wrapper) in above else [link]
                if key in below:
                    below[key] += chain
                else:
                    below[key] = chain
        above, tree = below, list(inside.values())
    return found


def links_of(tensor: torch.Tensor) -> list[Link]:
    """Returns the tensors directly inside a wrapper; none for any other tensor.

    A wrapper that returns different tensors at each call has none either: they say nothing about the saved ones.
    """
    try:
        if (local := getattr(tensor, "_local_tensor", None)) is not None:  # a DTensor: the quick way to the same
            return [Link(tensor, "_local_tensor", local)]
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        links = [Link(tensor, name, getattr(tensor, name)) for name in names]
        stable = all(link.holds() and link.inner is not tensor for link in links)
        if not stable or torch.Tensor.is_inference(tensor):
            return []
    except Exception:  # from the wrapper's class; its tensors are copied eagerly
        return []
    return [link for link in links if isinstance(link.inner, torch.Tensor)]


def address_inside(tensor: torch.Tensor, depth: int = _MAX_DEPTH) -> int:
    """Combines the addresses of the tensors inside a wrapper into one number; 0 if there are none."""
    links = links_of(tensor) if depth else []
    try:
        inside = [torch.Tensor.data_ptr(link.inner) or address_inside(link.inner, depth - 1) for link in links]
    except (RuntimeError, TypeError):  # one of them is fake
        return 0
    return hash(tuple(inside)) if any(inside) else 0
