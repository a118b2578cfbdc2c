"""Evidence that training writes to a parameter only in its optimizer's step.

Membership in ``param_groups`` proves nothing: momentum encoders and parameters that gradient hooks update are members,
too. A parameter earns lazy copies when it has a gradient at a gate of its optimizer. It keeps them until it is frozen
or gets other memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from lazyckpt.providers.wrappers import address_inside, storages_in

_MAX_KNOWN = 1024  # of one optimizer
_requires_grad = attrgetter("requires_grad")


def parameters_in_groups(optimizer: Any) -> list[torch.Tensor]:
    """Returns the tensors in the optimizer's groups. The code of a foreign optimizer may raise any error here."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    """Returns the address of each tensor's memory: for a wrapper one number for all memory inside, 0 for none."""
    with torch._C.DisableTorchFunction():  # a mode such as torch.device(…) would make this take 16 times as long
        try:
            found = list(map(torch.Tensor.data_ptr, tensors))
        except (RuntimeError, TypeError):  # one of them is sparse or fake
            return list(map(_address, tensors))
    if 0 in found:  # wrappers: combine the addresses of the tensors inside
        found = [at or _address(tensor) for at, tensor in zip(found, tensors, strict=True)]
    return found


def _address(tensor: torch.Tensor) -> int:
    try:
        at = torch.Tensor.data_ptr(getattr(tensor, "_local_tensor", tensor))  # a DTensor's, mostly: the quickest way
    except (RuntimeError, TypeError):
        at = 0
    return at or address_inside(tensor)


class Evidence:
    """The parameters that have earned lazy copies. One per gate.

    It holds no parameter, not even weakly: torch.utils.swap_tensors refuses a tensor with weak references. Entries die
    with their optimizer, which keeps its parameters alive."""

    def __init__(self) -> None:
        # By optimizer: its parameters that had a gradient, by identity, and where their memory was.
        self._earned: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        # By optimizer and groups: the places (group, number) of the parameters without evidence, at which steps look.
        # An optimizer may step with a part of its groups at a time, as ZeRO does.
        self._waiting: weakref.WeakKeyDictionary[Any, dict[Hashable, list[tuple[int, int]]]] = (
            weakref.WeakKeyDictionary()
        )
        self._embeddings: weakref.WeakSet[Any] = weakref.WeakSet()
        self.generation = 0  # grows whenever parameters may have earned or lost their evidence

    def look(self, optimizer: Any) -> None:
        """Notes which parameters have a gradient now. Call it between backward and the optimizer's write.

        Never fails: if a foreign optimizer raises, its parameters earn no evidence."""
        with contextlib.suppress(Exception):
            self._look(optimizer)

    def _look(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        known = self._waiting.setdefault(optimizer, {})
        members = _members(groups)
        waiting = known.get(members)
        if waiting is None:
            mine = self._earned.setdefault(optimizer, {})
            waiting = _places(groups, mine)
            if len(known) == _MAX_KNOWN:
                known.clear()
        elif not waiting:
            return
        earned, others = [], []
        with torch._C.DisableTorchFunction():
            for group, number in waiting:
                parameter = groups[group]["params"][number]
                if parameter.requires_grad and parameter.is_leaf and parameter.grad is not None:
                    earned.append(parameter)
                else:
                    others.append((group, number))
        if earned:
            self.generation += 1
        known[members] = others
        self._earned.setdefault(optimizer, {}).update(zip(map(id, earned), addresses(earned), strict=True))

    def without(self, optimizer: Any, tensors: list[torch.Tensor], at: Sequence[int]) -> list[torch.Tensor]:
        """Returns those of these parameters, with their present addresses, that have no evidence.

        The next steps of the optimizer look at them again."""
        mine = self._earned.get(optimizer, {})
        if len(mine) > len(tensors):  # others were removed, and may be freed
            members = set(map(id, tensors))
            for key in mine.keys() - members:
                del mine[key]
            self._waiting.pop(optimizer, None)
            self.generation += 1
        others = [table for table in list(self._earned.values()) if table is not mine]
        eager = []
        with torch._C.DisableTorchFunction():
            for tensor, address, trained in zip(tensors, at, map(_requires_grad, tensors), strict=True):
                key = id(tensor)
                earned = mine.get(key) == address or any(table.get(key) == address for table in others)
                if not earned or not trained:
                    eager.append(tensor)
        if eager:
            wanted = set(map(id, eager))
            if not wanted.isdisjoint(mine):
                self.generation += 1
            for key in wanted:
                mine.pop(key, None)
            self._waiting.pop(optimizer, None)
        return eager

    @contextlib.contextmanager
    def kept(self, optimizer: Any) -> Iterator[None]:
        """A context in which parameters keep their evidence although the optimizer moves them. Never fails."""
        before = _memory_of(optimizer)
        try:
            yield
        finally:
            after = _memory_of(optimizer)
            moved = [(key, old, after[key]) for key, old in before.items() if after.get(key, old) != old]
            if moved:
                self.generation += 1
            for table in list(self._earned.values()) if moved else ():
                table.update((key, new) for key, old, new in moved if table.get(key) == old)

    def watch(self, module: torch.nn.Module) -> None:
        """Notes the parts that may write to their parameters in forward: embeddings, with ``max_norm``."""
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        self._embeddings.update(part for part in module.modules() if isinstance(part, kinds))

    def eager_storages(self) -> set[int]:
        """Returns the storages (``_cdata``) that are eager despite any evidence."""
        return set(_storages([part.weight for part in list(self._embeddings) if part.max_norm is not None]))


def storages_of(optimizer: Any, tensors: list[torch.Tensor]) -> list[int]:
    """Returns the storages of these parameters, and of the state that the optimizer keeps for each of them alone."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, dict) or isinstance(
        optimizer, torch.optim.LBFGS
    ):  # LBFGS keeps all state for its first parameter
        state = {}
    return _storages([tensors, [state.get(tensor) for tensor in tensors]])


def _members(groups: Any) -> Hashable:
    """What tells these groups from others of the same optimizer, at no cost for each parameter."""
    columns = [group["params"] for group in groups]
    return tuple((len(column), id(column[0]), id(column[-1])) if column else None for column in columns)


def _places(groups: Any, earned: Container[int]) -> list[tuple[int, int]]:
    """The places of the trained parameters without evidence."""
    with torch._C.DisableTorchFunction():
        return [
            (group, number)
            for group, members in enumerate(groups)
            for number, parameter in enumerate(members["params"])
            if parameter.requires_grad and id(parameter) not in earned
        ]


def _memory_of(optimizer: Any) -> dict[int, int]:
    """The address of each of the optimizer's parameters; nothing for a foreign optimizer that raises."""
    try:
        parameters = parameters_in_groups(optimizer)
        return dict(zip(map(id, parameters), addresses(parameters), strict=True))
    except Exception:
        return {}


def _storages(tree: Any) -> list[int]:
    return [identity for storages in storages_in(tree) for identity in storages.identities]
