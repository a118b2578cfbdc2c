"""What each owner has at one instant: the facts from which ownership.py tells who must wait for which storage."""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from lazyckpt.gate import averages
from lazyckpt.gate.evidence import addresses, parameters_in_groups
from lazyckpt.gate.exclusion import Guarded
from lazyckpt.gate.foreign import warn_of_foreign
from lazyckpt.gate.gate import Gate
from lazyckpt.providers.wrappers import Storages, storages_in

_requires_grad = attrgetter("requires_grad")

Parameters = tuple["array[int]", "array[int]"]  # the tensors of an owner, by id, and their addresses


@dataclass
class Owned:
    """What one owner has."""

    owner: Any
    number: int  # among the owners, the newest first
    gated: bool  # its steps wait for saves, and nothing else writes
    guarded: bool  # a guarded object or a known average, no optimizer
    parameters: list[torch.Tensor]
    trained: list[bool]  # requires_grad of each
    storages: list[Storages]

    def facts(self) -> Any:
        """All that ownership depends on, without any tensor."""
        seen = [storages.seen for storages in self.storages]
        return self.number, self.gated, self.guarded, array("Q", map(id, self.parameters)), bytes(self.trained), seen


class Owners:
    """The owners at one instant, the newest first: those of earlier runs may live on as garbage."""

    def __init__(self, gate: Gate, steps_before: dict[int, int], *, watched: bool = True) -> None:
        """``watched``: the engine watches pages, so it finds unexpected writes."""
        self.owned: list[Owned] = []
        self.steps: dict[int, int] = {}
        self.evidence = gate.evidence
        self.generation = gate.evidence.generation
        self._raised: list[Any] = []
        owners, self.eager = gate.owners()
        """The storages that are eager despite their owners."""
        inside_step = gate.inside_step()
        for number, (owner, steps) in enumerate(reversed(owners)):
            self.steps[id(owner)] = steps
            try:
                parameters = _parameters(owner)
                with torch._C.DisableTorchFunction():
                    trained = list(map(_requires_grad, parameters))
                known = averages.is_known(owner)
                storages = _storages_of(owner, parameters)
                seen = watched and all(level.seen.is_on_host for level in storages)
                if not seen:  # versions are the witness
                    storages = _storages_of(owner, parameters, links=True)
                # If an optimizer does not step, something else may train its parameters. Hardly anything else writes to
                # a known average, however seldom it is updated, and the kernel finds such writes.
                gated = steps != steps_before.get(id(owner), 0) or (known and seen)
                gated = gated and not inside_step and gate.replayed.get(owner, True) and not _writes_outside_step(owner)
            except Exception as error:
                self.warn(owner, error)
                continue
            guarded = known or isinstance(owner, Guarded)
            self.owned.append(Owned(owner, number, gated, guarded, parameters, trained, storages))

    def warn(self, owner: Any, error: Exception) -> None:
        """Warns of an owner that raises: it may own any storage, so it makes none lazy."""
        self._raised.append(owner)
        warn_of_foreign(owner.obj if isinstance(owner, Guarded) else owner, error)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of all owners, one owner after the other."""
        return list(chain.from_iterable(s.tensors for owned in self.owned for s in owned.storages))

    def facts(self) -> Any:
        """All that ownership depends on, without any tensor; None if that is not known."""
        linked = any(storages.links for owned in self.owned for storages in owned.storages)
        if linked:
            return None
        refs = [weakref.ref(owner) for owner in (*(owned.owner for owned in self.owned), *self._raised)]
        return refs, len(self._raised), self.eager, self.generation, [owned.facts() for owned in self.owned]


def parameters_of(owner: Any) -> Parameters:
    """Returns the tensors that an owner has now, and their addresses."""
    return described(owner, _parameters(owner))


def described(owner: Any, parameters: list[torch.Tensor]) -> Parameters:
    guarded = _guarded(owner)
    identities = list(map(id, parameters)) if guarded is None else [id(guarded)]
    return array("Q", identities), array("q", addresses(parameters))


def _writes_outside_step(owner: Any) -> bool:
    """Whether the owner's parameters also change in forward or backward: Apex gathers them there from other ranks;
    torch's ZeroRedundancyOptimizer, overlapping with DDP, steps and broadcasts there."""
    of_zero = any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(owner).__mro__)
    gathers = any(cls.__module__.startswith("apex.contrib.optimizers.") for cls in type(owner).__mro__)
    return gathers or getattr(owner, "_overlap_with_ddp", of_zero)


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
