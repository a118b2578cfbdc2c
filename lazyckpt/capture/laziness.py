"""Decides which storages of a checkpoint are copied lazily.

A storage is lazy if gated optimizers own all of it that is saved, stepped since the last save, are not inside a step,
and have evidence for it (evidence.py). It must be larger than 4 KiB, or 16 KiB if the kernel watches its pages.
``save()`` copies everything else before it returns: buffers, which change in forward; scalars; RNG state; the user's
tensors. Frozen parameters become lazy once two snapshots in a row found them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from operator import add

from lazyckpt import devices
from lazyckpt.capture.frozen import Frozen, FrozenParameters
from lazyckpt.capture.ownership import Ownership
from lazyckpt.capture.shared import may_be_shared
from lazyckpt.capture.torn import TornStorages
from lazyckpt.providers.base import TensorViews

LAZY_MIN_BYTES = 4096
WATCHED_MIN_BYTES = 16 << 10  # smaller ones share pages with others, and are copied sooner than watched
FROZEN_MIN_BYTES = 8192  # more than any RNG state: modules are searched only for larger eager storages
FROZEN_BIT = 1 << 63  # together with the bits of optimizers that hold it in a group, although they do not train it


@dataclass
class Laziness:
    """Decides which storages of one checkpoint are lazy."""

    ownership: Ownership
    frozen: FrozenParameters
    frozen_here: Frozen  # in the modules of the Saver
    torn: TornStorages
    watched: bool  # the engine watches the pages of lazy host memory
    searched: bool = field(default=False, init=False)  # whether the decision depends on frozen parameters
    private: list[int] = field(default_factory=list, init=False)  # and the storages that must not be shared

    def decide(self, views: TensorViews, located: list[int] | None) -> tuple[list[int], dict[int, int], bool]:
        """Decides for all storages. ``located`` is what ``devices.locate`` returned for them.

        Returns the bits of the owners that wait for each storage, 0 if it is eager; the frozen parameters, lazy or not,
        by the place of the storage: their places in ``frozen_here``; and whether an optimizer that has stepped since
        the save before owns some of the storages."""
        may_be_lazy = list(map(self.ownership.lazy_owners.get, views.identities, repeat(0)))
        if self.ownership.covered:
            ends = views.sizes if views.offsets is None else list(map(add, views.offsets, views.sizes))
            claims = zip(may_be_lazy, views.identities, ends, strict=True)
            may_be_lazy = [bits if n <= self.ownership.covered.get(i, n) else 0 for bits, i, n in claims]
        owners = [bits if nbytes > LAZY_MIN_BYTES else 0 for bits, nbytes in zip(may_be_lazy, views.sizes, strict=True)]
        found = self._frozen_in(views, owners)
        for at, place in found.items():
            if self.frozen.is_lazy(views[at], self.frozen_here.tensors[place]):
                owners[at] = FROZEN_BIT | self.ownership.frozen_owners.get(views.identities[at], 0)
        owners = self.torn.without(owners, views.identities)
        if located is not None:  # torch copies these now
            owners = [0 if device == devices.ELSEWHERE else bits for device, bits in zip(located, owners, strict=True)]
        if self.watched:
            hosts = repeat(True) if located is None else map(devices.HOST.__eq__, located)
            owners = [
                0 if host and nbytes <= WATCHED_MIN_BYTES else bits
                for host, nbytes, bits in zip(hosts, views.sizes, owners, strict=located is not None)
            ]
        else:  # another process may write to shared memory; the page witness refuses it by itself
            columns = zip(owners, views.devices, strict=True)
            on_host = [at for at, (bits, device) in enumerate(columns) if bits and device.type == "cpu"]
            host = views.take(on_host)
            shared = may_be_shared(host.storages, host.identities, list(host.pointers))
            self.private = [at for at, is_shared in zip(on_host, shared, strict=True) if not is_shared]
            for at in set(on_host).difference(self.private):
                owners[at] = 0
        return owners, found, any(may_be_lazy)

    def _frozen_in(self, views: TensorViews, owners: list[int]) -> dict[int, int]:
        """The frozen parameters among the storages without owners."""
        eager = [at for at, bits in enumerate(owners) if not bits and views.sizes[at] > FROZEN_MIN_BYTES]
        if not eager:
            return {}
        self.searched = True
        frozen = self.frozen_here.places()
        for identity in self.ownership.guarded:  # these change, although no optimizer trains them
            frozen.pop(identity, None)
        identities = views.identities
        return {at: frozen[identities[at]] for at in eager if identities[at] in frozen}
