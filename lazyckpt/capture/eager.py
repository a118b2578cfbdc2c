"""Warns, once per Saver, of state that ``lazyckpt.guard`` could make lazy.

A save copies state that no optimizer owns before it returns. Often that is an average of weights that the user wrote,
and then ``guard`` helps. The warning needs evidence: two saves in a row copied the same storages that way, and
something wrote to them in between. These do not count: storages of an optimizer or a guarded object, which are eager
for another reason; a save in which nothing is lazy; storages that were torn before, and buffers, which stay eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from operator import not_

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazyckpt import _engine
from lazyckpt.capture.laziness import LAZY_MIN_BYTES
from lazyckpt.capture.sources import Sources
from lazyckpt.capture.torn import is_torn
from lazyckpt.providers.base import TensorView
from lazyckpt.warn import warn

MIN_SHARE = 0.2
MIN_BYTES = 64 << 20  # memory is copied at 6 GB/s or more: less than this keeps save() for at most 10 ms
_MAX_NAMES = 3


@dataclass
class Copied:
    """The large storages without an owner that one save copied eagerly. Keeps no memory alive."""

    checksums: dict[int, int] = field(default_factory=dict)  # by _cdata; empty until the copies are done
    _refs: list[StorageWeakRef] = field(default_factory=list)

    def fill_in(self, sources: Sources, job: _engine.Job) -> None:
        """Reads the checksums when ``job`` has copied all; on a background thread, since it takes a while."""
        eager = sum(compress(sources.sizes, map(not_, sources.owners))) if sources.in_training else 0
        views = _unowned(sources) if eager >= _enough(sum(sources.sizes)) else {}
        if views:
            # As long as there is a weak reference to a storage, no other one is given its _cdata.
            self._refs = [StorageWeakRef(view.storage) for view in views.values()]
            crcs = job.source_crcs()
            self.checksums = {view.storage._cdata: crcs[source] for source, view in views.items()}


class EagerShare:
    """Compares the saves of one Saver, and warns."""

    def __init__(self) -> None:
        self._before: list[Copied] = []  # by the last two saves
        self._told = False

    def look(
        self, sources: Sources, modules: Iterable[torch.nn.Module], name_of: Callable[[TensorView], str]
    ) -> Copied | None:
        """Compares the last two saves. Returns what this save copies, to be filled in; None after the warning. Call it
        on the thread that saves, before the engine has the sources."""
        if self._told:
            return None
        if len(self._before) == 2:
            first, second = (copied.checksums for copied in self._before)
            written = {identity for identity, crc in second.items() if first.get(identity, crc) != crc}
            if written:
                self._tell(sources, written - _buffers(modules), name_of)
        copied = Copied()
        self._before = [*self._before[-1:], copied]
        return copied

    def _tell(self, sources: Sources, written: set[int], name_of: Callable[[TensorView], str]) -> None:
        views = [view for view in _unowned(sources).values() if view.storage._cdata in written]
        views.sort(key=lambda view: -view.nbytes)
        copied, nbytes = sum(view.nbytes for view in views), sum(sources.sizes)
        if copied < _enough(nbytes):
            return
        self._told = True
        names = ", ".join(map(name_of, views[:_MAX_NAMES]))
        more = f" and {len(views) - _MAX_NAMES} more" if len(views) > _MAX_NAMES else ""
        with contextlib.suppress(Warning):  # a filter may turn warnings into errors; the save goes on
            warn(
                f"{copied / nbytes:.0%} of the checkpoint ({copied >> 20} MiB) is copied inside save() each time, "
                f"since no optimizer owns it and something writes to it between saves: {names}{more}. If one method of "
                'an object writes to it, call lazyckpt.guard(obj, "method"), and save() returns before it is copied'
            )


def _unowned(sources: Sources) -> dict[int, TensorView]:
    """The storages that are eager because no optimizer or guarded object owns them, by source."""
    columns = enumerate(zip(sources.owners, sources.owned, sources.sizes, strict=True))
    unowned = (source for source, (bits, owned, n) in columns if not (bits or owned) and n > LAZY_MIN_BYTES)
    return {source: sources.views[source] for source in unowned if not is_torn(sources.identities[source])}


def _enough(nbytes: int) -> float:
    """The eager bytes from which a state of ``nbytes`` deserves a warning."""
    return max(MIN_BYTES, MIN_SHARE * nbytes)


def _buffers(modules: Iterable[torch.nn.Module]) -> set[int]:
    found = set()
    for module in modules:
        for buffer in module.buffers():
            with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse, or a wrapper
                found.add(buffer.untyped_storage()._cdata)
    return found
