"""The storages of one checkpoint as columns, and the tensors whose versions tell whether the lazy ones stay the same.

``save()`` makes them before the engine has the checkpoint. laziness.py decides which storages are lazy.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Container
from itertools import chain, compress, count, islice, repeat
from typing import Any

import torch

from lazyckpt import _engine, devices
from lazyckpt.capture.laziness import Laziness
from lazyckpt.capture.ownership import Parameters
from lazyckpt.capture.versions import versions_of
from lazyckpt.providers.base import TensorView, TensorViews
from lazyckpt.providers.wrappers import Link


class Sources:
    """The storages of one checkpoint, file after file: the engine calls storage *i* source *i*. A storage that two
    files hold is two sources."""

    def __init__(self, files: list[TensorViews], engine: _engine.Engine, laziness: Laziness | None = None) -> None:
        """``files``: the storages of each file, in the order of the file. Without ``laziness`` all are eager.

        Raises OSError if ``engine`` cannot use a device of theirs."""
        self.files = files
        self.views = TensorViews.joined(files)
        self.identities = self.views.identities
        self.sizes = array("Q", self.views.sizes)
        located = devices.locate(self.views.storages, self.views.devices, engine)
        self.pointers, self.devices, self.streams, self._held, self.cuda = devices.sources(self.views.storages, located)
        self.whole_sizes = array("Q", map(torch.UntypedStorage.nbytes, self.views.storages))
        self.owners = array("Q", bytes(8 * len(self.sizes)))
        """The bits of the owners that wait for each source; 0 if it is eager."""
        self.lazy: list[int] = []
        self.in_training = False  # whether an optimizer at work owns some of the storages
        self.owned: Container[int] = ()  # identities of storages of optimizers and of guarded objects, lazy or not
        self.by_owner: weakref.WeakKeyDictionary[Any, tuple[int, Parameters]] = weakref.WeakKeyDictionary()
        """The bit of each owner, and its parameters at ``save()``."""
        self.frozen: list[tuple[int, TensorView, int, bool]] = []  # source, view, version, and whether it is lazy
        self.tensors_of: dict[int, tuple[torch.Tensor, ...]] = {}  # through which a storage is seen, by identity
        self.unseen: list[int] = []  # lazy, but the engine watches no pages of them
        # The tensors that view the unseen, the wrappers among them last; the source and the version of each.
        self.tensors: list[torch.Tensor] = []
        self.links: list[Link] = []  # of the wrappers
        self.source_of: list[int] = []
        self.versions: list[int] = []
        self.crcs: dict[int, int] = {}  # with audit, of the lazy sources
        if laziness is not None:
            self._make_lazy(laziness, located)

    def _make_lazy(self, laziness: Laziness, located: list[int] | None) -> None:
        ownership, identities = laziness.ownership, self.identities
        owners, frozen_at, self.in_training = laziness.decide(self.views, located)
        self.owners = array("Q", owners)
        self.lazy = list(compress(count(), owners))
        self.owned, self.by_owner = ownership.tensors, ownership.owners
        self.tensors_of = ownership.tensors | {identities[at]: (tensor,) for at, tensor in frozen_at.items()}
        # These must not change until they are copied. The engine watches host memory, if it can. For the rest, the
        # versions of the tensors that view it tell.
        watched = laziness.watched
        self.unseen = self.lazy if not watched else [s for s in self.lazy if located and located[s] != devices.HOST]
        seen_through = [self.tensors_of[identities[source]] for source in self.unseen]
        self.tensors = list(chain.from_iterable(seen_through))
        self.source_of = list(chain.from_iterable(map(repeat, self.unseen, map(len, seen_through))))
        # A write through a wrapper may move only the wrapper's version, a write to an inner tensor only that one's.
        wrapped = self.unseen if ownership.links else ()
        links = [(source, link) for source in wrapped for link in ownership.links.get(identities[source], ())]
        self.links = [link for _, link in links]
        self.source_of += [source for source, _ in links]
        self.tensors += [link.wrapper for link in self.links]
        self.versions = versions_of(self.tensors)
        self.frozen = [(at, self.views[at], frozen_at[at]._version, owners[at] != 0) for at in sorted(frozen_at)]
        self.crcs = self.checksums() if laziness.audit else {}

    def checksums(self) -> dict[int, int]:
        """The CRC-32 of each lazy source, as it is now."""
        copies = {s: devices.on_host(self.views.storages[s]) for s in self.lazy}
        return {s: _engine.crc32_at(copy.data_ptr(), self.sizes[s]) for s, copy in copies.items()}

    def moved(self, sources: list[int]) -> list[int]:
        """Those of ``sources`` whose storages have other memory now."""
        storages = [self.views.storages[source] for source in sources]
        now = zip(sources, map(devices.data_ptr, storages), storages, strict=True)
        return [
            source
            for source, p, storage in now
            if p != self.pointers[source] or storage.nbytes() != self.whole_sizes[source]
        ]

    def written(self, sources: list[int], versions: list[int]) -> list[int]:
        """Those of ``sources`` that were written to or exchanged since ``save()``, by the ``versions`` of now."""
        asked = set(sources)
        seen_through = zip(self.source_of, self.tensors, self.versions, versions, strict=True)
        direct = islice(seen_through, len(self.tensors) - len(self.links))  # the others are wrappers
        written = [
            source
            for source, tensor, before, version in direct
            # A tensor with another storage by this time proves nothing about this one.
            if (version != before or tensor.untyped_storage()._cdata != self.identities[source]) and source in asked
        ]
        written += [
            source
            for (source, _, before, version), link in zip(seen_through, self.links, strict=True)
            if (version != before or not link.holds()) and source in asked
        ]
        return list(dict.fromkeys(written))

    def release(self) -> None:
        """Drops its references to all tensors."""
        self.files, self.views, self._held, self.tensors, self.links = [], TensorViews(), [], [], []
        self.tensors_of, self.owned, self.frozen = {}, (), []
