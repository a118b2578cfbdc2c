"""Which optimizer owns which storage, and so who has to wait for its copy."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch

from lazyckpt import _engine
from lazyckpt.gate import Gate, Guarded

_SHARED_BIT = 62  # owners beyond the 62nd share a bit: they wait for each other's storages, too


class _Claim(NamedTuple):
    """What optimizers say of one storage that is not simply one tensor of one of them."""

    owners: int  # bits
    eligible: bool  # all of them are gated
    tensors: tuple[torch.Tensor, ...]
    whole: bool  # a contiguous one fills it

    def join(self, other: _Claim) -> _Claim:
        return _Claim(
            self.owners | other.owners,
            self.eligible and other.eligible,
            (*self.tensors, *other.tensors),
            self.whole or other.whole,
        )

    def lazy_owners(self, nbytes: int) -> int:
        return self.owners if self.eligible and (self.whole or _fill(self.tensors, nbytes)) else 0


def _fill(tensors: Iterable[torch.Tensor], nbytes: int) -> bool:
    """Whether they fill a storage together: views of a flat buffer, or one in another order of dimensions."""
    parts = {t.data_ptr(): t.nbytes for t in tensors}
    return sum(parts.values()) == nbytes and all(map(_is_dense, tensors))


class Ownership:
    """Which optimizer owns which storage, at one instant. Storages are known by their ``_cdata``."""

    def __init__(self, gate: Gate, steps_before: dict[int, int]) -> None:
        # The bit of each owner, and the parameters it had. Weakly held: an optimizer may die while its storages wait.
        self.owners: weakref.WeakKeyDictionary[Any, tuple[int, list[int]]] = weakref.WeakKeyDictionary()
        self.steps: dict[int, int] = {}
        self.lazy_owners: dict[int, int] = {}  # the bits of the owners that a storage waits for; 0: it is eager
        self.tensors: dict[int, tuple[torch.Tensor, ...]] = {}  # through which its owners see a storage
        mixed: dict[int, _Claim] = {}
        sizes: dict[int, int] = {}
        inside_step = gate.inside_step()
        for number, (owner, steps) in enumerate(list(gate.steps.items())):
            bit = 1 << min(number, _SHARED_BIT)
            self.owners[owner] = bit, parameters_of(owner)
            self.steps[id(owner)] = steps
            gated = not inside_step and steps != steps_before.get(id(owner), 0) and gate.replayed.get(owner, True)
            gated = gated and not _writes_outside_step(owner)
            tensors, identities, nbytes, whole = _storages_of(owner)
            simple = 0 not in whole and len(set(identities)) == len(identities)
            if simple and self.tensors.keys().isdisjoint(identities) and mixed.keys().isdisjoint(identities):
                self.lazy_owners.update(zip(identities, repeat(bit if gated else 0)))
                self.tensors.update(zip(identities, zip(tensors, strict=True), strict=True))
                continue
            for identity, tensor, size, fills in zip(identities, tensors, nbytes, whole, strict=True):
                claim = _Claim(bit, gated and not tensor.is_inference(), (tensor,), bool(fills))
                if identity in self.tensors:  # another owner has it, too
                    bits = self.lazy_owners.pop(identity)
                    claim = _Claim(bits, bits != 0, self.tensors.pop(identity), True).join(claim)
                elif identity in mixed:
                    claim = mixed[identity].join(claim)
                mixed[identity] = claim
                sizes[identity] = size
        for identity, claim in mixed.items():
            self.lazy_owners[identity] = claim.lazy_owners(sizes[identity])
            self.tensors[identity] = claim.tensors


def _writes_outside_step(owner: Any) -> bool:
    """Whether its parameters change in forward or backward, too: they are gathered there from other ranks (Apex), or
    stepped on and broadcast (torch's ZeroRedundancyOptimizer in overlap with DDP)."""
    gathers = any(cls.__module__.startswith("apex.contrib.optimizers.") for cls in type(owner).__mro__)
    return gathers or getattr(owner, "_overlap_with_ddp", False)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill numel x itemsize bytes of memory without overlap."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def parameters_of(owner: Any) -> list[int]:
    """Which tensors an owner is for, by identity; they are alive as long as it is."""
    if isinstance(owner, Guarded):
        return [id(owner.obj)]
    return [id(parameter) for group in owner.param_groups for parameter in group["params"]]


def _storages_of(owner: Any) -> tuple[list[torch.Tensor], list[int], list[int], bytes]:
    """The tensors that an optimizer or a guarded object owns; identity and bytes of the storage of each; and whether it
    fills that, simply."""
    if not isinstance(owner, Guarded):
        return _engine.storages_in([[group["params"] for group in owner.param_groups], owner.state])
    obj = owner.obj
    return _engine.storages_in(list(obj.parameters()) if isinstance(obj, torch.nn.Module) else obj.state_dict())
