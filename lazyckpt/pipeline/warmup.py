"""Prepares the staging buffer when training begins, so that the first save finds it ready.

The kernel takes seconds to hand out gigabytes of memory, and a GPU takes time to pin them. Without this, the copies of
the first save wait for both.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lazyckpt import devices
from lazyckpt.gate import hooks
from lazyckpt.gate.foreign import unwrapped
from lazyckpt.providers.wrappers import storages_in


class Warmup:
    """Calls ``prepare`` after the first step of each expected optimizer, on the thread that steps, with the tensors of
    all expected objects and the bytes of their storages.

    An optimizer that has stepped has its state, so the size is nearly that of the first save. A process that only
    restores does not step, and takes no memory. ``prepare`` is a bound method; this does not keep its object alive.
    """

    def __init__(self, prepare: Callable[[list[torch.Tensor], int], None]) -> None:
        self._prepare = weakref.WeakMethod(prepare)
        self._objects: list[torch.nn.Module | torch.optim.Optimizer] = []
        self._waiting: set[int] = set()  # ids of the optimizers that have not stepped yet

    def expect(self, obj: torch.nn.Module | torch.optim.Optimizer) -> None:
        known = unwrapped(obj) if isinstance(obj, torch.optim.Optimizer) else obj
        if any(known is other for other in self._objects):
            return
        self._objects.append(known)
        if isinstance(known, torch.optim.Optimizer):
            self._waiting.add(id(known))
            hooks.warmups.add(self)

    def forget(self) -> None:
        """Stops waiting for steps."""
        self._objects.clear()
        self._waiting.clear()
        hooks.warmups.discard(self)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gate calls this."""
        prepare = self._prepare()
        # Not in a capture: no device can be attached there. Nor in a compiled step, which is not for such work.
        busy = devices.capturing() or torch.compiler.is_compiling()
        if prepare is None or id(optimizer) not in self._waiting or busy:
            return
        self._waiting.discard(id(optimizer))
        if not self._waiting:
            hooks.warmups.discard(self)
        with contextlib.suppress(Exception):  # the first save raises the error
            tensors: list[torch.Tensor] = []
            sizes: dict[int, int] = {}  # by storage
            for storages in storages_in([_tensors_of(obj) for obj in self._objects]):
                tensors += storages.tensors
                sizes.update(zip(storages.identities, storages.seen.sizes, strict=True))
            prepare(tensors, sum(sizes.values()))


def _tensors_of(obj: torch.nn.Module | torch.optim.Optimizer) -> Any:
    return obj.state if isinstance(obj, torch.optim.Optimizer) else [*obj.parameters(), *obj.buffers()]
