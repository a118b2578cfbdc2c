"""Finds out which optimizer owns which storage, and so must wait for its copy."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import reduce
from itertools import repeat
from operator import or_
from typing import Any

import torch

from lazyckpt.gate import averages
from lazyckpt.gate.evidence import addresses, parameters_in_groups, storages_of
from lazyckpt.gate.exclusion import Guarded
from lazyckpt.gate.foreign import warn_of_foreign
from lazyckpt.gate.gate import Gate
from lazyckpt.providers.ranges import is_dense
from lazyckpt.providers.wrappers import Link, Storages, storages_in

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


Parameters = tuple[list[int], list[int]]  # the tensors of an owner, by id, and their addresses


class Ownership:
    """The owners of storages at one instant. Storages are known by their ``_cdata``."""

    def __init__(self, gate: Gate, steps_before: dict[int, int], *, watched: bool = True) -> None:
        """``watched``: the engine watches pages, so it finds unexpected writes."""
        # The bit and the parameters of each owner. Weak: an optimizer may die while its storages wait.
        self.owners: weakref.WeakKeyDictionary[Any, tuple[int, Parameters]] = weakref.WeakKeyDictionary()
        self.steps: dict[int, int] = {}
        self.lazy_owners: dict[int, int] = {}  # the bits of the owners that wait for a storage; 0: it is eager
        self.covered: dict[int, int] = {}  # the first bytes of a storage that its owners have, if not all of it
        self.tensors: dict[int, tuple[torch.Tensor, ...]] = {}  # the tensors through which its owners see a storage
        self.links: dict[int, list[Link]] = {}  # the wrappers that hold a storage, if the engine does not watch all
        self.guarded: set[int] = set()  # storages of guarded objects
        self.frozen_owners: dict[int, int] = {}  # the bits of the owners of a storage with a frozen parameter of theirs
        owners, eager = gate.owners()
        # Storages that are more than one tensor of one optimizer, with bit, eligibility, tensor and wholeness of each.
        mixed: dict[int, list[tuple[int, bool, torch.Tensor, bool]]] = {}
        sizes: dict[int, int] = {}
        inside_step = gate.inside_step()
        newest_first = reversed(owners)  # those of earlier runs may live on as garbage
        for number, (owner, steps) in enumerate(newest_first):
            bit = 1 << min(number, _SHARED_BIT)
            self.steps[id(owner)] = steps
            try:
                parameters = _parameters(owner)
                described = _described(owner, parameters)
                known = averages.is_known(owner)
                guarded = known or isinstance(owner, Guarded)
                if not guarded:
                    eager.update(self._eager(gate, owner, parameters, described[1], bit))
                owned = _storages_of(owner, parameters)
                if not (seen := watched and _are_on_host(owned)):  # versions are the witness
                    owned = _storages_of(owner, parameters, links=True)
                # If an optimizer does not step, something else may train its parameters. Hardly anything else writes to
                # a known average, however seldom it is updated, and the kernel finds such writes.
                gated = steps != steps_before.get(id(owner), 0) or (known and seen)
                gated = gated and not inside_step and gate.replayed.get(owner, True) and not _writes_outside_step(owner)
            except Exception as error:  # it may own any storage, so it makes none lazy
                warn_of_foreign(owner.obj if isinstance(owner, Guarded) else owner, error)
                continue
            if described[0]:  # otherwise it may own any storage
                self.owners[owner] = bit, described
            for tensors, identities, nbytes, whole, links in owned:
                if guarded:
                    self.guarded.update(identities)
                for identity, through in links.items():
                    self.links.setdefault(identity, []).extend(through)
                simple = 0 not in whole and len(set(identities)) == len(identities)
                if simple and self.tensors.keys().isdisjoint(identities) and mixed.keys().isdisjoint(identities):
                    self.lazy_owners.update(zip(identities, repeat(bit if gated else 0)))
                    self.tensors.update(zip(identities, zip(tensors, strict=True), strict=True))
                    continue
                for identity, tensor, size, fills in zip(identities, tensors, nbytes, whole, strict=True):
                    claims = mixed.setdefault(identity, [])
                    if identity in self.tensors:  # another owner has all of it, too
                        bits = self.lazy_owners.pop(identity)
                        claims.append((bits, bits != 0, self.tensors.pop(identity)[0], True))
                    claims.append((bit, gated and not tensor.is_inference(), tensor, bool(fills)))
                    sizes[identity] = size
        for identity, claims in mixed.items():
            bits_of_all, eligible, seen_through, filling = zip(*claims, strict=True)
            covered = sizes[identity] if any(filling) else _covered(seen_through)
            if covered < sizes[identity]:
                self.covered[identity] = covered
            self.lazy_owners[identity] = reduce(or_, bits_of_all) if all(eligible) else 0
            self.tensors[identity] = seen_through
        self.lazy_owners.update((identity, 0) for identity in eager if identity in self.lazy_owners)

    def _eager(self, gate: Gate, owner: Any, parameters: list[torch.Tensor], at: list[int], bit: int) -> list[int]:
        """The storages of parameters without evidence, and of their state."""
        without = gate.evidence.without(owner, parameters, at)
        if not without:
            return []
        for storages in storages_in([p for p in without if not p.requires_grad]):
            for identity in storages.identities:
                self.frozen_owners[identity] = self.frozen_owners.get(identity, 0) | bit
        return storages_of(owner, without)


def _are_on_host(owned: list[Storages]) -> bool:
    return all(tensor.is_cpu for storages in owned for tensor in storages.tensors)


def _writes_outside_step(owner: Any) -> bool:
    """Whether the owner's parameters also change in forward or backward: Apex gathers them there from other ranks;
    torch's ZeroRedundancyOptimizer, overlapping with DDP, steps and broadcasts there."""
    gathers = any(cls.__module__.startswith("apex.contrib.optimizers.") for cls in type(owner).__mro__)
    return gathers or getattr(owner, "_overlap_with_ddp", False)


def parameters_of(owner: Any) -> Parameters:
    """Returns the tensors that an owner has now, and their addresses."""
    return _described(owner, _parameters(owner))


def _described(owner: Any, parameters: list[torch.Tensor]) -> Parameters:
    guarded = _guarded(owner)
    identities = list(map(id, parameters)) if guarded is None else [id(guarded)]
    return identities, addresses(parameters)


def _guarded(owner: Any) -> Any:
    """The guarded object or known average behind an owner; None for an optimizer."""
    return owner.obj if isinstance(owner, Guarded) else owner if averages.is_known(owner) else None


def _parameters(owner: Any) -> list[torch.Tensor]:
    guarded = _guarded(owner)
    if guarded is None:
        return parameters_in_groups(owner)
    holder = averages.holder_of(guarded)
    return list(holder.parameters()) if isinstance(holder, torch.nn.Module) else []


def _storages_of(owner: Any, parameters: list[torch.Tensor], *, links: bool = False) -> list[Storages]:
    """The storages that an optimizer, an average or a guarded object owns."""
    guarded = _guarded(owner)
    if guarded is None:
        return storages_in([parameters, getattr(owner, "state", None)], links=links)
    holder = averages.holder_of(guarded)
    has_parameters = holder is None or isinstance(holder, torch.nn.Module)
    return storages_in(parameters if has_parameters else holder.state_dict(), links=links)
