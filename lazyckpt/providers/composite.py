"""Several named providers as one: the state of a whole checkpoint (DataStates-LLM, V-A3, composition)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import Landing, StorageTable
from lazyckpt.providers.naming import name_in, names_in
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.pickles import dict_opcodes
from lazyckpt.providers.restorable import UnrestorableError
from lazyckpt.providers.sharded import ShardedTensorError


class CompositeProvider:
    """A dict of providers, saved as a dict of their states. Keys of storages stay the same from save to save."""

    def __init__(self) -> None:
        self.parts: dict[str, StateProvider] = {}
        self.added: dict[str, range] = {}  # the places in the table of what each part has added last
        self._landings: dict[str, set[int]] = {}  # of each part, by id of the saved tensor; see landings() and load()

    def opcodes(self, table: StorageTable) -> bytes:
        """Pickles the state as it is now, see ``StateProvider.opcodes``. Raises UnpicklableError, and
        UnrestorableError or ShardedTensorError for state that a save refuses."""
        opcodes = {}
        for name, part in self.parts.items():
            before = len(table.views)
            try:
                opcodes[name] = part.opcodes(table)
                self.added[name] = range(before, len(table.views))
            except (ShardedTensorError, UnrestorableError) as error:
                raise error.inside(name) from None
            except Exception as error:
                raise UnpicklableError(name, error) from error
        return dict_opcodes(opcodes)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        """Returns a name such as ``model.layers.0.weight`` or ``optimizer.state.3.exp_avg``; None if no tensor views
        ``storage``."""
        names = (name_in(part.state(), name, storage) for name, part in self.parts.items())
        return next(filter(None, names), None)

    def names_of(self, identities: Iterable[int]) -> list[str]:
        """The names of storages with these ``_cdata``; "?" where no tensor of the state views one. Asks every part."""
        return names_in({name: part.state() for name, part in self.parts.items()}, identities)

    def landings(self, saved: Any) -> list[Landing]:
        """Checks ``saved`` against all live state. Raises RestoreError that lists everything that does not fit."""
        if type(saved) is not dict:
            raise RestoreError(f"expected a dict of {', '.join(self.parts)}, found {type(saved).__name__}")
        missing = [name for name in self.parts if name not in saved]
        unexpected = [name for name in saved if name not in self.parts]
        problems = [f"{name}: not in the checkpoint" for name in missing]
        problems += [f"{name}: in the checkpoint, but not tracked" for name in unexpected]
        landings = []
        self._landings = {}
        for name, part in self.parts.items():
            if name not in saved:
                continue
            try:
                landings.append(part.landings(saved[name]))
                self._landings[name] = {id(landing.saved) for landing in landings[-1]}
            except RestoreError as error:
                problems += [f"{name}: {line}" for line in str(error).splitlines()]
        if problems:
            raise RestoreError("\n".join(problems))
        return list(itertools.chain.from_iterable(landings))

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        """Raises RestoreError if a part fails, and says which parts are already overwritten."""
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


class UnpicklableError(Exception):
    """A part of the state cannot be pickled; the Checkpointer turns this into a SerializationError."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(f"the state of {name!r} cannot be pickled: {type(cause).__name__}: {cause}")
        self.name = name
