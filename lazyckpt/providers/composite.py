"""Several named providers as one: the state of a whole checkpoint (DataStates-LLM, V-A3, composition)."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import Bytes, Landing, Provider, Segment, StorageTable, TensorView, TensorViews
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.pickles import dict_opcodes
from lazyckpt.providers.restorable import UnrestorableError, refuse_unreadable
from lazyckpt.providers.sharded import ShardedTensorError
from lazyckpt.providers.training import RngProvider


class CompositeProvider(Provider):
    """A dict of providers, saved as a dict of their states. Keys of storages stay the same from save to save."""

    def __init__(self) -> None:
        self.parts: dict[str, Provider] = {}
        self._landings: dict[str, set[int]] = {}  # of each part, by id of the saved tensor; see landings() and load()
        self._accepted: set[int] = set()  # parts that write opcodes of their own, which restore() can read

    def segments(self, table: StorageTable) -> Iterator[Segment]:
        opcodes = {}
        for name, part in self.parts.items():
            try:
                opcodes[name] = yield from _checked(part, table)
                if not isinstance(part, StateProvider) and id(part) not in self._accepted:
                    refuse_unreadable(None, "", opcodes[name], table)
                    self._accepted.add(id(part))
            except ShardedTensorError as error:
                raise error.inside(name) from None
            except UnrestorableError as error:
                raise error.inside(name) from None
            except Exception as error:
                raise UnpicklableError(name, error) from error
        yield Bytes(dict_opcodes(opcodes))

    def landings(self, saved: Any) -> list[Landing]:
        problems = []
        landings = []
        self._landings = {}
        if type(saved) is not dict:
            raise RestoreError(f"expected a dict of {', '.join(self.parts)}, found {type(saved).__name__}")
        missing = [name for name in self.parts if name not in saved]
        unexpected = [name for name in saved if name not in self.parts]
        problems += [f"{name}: not in the checkpoint" for name in missing]
        problems += [f"{name}: in the checkpoint, but not tracked" for name in unexpected]
        fitting, failed = [], False
        for name, part in self.parts.items():
            if name not in saved:
                continue
            try:
                landings.append(part.landings(saved[name]))
                self._landings[name] = {id(landing.saved) for landing in landings[-1]}
                fitting += [] if isinstance(part, RngProvider) else [name]
            except RestoreError as error:
                problems += [f"{name}: {line}" for line in str(error).splitlines()]
                failed = True
        if problems:
            if not failed:
                problems.append("restore(strict=False) takes over the parts that both have")
            elif fitting:
                quoted = ", ".join(f'"{name}"' for name in fitting)
                problems.append(f"restore(only=[{quoted}]) takes over what fits")
            raise RestoreError("\n".join(problems))
        return list(itertools.chain.from_iterable(landings))

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        """Raises RestoreError for whatever a part raises, and says which parts are overwritten by then."""
        overwritten = {name for name, saved_ids in self._landings.items() if not saved_ids.isdisjoint(landed)}
        for name, part in self.parts.items():
            try:
                part.load(saved[name], landed)
            except Exception as error:
                what = str(error) if isinstance(error, RestoreError) else f"{type(error).__name__}: {error}"
                raise RestoreError(f"{name}: {what} ({self._fates(overwritten, name)})") from error
            overwritten.add(name)

    def _fates(self, overwritten: set[str], failed: str) -> str:
        others = [name for name in self.parts if name != failed]
        fates = {
            "overwritten": [name for name in others if name in overwritten],
            "perhaps overwritten in part": [failed],
            "as before": [name for name in others if name not in overwritten],
        }
        return "; ".join(f"{fate}: {', '.join(names)}" for fate, names in fates.items() if names)


def _checked(part: Provider, table: StorageTable) -> Generator[Segment, None, bytes]:
    """Yields the storages of ``part`` and returns its pickle. Raises TypeError or ValueError for a stream that breaks
    the rules of ``Provider.segments``."""
    foreign = type(part).segments is not StateProvider.segments
    first = len(table.views)
    keys: list[str] = []
    pickles = []
    for segment in part.segments(table):
        if isinstance(segment, Bytes) and isinstance(segment.data, bytes):
            pickles.append(segment.data)
            continue
        if not isinstance(segment, TensorView | TensorViews):
            raise TypeError(f"segments() gave a {type(segment).__name__}; expected storages and Bytes")
        if foreign:
            keys += [segment.key] if isinstance(segment, TensorView) else segment.keys
        yield segment
    if len(pickles) != 1:
        raise TypeError(f"segments() gave {len(pickles)} pickles; expected one")
    if foreign:
        table.check(first, keys)
    return pickles[0]


class UnpicklableError(Exception):
    """A part of the state cannot be pickled; the Checkpointer turns this into a SerializationError."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(f"the state of {name!r} cannot be pickled: {type(cause).__name__}: {cause}")
        self.name = name
