"""Decides which storages of a checkpoint are copied lazily.

A storage is lazy if gated optimizers own all of it that is saved, stepped since the last save, are not inside a step,
and have evidence for it (evidence.py). It must be larger than 4 KiB, or 16 KiB if the kernel watches its pages.
``save()`` copies everything else before it returns: buffers, which change in forward; scalars; RNG state; the user's
tensors. Frozen parameters become lazy once two snapshots in a row found them unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import torch

from lazyckpt import devices
from lazyckpt.capture.frozen import FrozenParameters, frozen_parameters
from lazyckpt.capture.ownership import Ownership
from lazyckpt.capture.shared import may_be_shared
from lazyckpt.capture.torn import TornStorages
from lazyckpt.providers.base import TensorViews
from lazyckpt.providers.wrappers import storages_in

LAZY_MIN_BYTES = 4096
WATCHED_MIN_BYTES = 16 << 10  # smaller ones share pages with others, and are copied sooner than watched
FROZEN_MIN_BYTES = 8192  # more than any RNG state: modules are searched only for larger eager storages
FROZEN_BIT = 1 << 63  # together with the bits of optimizers that hold it in a group, although they do not train it


@dataclass
class Laziness:
    """Decides which storages of one checkpoint are lazy."""

    ownership: Ownership
    frozen: FrozenParameters
    modules: Iterable[torch.nn.Module]
    torn: TornStorages
    watched: bool  # the engine watches the pages of lazy host memory
    audit: bool  # compares checksums of the lazy storages, too

    def decide(self, views: TensorViews, located: list[int] | None) -> tuple[list[int], dict[int, torch.Tensor], bool]:
        """Decides for all storages. ``located`` is what ``devices.locate`` returned for them.

        Returns the bits of the owners that wait for each storage, 0 if it is eager; the frozen parameters by place,
        lazy or not; and whether an optimizer that has stepped since the save before owns
        some of the storages."""
        may_be_lazy = list(map(self.ownership.lazy_owners.get, views.identities, repeat(0)))
        if self.ownership.covered:
            claims = zip(may_be_lazy, views.identities, views.sizes, strict=True)
            may_be_lazy = [bits if n <= self.ownership.covered.get(i, n) else 0 for bits, i, n in claims]
        owners = [bits if nbytes > LAZY_MIN_BYTES else 0 for bits, nbytes in zip(may_be_lazy, views.sizes, strict=True)]
        found = _frozen_in(views, owners, self.modules, self.ownership)
        for at, tensor in found.items():
            if self.frozen.is_lazy(views[at], tensor):
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
            for at, shared in zip(on_host, may_be_shared([views.storages[at] for at in on_host]), strict=True):
                owners[at] = 0 if shared else owners[at]
        return owners, found, any(may_be_lazy)


def _frozen_in(
    views: TensorViews, owners: list[int], modules: Iterable[torch.nn.Module], ownership: Ownership
) -> dict[int, torch.Tensor]:
    """The frozen parameters among the storages without owners, by place."""
    eager = [at for at, bits in enumerate(owners) if not bits and views.sizes[at] > FROZEN_MIN_BYTES]
    if not eager:
        return {}
    frozen: dict[int, torch.Tensor] = {}
    for storages in storages_in(frozen_parameters(modules)):
        here = zip(storages.identities, storages.tensors, strict=True)
        frozen.update((identity, tensor) for identity, tensor in here if not tensor.is_inference())
    for identity in ownership.guarded:  # these change, although no optimizer trains them
        frozen.pop(identity, None)
    identities = views.identities
    return {at: frozen[identities[at]] for at in eager if identities[at] in frozen}
