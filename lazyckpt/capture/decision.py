"""What a save decides for the storages of its checkpoint: their order in the files, and which are lazy.

It is a function of facts: the columns of the storages, what every owner has, the evidence. Between two saves of a
training run only values change. So the next save compares the facts, and keeps the decision if they are equal.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, compress, count, repeat
from operator import ne, or_
from typing import Any

import torch

from lazyckpt import _engine, devices
from lazyckpt.capture.frozen import Frozen, FrozenParameters
from lazyckpt.capture.laziness import Laziness
from lazyckpt.capture.owners import Owners, Parameters
from lazyckpt.capture.ownership import Ownership
from lazyckpt.capture.places import Places
from lazyckpt.capture.shared import may_be_shared
from lazyckpt.capture.torn import TornStorages
from lazyckpt.providers.base import Parts, TensorViews
from lazyckpt.providers.wrappers import Link

Order = Callable[[TensorViews, Container[int]], "list[int] | Parts | None"]
"""The places of the storages of one file, or of the parts that it takes, in the order of the file; None: as they are.
Asked with the identities of the storages that have an owner."""


MAX_KEPT = 8  # decisions


def _places(at: Iterable[int] = ()) -> array[int]:
    return array("I", at)


def _shared(at: Iterable[int], like: array[int]) -> array[int]:
    """These places; ``like`` itself if it holds the same."""
    found = _places(at)
    return like if found == like else found


@dataclass
class Decision:
    """The storages of one checkpoint as columns, file after file. Holds no tensor but in ``links``.

    It is kept from save to save, so numbers are in arrays."""

    orders: list[array[int] | None]  # of each file: the place of each storage as it was gathered
    files: list[TensorViews]  # in the order of the file, without the storages
    located: list[int] | None  # see devices.locate
    memory: list[tuple[array[int], array[int]]] = field(default_factory=list)
    """Identities and pointers of the storages of each file, as they were gathered."""
    owners: array[int] = field(default_factory=lambda: array("Q"))
    """The bits of the owners that wait for each source; 0 if it is eager."""
    lazy: array[int] = field(default_factory=_places)
    in_training: bool = False  # whether an optimizer at work owns some of the storages
    owned: bytes = b""  # of each source: whether an optimizer or a guarded object owns it, lazy or not
    by_owner: weakref.WeakKeyDictionary[Any, tuple[int, Parameters]] = field(default_factory=weakref.WeakKeyDictionary)
    """The bit of each owner, and its parameters at ``save()``."""
    places: Places = field(default_factory=lambda: Places({}))
    """The tensors through which a storage is seen, by its identity: places in those of the owners, and behind them in
    the frozen parameters."""
    frozen: list[tuple[int, int]] = field(default_factory=list)  # source, and place of the tensor
    unseen: array[int] = field(default_factory=_places)  # lazy, but the engine watches no pages of them
    seen_at: array[int] = field(default_factory=_places)  # places of the tensors that view them
    source_of: array[int] = field(default_factory=_places)  # their sources, and then those of the links
    links: list[Link] = field(default_factory=list)  # the wrappers that hold unseen storages
    frozen_facts: Any = None  # by which frozen parameters were found, if they were looked for
    private: array[int] = field(default_factory=_places)  # sources in host memory that no other process has
    owed: int = 0  # the bits of the owners whose storages only versions protect
    whole_sizes: array[int] | None = None  # of the storages of which these are parts; None: not known

    def __post_init__(self) -> None:
        columns = [file.sizes for file in self.files]
        self.sizes = columns[0] if len(columns) == 1 else array("Q", chain.from_iterable(columns))
        if all(file.whole for file in self.files):
            self.whole_sizes = self.sizes
        self.owners = self.owners or array("Q", bytes(8 * len(self.sizes)))
        self.owned = self.owned or bytes(len(self.sizes))

    def moved(self, gathered: list[TensorViews]) -> Decision:
        """The same decision for other storages."""
        files = [
            columns.with_memory(_in_order(file.identities, order), _in_order(file.pointers, order))
            for columns, order, file in zip(self.files, self.orders, gathered, strict=True)
        ]
        return replace(self, files=files, memory=[(file.identities, file.pointers) for file in gathered])

    def bind(self, gathered: list[TensorViews]) -> list[TensorViews]:
        """The files with the storages of now."""
        return [
            columns.with_storages(_in_order(file.storages, order))
            for columns, order, file in zip(self.files, self.orders, gathered, strict=True)
        ]


def _chosen(file: TensorViews, at: list[int] | Parts | None) -> TensorViews:
    if at is None:
        return file
    return file.parts(at) if isinstance(at, Parts) else file.take(at)


def _in_order(column: Any, order: array[int] | None) -> Any:
    return column if order is None else list(map(column.__getitem__, order))


def _without_memory(file: TensorViews) -> Any:
    """The columns that do not say which storages these are."""
    return file.keys, file.sizes, file.offsets, file.dtypes, file.devices, file.whole


def _differing(now: tuple[array[int], ...], before: tuple[array[int], ...]) -> set[int]:
    """The places at which columns differ."""
    return {at for a, b in zip(now, before, strict=True) for at in compress(count(), map(ne, a, b))}


def all_eager(files: list[TensorViews], engine: _engine.Engine) -> Decision:
    """Copies everything inside ``save()``, in the order given. Raises OSError if ``engine`` cannot use a device."""
    views = TensorViews.joined(files)
    located = devices.locate(views.storages, views.devices, engine)
    return Decision([None] * len(files), [file.with_storages([]) for file in files], located)


class Decisions:
    """The decisions of one Saver. Keeps the last one for each of the last few choices, and the facts for which it
    holds."""

    def __init__(self, engine: _engine.Engine, modules: Iterable[torch.nn.Module], *, watched: bool) -> None:
        """``modules``: whose frozen parameters may become lazy. ``watched``: the engine watches the pages of lazy host
        memory."""
        self.frozen = FrozenParameters()
        self.torn = TornStorages()
        self._engine = engine
        self._modules = modules
        self._watched = watched
        self._kept: dict[tuple[Hashable, ...], tuple[Decision, Any]] = {}
        """By choices: a decision and its facts, which are None if another one may be due although they are equal."""

    def forget_frozen(self) -> None:
        """Forgets the observations of frozen parameters, since they were written to."""
        self.frozen = FrozenParameters()
        self._kept.clear()

    def decide(
        self, gathered: list[TensorViews], orders: Sequence[Order], owners: Owners, choices: Sequence[Hashable] = ()
    ) -> tuple[Decision, Frozen]:
        """``choices``: what the orders depend on besides. Raises OSError if the engine cannot use a device of the
        storages."""
        frozen = Frozen(self._modules)
        choice = tuple(choices)
        known = owners.facts(), self.torn.facts(), [_without_memory(file) for file in gathered]
        facts = None if None in known[:2] else known
        # Out of the table while this decides: Ctrl-C must not leave old facts beside a new decision.
        kept, facts_then = self._kept.pop(choice, (None, None))
        last = self._again(kept, gathered, frozen) if kept and facts and facts == facts_then else None
        if last is None:
            last = self._decide(gathered, orders, owners, frozen)
        self._kept[choice] = last, facts
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return last, frozen

    def _again(self, last: Decision, gathered: list[TensorViews], frozen: Frozen) -> Decision | None:
        """The last decision, for storages of the same kind and number, if it holds for them."""
        if last.frozen_facts is not None and last.frozen_facts != self._frozen_facts(frozen):
            return None
        again = self._moved(last, gathered, frozen)
        if again is not None and not self._watched:
            views = TensorViews.joined(again.bind(gathered))
            columns = views.storages, views.identities, views.pointers
            if any(may_be_shared(*(_in_order(column, last.private) for column in columns))):
                return None
        return again

    def _moved(self, last: Decision, gathered: list[TensorViews], frozen: Frozen) -> Decision | None:
        """The last decision for the memory of now; None if that changes it."""
        memory = [(file.identities, file.pointers) for file in gathered]
        if memory == last.memory:
            return last
        # Some storages are new at every save, such as random states. Storages without an owner may change places.
        known = frozen.places() if last.frozen_facts is not None else {}
        for now, before in zip(memory, last.memory, strict=True):
            for at in _differing(now, before):
                identity = now[0][at]
                if before[0][at] in last.places or identity in last.places or identity in known:
                    return None
        return last.moved(gathered)

    def _frozen_facts(self, frozen: Frozen) -> Any:
        return self.frozen.generation, frozen.facts()

    def _decide(self, gathered: list[TensorViews], orders: Sequence[Order], owners: Owners, frozen: Frozen) -> Decision:
        ownership = Ownership(owners)
        chosen = [order(file, ownership.places) for order, file in zip(orders, gathered, strict=True)]
        files = [_chosen(file, at) for file, at in zip(gathered, chosen, strict=True)]
        order = [at.places if isinstance(at, Parts) else at for at in chosen]
        views = TensorViews.joined(files)
        identities = views.identities
        located = devices.locate(views.storages, views.devices, self._engine)
        memory = [(file.identities, file.pointers) for file in gathered]
        orders_kept = [None if at is None else _places(at) for at in order]
        decision = Decision(orders_kept, [file.with_storages([]) for file in files], located, memory)
        if decision.whole_sizes is None and all(file.whole for file in gathered):  # the facts tell of other sizes
            decision.whole_sizes = array("Q", map(torch.UntypedStorage.nbytes, views.storages))
        laziness = Laziness(ownership, self.frozen, frozen, self.torn, self._watched)
        bits, frozen_at, decision.in_training = laziness.decide(views, located)
        decision.owners = array("Q", bits)
        decision.lazy = _places(compress(count(), bits))
        decision.owned = bytes(map(ownership.places.__contains__, identities))
        decision.by_owner = ownership.owners
        behind = len(owners.tensors)
        of_frozen = {identities[at]: (behind + place,) for at, place in frozen_at.items()}
        places = ownership.places | of_frozen if of_frozen else ownership.places
        decision.places = Places(places)
        decision.frozen = sorted((at, behind + place) for at, place in frozen_at.items())
        decision.private = _shared(laziness.private, decision.lazy)
        for file in decision.files:
            file.devices = []  # in `located`
        if laziness.searched:
            decision.frozen_facts = self._frozen_facts(frozen)
        # These must not change until they are copied. The engine watches host memory, if it can. For the rest, the
        # versions of the tensors that view it tell.
        on_devices = _places(source for source in decision.lazy if located and located[source] != devices.HOST)
        decision.unseen = on_devices if self._watched else decision.lazy
        decision.owed = reduce(or_, map(decision.owners.__getitem__, decision.unseen), 0)
        seen_through = [places[identities[source]] for source in decision.unseen]
        decision.seen_at = _places(chain.from_iterable(seen_through))
        source_of = chain.from_iterable(map(repeat, decision.unseen, map(len, seen_through)))
        decision.source_of = _shared(source_of, decision.unseen)
        # A write through a wrapper may move only the wrapper's version, a write to an inner tensor only that one's.
        wrapped = decision.unseen if ownership.links else ()
        links = [(source, link) for source in wrapped for link in ownership.links.get(identities[source], ())]
        if links:
            decision.source_of = decision.source_of + _places(source for source, _ in links)
        decision.links = [link for _, link in links]
        return decision
