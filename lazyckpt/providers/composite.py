"""Several named providers as one: the state of a whole checkpoint (DataStates-LLM, V-A3, composition)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import Bytes, Landing, Provider, Segment, StorageTable
from lazyckpt.providers.pickles import dict_opcodes


class CompositeProvider(Provider):
    """A dict of providers, saved as a dict of their states. Keys of storages stay the same from save to save."""

    def __init__(self) -> None:
        self.parts: dict[str, Provider] = {}

    def segments(self, table: StorageTable) -> Iterator[Segment]:
        opcodes = {}
        for name, part in self.parts.items():
            try:
                for segment in part.segments(table):
                    if isinstance(segment, Bytes):
                        opcodes[name] = segment.data
                    else:
                        yield segment
            except Exception as error:
                raise UnpicklableError(name, error) from error
        yield Bytes(dict_opcodes(opcodes))

    def landings(self, saved: Any) -> list[Landing]:
        problems = []
        landings = []
        if type(saved) is not dict:
            raise RestoreError(f"expected a dict of {', '.join(self.parts)}, found {type(saved).__name__}")
        problems += [f"{name}: not in the checkpoint" for name in self.parts if name not in saved]
        problems += [f"{name}: in the checkpoint, but not tracked" for name in saved if name not in self.parts]
        for name, part in self.parts.items():
            if name not in saved:
                continue
            try:
                landings.append(part.landings(saved[name]))
            except RestoreError as error:
                problems += [f"{name}: {line}" for line in str(error).splitlines()]
        if problems:
            raise RestoreError("\n".join(problems))
        return list(itertools.chain.from_iterable(landings))

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        for name, part in self.parts.items():
            part.load(saved[name], landed)


class UnpicklableError(Exception):
    """Which part of the state could not be pickled; the Checkpointer makes a SerializationError of it."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(f"the state of {name!r} cannot be pickled: {type(cause).__name__}: {cause}")
        self.name = name
