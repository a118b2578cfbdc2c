"""Takes a part out of a saved object by its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_KEYS = 10  # in a message


class NoPart(Exception):
    """There is no such part. Says what there is."""


def part(obj: Any, key: str) -> Any:
    """Returns ``obj["a"]["b"]`` for "a.b"; prefers keys that contain the dot themselves. Raises NoPart."""
    if not isinstance(obj, Mapping):
        raise NoPart(f"there is no {key!r}: expected a dict there, found {type(obj).__name__}")
    for head, rest in [(key, "")] + [(key[:i], key[i + 1 :]) for i in reversed(range(len(key))) if key[i] == "."]:
        if head in obj:
            return part(obj[head], rest) if rest else obj[head]
    there = ", ".join(map(str, list(obj)[:_MAX_KEYS])) + (", …" if len(obj) > _MAX_KEYS else "")
    raise NoPart(f"there is no {key!r}; there is: {there or 'nothing'}; give one of these as key")


_Holder = torch.Tensor | torch.TypedStorage | torch.UntypedStorage


def tensors_in(obj: Any) -> Iterator[_Holder]:
    """Yields the tensors, and the storages as such, in the containers of Python below ``obj``."""
    seen: set[int] = set()
    todo = [obj]
    while todo:
        obj = todo.pop()
        if isinstance(obj, _Holder):
            yield obj
        elif isinstance(obj, Mapping | list | tuple | set | frozenset) and id(obj) not in seen:
            seen.add(id(obj))
            todo += [*obj.keys(), *obj.values()] if isinstance(obj, Mapping) else obj
            todo += getattr(obj, "__dict__", {}).values()  # of an OrderedDict
