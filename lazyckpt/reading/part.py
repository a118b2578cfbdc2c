"""Takes a part out of a saved object by its key, and renames its entries: what ``load`` takes from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.providers.rename import Rename, checked, rename_state

_MAX_KEYS = 10  # in a message


class NoPart(Exception):
    """There is no such part. Names the existing ones."""


def part(obj: Any, key: str) -> Any:
    """Returns ``obj["a"]["b"]`` for "a.b"; prefers keys that contain the dot themselves. Raises NoPart."""
    if not isinstance(obj, Mapping):
        raise NoPart(f"there is no {key!r}: expected a dict there, found {type(obj).__name__}")
    for head, rest in [(key, "")] + [(key[:i], key[i + 1 :]) for i in reversed(range(len(key))) if key[i] == "."]:
        if head in obj:
            return part(obj[head], rest) if rest else obj[head]
    there = ", ".join(map(str, list(obj)[:_MAX_KEYS])) + (", …" if len(obj) > _MAX_KEYS else "")
    raise NoPart(f"there is no {key!r}; there is: {there or 'nothing'}; give one of these as key")


@dataclass(frozen=True)
class Choice:
    """What ``load`` takes from a saved object: the part ``key``, its entries under new names."""

    key: str | None
    rename: Rename | None

    @classmethod
    def of(cls, key: Any, rename: Any) -> Choice:
        """Raises ConfigError for arguments that make no sense."""
        if key is not None and not isinstance(key, str):
            raise ConfigError(f'load: key={key!r}: expected a text, such as "model"')
        return cls(key, None if rename is None else checked(rename))

    @property
    def takes_all(self) -> bool:
        return self.key is None and self.rename is None

    def needs(self, name: str) -> bool:
        """Whether the part is, is in, or holds the tensor or object whose keys, joined by dots, are ``name``."""
        key = self.key
        return key is None or f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")

    def __call__(self, saved: Any) -> Any:
        """Raises NoPart, and ConfigError if the entries of the part have no names."""
        if self.key is not None:
            saved = part(saved, self.key)
        if self.rename is None:
            return saved
        if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
            raise ConfigError(f"load: rename is for a dict with names as keys, not {type(saved).__name__}; give a key")
        return rename_state(saved, self.rename)


EVERYTHING = Choice(None, None)
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
