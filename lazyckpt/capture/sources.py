"""The storages of one checkpoint, and the tensors whose versions tell whether the lazy ones stay the same.

``save()`` makes them before the engine has the checkpoint. decision.py decides which storages are lazy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from operator import add

import torch

from lazyckpt import _engine, devices
from lazyckpt.capture.decision import Decision
from lazyckpt.capture.versions import versions_of
from lazyckpt.providers.base import TensorViews


class Sources:
    """The storages of one checkpoint, file after file: the engine calls storage *i* source *i*. A storage that two
    files hold is two sources."""

    def __init__(
        self, decision: Decision, files: list[TensorViews], tensors: list[torch.Tensor], *, audit: bool = False
    ) -> None:
        """``files``: those of ``decision`` with their storages of now. ``tensors``: those of the owners, and then the
        frozen parameters. With ``audit``, the lazy sources get checksums."""
        self.decision = decision
        self.files = files
        self.views = TensorViews.joined(files)
        self.identities, self.sizes, self.owners = self.views.identities, decision.sizes, decision.owners
        self.lazy, self.in_training, self.owned = decision.lazy, decision.in_training, decision.owned
        self.pointers, self.devices, self.streams, self._held, self.cuda = devices.sources(
            self.views.storages, self.views.pointers, decision.located
        )
        self._offsets = self.views.offsets
        if self._offsets is not None:
            self.pointers = array("Q", map(add, self.pointers, self._offsets))
        whole_sizes = decision.whole_sizes
        self.whole_sizes = whole_sizes or array("Q", map(torch.UntypedStorage.nbytes, self.views.storages))
        self._pool = tensors
        self.frozen = [(at, tensors[place]._version, self.owners[at] != 0) for at, place in decision.frozen]
        """Source, version, and whether it is lazy."""
        # The tensors that view the unseen sources, the wrappers among them last, and their versions.
        self.tensors = [tensors[place] for place in decision.seen_at] + [link.wrapper for link in decision.links]
        self.versions = versions_of(self.tensors)
        self.crcs = self.checksums() if audit else {}
        """Of the lazy sources."""

    def seen_through(self, source: int) -> list[torch.Tensor]:
        """The tensors through which training sees a source."""
        return [self._pool[place] for place in self.decision.places.of(self.identities[source])]

    def checksums(self) -> dict[int, int]:
        """The CRC-32 of each lazy source, as it is now."""
        lazy = {self.identities[s]: self.views.storages[s] for s in self.lazy}
        copies = {identity: devices.on_host(storage) for identity, storage in lazy.items()}
        begins = {s: copies[self.identities[s]].data_ptr() + self._offset(s) for s in self.lazy}
        return {s: _engine.crc32_at(begin, self.sizes[s]) for s, begin in begins.items()}

    def _offset(self, source: int) -> int:
        return 0 if self._offsets is None else self._offsets[source]

    def moved(self, sources: list[int]) -> list[int]:
        """Those of ``sources`` whose storages have other memory now."""
        storages = [self.views.storages[source] for source in sources]
        now = zip(sources, map(devices.data_ptr, storages), storages, strict=True)
        return [
            source
            for source, p, storage in now
            if p + self._offset(source) != self.pointers[source] or storage.nbytes() != self.whole_sizes[source]
        ]

    def written(self, sources: list[int], versions: Sequence[int]) -> list[int]:
        """Those of ``sources`` that were written to or exchanged since ``save()``, by the ``versions`` of now."""
        asked = set(sources)
        links = self.decision.links
        seen_through = zip(self.decision.source_of, self.tensors, self.versions, versions, strict=True)
        direct = islice(seen_through, len(self.tensors) - len(links))  # the others are wrappers
        written = [
            source
            for source, tensor, before, version in direct
            # A tensor with another storage by this time proves nothing about this one.
            if (version != before or tensor.untyped_storage()._cdata != self.identities[source]) and source in asked
        ]
        written += [
            source
            for (source, _, before, version), link in zip(seen_through, links, strict=True)
            if (version != before or not link.holds()) and source in asked
        ]
        return list(dict.fromkeys(written))

    def release(self) -> None:
        """Drops its references to all tensors."""
        self.files, self.views, self._held, self.tensors, self._pool = [], TensorViews(), [], [], []
        self.decision = Decision([], [], None)
        self.owned, self.frozen = b"", []
