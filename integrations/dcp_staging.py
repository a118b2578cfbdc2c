"""Stages a state for ``async_save``: captures the tensors that this rank is sure to write, and freezes everything
else."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

import lazyckpt
from lazyckpt import waits
from lazyckpt.collector import collector_paused
from lazyckpt.errors import ConfigError
from lazyckpt.shards import ShardCapture, ShardSaver

_SUFFIX = ".distcp"

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_DICTS = frozenset((dict, OrderedDict))
_SIMPLE = frozenset((int, float, bool, str, type(None)))


class _Shared:
    """State that the writers of one Saver share."""

    def __init__(self, saver: lazyckpt.Saver) -> None:
        self.saver = ShardSaver(saver)
        self.shares: dict[Any, frozenset[str]] = {}
        """The tensors that this rank wrote last time, of those that several ranks hold; by names and shapes of the
        latter."""


_shared: weakref.WeakKeyDictionary[lazyckpt.Saver, _Shared] = weakref.WeakKeyDictionary()


def _shared_by(saver: lazyckpt.Saver) -> _Shared:
    if saver not in _shared:
        _shared[saver] = _Shared(saver)
    return _shared[saver]


@cache
def _own_saver(pid: int) -> lazyckpt.Saver:
    """The Saver of this process for writers that were given none. A forked child makes its own."""
    return lazyckpt.Saver()


class _State(dict[str, Any]):
    """A staged state, which only this process can write."""

    def __init__(self, state: dict[str, Any], refuse: Callable[[], NoReturn]) -> None:
        super().__init__(state)
        self._refuse = refuse

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()


class Staged:
    """One staged save: from ``stage`` until ``write_data``."""

    def __init__(self, state_dict: dict[str, Any], target: Path, saver: lazyckpt.Saver | None) -> None:
        """``saver``: None for that of this process."""
        shared = _shared_by(saver or _own_saver(os.getpid()))
        self.thread: threading.Thread | None = None  # on which torch saves, once it has begun
        self.capture: ShardCapture | None = None
        self._begun = time.monotonic()
        self._target = target
        self._shares = shared.shares
        with collector_paused():
            self._freeze(state_dict)
        if self._captured:
            self.capture = shared.saver.capture(self._captured, file_name(0), target=target, look=self._look)

    def _freeze(self, state_dict: dict[str, Any]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        _find_tensors(state_dict, "", tensors)
        several = _ranks() > 1
        common = {
            name: tensor
            for name, tensor in tensors.items()
            if (several if type(tensor) in _PLAIN else _is_common(tensor, several))
        }
        self._common = set(common)
        self._signature = _ranks(), *(_form(name, tensor) for name, tensor in common.items())
        self._share = self._shares.get(self._signature)  # None: unknown yet
        self._captured: list[tuple[str, torch.Tensor]] = []
        self._copied: list[torch.Tensor] = []
        self._names_match = False
        memo: dict[int, Any] = {}
        for name, tensor in tensors.items():
            if id(tensor) in memo:
                continue
            if type(tensor) in _PLAIN and name not in self._common:  # most: with no call for each
                alias = memo[id(tensor)] = tensor.detach()
                self._captured.append((name, alias))
            else:
                memo[id(tensor)] = self._stand_in(name, tensor)
        self.state = _State(_frozen(state_dict, memo), self._refuse_process)

    def _stand_in(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the staged state: the same memory, even if ``tensor`` gets other memory later, or a copy."""
        if type(_local(tensor)) not in _PLAIN or (self._share is None and name in self._common):
            copied = tensor.detach().clone()
            self._copied.append(_local(copied))
            return copied
        alias = _alias(tensor)
        if _takes_part(tensor) and (self._share is None or name not in self._common or name in self._share):
            self._captured.append((name, _local(alias)))
        return alias

    def missing(self) -> frozenset[str]:
        """The tensors that several ranks hold and that this one did not capture."""
        return frozenset() if self._share is None else frozenset(self._common - self._share)

    def find(self, values: Mapping[MetadataIndex, torch.Tensor | bytes]) -> dict[MetadataIndex, str]:
        """Returns the names under which tensors were captured. The others were copied.

        Raises ConfigError for a tensor that is neither: it may have changed since."""
        captured = {_memory(tensor): name for name, tensor in self._captured}
        copied = set(map(_memory, self._copied))
        found = {}
        for index, value in values.items():
            if isinstance(value, bytes):
                continue
            memory = _memory(value)
            if memory in captured:
                found[index] = captured[memory]
            elif memory not in copied:
                self._shares.pop(self._signature, None)
                raise ConfigError(
                    f"{name_of(index)} is not in the snapshot that async_save took: the planner makes a new tensor, "
                    "or another rank has changed what it holds. The next async_save copies everything first; for such "
                    "a planner use save"
                )
        return found

    def learn(self, written: Iterable[str]) -> None:
        """Notes what this rank wrote, so that the next save captures it."""
        if self._share is None and self._names_match:
            self._shares[self._signature] = frozenset(self._common.intersection(written))

    def compare(self, planned: Iterable[str]) -> None:
        """Notes whether the planner uses the names of this module. If not, the tensors are copied each time."""
        self._names_match = self._common.issubset(planned)

    def is_wanted(self) -> bool:
        """Whether torch may still write it."""
        if self.thread is not None:
            return self.thread.is_alive()
        return time.monotonic() < self._begun + waits.UNBEGUN_S

    def _look(self) -> None:
        if not self.is_wanted():
            self.abandon("torch.distributed.checkpoint gave it up before it was written; see its error")

    def abandon(self, why: str) -> None:
        if self.capture is not None:
            self.capture.abandon(why)

    def _refuse_process(self) -> NoReturn:
        self.abandon("AsyncCheckpointerType.PROCESS is not supported")
        raise ConfigError(
            f"{self._target}: a lazy save cannot be handed to another process: use AsyncCheckpointerType.THREAD, which "
            "is torch's default, instead of PROCESS. It takes no memory of the training process either"
        )


def _find_tensors(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    """Adds the tensors of a state to ``found``, with the names that DCP gives them."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, ShardedTensor):
            raise ConfigError(f"{name} is a ShardedTensor, of FSDP 1: use torch's fully_shard, or dcp.save")
        found[name] = value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    prefix = f"{name}." if name else ""
    for key, child in items:
        kind = type(child)
        if kind in _PLAIN:
            found[f"{prefix}{key!s}"] = child
        elif kind not in _SIMPLE:
            _find_tensors(child, f"{prefix}{key!s}", found)


def _frozen(state: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """A copy of the state with other tensors: ``memo`` has them by ``id``. Torch pickles it while training goes on."""
    frozen = {}
    for key, value in state.items():
        try:
            frozen[key] = _copied(value, memo)
        except Exception as error:  # code of a class of the user's
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"state[{key!r}] cannot be copied, so async_save cannot freeze it: {what}") from error
    return frozen


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """As ``copy.deepcopy``, which takes many times as long for nested dicts and lists."""
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind in _DICTS:
        return {
            key: known if (known := memo.get(id(inner))) is not None else _copied(inner, memo)
            for key, inner in value.items()
        }
    if kind is list:
        return [_copied(inner, memo) for inner in value]
    return copy.deepcopy(value, memo)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without gradient. ``detach`` of a DTensor takes three times as long."""
    if type(tensor) is DTensor:
        return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
    return tensor.detach()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_common(tensor: torch.Tensor, several: bool) -> bool:
    """Whether several ranks may hold the same part of it; ``several``: whether there are several."""
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        replicated = [axis for axis, how in enumerate(spec.placements) if how.is_replicate()]
        return any(spec.mesh.size(axis) > 1 for axis in replicated)
    return several


def _form(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """The facts that decide which ranks hold a tensor."""
    mesh = (tensor.device_mesh.shape, tensor.placements) if isinstance(tensor, DTensor) else ()
    return name, tensor.shape, tensor.dtype, *mesh


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _takes_part(tensor: torch.Tensor) -> bool:
    """Whether this rank is on the tensor's mesh."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def _memory(tensor: torch.Tensor) -> Any:
    """A key that is equal for two tensors if they view the same memory in the same way."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return id(tensor)


def file_name(number: int) -> str:
    return f"__{dist.get_rank() if dist.is_initialized() else 0}_{number}{_SUFFIX}"


def name_of(index: MetadataIndex) -> str:
    return index.fqn if not index.offset or not any(index.offset) else f"{index.fqn} at {list(index.offset)}"
