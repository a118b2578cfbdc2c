"""Delays ``optimizer.step()`` until the engine has copied the storages that this optimizer owns (DataStates-LLM, V-A2).

Parameters and optimizer state change in ``optimizer.step()`` and nowhere else. So the engine may copy them *lazily*,
during the next forward and backward, if a gate stands in front of the step. hooks.py puts it there: it calls the gate
from torch's step hooks. laziness.py decides which storages are lazy, and snapshot.py checks that they stayed as they
were. A snapshot that is taken inside an open step is all eager.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from lazyckpt import devices, waits
from lazyckpt.gate.evidence import Evidence
from lazyckpt.gate.exclusion import Exclusion, Step


class Pending(Protocol):
    """A snapshot, or another object, with tensors that are not copied yet."""

    def wait(self, owner: object) -> None: ...  # returns when ``owner`` may write to its storages
    def wait_all(self) -> None: ...
    def wait_for_storage(self, storage: torch.UntypedStorage) -> None: ...  # returns when it may free its memory
    def give_verdict(self) -> None: ...  # if the calling thread owes it and everything is copied
    def is_held(self) -> bool: ...  # whether this thread has a lock that a background thread needs to finish it


class Gate(Exclusion):
    """Delays steps until their storages are copied. One per process.

    Thread-safe: an optimizer in backward steps on autograd's threads."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: tuple[Pending, ...] = ()
        self.evidence = Evidence()
        # Every optimizer that was seen to step and every known average (averages.py) that was updated, with the number
        # of these steps. They need no registration.
        self.steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Optimizers whose step is in a CUDA graph of torch's, which is replayed without any hook; True if the user
        # waits by hand.
        self.replayed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # Every watched module, and its parts. No hooks on them: a copy of a module must be free of the gate.
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._capturing = threading.local()  # `steps`: of the CUDAGraph (guard.py) that this thread captures

    def add(self, pending: Pending) -> None:
        with self._changed:
            self._pending = (*self._pending, pending)

    def discard(self, pending: Pending) -> None:
        with self._changed:
            self._pending = tuple(p for p in self._pending if p is not pending)

    def forget(self) -> None:
        """Drops pending snapshots in a forked child."""
        self._changed = threading.Condition()
        self._pending = ()
        self._open = {}
        self._armings = []

    def is_held(self) -> bool:
        """Whether this thread has a lock that background threads need to finish a save."""
        owned = self._changed._is_owned()  # type: ignore[attr-defined]
        return owned or any(pending.is_held() for pending in self._pending)

    def wait_all(self) -> None:
        """Returns when no tensor waits for its copy."""
        for pending in self._pending:
            pending.wait_all()

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        """Returns when ``storage`` may free its memory."""
        for pending in self._pending:
            pending.wait_for_storage(storage)

    def give_verdicts(self) -> None:
        """Gives the verdicts that the calling thread owes (verdict.py), for snapshots that are copied completely."""
        for pending in self._pending:
            pending.give_verdict()

    def wait_by_hand(self) -> None:
        """Waits for all copies, in the place of the hook of replayed steps; see ``lazyckpt.wait_captured``."""
        self.wait_all()
        for optimizer in list(self.replayed):
            self.replayed[optimizer] = True
            self.count(optimizer)

    def capture_into(self, steps: weakref.WeakSet[Any] | None) -> None:
        """Collects, from now on, the optimizers whose step this thread captures in ``steps``; None ends that."""
        self._capturing.steps = steps

    # steps

    @contextlib.contextmanager
    def step(self, *owners: Any, counted: bool = True) -> Iterator[None]:
        """A context in which ``owners`` may write. With ``counted``, they become owners of their storages."""
        frame = sys._getframe(2)  # behind that of contextlib
        opened: list[Step] = []
        try:
            for owner in owners:
                opened.append(self.enter(owner, frame))
                if counted:
                    self.count(owner)
                    self.note_capture(owner)
            if opened:
                self.begin_writing(opened, owners)
            yield
        finally:
            for step in reversed(opened):
                self.leave(step)

    def count(self, owner: Any) -> None:
        """Counts a step of ``owner``."""
        with self._changed:
            self.steps[owner] = self.steps.get(owner, 0) + 1

    def note_capture(self, owner: Any) -> None:
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

    def begin_writing(self, steps: list[Step], owners: tuple[Any, ...]) -> None:
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

    def watch(self, module: torch.nn.Module) -> None:
        """Makes ``load_state_dict`` of ``module`` and of its parts wait for pending copies.

        From now on, saves eagerly copy the parameters that its parts write to in forward.
        """
        with self._changed:
            self.evidence.watch(module)
            self.modules.update(module.modules())

    def owners(self) -> tuple[list[tuple[Any, int]], set[int]]:
        """The owners that were seen to step, with the number of steps, oldest first; and the storages that are eager
        despite their owners."""
        with self._changed:
            return list(self.steps.items()), self.evidence.eager_storages()


gate = Gate()
os.register_at_fork(after_in_child=gate.forget)
