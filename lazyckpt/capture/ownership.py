"""Finds out which optimizer owns which storage, and so must wait for its copy."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import repeat
from operator import or_
from typing import Any

import torch

from lazyckpt.capture.owners import Owned, Owners, Parameters, described
from lazyckpt.gate.evidence import Evidence, storages_of
from lazyckpt.providers.ranges import is_dense
from lazyckpt.providers.wrappers import Link, storages_in

_SHARED_BIT = 62  # owners beyond the 62nd share a bit: they wait for each other's storages, too


def _covered(tensors: Iterable[torch.Tensor]) -> int:
    """How many of the first bytes of a storage dense tensors cover together: all, if they are the views of a flat
    buffer or one transposed tensor; a part, if one is a shard in a padded storage."""
    end = 0
    for begin, size in sorted((t.storage_offset() * t.itemsize, t.nbytes) for t in tensors if is_dense(t)):
        if begin > end:
            break
        end = max(end, int(begin + size))
    return end


class Ownership:
    """The owners of storages at one instant. Storages are known by their ``_cdata``.

    Holds no tensor, but for ``links``."""

    def __init__(self, owners: Owners) -> None:
        # The bit and the parameters of each owner. Weak: an optimizer may die while its storages wait.
        self.owners: weakref.WeakKeyDictionary[Any, tuple[int, Parameters]] = weakref.WeakKeyDictionary()
        self.lazy_owners: dict[int, int] = {}  # the bits of the owners that wait for a storage; 0: it is eager
        self.covered: dict[int, int] = {}  # the first bytes of a storage that its owners have, if not all of it
        self.places: dict[int, tuple[int, ...]] = {}
        """The tensors through which its owners see a storage, by their places in ``Owners.tensors``."""
        self.links: dict[int, list[Link]] = {}  # the wrappers that hold a storage, if the engine does not watch all
        self.guarded: set[int] = set()  # storages of guarded objects
        self.frozen_owners: dict[int, int] = {}  # the bits of the owners of a storage with a frozen parameter of theirs
        # Storages that are more than one tensor of one optimizer, with bit, eligibility, place and wholeness of each.
        mixed: dict[int, list[tuple[int, bool, int, bool]]] = {}
        sizes: dict[int, int] = {}
        eager = set(owners.eager)
        end = 0
        for owned in owners.owned:
            first, end = end, end + sum(len(storages.tensors) for storages in owned.storages)
            bit = 1 << min(owned.number, _SHARED_BIT)
            try:
                parameters = described(owned.owner, owned.parameters)
                if not owned.guarded:
                    eager.update(self._eager(owners.evidence, owned, parameters[1], bit))
            except Exception as error:
                owners.warn(owned.owner, error)
                continue
            if parameters[0]:  # otherwise it may own any storage
                self.owners[owned.owner] = bit, parameters
            for storages in owned.storages:
                identities, whole = storages.identities, storages.seen.whole
                places = range(first, first := first + len(identities))
                if owned.guarded:
                    self.guarded.update(identities)
                for identity, through in storages.links.items():
                    self.links.setdefault(identity, []).extend(through)
                simple = 0 not in whole and len(set(identities)) == len(identities)
                if simple and self.places.keys().isdisjoint(identities) and mixed.keys().isdisjoint(identities):
                    self.lazy_owners.update(zip(identities, repeat(bit if owned.gated else 0)))
                    self.places.update(zip(identities, zip(places, strict=True), strict=True))
                    continue
                columns = zip(identities, places, storages.tensors, storages.seen.sizes, whole, strict=True)
                for identity, place, tensor, size, fills in columns:
                    claims = mixed.setdefault(identity, [])
                    if identity in self.places:  # another owner has all of it, too
                        bits = self.lazy_owners.pop(identity)
                        claims.append((bits, bits != 0, self.places.pop(identity)[0], True))
                    claims.append((bit, owned.gated and not tensor.is_inference(), place, bool(fills)))
                    sizes[identity] = size
        for identity, claims in mixed.items():
            bits_of_all, eligible, seen_through, filling = zip(*claims, strict=True)
            covered = sizes[identity] if any(filling) else _covered(map(owners.tensors.__getitem__, seen_through))
            if covered < sizes[identity]:
                self.covered[identity] = covered
            self.lazy_owners[identity] = reduce(or_, bits_of_all) if all(eligible) else 0
            self.places[identity] = seen_through
        self.lazy_owners.update((identity, 0) for identity in eager if identity in self.lazy_owners)

    def _eager(self, evidence: Evidence, owned: Owned, at: Sequence[int], bit: int) -> list[int]:
        """The storages of parameters without evidence, and of their state. ``at``: the addresses of the parameters."""
        without = evidence.without(owned.owner, owned.parameters, at)
        if not without:
            return []
        for storages in storages_in([p for p in without if not p.requires_grad]):
            for identity in storages.identities:
                self.frozen_owners[identity] = self.frozen_owners.get(identity, 0) | bit
        return storages_of(owned.owner, without)
