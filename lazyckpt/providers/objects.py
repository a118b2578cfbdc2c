"""``StateProvider``, the base of all providers: turns a state into opcodes and storages (pickles.py), and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import Landing, StorageTable
from lazyckpt.providers.pickles import Skeleton, dict_opcodes
from lazyckpt.providers.restorable import UnrestorableError, refuse_unreadable
from lazyckpt.providers.sharded import ShardedTensorError


class StateProvider(ABC):
    """The base of your own providers: return the state, and take it back.

    Derive, implement ``state`` and ``load_state``, hand an instance to ``Checkpointer.track``. Tensors of the state
    that an optimizer owns may be copied after ``save()`` has returned, and its next step waits for that. All others are
    copied before ``save()`` returns.
    """

    values_are_apart = False
    """Whether the state is a dict by strings whose values share no object. Each value then has a pickle of its own, so
    a value that changes does not cost the others theirs."""

    def __init__(self) -> None:
        self._skeletons: dict[str | None, Skeleton] = {}

    @abstractmethod
    def state(self) -> Any:
        """Returns the present state: anything that ``torch.save`` takes. Tensors may alias live ones; objects are
        pickled at once. Must not depend on anything that ``save()`` changes."""

    @abstractmethod
    def load_state(self, state: Any) -> None:
        """Takes back a state that ``state`` returned."""

    def opcodes(self, table: StorageTable) -> bytes:
        """Pickles the state as it is now, and adds its storages to ``table``. Called inside ``save()``.

        The opcodes (protocol 2, without PROTO and STOP) leave one object on the unpickler's stack. Raises pickle's
        errors, and UnrestorableError."""
        return self.opcodes_of(self.state(), table)

    def opcodes_of(self, state: Any, table: StorageTable) -> bytes:
        kept = self.__dict__.get("_skeletons", {})  # also where __init__ was not called
        apart = self.values_are_apart and type(state) is dict and state
        parts: dict[Any, Any] = state if apart else {None: state}
        self._skeletons = {key: kept.get(key) or Skeleton() for key in parts}
        opcodes = {}
        for key, value in parts.items():
            try:
                opcodes[key] = self._skeletons[key].opcodes(value, table)
            except ShardedTensorError as error:
                raise (error.inside(key) if apart else error) from None
        self._refuse_unreadable(parts, table)
        self.refuse_untakable(state)
        return dict_opcodes(opcodes) if apart else opcodes[None]

    def _refuse_unreadable(self, parts: dict[Any, Any], table: StorageTable) -> None:
        for key, skeleton in self._skeletons.items():
            if not skeleton.kinds.keys() <= skeleton.accepted.keys():
                refuse_unreadable(parts[key], key or "", skeleton.pickled, table)
                skeleton.accepted |= skeleton.kinds

    def refuse_untakable(self, state: Any) -> None:
        """Raises UnrestorableError if what ``state()`` has returned would not be taken back, though it can be read.
        Called inside every ``save()``."""
        return None

    def landings(self, saved: Any) -> list[Landing]:
        """Checks ``saved`` against the live state, before a byte of it is read; says what may land in place.

        ``saved`` is the unpickled state, its tensors allocated but not filled. Raises ``RestoreError`` that lists every
        missing, unexpected and misshapen entry."""
        return []

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        """Takes over ``saved``, whose tensors are filled now, except those in ``landed`` (by ``id`` of the saved
        tensor), whose bytes are in the live tensor that it maps to."""
        self.load_state(saved)


class StatefulProvider(StateProvider):
    """Anything with ``state_dict()`` and ``load_state_dict()``: schedulers, loaders, scalers, metrics."""

    def __init__(self, obj: Any) -> None:
        super().__init__()
        self.obj = obj

    def state(self) -> Any:
        return self.obj.state_dict()

    def load_state(self, state: Any) -> None:
        self.obj.load_state_dict(state)


class TensorProvider(StateProvider):
    """A single tensor, restored in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def state(self) -> torch.Tensor:
        return self._tensor.detach()

    def refuse_untakable(self, state: torch.Tensor) -> None:
        if (why := unfillable(state)) is not None:
            raise UnrestorableError("", f"is {why}")

    def landings(self, saved: Any) -> list[Landing]:
        if not isinstance(saved, torch.Tensor) or saved.is_nested or describe(saved) != describe(self._tensor):
            raise RestoreError(f"saved {describe(saved)}, tracked {describe(self._tensor)}")
        return [Landing(saved, self._tensor.detach())]

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        if id(saved) not in landed:
            self.load_state(saved)

    def load_state(self, state: torch.Tensor) -> None:
        with torch.no_grad():
            self._tensor.copy_(state)


def matches(saved: Any, live: Any) -> bool:
    """Whether ``describe`` says the same of both."""
    plain = type(saved) is type(live) is torch.Tensor and saved.layout is live.layout is torch.strided
    if plain and not saved.is_nested and not live.is_nested:
        return saved.dtype is live.dtype and saved.shape == live.shape
    return describe(saved) == describe(live)


def unfillable(tensor: Any) -> str | None:
    """Returns why ``restore()`` cannot write into a tensor; None if it can."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor):
        return None
    if tensor.is_nested:
        return "a nested tensor, which restore() cannot fill: keep its parts in a list"
    # expand() makes strides of zero. torch does not recognize other overlapping views, and writes to them.
    if tensor.layout is torch.strided and 0 in tensor.stride() and _is_expanded(tensor):
        return "an expanded tensor, whose elements share memory, so that restore() cannot fill it: call contiguous()"
    return None


def _is_expanded(tensor: torch.Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step == 0 for size, step in strides)


def describe(obj: Any) -> str:
    """Describes a tensor by shape, dtype and layout, anything else by type; for messages and comparison."""
    if not isinstance(obj, torch.Tensor):
        return type(obj).__name__
    # The other sizes of a nested tensor may be symbols, or refused.
    shape = f"nested ({obj.size(0)}{', …' * (obj.dim() - 1)})" if obj.is_nested else str(tuple(obj.shape))
    words = [shape, str(obj.dtype).removeprefix("torch.")]
    if obj.layout is not torch.strided:
        words.append(str(obj.layout).removeprefix("torch."))
    if obj.layout in _COMPRESSED:  # which copy_() fills only with as many elements
        words.append(f"of {obj._nnz()} elements")
    return " ".join(words)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
