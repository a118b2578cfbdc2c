"""Puts the gate in front of writes for which torch calls no hook: a method of the user's, a CUDA graph, a write by
hand."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lazyckpt.gate import averages, hooks
from lazyckpt.gate.exclusion import Guarded
from lazyckpt.gate.gate import gate


class CUDAGraph(torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` whose replay waits like the optimizer steps that it captured.

    torch calls no hook when a graph is replayed. So ``save()`` copies an optimizer whose step is in a graph of torch's
    own before it returns. With a graph of this class it copies the optimizer lazily:

        graph = lazyckpt.CUDAGraph()
        with torch.cuda.graph(graph):
            ...
            optimizer.step()

    An optimizer that is in graphs of both kinds is copied before ``save()`` returns.
    """

    _steps: weakref.WeakSet[Any] | tuple[()] = ()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        hooks.install()
        super().capture_begin(*args, **kwargs)
        self._steps = weakref.WeakSet()
        gate.capture_into(self._steps)

    def capture_end(self) -> None:
        gate.capture_into(None)
        super().capture_end()

    def replay(self) -> None:
        """Replays behind the gate: the GPU, not the host, waits for the copies of tensors that the graph writes to."""
        with gate.step(*self._steps):
            super().replay()


class GatedMethod:
    """Replaces a bound method with one that waits at the gate.

    Copies and pickles of the object get their own method without the gate, so they do not need lazyckpt."""

    def __init__(self, owner: Any, method: Callable[..., Any]) -> None:
        self.owner = owner
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with gate.step(self.owner):
            return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._method,)


def wait_captured() -> None:
    """Wait until every pending lazy copy in this process is done.

    Call it before anything other than an optimizer step changes parameters or optimizer state in place: the replay of
    a CUDA graph, a schedule-free swap of weights, a kernel of your own.

    If an optimizer's step was captured into a graph other than a ``lazyckpt.CUDAGraph``, saves copy that optimizer
    eagerly until you call this for the first time. After that they copy it lazily:

        lazyckpt.wait_captured()
        graph.replay()
    """
    gate.wait_by_hand()


def guard(obj: Any, method: str) -> None:
    """Put the gate in front of ``obj.method`` too, as in ``guard(average, "update")``.

    From then on saves copy the parameters of ``obj`` (of a module; otherwise the tensors of its ``state_dict()``)
    lazily, since nothing but this method changes them. Buffers stay eager. The averages of torch, timm, ema-pytorch,
    torch-ema and diffusers need no guard. Raises AttributeError if there is no such method.
    """
    hooks.install()
    own = getattr(obj, method)
    if isinstance(own, GatedMethod) or averages.is_update(obj, method):
        return
    # One owner for all methods: a program may call any of them between two saves, or none.
    others = [m.owner for m in getattr(obj, "__dict__", {}).values() if isinstance(m, GatedMethod)]
    owner = obj if averages.is_known(obj) else others[0] if others else Guarded(obj)
    setattr(obj, method, GatedMethod(owner, own))
