"""Delays ``optimizer.step()`` until the engine has copied the storages that this optimizer owns (DataStates-LLM, V-A2).

Parameters and optimizer state change in ``optimizer.step()`` and nowhere else. So the engine may copy them *lazily*,
during the next forward and backward, if a gate stands in front of the step. The gate is a global pre-step hook of
torch. With a closure, the wait moves behind the closure, so that forward and backward still overlap with the copy.
laziness.py decides which storages are lazy, and snapshot.py checks that they stayed as they were. A snapshot that is
taken inside an open step is all eager.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer

from lazyckpt import devices, waits
from lazyckpt.gate import averages
from lazyckpt.gate.evidence import Evidence
from lazyckpt.gate.exclusion import Exclusion, Step
from lazyckpt.gate.foreign import guard_callers, guard_switches, warn_of_foreign, writes_before_closure
from lazyckpt.gate.standing import Standing
from lazyckpt.gate.torch_methods import gate_methods


class Pending(Protocol):
    """What is not copied yet: a snapshot, for example."""

    def wait(self, owner: object) -> None: ...  # returns when ``owner`` may change what it owns
    def wait_all(self) -> None: ...
    def wait_for_storage(self, storage: torch.UntypedStorage) -> None: ...  # until it may let go of its memory
    def give_verdict(self) -> None: ...  # if the calling thread owes it and everything is copied
    def is_held(self) -> bool: ...  # whether this thread has a lock that a background thread needs to finish it


class Gate(Exclusion):
    """Delays steps until their storages are copied. One per process.

    Thread-safe: an optimizer in backward steps on autograd's threads."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: tuple[Pending, ...] = ()
        self._installed = False
        self.standing = Standing()
        self.evidence = Evidence()
        # Every optimizer that was seen to step and every known average (averages.py) that was updated, with the number
        # of these steps. Nobody has to register them.
        self.steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Optimizers whose step is in a CUDA graph of torch's, which is replayed without any hook; True if the user
        # waits by hand.
        self.replayed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # Every module that was watched, and its parts. No hooks: a copy of a module has nothing of the gate.
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.warmups: weakref.WeakSet[Any] = weakref.WeakSet()  # told of steps that are over (warmup.py)
        self._capturing = threading.local()  # `steps`: of the CUDAGraph (guard.py) that this thread captures

    def install(self) -> None:
        """Registers the hooks, once per process."""
        self.guard_averages()
        with self._changed:
            if self._installed:
                return
            self._installed = True
        hook = torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
        # Hooks of others may write, too: they run behind ours, even those that were there before.
        torch_optimizer._global_optimizer_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
        torch_optimizer.register_optimizer_step_post_hook(self._after_step)
        gate_methods(self)

    def add(self, pending: Pending) -> None:
        with self._changed:
            self._pending = (*self._pending, pending)

    def discard(self, pending: Pending) -> None:
        with self._changed:
            self._pending = tuple(p for p in self._pending if p is not pending)

    def forget(self) -> None:
        """Forgets all that waits, in a forked child, where nothing is copied."""
        self._changed = threading.Condition()
        self._pending = ()
        self._open = {}
        self._armings = []
        self.standing = Standing()

    def is_held(self) -> bool:
        """Whether this thread has a lock that background threads need to finish a save."""
        owned = self._changed._is_owned()  # type: ignore[attr-defined]
        return owned or any(pending.is_held() for pending in self._pending)

    def wait_all(self) -> None:
        """Returns when no tensor waits for its copy."""
        for pending in self._pending:
            pending.wait_all()

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        """Returns when ``storage`` may let go of its memory."""
        for pending in self._pending:
            pending.wait_for_storage(storage)

    def give_verdicts(self) -> None:
        """Gives the verdicts that the calling thread owes (verdict.py), for snapshots that are all copied."""
        for pending in self._pending:
            pending.give_verdict()

    def wait_by_hand(self) -> None:
        """Waits for all copies, in the place of the hook of replayed steps; see ``lazyckpt.wait_captured``."""
        self.wait_all()
        for optimizer in list(self.replayed):
            self.replayed[optimizer] = True
            self._count(optimizer)

    def guard_averages(self) -> None:
        """Puts the gate in front of what writes to averages of known classes that were imported since the last call."""
        averages.guard_imported(self)

    def capture_into(self, steps: weakref.WeakSet[Any] | None) -> None:
        """Collects, from now on, the optimizers whose step this thread captures in ``steps``; None ends that."""
        self._capturing.steps = steps

    # steps

    @contextlib.contextmanager
    def step(self, *owners: Any, counted: bool = True) -> Iterator[None]:
        """A context in which ``owners`` may write. With ``counted``, they own what they hold from now on."""
        frame = sys._getframe(2)  # behind that of contextlib
        opened: list[Step] = []
        try:
            for owner in owners:
                opened.append(self._enter(owner, frame))
                if counted:
                    self._count(owner)
                    self._note_capture(owner)
            if opened:
                self._begin_writing(opened, owners)
            yield
        finally:
            for step in reversed(opened):
                self._leave(step)

    def _count(self, owner: Any) -> None:
        with self._changed:
            self.steps[owner] = self.steps.get(owner, 0) + 1

    def _note_capture(self, owner: Any) -> None:
        """Notes the step of ``owner`` if it is being captured into a CUDA graph."""
        if devices.capturing():
            steps = getattr(self._capturing, "steps", None)
            if steps is None:
                self.replayed.setdefault(owner, False)
            else:
                steps.add(owner)

    def _wait(self, owner: Any) -> None:
        for pending in self._pending:
            pending.wait(owner)

    def _begin_writing(self, steps: list[Step], owners: tuple[Any, ...]) -> None:
        """Returns when ``owners`` may write: all their storages are copied, and no save is being armed. No save waits
        for a step that waits here."""
        since = None
        while True:
            seen = self._pending
            for owner in owners:
                self._wait(owner)
            with self._changed:
                if self._pending is not seen and any(not any(p is q for q in seen) for p in self._pending):
                    continue
                if self._try_writing(steps, since):
                    return
                since = since or time.monotonic()
                self._changed.wait(waits.STEP_LOOK_S)

    # torch's hooks

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        frame = sys._getframe(1)
        try:
            return self._open_step(optimizer, args, kwargs, frame)
        except Exception as error:  # the optimizer is not as torch's are: it owns nothing, and waits for everything
            with contextlib.suppress(Exception):  # it may have no hash
                self.steps.pop(optimizer, None)
            warn_of_foreign(optimizer, error)
            self.wait_all()
            self._begin_writing([self._enter(optimizer, frame)], ())
            return None

    def _open_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self.steps:
            guard_switches(type(optimizer), self)
        guard_callers(frame, self)
        step = self._enter(optimizer, frame)
        mine = self._open[step.thread]
        if len(mine) == 1 or all(other.owner != step.owner for other in mine[:-1]):
            self._count(optimizer)  # the hook runs twice for a subclass that calls super().step()
        self._note_capture(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # torch's own optimizers run the closure, which holds forward and backward, before they change anything. So do
        # those whose code proves it (closures.py). Others may not (SAM), and wait up front.
        if not callable(closure) or writes_before_closure(optimizer, frame, by_name=len(args) <= 1):
            if not callable(closure):
                self.evidence.look(optimizer)
            self._begin_writing([step], (optimizer,))
            return None

        def gated_closure() -> Any:
            self._pause(step)
            loss = closure()
            self.evidence.look(optimizer)
            self._begin_writing([step], (optimizer,))
            return loss

        if len(args) > 1:
            return (args[0], gated_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": gated_closure}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs:
            self.evidence.look(optimizer)  # with a closure behind the gate, the gradients exist only now
        frame, owner = id(sys._getframe(1)), id(optimizer)
        for step in reversed(self._open.get(threading.get_ident(), ())):
            if step.owner == owner and step.frame == frame:
                self._leave(step)
                break
        for warmup in list(self.warmups):
            warmup.after_step(optimizer)

    def watch(self, module: torch.nn.Module) -> None:
        """Makes ``load_state_dict`` of ``module`` and of its parts wait for pending copies.

        Saves copy eagerly, from now on, what its parts write to in forward.
        """
        with self._changed:
            self.evidence.watch(module)
            self.modules.update(module.modules())

    def owners(self) -> tuple[list[tuple[Any, int]], set[int]]:
        """The owners that were seen to step, with the number of steps, oldest first; and the storages that are eager
        whoever owns them."""
        with self._changed:
            return list(self.steps.items()), self.evidence.eager_storages()


gate = Gate()
os.register_at_fork(after_in_child=gate.forget)
