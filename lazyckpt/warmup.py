"""Prepares the staging buffer when training begins, so that the first save finds it ready.

The system hands out gigabytes of memory in seconds, and a GPU takes time to pin them. Without this, the copies of the
first save wait for both.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from lazyckpt import _engine, devices
from lazyckpt.gate import gate, unwrapped


class Buffered(Protocol):
    """Has a staging buffer."""

    def prepare(self, tensors: list[torch.Tensor], nbytes: int) -> None:
        """Begins to prepare the buffer for a save of these tensors, whose storages have ``nbytes``."""


class Warmup:
    """Calls ``prepare`` of its owner after the first step of each expected optimizer, on the thread that steps.

    An optimizer that has stepped has its state, so the size is nearly that of the first save. A process that only
    restores does not step, and takes no memory. The Warmup keeps its owner alive no longer than others do.
    """

    def __init__(self, owner: Buffered) -> None:
        self._owner = weakref.ref(owner)
        self._objects: list[torch.nn.Module | torch.optim.Optimizer] = []
        self._waiting: set[int] = set()  # ids of the optimizers that have not stepped yet
        self._hooks: list[RemovableHandle] = []

    def expect(self, obj: torch.nn.Module | torch.optim.Optimizer) -> None:
        known = unwrapped(obj) if isinstance(obj, torch.optim.Optimizer) else obj
        if any(known is other for other in self._objects):
            return
        self._objects.append(known)
        if isinstance(known, torch.optim.Optimizer):
            with contextlib.suppress(AttributeError):  # its class does not call Optimizer.__init__
                self._hooks.append(known.register_step_post_hook(_AfterStep(self)))
                self._waiting.add(id(known))

    def forget(self) -> None:
        """Prepares nothing any more."""
        self._objects.clear()
        self._waiting.clear()
        if not gate.inside_step():  # torch may be calling them; those that stay do nothing
            for hook in self._hooks:
                hook.remove()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        owner = self._owner()
        # Not in a capture: no device can be attached there.
        if owner is None or id(optimizer) not in self._waiting or devices.capturing():
            return
        self._waiting.discard(id(optimizer))
        tensors, identities, sizes, _ = _engine.storages_in([_tensors_of(obj) for obj in self._objects])
        owner.prepare(tensors, sum(dict(zip(identities, sizes, strict=True)).values()))


class _AfterStep:
    """A hook of torch. It keeps nothing alive."""

    def __init__(self, warmup: Warmup) -> None:
        self._warmup = weakref.ref(warmup)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        warmup = None if torch.compiler.is_compiling() else self._warmup()  # a compiled step is not for such work
        if warmup is not None:
            warmup.after_step(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of an optimizer that is pickled with its hooks, as torch's are not: something that takes any arguments, does
        # nothing and needs no lazyckpt.
        return functools.partial, (collections.ChainMap,)


def _tensors_of(obj: torch.nn.Module | torch.optim.Optimizer) -> Any:
    return obj.state if isinstance(obj, torch.optim.Optimizer) else [*obj.parameters(), *obj.buffers()]
