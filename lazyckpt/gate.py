"""The gate: an optimizer step waits for what is not copied yet (DataStates-LLM, V-A2).

Parameters and optimizer state change in ``optimizer.step()`` and nowhere else. So they may be copied *lazily*,
during the next forward and backward, if a gate stands in front of the step. This module is that gate: a global
hook of torch in front of every optimizer step. Which storages are lazy, and whether they really stayed as they
were, is snapshot.py's part.

A step counts as *open* from its pre-hook to its post-hook, to an exception from its closure (torch then calls no
post-hook), or to the same optimizer's next pre-hook. A snapshot taken inside an open step is not lazy.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lazyckpt import devices
from lazyckpt.evidence import Evidence

# Methods of a storage after which it has other memory. To hold on to the storage does not help: what it had is freed at
# once, and whoever reads that may end the process. Sharded training resizes; share_memory(), and whoever sends a tensor
# to another process, moves what it has. torch has no hook for them.
_GIVE_MEMORY_BACK = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


class Pending(Protocol):
    """A snapshot that is not copied yet."""

    def wait(self, owner: object) -> None:
        """Returns when ``owner`` may change what it owns."""

    def wait_all(self) -> None:
        """Returns when everything may change."""

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        """Returns when ``storage`` may let go of its memory."""


class Guarded:
    """An object other than an optimizer whose ``method`` changes tensors, and nothing else does."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj


class Gate:
    """One per process. Thread-safe: an optimizer in backward steps on autograd's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: tuple[Pending, ...] = ()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()  # the owners of steps under way
        self._installed = False
        self.evidence = Evidence()
        # Every optimizer that was seen to step, with the number of its steps. Nobody has to name optimizers.
        self.steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Those whose step is in a CUDA graph of torch's, which is replayed without any hook; True if the user waits by
        # hand.
        self.replayed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._capturing = threading.local()  # `steps`: of the CUDAGraph below that this thread captures

    def install(self) -> None:
        """Registers the hooks, once per process."""
        with self._lock:
            if self._installed:
                return
            self._installed = True
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for name in _GIVE_MEMORY_BACK:
            setattr(torch.UntypedStorage, name, self._gated(getattr(torch.UntypedStorage, name)))

    def add(self, pending: Pending) -> None:
        with self._lock:
            self._pending = (*self._pending, pending)

    def discard(self, pending: Pending) -> None:
        with self._lock:
            self._pending = tuple(p for p in self._pending if p is not pending)

    def forget(self) -> None:
        """In a forked child: nothing is copied there, so nothing waits."""
        self._lock = threading.Lock()
        self._pending = ()
        self._open = weakref.WeakSet()

    def inside_step(self) -> bool:
        return bool(self._open)

    def wait_all(self) -> None:
        """Returns when no tensor is waiting to be copied any more."""
        for pending in self._pending:
            pending.wait_all()

    def wait_by_hand(self) -> None:
        """See ``lazyckpt.wait_captured``. It stands for the hook of steps that are replayed."""
        self.wait_all()
        for optimizer in list(self.replayed):
            self.replayed[optimizer] = True
            self._count(optimizer)

    def guard(self, obj: Any, method: str) -> None:
        """See ``lazyckpt.guard``."""
        setattr(obj, method, GatedMethod(obj, getattr(obj, method)))

    def capture_into(self, steps: weakref.WeakSet[Any] | None) -> None:
        """From here on, the optimizers whose step this thread captures go into ``steps``; None: the capture is over."""
        self._capturing.steps = steps

    @contextlib.contextmanager
    def step(self, *owners: Any) -> Iterator[None]:
        """What ``owners`` change is changed in here."""
        for owner in owners:
            self._wait(owner)
            self._count(owner)
        try:
            self._open.update(owners)
            yield
        finally:
            self._open.difference_update(owners)

    def _count(self, owner: Any) -> None:
        with self._lock:
            self.steps[owner] = self.steps.get(owner, 0) + 1

    def _wait(self, owner: Any) -> None:
        for pending in self._pending:
            pending.wait(owner)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self.steps:
            optimizer.register_load_state_dict_pre_hook(_WaitBeforeLoad())
        if optimizer not in self._open:  # a subclass that calls super().step() comes by twice
            self._count(optimizer)
        self._open.add(optimizer)
        if devices.capturing():
            steps = getattr(self._capturing, "steps", None)
            if steps is None:
                self.replayed.setdefault(optimizer, False)
            else:
                steps.add(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # torch's own optimizers run the closure, which holds forward and backward, before they change anything.
        # Others may not (SAM), and wait up front.
        if not callable(closure) or not is_of_torch(optimizer):
            if not callable(closure):
                self.evidence.look(optimizer)
            self._wait(optimizer)
            return None

        def gated_closure() -> Any:
            try:
                loss = closure()
            except BaseException:
                self._open.discard(optimizer)
                raise
            self.evidence.look(optimizer)
            self._wait(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], gated_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": gated_closure}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._open.discard(optimizer)
        if len(args) > 1 or kwargs.get("closure") is not None:
            self.evidence.look(optimizer)  # of a closure behind the gate, the gradients are there by now

    def _gated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wait_and_call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            for pending in self._pending:
                pending.wait_for_storage(storage)
            return method(storage, *args, **kwargs)

        return wait_and_call


def is_of_torch(optimizer: object) -> bool:
    """Whether it is exactly one of torch's own optimizers, not of a class derived from them."""
    return type(optimizer).__module__.startswith("torch.optim.")


gate = Gate()


class CUDAGraph(torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` whose replay waits as the steps would that were captured into it.

    torch calls no hook when a graph is replayed. So an optimizer whose step is in a graph of torch's own is copied
    before ``save()`` returns; in a graph of this class, lazily:

        graph = lazyckpt.CUDAGraph()
        with torch.cuda.graph(graph):
            ...
            optimizer.step()

    An optimizer that is in graphs of both kinds is copied before ``save()`` returns.
    """

    _steps: weakref.WeakSet[Any] | tuple[()] = ()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        gate.install()
        super().capture_begin(*args, **kwargs)
        self._steps = weakref.WeakSet()
        gate.capture_into(self._steps)

    def capture_end(self) -> None:
        """As torch's."""
        gate.capture_into(None)
        super().capture_end()

    def replay(self) -> None:
        """As torch's, behind the gate: the GPU waits for copies of what the graph writes, not the host."""
        with gate.step(*self._steps):
            super().replay()


class GatedMethod:
    """Stands in an object's way to its own method. Not a closure: who copies or pickles the object gets one for the
    copy, and not one that updates the original."""

    def __init__(self, obj: Any, method: Callable[..., Any]) -> None:
        self._owner = Guarded(obj)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with gate.step(self._owner):
            return self._method(*args, **kwargs)


os.register_at_fork(after_in_child=gate.forget)


class _WaitBeforeLoad:
    """A hook. Who pickles or copies the module that has it gets one that does nothing, and needs no lazyckpt to load
    the pickle."""

    def __call__(self, *_: Any) -> None:
        gate.wait_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (collections.ChainMap,)  # takes whatever it is called with


def watch_module(module: torch.nn.Module) -> Callable[[], None]:
    """Makes ``load_state_dict`` of ``module`` and of its parts wait for pending copies; the result undoes it.

    What its parts write to in forward is eager from here on."""
    gate.evidence.watch(module)
    handles = [part.register_load_state_dict_pre_hook(_WaitBeforeLoad()) for part in module.modules()]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def wait_captured() -> None:
    """Wait until every pending lazy copy in this process is done.

    Call it before anything but an optimizer step changes parameters or optimizer state in place: the replay of a
    CUDA graph, a schedule-free swap of weights, a kernel of your own.

    An optimizer whose step was captured into a graph other than a ``lazyckpt.CUDAGraph`` is copied eagerly, until
    this was called for the first time: then it is lazy again after every call:

        lazyckpt.wait_captured()
        graph.replay()
    """
    gate.wait_by_hand()


def guard(obj: Any, method: str) -> None:
    """Put the gate in front of ``obj.method`` too, as in ``guard(ema, "update_parameters")``.

    From then on the parameters of ``obj`` (of a module; otherwise the tensors of its ``state_dict()``) are copied
    lazily, since nothing but this method changes them; buffers stay eager. Raises AttributeError if there is no
    such method.
    """
    gate.install()
    gate.guard(obj, method)
